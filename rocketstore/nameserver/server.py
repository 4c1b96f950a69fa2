"""One name server, wired: settings, values, tables, port. One thread serves; others write values and decode topics."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import Final

from dledger.errors import ConfigError, ShutdownError
from dledger.remoting.acceptor import RemotingAcceptor
from dledger.remoting.server import RemotingServer, ServerLimits
from dledger.rpc.listening import listen
from dledger.rpc.loops import LoopBridge, LoopThread
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.runtime.threads import EXIT_FATAL, Supervisor
from dledger.values import address_text, is_loopback
from rocketstore.nameserver.service import NameServerMeasurements, NameService
from rocketstore.nameserver.settings import NameServerConfig
from rocketstore.nameserver.tables import KvConfig, RouteTables

_LOG = logging.getLogger(__name__)

STOP_GRACE_S: Final = 2.0
SCAN_INTERVAL_S: Final = 10.0
"""RocketMQ's interval of looking for brokers that have not registered in time."""
HANDSHAKE_S_MAX: Final = 5.0
REQUESTS_MAX: Final = 16 * 1024
"""The limit of registrations and changes of values under way; all other requests are answered immediately."""
HOST_REQUESTS_MAX: Final = REQUESTS_MAX // 4
REQUEST_S_MAX: Final = 30.0


class NameServer:
    """A name server. Use ``start``, ``wait`` and ``stop``. The constructor raises ``ConfigError``."""

    def __init__(self, config: NameServerConfig) -> None:
        problems = config.problems()
        if problems:
            raise ConfigError(problems)
        self.config: Final = config
        security = config.security
        self._tls = TlsKeeper(security, name="name server", member=None) if security.has_tls else None
        kv = KvConfig(config.kv_config_path, entries_max=config.kv_entries_max, bytes_max=config.kv_bytes_max)
        self.tables: Final = RouteTables(config.table_limits)
        """For the loop's thread only."""
        self._service = NameService(config, self.tables, kv)
        self._life_lock = threading.RLock()  # one start or stop at a time; a start that fails stops
        self._stopped = threading.Event()
        self._threads = Supervisor(self._fail)
        self._loop = LoopThread("dledger-nameserver", self._threads.report)
        self._bridge: LoopBridge | None = None
        self._server: RemotingServer | None = None
        self._acceptor: RemotingAcceptor | None = None
        self._scan: asyncio.TimerHandle | None = None
        self._port = config.listen_port

    def start(self) -> NameServer:
        """Serve, unless it was stopped. Raises ``ConfigError``: the port is in use."""
        with self._life_lock:
            if self._stopped.is_set():
                return self
            try:
                listening = listen(self.config.listen_host, self.config.listen_port, "name server's")
                self._port = listening[0].getsockname()[1]
                if not self.config.allowed_brokers and not is_loopback(self.config.listen_host):
                    _LOG.warning(
                        "anyone who can connect to %s can register as a broker, and gets what clients send: set "
                        "allowedBrokers to the addresses of your brokers",
                        self.address,
                    )
                self._bridge = self._loop.start()
                self._bridge.run(self._serve(listening))
            except BaseException:
                self.stop()
                raise
            return self

    def stop(self) -> None:
        """Answer the requests under way and stop. Idempotent."""
        with self._life_lock:
            if self._stopped.is_set():
                return
            if self._bridge is not None:
                self._bridge.run(self._end())
            self._loop.stop()
            self._service.close()
            self._stopped.set()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Block until it has stopped: its exit status (0, or 70 after a fatal error), None on timeout."""
        if not self._stopped.wait(timeout_s):
            return None
        return EXIT_FATAL if self.fatal is not None else 0

    @property
    def fatal(self) -> BaseException | None:
        """Why it stopped by itself."""
        return self._threads.fatal

    @property
    def address(self) -> str:
        """The address listened on."""
        return address_text(self.config.listen_host, self._port)

    def measure(self) -> NameServerMeasurements:
        """The figures for metrics. Raises ``ShutdownError`` unless it serves."""
        with self._life_lock:
            bridge, server = self._bridge, self._server
            if bridge is None or server is None or self._stopped.is_set():
                raise ShutdownError("the name server does not serve")

            async def measured() -> NameServerMeasurements:
                return self._service.measure(server)

            return bridge.run(measured())

    async def _serve(self, listening: list[socket.socket]) -> None:
        config = self.config
        limits = ServerLimits(
            config.connections_max,
            config.host_connections_max,
            REQUESTS_MAX,
            HOST_REQUESTS_MAX,
            REQUEST_S_MAX,
            config.receive_bytes_max,
            config.host_receive_bytes_max,
            unsent_bytes_max=config.receive_bytes_max,
            host_unsent_bytes_max=config.host_receive_bytes_max,
        )
        self._server = server = RemotingServer("the name server", self._service.handlers(), limits)
        self._acceptor = RemotingAcceptor(
            "name server", server.protocol, self._tls, config.tls_server_mode, HANDSHAKE_S_MAX
        )
        self._acceptor.open(listening)
        self._look()

    def _look(self) -> None:
        """Remove brokers that have not registered in time, and again later."""
        self._service.expire()
        self._scan = asyncio.get_running_loop().call_later(SCAN_INTERVAL_S, self._look)

    async def _end(self) -> None:
        if self._scan is not None:
            self._scan.cancel()
        if self._acceptor is not None:
            await self._acceptor.close()
        if self._server is not None:
            await self._server.close(STOP_GRACE_S)

    def _fail(self, error: BaseException) -> None:
        """Stop after a failure of the loop."""
        _LOG.critical("the name server stops: %s", error)
        self._stopped.set()
