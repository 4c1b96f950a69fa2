"""The servers for clients, on one event loop in its own thread: the log over remoting and gRPC, health, reflection."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from dledger.access.guard import AccessGuard
from dledger.conditions import Conditions
from dledger.config import ServerConfig
from dledger.errors import ConfigError, InvariantError
from dledger.remoting.log.service import LogHandlers, log_server
from dledger.remoting.shared_port import SharedPort
from dledger.rpc import loops, options
from dledger.rpc.bridge import LoopBridge, Report, log_failure
from dledger.rpc.clients.aio_server import Methods, add_methods, aio_server
from dledger.rpc.clients.connections import Connections
from dledger.rpc.clients.log_requests import LogRequests
from dledger.rpc.clients.log_service import LogService
from dledger.rpc.clients.standard_services import StandardServices
from dledger.rpc.ports import LogNode
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.values import address_text

_LOG = logging.getLogger(__name__)


class ClientServer:
    """Listens on the client port and on that of gRPC from ``start`` to ``close``."""

    def __init__(
        self,
        config: ServerConfig,
        node: LogNode,
        guard: AccessGuard | None = None,
        tls_keeper: TlsKeeper | None = None,
        report: Report = log_failure,
        conditions: Conditions | None = None,
    ) -> None:
        self._config = config
        self.conditions = conditions or Conditions(config.node_id)
        """Where limits report that they refuse requests."""
        self._report = report
        self._guard = guard
        self._tls = tls_keeper or TlsKeeper.of(config)
        self._node = node
        self._port = 0
        self.grpc_port = 0
        """The port of gRPC, once started; 0: none."""
        self._ready = threading.Event()
        self._failure: ConfigError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._bridge: LoopBridge | None = None
        self._connections: Connections | None = None
        self._methods: Methods | None = None
        self._log_handlers: LogHandlers | None = None
        self._thread = threading.Thread(target=self._run, name=f"dledger-client-rpc-{config.node_id}")

    @property
    def port(self) -> int:
        """The port listened on, once started."""
        return self._port

    @property
    def bridge(self) -> LoopBridge:
        """The bridge to the event loop, once started; others may use it until ``close``."""
        if self._bridge is None:
            raise InvariantError("the client server is not started")
        return self._bridge

    @property
    def methods(self) -> Methods:
        """The log service's methods, for another server on the same event loop, once started."""
        if self._methods is None:
            raise InvariantError("the client server is not started")
        return self._methods

    @property
    def log_handlers(self) -> LogHandlers:
        """The log's handlers over remoting, for another server on the same event loop, once started."""
        if self._log_handlers is None:
            raise InvariantError("the client server is not started")
        return self._log_handlers

    @property
    def connections(self) -> Connections:
        """The client connections, for another server of this process to watch its own there, once started."""
        if self._connections is None:
            raise InvariantError("the client server is not started")
        return self._connections

    @property
    def address(self) -> str:
        """The address for clients: the advertised one, or the one listened on."""
        if self._config.advertised_client_address:
            return self._config.advertised_client_address
        host = self._config.client_host or self._config.self_member.host
        return address_text(host, self._port)

    def start(self) -> None:
        """Return once clients are served. Raises ``ConfigError`` if it cannot listen."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def close(self) -> None:
        """Cancel calls in progress and join every thread. Idempotent."""
        if self._thread.ident is None:
            return
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop may just have ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def _host(self) -> str:
        return self._config.client_bind_host

    def _run(self) -> None:
        try:
            loops.run(self._serve())
        except ConfigError as error:
            self._failure = error
        except BaseException as error:
            if self._ready.is_set():  # neither clients nor peers are served any more: this thread also sends the pushes
                self._report(error)
            raise
        finally:
            if not self._ready.is_set() and self._failure is None:
                self._failure = ConfigError(["the client server did not start: see the traceback above"])
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        config = self._config
        self._bridge = LoopBridge()
        calls_max = options.calls_max(config)
        self._connections = connections = Connections(
            f"dledger-connections-{config.node_id}",
            config.limits,
            share_percent=config.access.account_share_percent,
            conditions=self.conditions,
        )
        requests = LogRequests(config, self._node, self._bridge, self._guard, self.conditions)
        self._log_handlers = handlers = LogHandlers(requests)
        remoting = log_server(requests, handlers)
        port = SharedPort("node", remoting.protocol, self._tls, None, config.limits)
        try:
            server = aio_server(options.client_server_options(config), calls_max)
            self._methods = LogService(requests, connections).methods()
            add_methods(server, options.LOG_SERVICE, self._methods)
            statuses = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in grpc-stubs
            standard = StandardServices(server, connections, config.client_streams_max)
            standard.add_health(statuses)
            for name in ("", options.LOG_SERVICE):
                await statuses.set(name, health_pb2.HealthCheckResponse.SERVING)
            if self._guard is None:  # reflection tools cannot sign; health stays open for monitoring
                standard.add_reflection((options.LOG_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME))
            self._port = port.listen(self._host, config.client_bind_port, "client")
            port.bind(server, config.store.base_dir)
            self._listen_for_grpc(server)
            await server.start()
            port.open()
            connections.watch({self._port, self.grpc_port} - {0}, calls_max, port.remoting_clients)
            try:
                self._ready.set()
                await self._stop.wait()
                port.stop_listening()
                await statuses.enter_graceful_shutdown()
            finally:
                await remoting.close(0)
                await server.stop(None)
                await requests.drain()
        finally:
            await port.close()
            requests.close()
            connections.close()

    def _listen_for_grpc(self, server: grpc.aio.Server) -> None:
        wanted = self._config.grpc_bind_port
        if wanted is None and self._config.grpc_server_port is None:
            _LOG.warning("no port of gRPC: the client port + 2 is another member's on this host; set grpcServerPort")
        if wanted is not None:
            credentials = self._tls.client_server_credentials() if self._tls is not None else None
            self.grpc_port = options.bind(server, self._host, wanted, "gRPC", credentials)
