"""The resources shared by the groups of a process: ports, event loops, certificates, access rules, timer threads.

Each group's member (``dledger.server.DLedgerServer``) has its own directory, lock, flusher, dispatchers and links.

``ClientServer`` serves clients on an event loop in its own thread: its groups' logs over remoting, and over gRPC.
Brokers serve them at ports of their own, one group at each, on this loop: then none is opened here.

With several groups at one port, each request goes to the handlers of the group that it names. A request whose group is
missing, or none of this process's, goes to any of them, which answer what is wrong with it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, NamedTuple

import grpc

from dledger.access.guard import AccessControl, AccessGuard
from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.errors import InvalidRequestError, InvariantError
from dledger.monitoring import Conditions
from dledger.remoting import log_codec, log_service
from dledger.remoting.acceptor import RemotingAcceptor
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from dledger.remoting.log_codec import JavaCode, LogCode
from dledger.remoting.log_service import LogHandlers, log_server
from dledger.remoting.server import Answer, Direct, Handler, RemotingServer
from dledger.rpc import options
from dledger.rpc.clients.codec import group_named
from dledger.rpc.clients.connections import Connections
from dledger.rpc.clients.grpc_server import GrpcServer, Methods
from dledger.rpc.clients.log_requests import ClientRoom, LogRequests
from dledger.rpc.clients.log_service import LogService
from dledger.rpc.listening import listen_for_clients
from dledger.rpc.loops import LoopBridge, LoopThread, Report, log_failure
from dledger.rpc.peers.port import PeerPort
from dledger.rpc.ports import LogNode
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.runtime.threads import Housekeeping, Supervisor, Task
from dledger.values import address_text


class _GroupedHandlers:
    """The handlers of at least one group, by its name. On the loop."""

    def __init__(self, groups: Mapping[str, LogHandlers]) -> None:
        self._groups: Final = groups
        self._any: Final = next(iter(groups.values()))
        self.direct: Final[Mapping[int, Direct]] = {code: partial(self._take, code) for code in self._any.direct}
        self.awaited: Final[Mapping[int, Handler]] = {code: partial(self._handle, code) for code in self._any.awaited}

    def closed(self, connection: RemotingConnection) -> None:
        """A client is gone."""
        for handlers in self._groups.values():
            handlers.closed(connection)

    def _take(self, code: int, connection: RemotingConnection, frame: Frame) -> None:
        self._named(code, frame).direct[code](connection, frame)

    async def _handle(self, code: int, connection: RemotingConnection, frame: Frame) -> Answer:
        return await self._named(code, frame).awaited[code](connection, frame)

    def _named(self, code: int, frame: Frame) -> LogHandlers:
        try:
            name = _NAMED.get(code, _by_field)(frame)
        except InvalidRequestError:  # its handler says so
            return self._any
        return self._groups.get(name, self._any)


def _by_field(frame: Frame) -> str:
    return group_named(frame.body)


def _in_json(frame: Frame) -> str:
    return log_service.text_of(log_service.request_of(frame), "group")


_NAMED: Final[Mapping[int, Callable[[Frame], str]]] = {
    LogCode.APPEND: lambda frame: log_codec.group_of_append(frame.body),
    LogCode.READ: lambda frame: log_codec.decode_read(frame.body).read.group,
    **dict.fromkeys(JavaCode, _in_json),
}
"""How requests name their group, unless as protobuf messages do."""


_LOG = logging.getLogger(__name__)
GROUP_METADATA: Final = "dledger-group"
"""Names the group of a stream of requests, which is admitted before the first of them arrives."""
_Context = grpc.aio.ServicerContext[bytes, bytes]
_Handler = Any  # grpc.RpcMethodHandler, whose stubs lack the functions that it holds


class ServedLog(NamedTuple):
    """A group's log, and where limits report that they refuse its requests."""

    config: ServerConfig
    node: LogNode
    conditions: Conditions


