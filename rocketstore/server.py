"""Wires up one broker: log, store, state, delayed delivery, roles, gRPC. The only module in which they all meet.

A process has one event loop for all gRPC services: two would wake each other. A plain broker has its own loop; a
DLedger broker uses its node's, which also serves the log service at the broker's address. So the client address that
nodes tell each other is the broker's, and every broker knows the master's address.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from dledger.access.control import AccessControl
from dledger.access.guard import AccessGuard
from dledger.clock import Clock
from dledger.conditions import Conditions
from dledger.config import ServerConfig
from dledger.errors import ConfigError, DLedgerError, LeaderHint
from dledger.instruments import SILENT, Instruments
from dledger.remoting.client import RemotingClient
from dledger.remoting.shared_port import RemotingFactory
from dledger.rpc import options as rpc_options
from dledger.rpc import tls
from dledger.rpc.bridge import LoopBridge, LoopThread
from dledger.rpc.clients.aio_server import add_methods, aio_server
from dledger.rpc.clients.connections import Connections
from dledger.rpc.clients.standard_services import StandardServices
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.runtime.supervisor import EXIT_FATAL, Supervisor
from dledger.server import DLedgerServer
from dledger.store.opening import layout_of
from dledger.types import LogIndex
from dledger.values import address_text, host_of
from rocketstore.broker.broker import Broker, ClientShares, LoopTools, Storage
from rocketstore.broker.catch_up import CatchUp
from rocketstore.broker.clock_watch import ClockWatch
from rocketstore.broker.hosts import resolve
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.measurements import BrokerMeasurements, ServiceCounters, measure
from rocketstore.broker.other_mode import refuse_other_mode
from rocketstore.broker.ports import GroupView
from rocketstore.broker.positions import no_indexes
from rocketstore.broker.readers import ReadThreads
from rocketstore.broker.role_change import BrokerRoleChange
from rocketstore.broker.schedule import ScheduleService
from rocketstore.broker.status import group_view, is_leader
from rocketstore.broker.transactions.service import TransactionService
from rocketstore.broker_config import HA_PORT_OFFSET, BrokerConfig
from rocketstore.broker_grpc import codec
from rocketstore.broker_grpc.service import STREAM_KINDS, BrokerService
from rocketstore.broker_ports import BrokerDoor
from rocketstore.broker_remoting.registration import MASTER_ID, NameServerRegistration
from rocketstore.broker_remoting.service import RemotingService
from rocketstore.broker_remoting.successor import SuccessorWatch
from rocketstore.commit_log.mixed import MixedCommitLog
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.port import CommitLog
from rocketstore.commit_log.replicated import MESSAGES, ReplicatedCommitLog, for_broker
from rocketstore.ha.service import HaService
from rocketstore.ha.slave_sync import SlaveSync
from rocketstore.message.delay import DelayLevels
from rocketstore.remoting.bodies.ha import HA_PORT
from rocketstore.remoting.bodies.runtime import GRPC_PORT
from rocketstore.state.broker_state import BrokerState, StateSettings
from rocketstore.state.limits import StateLimits
from rocketstore.state.unserved import TIMER_TOPIC, unserved
from rocketstore.store.message_store import MessageStore
from rocketstore.store.takeover import take_over
from rocketstore.types import BrokerRole

_log = logging.getLogger("rocketstore")

STOP_GRACE_S: Final = 2.0
"""How long accepted requests may still be answered when the broker stops."""
WATCH_INTERVAL_S: Final = 1.0


class BrokerServer:
    """A broker from its directory to its port. Use ``start``, ``wait`` and ``stop``.

    The constructor raises, before opening a port: ``ConfigError``, ``DirectoryLockedError``, ``CorruptLogError``,
    ``IdentityError``, ``DiskError``. ``repair``: set a damaged replicated log aside and fetch it from the others.
    ``remoting``: whether RocketMQ's clients are served, or the factory of what serves them instead.
    """

    def __init__(
        self,
        config: BrokerConfig,
        *,
        repair: bool = False,
        clock: Clock | None = None,
        instruments: Instruments = SILENT,
        remoting: RemotingFactory | bool = True,
    ) -> None:
        problems = config.problems()
        if problems:
            raise ConfigError(problems)
        if repair and config.dledger is None:
            raise ConfigError(
                [
                    "--repair fetches a damaged log from other members, and a plain broker has none: restore it "
                    "from a copy"
                ]
            )
        refuse_other_mode(config)
        self.config: Final = config
        self._instruments = instruments
        self._tls: TlsKeeper | None = None
        if config.dledger is None and config.security.has_tls:
            self._tls = TlsKeeper(config.security, name=f"broker {config.name}", member=None)
        self._clock = clock or Clock()
        self.conditions = Conditions(config.node_id, self._clock)
        """The conditions of this broker; a replicated one shares its node's."""
        self._life_lock = threading.RLock()  # one start or stop at a time; a failed start stops
        self._stopped = threading.Event()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._role_change: BrokerRoleChange | None = None
        self._threads = Supervisor(self._fail)
        self._loop = LoopThread("rocketstore-rpc", self._threads.report)
        self._bridge: LoopBridge | None = None
        self._connections: Connections | None = None  # for a plain broker; a node has its own
        self._port = config.listen_port
        self._own_remoting = remoting
        self._slave_sync: SlaveSync | None = None
        self.replication: HaService | None = None
        """Classic replication, of a plain broker."""
        self._successors: SuccessorWatch | None = None
        self._remoting: RemotingService | None = None
        self._registration: NameServerRegistration | None = None
        self._dialled: tuple[RemotingClient, ...] = ()
        self._door: BrokerDoor | None = None
        self._server: grpc.aio.Server | None = None
        self._broker: Broker | None = None
        self._service: BrokerService | None = None
        self._health: health.aio.HealthServicer | None = None  # type: ignore[name-defined]  # missing in grpc-stubs
        self._watcher = self._threads.thread("rocketstore-watch", self._watch)
        self._watcher.daemon = True
        self._has_caught_up: Callable[[], bool] = lambda: True
        self.node: DLedgerServer | None = None
        self._access: AccessControl | None = None  # for a plain broker; a node has its own
        if config.dledger is None:
            self._access = AccessControl.of(config.access, name=config.name, clock=self._clock)
        self._open(config.dledger, repair=repair)

    def _open(self, dledger: ServerConfig | None, *, repair: bool) -> None:
        config = self.config
        log: CommitLog
        if dledger is None:
            log = PlainCommitLog(config.store, clock=self._clock, instruments=self._instruments)
        else:
            layout = layout_of(dledger.store, dledger.node_id)
            old = take_over(config.store, layout, dledger.store.segment_bytes, clock=self._clock)
            self.node = DLedgerServer(
                for_broker(dledger),
                repair=repair,
                clock=self._clock,
                instruments=self._instruments,
                bodies=MESSAGES,
                prehistory=lambda: None if old is None else old.now(),
            )
            self._tls = self.node.tls
            self.conditions = self.node.conditions
        try:
            if self.node is not None:
                log = replicated = ReplicatedCommitLog(self.node, config.store, clock=self._clock)
                if old is not None:
                    log = MixedCommitLog(old.files, replicated, old.record, old.expired)
            self.store = MessageStore(config.store, log, clock=self._clock, conditions=self.conditions)
            if isinstance(log, PlainCommitLog):
                self.replication = HaService(
                    config,
                    log,
                    self.conditions,
                    self._clock,
                    tls=self._tls,
                    report=self._threads.report,
                    require_replicas=self.store.require_replicas,
                    supersede=self.store.supersede,
                )
                self.store.let_log_go_first(while_=self.replication.is_catching_up)
            self.state = BrokerState(
                self.store,
                config.store.config_dir,
                clock=self._clock,
                settings=StateSettings(
                    accept_incomplete=dledger is None,
                    limits=StateLimits(config.queues_max, config.groups_max, config.offsets_max),
                ),
                conditions=self.conditions,
            )
            delays = DelayLevels.parse(config.store.message_delay_level)
            self.schedule = ScheduleService(self.store, self.state, delays, self._clock)
            self.transactions = TransactionService(
                config, self.store, self.state, self._clock, conditions=self.conditions
            )
            if self.node is not None:
                self._role_change = BrokerRoleChange(
                    self.node,
                    replicated,
                    self.store,
                    self.state,
                    self.schedule,
                    self.transactions,
                    name=config.node_id,
                    listener=self._role_changed,
                )
                self.node.add_role_change_handler(self._role_change)
            self.store.load()
            self.state.load()
            self._say_what_is_not_served()
            if self.replication is not None:
                self.replication.prepare()
            if self.node is not None:
                node = self.node
                caught_up = CatchUp(
                    node.status, self.store, lambda: replicated.max_offset, lambda: self.state.is_applied
                )
                self._has_caught_up = lambda: not node.fenced and caught_up()
        except BaseException:
            self._close_store()
            raise

    def _say_what_is_not_served(self) -> None:
        """Messages of RocketMQ 5 that would otherwise be missing without a word."""
        root = self.config.store.store_path_root_dir
        try:
            found = unserved(root, self.store.max_offset(TIMER_TOPIC, 0))
        except OSError as error:
            found = [f"unknown, because a part that RocketMQ 5 may have written cannot be read ({error})"]
        for what in found:
            _log.warning("%s: not served: %s", root, what)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> BrokerServer:
        """Serve, and join the group if any; does nothing after a stop. Raises ``ConfigError`` if a port is in use."""
        with self._life_lock:
            if self._stopped.is_set():
                return self
            try:
                leads = self.store.role is not BrokerRole.SLAVE
                replication = self.replication
                if leads and replication is not None and self.config.name_servers:
                    self._bridge = self._loop.start()
                    leads = not self._bridge.run(self._look_for_successor(replication))
                self.state.start()
                self.store.start()
                if self.node is None:
                    bridge = self._bridge or self._loop.start()
                    if self._access is not None:
                        self._access.start(bridge.post, self._threads.thread)
                    if leads:
                        self.state.catch_up()
                        self.schedule.start()
                        self.transactions.start()
                else:
                    bridge = self.node.bridge
                self._bridge = bridge
                bridge.run(self._serve(bridge))
                if self.replication is not None:
                    self.replication.start(self._port)
                self._watcher.start()
            except BaseException:
                self.stop(graceful=False)
                raise
            return self

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the broker has stopped; returns its exit status (0, or 70 after a fatal error), or None on
        timeout.
        """
        if not self._stopped.wait(timeout_s):
            return None
        return EXIT_FATAL if self.fatal is not None else 0

    def stop(self, *, graceful: bool = True) -> None:
        """Stop: a master first transfers leadership (``graceful``), then accepted requests are answered. Idempotent."""
        with self._life_lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            if graceful and self.fatal is None:
                self.transactions.stop()
                self.schedule.stop()  # while the node leads, so that the next master knows what was delivered
                self._hand_over()
            self._close_service(STOP_GRACE_S if graceful else 0)
            if self.replication is not None:
                self.replication.stop(graceful=graceful and self.fatal is None)
            self.transactions.stop()
            self.schedule.stop()
            self.state.shutdown()
            self._close_store()
            if self._access is not None:
                self._access.close()
            self._loop.stop()
            self._stopped.set()

    @property
    def fatal(self) -> BaseException | None:
        """The error that made the broker stop itself, if any."""
        if self._failure is None and self.node is not None:
            return self.node.fatal
        return self._failure

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._port

    @property
    def grpc_port(self) -> int:
        """The port of gRPC, once started; 0: none."""
        return 0 if self._door is None else self._door.grpc_port

    @property
    def address(self) -> str:
        """The address for clients."""
        return self.config.address(self._port)

    @property
    def guard(self) -> AccessGuard | None:
        """Access control; None: everybody may do everything."""
        if self.node is not None:
            return self.node.guard
        return None if self._access is None else self._access.guard

    def view(self) -> GroupView:
        """This broker's view of its group."""
        if self.node is not None:
            return group_view(self.node.status())
        own = self.config.node_id
        if self.store.role is not BrokerRole.SLAVE:
            return GroupView(leader=own, leader_address=self.address, members={own: self.address})
        master = self._registration.master if self._registration is not None else ""
        members = {own: self.address} | ({str(MASTER_ID): master} if master else {})
        return GroupView(leader=str(MASTER_ID) if master else "", leader_address=master, members=members)

    @property
    def is_ready(self) -> bool:
        """Whether clients can use it: it serves, knows a master, and knows what is committed."""
        serves = self._service is not None and not self._stopping.is_set() and self.fatal is None
        return serves and bool(self.view().leader) and self._has_caught_up()

    def _ports_and_replication(self) -> dict[str, str]:
        """What its runtime information says besides what the broker itself knows."""
        table, replication = {GRPC_PORT: str(self.grpc_port)}, self.replication
        if replication is None:
            return table
        facts = replication.facts()
        return table | facts.table() | ({} if facts.is_slave else {HA_PORT: str(replication.port)})

    def measure(self) -> BrokerMeasurements:
        """The broker's measurements for metrics, besides those of its node. May wait for a disk."""
        service = self._broker.counters() if self._broker is not None else ServiceCounters()
        service = replace(service, dropped_messages=service.dropped_messages + self.schedule.dropped_count)
        return measure(self.store, self.state, service, topics_max=self.config.metrics_topics_max)

    # -- gRPC ------------------------------------------------------------------------------------------------------

    async def _serve(self, bridge: LoopBridge) -> None:
        config = self.config
        calls_max = config.pulls_waiting_max + config.send_pending_messages_max + STREAM_KINDS * config.streams_max
        self._server = server = aio_server(_options(config), calls_max)
        self._health = statuses = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in grpc-stubs
        connections = self._watched_connections()
        standard = StandardServices(server, connections, config.streams_max)
        standard.add_health(statuses)
        names = [codec.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        if self.node is not None:
            add_methods(server, rpc_options.LOG_SERVICE, self.node.client_methods)
            names.append(rpc_options.LOG_SERVICE)
        for name in ("", *names[:1]):
            await statuses.set(name, health_pb2.HealthCheckResponse.SERVING)
        guard = self.guard
        if guard is None:  # tools that use reflection cannot sign requests; health stays open for monitoring
            standard.add_reflection(names)
        self._door = door = BrokerDoor(config, self._tls, self._remoting_factory())
        self._port = door.bind(server)
        if self.node is not None:
            self.node.grpc_port = door.grpc_port
        name, port = host_of(self.address), self._port
        self.transactions.host = store_host = await asyncio.to_thread(resolve, name, port)
        self._broker = broker = Broker(
            config,
            Storage(self.store, self.state, self.transactions),
            Mastership(self.store, self.view, self._has_caught_up),
            LoopTools(bridge, self._clock, ReadThreads(config.read_threads), self.conditions),
            ClientShares(config, guard),
            store_host,
        )
        self._service = BrokerService(broker, connections, self._position_of, self._ports_and_replication)
        add_methods(server, codec.SERVICE, self._service.methods())
        self._serve_remoting(broker)
        await server.start()
        door.open()
        connections.watch(door.ports, calls_max, door.remoting_clients)

    def _serve_remoting(self, broker: Broker) -> None:
        """RocketMQ's clients on the same port; and the name servers that tell them of it."""
        to_members = RemotingClient(tls=None if self._tls is None else self._tls.connecting_by_name)
        to_name_servers = RemotingClient(
            tls=_name_server_tls(self.config), lost=lambda address: registration.lost(address)
        )
        self._dialled = (to_members, to_name_servers)
        host = host_of(self.address)
        ha_address = address_text(host, self.config.store.ha_listen_port or self._port + HA_PORT_OFFSET)
        self._registration = registration = NameServerRegistration(broker, to_name_servers, self.address, ha_address)
        replication = self.replication
        if replication is not None:
            replication.known_master = lambda: registration.master_for_slaves
            registration.lacks_master = replication.lacks_master
            if (successors := self._successors) is not None:
                registration.may_lead = lambda: not successors.found
            if self.store.role is BrokerRole.SLAVE:
                self._slave_sync = SlaveSync(self.state, to_members, replication.master, lambda: registration.master)
                self._slave_sync.start(self._threads.report)
        log = None if self.node is None else self.node.log_handlers
        announce, runtime = registration.announce, self._ports_and_replication
        self._remoting = RemotingService(broker, to_members, announce, runtime, log)
        registration.start()

    async def _look_for_successor(self, replication: HaService) -> bool:
        """Whether a plain master has one, before it writes anything: that would be in no other log."""
        self._successors = watch = SuccessorWatch(
            self.config,
            lambda: self.address,
            replication,
            RemotingClient(tls=None if self._tls is None else self._tls.connecting_by_name),
            RemotingClient(tls=_name_server_tls(self.config)),
        )
        await watch.look()
        watch.start(self._threads.report)
        return watch.found

    def _remoting_factory(self) -> RemotingFactory | None:
        wanted = self._own_remoting
        if wanted is True:
            return self._remoting_connection
        return None if isinstance(wanted, bool) else wanted

    def _remoting_connection(self) -> asyncio.Protocol:
        assert self._remoting is not None  # it is made before the door opens
        return self._remoting.server.protocol()

    def _role_changed(self, _role: BrokerRole) -> None:
        self.state.wake()
        registration, bridge = self._registration, self._bridge
        if registration is not None and bridge is not None:
            bridge.post(registration.wake)

    def _watched_connections(self) -> Connections:
        if self.node is not None:
            return self.node.connections
        config = self.config
        self._connections = Connections(
            "rocketstore-connections",
            config.limits,
            share_percent=config.access.account_share_percent,
            conditions=self.conditions,
        )
        return self._connections

    def _position_of(self, index: int) -> int:
        """The start of an entry; the log's begin or committed end if it is out of that range."""
        if self.node is None:
            return no_indexes(index)
        known = self.node.bulk.committed_range()
        if index <= known.begin.index:
            return int(known.begin.position)
        return int(self.node.bulk.place_of_index(min(LogIndex(index), known.end.index)).position)

    async def _end_service(self, grace_s: float) -> None:
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        if self._service is not None:
            self._service.stop_waiting()
        if self._door is not None:
            self._door.stop_listening()
        if self._slave_sync is not None:
            await self._slave_sync.close()
        if self._successors is not None:
            await self._successors.close()
        if self._registration is not None:
            await self._registration.close()
        if self._remoting is not None:
            await self._remoting.close(grace_s)
        if self._server is not None:
            await self._server.stop(grace_s or None)
        if self._service is not None and self._broker is not None:
            await self._service.drain()
            await self._broker.close()
        if self._door is not None:
            await self._door.close()
        for client in self._dialled:
            await client.close()

    def _close_service(self, grace_s: float) -> None:
        if self._bridge is not None:
            with suppress(RuntimeError):  # the node failed and its loop is gone
                self._bridge.run(self._end_service(grace_s))
        if self._broker is not None:
            self._broker.loop.readers.close()
        if self._connections is not None:
            self._connections.close()

    # -- stopping --------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Transfer leadership while clients are still served, so that they learn the new master's address from this
        one.
        """
        node = self.node
        if node is None or not node.config.peers or not is_leader(node.status()):
            return
        finished = threading.Event()

        def done(result: LeaderHint | DLedgerError) -> None:
            _log.info("handing over: %s", result)
            finished.set()

        node.submit_transfer(None, done)
        finished.wait(node.config.election.transfer_timeout_ms / 1000 + 1)

    def _close_store(self) -> None:
        store: MessageStore | None = getattr(self, "store", None)
        try:
            if store is not None:
                store.shutdown()
        except (DLedgerError, OSError) as error:
            _log.error("closing the store failed: %s", error)
            self._failure = self._failure or error
        finally:
            if self.node is not None:
                self.node.stop(graceful=False)

    def _watch(self) -> None:
        """Stop the broker if its node failed; on a member, give up leadership if its store failed.

        It also stops if its state or delayed delivery fails, in a group or not, because no broker can do without them.
        """
        clock = ClockWatch(self._clock, self.conditions, lambda: self.store.index_end().store_ms)
        while not self._stopping.wait(WATCH_INTERVAL_S):
            clock.look()
            self.conditions.now()  # removes expired conditions
            failure = self.state.fatal or self.schedule.fatal or self.transactions.fatal
            if self._role_change is not None:
                failure = failure or self._role_change.fatal
            if self.node is not None:
                failure = self.node.fatal or self.store.failure or failure
            if failure is not None:
                _log.critical("stopping: %s", failure)
                self._fail(failure)
                return
            if self.node is None:
                if self._tls is not None:
                    self._tls.refresh()
                continue
            self._has_caught_up()  # otherwise this would only be noticed at the first read, which would be refused

    def _fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._stopped.set()


def _options(config: BrokerConfig) -> rpc_options.Options:
    calls_max = config.pulls_waiting_max + config.streams_max
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", rpc_options.request_bytes_for(config.store.max_message_size)),
        ("grpc.max_send_message_length", -1),
        ("grpc.server.max_pending_requests", calls_max),
        ("grpc.server.max_pending_requests_hard_limit", 2 * calls_max),
        *rpc_options.limit_options(config.limits),
    ]


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
