"""Health and reflection at a client port, with limits that gRPC's own services lack.

Anyone who can connect may call them, without an account, and keep a stream open. So their streams count as calls of the
address, and their number is limited by the port's room.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from dledger.access.quota import TooManyWaitsError
from dledger.errors import told
from dledger.rpc.clients.aio_server import add_methods
from dledger.rpc.clients.connections import Connections

_Context = grpc.aio.ServicerContext[Any, Any]  # Any: messages of either service


class StandardServices:
    """Registers the services of one server before it is started."""

    def __init__(self, server: grpc.aio.Server, connections: Connections, streams_max: int) -> None:
        self._server = server
        self._connections = connections
        self._streams_max = streams_max
        self._streams = 0

    def add_health(self, statuses: Any) -> None:  # noqa: ANN401  # gRPC's HealthServicer; grpc-stubs lacks it
        """``Check`` and ``Watch``."""

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

    def add_reflection(self, services: Sequence[str]) -> None:
        """Describe these services and their messages."""
        servicer = reflection.aio.ReflectionServicer(services)  # type: ignore[attr-defined]  # missing in its stubs

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
        with self._connections.call(context):
            self._streams += 1
            try:
                yield
            finally:
                self._streams -= 1