class ClientServer:
    """From ``start`` to ``close``."""

    def __init__(
        self,
        logs: Sequence[ServedLog],
        guard: AccessGuard | None = None,
        tls_keeper: TlsKeeper | None = None,
        report: Report = log_failure,
    ) -> None:
        """``logs``: of all groups, whose settings agree on the ports and limits."""
        self._logs = logs
        self._config = config = logs[0].config
        self.conditions = logs[0].conditions
        """Where limits of connections report that they refuse some."""
        self._guard = guard
        self._tls = tls_keeper or TlsKeeper.of(config)
        # If it fails, neither clients nor peers are served any more: it also sends the pushes.
        self._loop = LoopThread(f"dledger-client-rpc-{config.node_id}", report)
        self._requests: Mapping[str, LogRequests] = {}
        self._log_handlers: Mapping[str, LogHandlers] = {}
        self._remoting: RemotingServer | None = None
        self._acceptor: RemotingAcceptor | None = None
        self._grpc: GrpcServer | None = None
        self.port = 0
        """The port for clients, once started."""

    @property
    def grpc_port(self) -> int:
        """The port of gRPC, once started; 0: none."""
        return 0 if self._grpc is None else self._grpc.port

    @property
    def bridge(self) -> LoopBridge:
        """The bridge to the event loop, once started; others may use it until ``close``."""
        if (bridge := self._loop.bridge) is None:
            raise InvariantError("the client server is not started")
        return bridge

    def log_handlers(self, group: str) -> LogHandlers:
        """A log's handlers over remoting, for another server on the same event loop, once started."""
        if not self._log_handlers:
            raise InvariantError("the client server is not started")
        return self._log_handlers[group]

    @property
    def address(self) -> str:
        """The address for clients: the advertised one, or the one listened on."""
        if self._config.advertised_client_address:
            return self._config.advertised_client_address
        host = self._config.client_host or self._config.self_member.host
        return address_text(host, self.port)

    def start(self, *, ports: bool = True) -> None:
        """Return once clients are served; ``ports`` False: those of the log, by others. Raises ``ConfigError``."""
        bridge = self._loop.start()
        try:
            bridge.run(self._serve(bridge, ports=ports))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel calls in progress and join every thread. Idempotent."""
        if self._loop.bridge is not None:
            ending = self._end()
            try:
                self._loop.bridge.run(ending)
            except RuntimeError:  # the loop has ended, by a failure or an earlier close
                ending.close()
        self._loop.stop()

    def grpc_server(self, name: str, groups: Sequence[str], connection_calls_max: int = 0) -> GrpcServer:
        """A server of the service of these groups' logs, not started yet; on the loop.

        ``name``: of the thread that watches it. ``connection_calls_max``: instead of the one in the settings, unless it
        is 0.
        """
        if not self._requests:
            raise InvariantError("the client server is not started")
        served = {group: self._requests[group] for group in groups}
        some = max(served.values(), key=lambda one: options.request_bytes_max(one.config))
        config, quotas = some.config, some.quotas
        share = config.access.account_share_percent
        connections = Connections(name, config.limits, share_percent=share, conditions=some.conditions)
        most = connection_calls_max or config.limits.connection_calls_max
        server_options, calls_max = options.client_server_options(config, most), options.calls_max(config)
        server = GrpcServer(connections, server_options, calls_max, quotas, "client_streams_max")
        services = {group: LogService(one, connections).methods() for group, one in served.items()}
        server.add(options.LOG_SERVICE, services[groups[0]] if len(services) == 1 else grouped(services))
        return server

    async def _serve(self, bridge: LoopBridge, *, ports: bool) -> None:
        config, guard = self._config, self._guard
        room = ClientRoom.of(config)
        groups = tuple(one.config.group for one in self._logs) if ports else ()
        self._requests = {
            one.config.group: LogRequests(one.config, one.node, bridge, guard, one.conditions, room, groups)
            for one in self._logs
        }
        self._log_handlers = {group: LogHandlers(one) for group, one in self._requests.items()}
        if not ports:
            return
        with ExitStack() as opened:
            listening = listen_for_clients(config.client_bind_host, config.client_bind_port, "client")
            for one in listening:
                opened.callback(one.close)
            self.port = listening[0].getsockname()[1]
            await self._serve_grpc()
            opened.pop_all()
        only, *others = self._log_handlers.values()
        handlers = _GroupedHandlers(self._log_handlers) if others else only
        self._remoting = log_server(self._requests[config.group], handlers)
        handshake_s_max = config.limits.handshake_ms_max / 1000
        self._acceptor = RemotingAcceptor("node", self._remoting.protocol, self._tls, None, handshake_s_max)
        self._acceptor.open(listening, self.grpc_port)

    async def _serve_grpc(self) -> None:
        config, port = self._config, self._config.grpc_bind_port
        if port is None:
            if config.grpc_server_port is None:
                _LOG.warning("no port of gRPC: client port + 2 is another member's on this host; set grpcServerPort")
            return
        server = self.grpc_server(f"dledger-connections-{config.node_id}", tuple(self._requests))
        credentials = None if self._tls is None else self._tls.client_server_credentials()
        await server.start(config.client_bind_host, port, credentials, describes_itself=self._guard is None)
        self._grpc = server

    async def _end(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.close()
        if self._grpc is not None:
            await self._grpc.announce_end()
        if self._remoting is not None:
            await self._remoting.close(0)
        if self._grpc is not None:
            await self._grpc.stop(0)
        for requests in self._requests.values():
            await requests.drain()
            requests.close()


def grouped(services: Mapping[str, Methods]) -> Methods:
    """The log services of several groups at one port of gRPC: each call goes to that of the group that it names.

    A call whose group is missing, or none of this process's, goes to any of them, which answers what is wrong with it.

    The methods of at least one group's log service, by the group's name, as those of one service.
    """
    some = next(iter(services.values()))
    return {name: _grouped({group: methods[name] for group, methods in services.items()}) for name in some}


def _grouped(groups: Mapping[str, _Handler]) -> _Handler:
    some = next(iter(groups.values()))

    def named(data: bytes) -> _Handler:
        try:
            return groups.get(group_named(data), some)
        except InvalidRequestError:  # its handler says so
            return some

    async def call(data: bytes, context: _Context) -> bytes:
        answer: bytes = await named(data).unary_unary(data, context)
        return answer

    async def stream(data: bytes, context: _Context) -> None:
        await named(data).unary_stream(data, context)

    async def streams(requests: AsyncIterable[bytes], context: _Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        name = str(metadata.get(GROUP_METADATA, ""))
        if not name and len(groups) > 1:
            told = f"this node serves the groups {', '.join(sorted(groups))}: name one in the metadata {GROUP_METADATA}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, told)
        await groups.get(name, some).stream_stream(requests, context)

    if some.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(call)
    if some.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.stream_stream_rpc_method_handler(streams)


_TLS_INTERVAL_MS: Final = 2000

Failed = Callable[[str, BaseException], None]
"""Told which group's member has failed, and why."""


