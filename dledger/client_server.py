"""A process's server for clients, on an event loop in its own thread: its groups' logs over remoting, and over gRPC.

Brokers serve them at ports of their own, one group at each, on this loop: then none is opened here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import grpc

from dledger.access.guard import AccessGuard
from dledger.conditions import Conditions
from dledger.config import ServerConfig
from dledger.errors import InvalidRequestError, InvariantError
from dledger.remoting.acceptor import RemotingAcceptor
from dledger.remoting.log.groups import GroupedHandlers
from dledger.remoting.log.service import LogHandlers, log_server
from dledger.remoting.server import RemotingServer
from dledger.rpc import options
from dledger.rpc.bridge import LoopBridge, LoopThread, Report, log_failure
from dledger.rpc.clients.aio_server import Methods
from dledger.rpc.clients.codec import group_named
from dledger.rpc.clients.connections import Connections
from dledger.rpc.clients.grpc_server import GrpcServer
from dledger.rpc.clients.log_requests import ClientRoom, LogRequests
from dledger.rpc.clients.log_service import LogService
from dledger.rpc.listening import listen_for_clients
from dledger.rpc.ports import LogNode
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.values import address_text

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
        handlers = GroupedHandlers(self._log_handlers) if others else only
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
