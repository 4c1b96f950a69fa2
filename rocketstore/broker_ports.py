"""The part of a broker on its event loop: its ports for clients, and its words to name servers and other brokers.

``listenPort`` and the VIP port are RocketMQ's remoting, ``grpcServerPort`` is gRPC: RocketMQ 5's clients, health,
reflection, and the log service of a member of a group.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import grpc

from dledger.access.guard import AccessGuard
from dledger.clock import Clock
from dledger.errors import ConfigError
from dledger.monitoring import Conditions
from dledger.remoting.acceptor import RemotingAcceptor
from dledger.remoting.client import RemotingClient
from dledger.rpc import options, self_signed, tls
from dledger.rpc.clients.connections import Connections
from dledger.rpc.clients.grpc_server import GrpcServer
from dledger.rpc.listening import listen_for_clients
from dledger.rpc.loops import LoopBridge, Report
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.server import DLedgerServer
from dledger.types import TlsServerMode
from dledger.values import address_text, host_of
from rocketstore.broker.broker import Broker, ClientQuotas, LoopTools, Storage
from rocketstore.broker.mastership import GroupView, Mastership, group_view, resolve
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.statistics import ServiceCounters
from rocketstore.broker_config import HA_PORT_OFFSET, BrokerConfig
from rocketstore.broker_remoting.registration import NameServerRegistration, SuccessorWatch
from rocketstore.broker_remoting.service import RemotingService
from rocketstore.grpc.routes import OtherGroups
from rocketstore.grpc.service import SERVICE, GatewayService
from rocketstore.ha.service import HaService, SlaveSync
from rocketstore.pb.pool import POOL
from rocketstore.remoting.runtime import GRPC_PORT, HA_PORT
from rocketstore.remoting.topics import MASTER_ID
from rocketstore.types import BrokerRole

_LOG = logging.getLogger("rocketstore")


class Served(NamedTuple):
    """The parts of a broker that serving its clients takes."""

    storage: Storage
    node: DLedgerServer | None
    """None for a plain broker."""
    replication: HaService | None
    """Classic replication, of a plain broker."""
    guard: AccessGuard | None
    """None: everybody may do everything."""
    tls: TlsKeeper | None
    clock: Clock
    conditions: Conditions


class BrokerPorts:
    """From ``open`` to ``close``, on the event loop, like everything here that does not say otherwise."""

    def __init__(self, config: BrokerConfig, served: Served, has_caught_up: Callable[[], bool], report: Report) -> None:
        self._config = config
        self._served = served
        self._has_caught_up = has_caught_up
        self._report = report
        self.port = config.listen_port
        """``listenPort``, once open."""
        self.broker: Broker | None = None
        """Once open."""
        self._successors: SuccessorWatch | None = None
        self._slave_sync: SlaveSync | None = None
        self._registration: NameServerRegistration | None = None
        self._remoting: RemotingService | None = None
        self._acceptor: RemotingAcceptor | None = None
        self._grpc: GrpcServer | None = None
        self._gateway: GatewayService | None = None
        self._to_members: RemotingClient
        self._to_name_servers: RemotingClient
        self._dialled: list[RemotingClient] = []

    # -- for any thread ------------------------------------------------------------------------------------------------

    @property
    def grpc_port(self) -> int:
        """The port of gRPC, once open; 0: none."""
        return 0 if self._grpc is None else self._grpc.port

    @property
    def address(self) -> str:
        """The broker's address for clients."""
        return self._config.address(self.port)

    def counters(self) -> ServiceCounters:
        """Requests in progress."""
        if self.broker is None:
            return ServiceCounters()
        counters = self.broker.counters()
        return counters if self._gateway is None else self._gateway.counted(counters)

    def view(self) -> GroupView:
        """This broker's view of its group."""
        node, own, store = self._served.node, self._config.node_id, self._served.storage.store
        if node is not None:
            return group_view(node.status(), node.removed)
        if store.role is not BrokerRole.SLAVE:
            return GroupView(leader=own, leader_address=self.address, members={own: self.address})
        master = self._registration.master if self._registration is not None else ""
        members = {own: self.address} | ({str(MASTER_ID): master} if master else {})
        return GroupView(leader=str(MASTER_ID) if master else "", leader_address=master, members=members)

    def _belongs(self) -> bool:
        """Whether clients may be sent here: not to who left or waits to join, nor to a learner that has little yet."""
        view = self.view()
        if view.removed or view.number < 0:
            return False
        return self._config.node_id not in view.learners or self._has_caught_up()

    def _runtime(self) -> dict[str, str]:
        """Entries of the runtime information that the broker itself does not know."""
        table, replication = {GRPC_PORT: str(self.grpc_port)}, self._served.replication
        if replication is None:
            return table
        facts = replication.facts()
        return table | facts.table() | ({} if facts.is_slave else {HA_PORT: str(replication.port)})

    # -- opening -------------------------------------------------------------------------------------------------------

    async def has_successor(self) -> bool:
        """Whether a plain master has one, before it writes anything: that would be in no other log."""
        replication = self._served.replication
        if replication is None or not self._config.name_servers:
            return False
        self._successors = watch = SuccessorWatch(
            self._config,
            lambda: self.address,
            replication,
            self._client_of_members(),
            RemotingClient(tls=_name_server_tls(self._config)),
        )
        await watch.look()
        watch.start(self._report)
        return watch.found

    async def open(self, bridge: LoopBridge) -> None:
        """Serve clients. Raises ``ConfigError`` if a port is taken."""
        with ExitStack() as opened:
            listening = self._listen(opened)
            self.broker = broker = await self._broker(bridge)
            self._to_members = self._client_of_members()
            self._to_name_servers = RemotingClient(tls=_name_server_tls(self._config))
            self._dialled = [self._to_members, self._to_name_servers]
            await self._serve_grpc(broker)
            opened.pop_all()
        self._remoting = self._serve_remoting(broker)
        limits = self._config.effective_limits
        self._acceptor = RemotingAcceptor(
            "broker",
            self._remoting.server.protocol,
            self._served.tls,
            self._config.tls_server_mode,
            limits.handshake_ms_max / 1000,
        )
        self._acceptor.open(listening, self.grpc_port)

    def _listen(self, opened: ExitStack) -> list[socket.socket]:
        """Listen at ``listenPort`` and the VIP port. If the latter is taken, that is an error only if ``vip_port`` was
        set: few clients use it.
        """
        config = self._config
        listening = listen_for_clients(config.bind_host, config.listen_port, "broker's")
        self.port = listening[0].getsockname()[1]
        for one in listening:
            opened.callback(one.close)
        if not config.vip_bind_port:
            return listening
        try:
            further = listen_for_clients(config.bind_host, config.vip_bind_port, "broker's VIP")
        except ConfigError as error:
            if config.vip_port is not None:
                raise
            _LOG.warning("no VIP port, set vipPort to another one, or to 0 for none: %s", error)
            return listening
        for one in further:
            opened.callback(one.close)
        return [*listening, *further]

    async def _broker(self, bridge: LoopBridge) -> Broker:
        config, (storage, _, _, guard, _, clock, conditions) = self._config, self._served
        storage.transactions.host = host = await asyncio.to_thread(resolve, host_of(self.address), self.port)
        return Broker(
            config,
            storage,
            Mastership(storage.store, self.view, self._has_caught_up),
            LoopTools(bridge, clock, ReadThreads(config.read_threads), conditions),
            ClientQuotas(config, guard),
            host,
        )

    async def _serve_grpc(self, broker: Broker) -> None:
        config, node, port = self._config, self._served.node, self._config.grpc_bind_port
        if port is None:
            return
        if node is not None:
            server = node.grpc_server("rocketstore-connections", config.grpc_connection_calls_max)
        else:
            connections = Connections(
                "rocketstore-connections",
                config.limits,
                share_percent=config.access.account_share_percent,
                conditions=self._served.conditions,
            )
            waiting_max = config.pulls_waiting_max + config.grpc_clients_max + config.streams_max
            bytes_max = options.request_bytes_for(config.store.max_message_size)
            limits = replace(config.limits, connection_calls_max=config.grpc_connection_calls_max)
            server_options = options.server_options(limits, bytes_max, waiting_max)
            server = GrpcServer(connections, server_options, 2 * waiting_max, broker.shares.quotas, "streams_max")
        self._gateway = gateway = GatewayService(
            broker,
            server.connections,
            self._to_members,
            OtherGroups(config.name, config.name_servers, self._to_name_servers, self._to_members),
        )
        server.add(SERVICE, gateway.grpc_methods(), POOL)
        gateway.presence.own_address = lambda: address_text(host_of(self.address), self.grpc_port)
        credentials, both = self._grpc_credentials()
        await server.start(
            config.bind_host,
            port,
            credentials,
            describes_itself=self._served.guard is None,
            plaintext_s_max=config.effective_limits.handshake_ms_max / 1000 if both else 0,
        )
        self._grpc = server
        gateway.presence.start()
        if node is not None:
            node.grpc_port = server.port

    def _grpc_credentials(self) -> tuple[grpc.ServerCredentials | None, bool]:
        """None: plaintext only; and whether that is accepted besides TLS."""
        config, keeper, mode = self._config, self._served.tls, self._config.grpc_tls_mode
        if mode is TlsServerMode.DISABLED:
            return None, False
        if keeper is not None:
            return keeper.client_server_credentials(), mode is TlsServerMode.PERMISSIVE
        if not config.grpc_self_signed:
            return None, False
        made = self_signed.credentials(host_of(self.address))
        return made, mode is not TlsServerMode.ENFORCING

    def _serve_remoting(self, broker: Broker) -> RemotingService:
        """RocketMQ's clients, and the name servers that tell them of this broker."""
        config, (storage, node, replication, *_) = self._config, self._served
        to_members = self._to_members
        to_name_servers = RemotingClient(tls=_name_server_tls(config), lost=lambda address: registration.lost(address))
        self._dialled.append(to_name_servers)
        ha_address = address_text(host_of(self.address), config.store.ha_listen_port or self.port + HA_PORT_OFFSET)
        self._registration = registration = NameServerRegistration(broker, to_name_servers, self.address, ha_address)
        registration.belongs = self._belongs
        if replication is not None:
            replication.known_master = lambda: registration.master_for_slaves
            registration.lacks_master = replication.lacks_master
            if (successors := self._successors) is not None:
                registration.may_lead = lambda: not successors.found
            if storage.store.role is BrokerRole.SLAVE:
                self._slave_sync = SlaveSync(storage.state, to_members, replication.master, lambda: registration.master)
                self._slave_sync.start(self._report)
        log = None if node is None else node.log_handlers
        calls = {} if self._gateway is None else self._gateway.member_calls()
        service = RemotingService(broker, to_members, registration.announce, self._runtime, log, calls)
        registration.start()
        return service

    def _client_of_members(self) -> RemotingClient:
        keeper = self._served.tls
        return RemotingClient(tls=None if keeper is None else keeper.connecting_by_name)

    def role_changed(self) -> None:
        """Tell name servers who leads now, and who waits for messages here."""
        if self.broker is not None:
            self.broker.popping.role_changed()
        if self._registration is not None:
            self._registration.wake()
        if self._gateway is not None:
            self._gateway.role_changed()

    # -- closing -------------------------------------------------------------------------------------------------------

    async def close(self, grace_s: float) -> None:
        """Answer what was accepted, within ``grace_s``, and close everything. Idempotent."""
        await self._accept_nothing_more()
        if self._remoting is not None:
            await self._remoting.close(grace_s)
        if self._grpc is not None:
            await self._grpc.stop(grace_s)
        if self._gateway is not None:
            await self._gateway.close()
        if self.broker is not None:
            await self.broker.close()
        if self._acceptor is not None:
            await self._acceptor.close()
        for client in self._dialled:
            await client.close()

    async def _accept_nothing_more(self) -> None:
        if self._gateway is not None:
            self._gateway.announce_end()
        if self._grpc is not None:
            await self._grpc.announce_end()
        if self.broker is not None:
            self.broker.stop_waiting()
        if self._acceptor is not None:
            self._acceptor.stop_listening()
        for one in (self._slave_sync, self._successors, self._registration):
            if one is not None:
                await one.close()


def _name_server_tls(config: BrokerConfig) -> Callable[[], ssl.SSLContext] | None:
    """Makes a context for each connection, from the files as they are then. None: plaintext. Raises ``ConfigError``."""
    ca, cert, key = config.namesrv_tls_files
    if not config.namesrv_tls or ca is None:
        return None
    files = tls.TlsFiles(ca, cert, key)

    def context() -> ssl.SSLContext:
        made = tls.client_context(tls.read(files))
        made.check_hostname = True
        return made

    context()
    return context