def _nowhere(_group: str, _error: BaseException) -> None:
    """A member alone in its process ends it."""


class Host:
    """In this order: its groups ``add`` their logs, ``start``, ``accept`` once the members are started; the members'
    transports are closed, ``close_ports``, the members' work ends, ``stop``.
    """

    def __init__(
        self, configs: Sequence[ServerConfig], clock: Clock, supervisor: Supervisor, failed: Failed = _nowhere
    ) -> None:
        """``configs``: of its groups, which agree on what is the process's (``host_settings``).

        ``supervisor`` is told if what they share fails, ``failed`` if one of them does, on any thread. Raises
        ``ConfigError``.
        """
        self._config = config = configs[0]
        self._clock = clock
        self._supervisor = supervisor
        self.groups: Final = tuple(one.group for one in configs)
        """The names of its groups."""
        self.failed: Final = failed
        self.tls: Final = TlsKeeper.of(config)
        """The certificates in use; None for plaintext."""
        self.housekeeping: Final = Housekeeping(config.node_id, clock, supervisor)
        self.peer_port: Final = PeerPort(config, self.groups, self.tls, supervisor.report)
        self._access = AccessControl.of(config.access, name=config.node_id, clock=clock)
        self._logs: list[ServedLog] = []
        self._clients: ClientServer | None = None
        self._renewal = None if self.tls is None else Task(self.housekeeping.clean, self._renew_tls, supervisor)

    def add(self, log: ServedLog) -> None:
        """Serve a group's log to clients; before ``start``."""
        self._logs.append(log)

    @property
    def clients(self) -> ClientServer:
        """The server for clients, from ``start`` on. Raises ``InvariantError`` before."""
        if self._clients is None:
            raise InvariantError("the host is not started")
        return self._clients

    @property
    def client_address(self) -> str:
        """The address for clients; its port is 0 before ``start``, if it is chosen freely."""
        if self._clients is not None:
            return self._clients.address
        return address_text(self._config.client_host or self._config.self_member.host, self._config.client_bind_port)

    @property
    def guard(self) -> AccessGuard | None:
        """Access control of all its groups; None: everything is allowed."""
        return None if self._access is None else self._access.guard

    def start(self, *, client_ports: bool = True) -> None:
        """Open the ports; members are connected only from ``accept`` on. Raises ``ConfigError`` if a port is taken.

        ``client_ports`` False: clients are served by others, on the event loop of ``clients``.
        """
        self._clients = clients = ClientServer(self._logs, self.guard, self.tls, self._supervisor.report)
        clients.start(ports=client_ports)
        if self._access is not None:
            self._access.start(clients.bridge.post, self._supervisor.thread)
        self.peer_port.open()
        self.housekeeping.start()
        if self._renewal is not None:
            self._renewal.start()

    def accept(self) -> None:
        """Take the connections of the groups' members, whose transports are started."""
        self.peer_port.accept()

    def close_ports(self) -> None:
        """Serve nobody any more. Idempotent."""
        self.peer_port.close()
        if self._clients is not None:
            self._clients.close()
        if self._access is not None:
            self._access.close()

    def stop(self) -> None:
        """Close the ports, and end the threads. Idempotent."""
        self.close_ports()
        self.housekeeping.stop()

    def _renew_tls(self) -> int:
        if self.tls is not None:
            self.tls.refresh()
        return self._clock.monotonic_ms() + _TLS_INTERVAL_MS
