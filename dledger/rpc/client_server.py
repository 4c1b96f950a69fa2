"""The server that clients talk to: LogService, health and reflection on an event loop in a thread of its own."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dledger.config import CLIENT_PORT_OFFSET, ServerConfig
from dledger.errors import InvariantError
from dledger.rpc import options
from dledger.rpc.log_service import LogService
from dledger.rpc.loop_thread import LoopThread
from dledger.rpc.ports import LogNode


class ClientServer:
    """Listens on the client address from ``start`` to ``close``, which belong to one thread."""

    def __init__(self, config: ServerConfig, node: LogNode) -> None:
        self._config = config
        self._node = node
        self._port = 0
        self._loop: LoopThread | None = None
        self._service: LogService | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def port(self) -> int:
        """The port listened on, once started."""
        return self._port

    @property
    def address(self) -> str:
        """What clients shall connect to: the advertised address, or the one listened on."""
        if self._config.advertised_client_address:
            return self._config.advertised_client_address
        host = self._host
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    def start(self) -> None:
        """Return once clients are served. Raises ``ConfigError`` if the address cannot be had."""
        if self._loop is not None:
            raise InvariantError("the client server is started only once")
        self._loop = LoopThread.lease()
        try:
            self._loop.run(self.open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what is under way and join every thread. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.run(self.shut())
        if self._service is not None:
            self._service.join()
        loop.release()

    async def open(self) -> None:
        """What ``start`` does on the loop; for a program that has a loop already, with ``shut``."""
        config = self._config
        self._service = LogService(config, self._node)
        self._server = grpc.aio.server(
            options=options.client_server_options(config),
            maximum_concurrent_rpcs=2 * config.replication.pending_entries_max + config.client_streams_max,
        )
        self._server.add_generic_rpc_handlers((self._service.handlers(),))
        statuses = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in grpc-stubs
        health_pb2_grpc.add_HealthServicer_to_server(statuses, self._server)
        for name in ("", options.LOG_SERVICE):
            await statuses.set(name, health_pb2.HealthCheckResponse.SERVING)
        names = (options.LOG_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._port = options.bind(self._server, self._host, self._wanted_port(), "client")
        await self._server.start()

    async def shut(self) -> None:
        """What ``close`` does on the loop; calls under way end with UNAVAILABLE."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        if self._service is not None:
            self._service.close()

    @property
    def _host(self) -> str:
        return self._config.client_host or self._config.self_member.host

    def _wanted_port(self) -> int:
        if self._config.client_port is not None:
            return self._config.client_port
        port = self._config.self_member.port + CLIENT_PORT_OFFSET
        if port > 65535:
            raise InvariantError("the configuration was not checked")
        return port
