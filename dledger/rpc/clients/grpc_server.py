"""A port of gRPC: its services, health and reflection, and the limits of calls and connections.

Anyone who can connect may call health and reflection, without an account, and keep a stream open. So their streams
count as calls of the address, and their number is limited by the port's room.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from dledger.access.quota import TooManyWaitsError
from dledger.errors import told
from dledger.rpc import options
from dledger.rpc.clients.aio_server import Methods, add_methods, aio_server
from dledger.rpc.clients.connections import Connections
from dledger.rpc.options import Options
from dledger.rpc.tls_keeper import TlsKeeper

_Context = grpc.aio.ServicerContext[Any, Any]  # Any: messages of either service


class GrpcServer:
    """On an event loop: ``add`` services, then ``start``, and ``stop``."""

    def __init__(self, connections: Connections, server_options: Options, calls_max: int, streams_max: int) -> None:
        """``streams_max``: of health and reflection together."""
        self.connections: Final = connections
        """For the services' calls."""
        self._server = aio_server(server_options, calls_max)
        self._calls_max = calls_max
        self._streams_max = streams_max
        self._streams = 0
        self._statuses = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in grpc-stubs
        self._services: list[str] = []
        self.port = 0
        """Once started."""

    def add(self, service: str, methods: Methods) -> None:
        """Serve these methods; call it before the start."""
        self._services.append(service)
        add_methods(self._server, service, methods)

    async def start(self, host: str, port: int, tls_keeper: TlsKeeper | None, *, describes_itself: bool) -> None:
        """Serve there; ``port`` 0: any free one. Raises ``ConfigError``.

        ``describes_itself``: by reflection, to everybody, because tools that use it cannot sign; health is open to
        everybody in any case, for monitoring.
        """
        self._add_health()
        for name in ("", *self._services):
            await self._statuses.set(name, health_pb2.HealthCheckResponse.SERVING)
        if describes_itself:
            self._add_reflection()
        credentials = tls_keeper.client_server_credentials() if tls_keeper is not None else None
        self.port = options.bind(self._server, host, port, "gRPC", credentials)
        await self._server.start()
        self.connections.watch(self.port, self._calls_max)

    async def announce_end(self) -> None:
        """Tell whoever asks for its health that it stops."""
        await self._statuses.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, and cancel what is under way after ``grace_s``. Idempotent."""
        await self._server.stop(grace_s or None)
        self.connections.close()

    def _add_health(self) -> None:
        """``Check`` and ``Watch``."""
        statuses = self._statuses

        async def check(request: health_pb2.HealthCheckRequest, context: _Context) -> object:
            return await statuses.Check(request, context)

        async def watch(request: health_pb2.HealthCheckRequest, context: _Context) -> None:
            try:
                with self._stream(context):
                    await statuses.Watch(request, context)
            except TooManyWaitsError as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, told(error))

        decode, encode = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(check, decode, encode),
            "Watch": grpc.unary_stream_rpc_method_handler(watch, decode, encode),
        }
        add_methods(self._server, health.SERVICE_NAME, methods)

    def _add_reflection(self) -> None:
        """Describe the services and their messages."""
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # missing in its stubs

        async def info(requests: AsyncIterable[reflection_pb2.ServerReflectionRequest], context: _Context) -> None:
            try:
                with self._stream(context):
                    async for answer in servicer.ServerReflectionInfo(requests, context):
                        await context.write(answer)
            except TooManyWaitsError as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, told(error))

        decode = reflection_pb2.ServerReflectionRequest.FromString
        encode = reflection_pb2.ServerReflectionResponse.SerializeToString
        handler = grpc.stream_stream_rpc_method_handler(info, decode, encode)
        add_methods(self._server, reflection.SERVICE_NAME, {"ServerReflectionInfo": handler})

    @contextmanager
    def _stream(self, context: _Context) -> Iterator[None]:
        """Count a stream while it runs. Raises ``TooManyWaitsError``."""
        if self._streams >= self._streams_max:
            raise TooManyWaitsError(f"{self._streams} health and reflection streams are open, which is the limit")
        with self.connections.call(context):
            self._streams += 1
            try:
                yield
            finally:
                self._streams -= 1
