"""A port of gRPC: its services, health and reflection, and the limits of calls and connections.

Anyone who can connect may call health and reflection, without an account, and keep a stream open. So each address has
its share of these streams, and requests, which name a service or a symbol, are short: gRPC keeps the request of a
stream in memory, several times, as long as the stream. They are decoded here, because gRPC would log a traceback for
each that is malformed.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn, TypeVar

import grpc
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from dledger.access.guard import quota_at
from dledger.access.quota import Quotas, TooManyWaitsError
from dledger.errors import InvalidRequestError, InvariantError, told
from dledger.rpc import options
from dledger.rpc.clients.aio_server import Methods, add_methods, aio_server
from dledger.rpc.clients.connections import Connection, Connections
from dledger.rpc.clients.first_byte import PRIVATE_HOST, FirstByteRelay
from dledger.rpc.fields import parse
from dledger.rpc.listening import GRPC_ADVICE, listen_for_clients
from dledger.rpc.options import Options

ASKED_BYTES_MAX: Final = 1024
"""The longest request to health and reflection."""

_Context = grpc.aio.ServicerContext[Any, Any]  # Any: messages of either service
_Asked = TypeVar("_Asked", bound=Message)


class GrpcServer:
    """On an event loop: ``add`` services, then ``start``, and ``stop``."""

    def __init__(
        self, connections: Connections, server_options: Options, calls_max: int, quotas: Quotas, setting: str
    ) -> None:
        """``quotas``: whose limit of streams, named ``setting``, is that of health and reflection together."""
        self.connections: Final = connections
        """For the services' calls."""
        self._server = aio_server(server_options, calls_max)
        self._calls_max = calls_max
        self._quotas = quotas
        self._setting = setting
        self._statuses = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in grpc-stubs
        self._services: list[str] = []
        self._pools: list[DescriptorPool] = [Default()]
        self._relay: FirstByteRelay | None = None
        self.port = 0
        """Once started."""

    def add(self, service: str, methods: Methods, pool: DescriptorPool | None = None) -> None:
        """Serve these methods; call it before the start. ``pool``: of its messages, if they are in one of their own."""
        self._services.append(service)
        if pool is not None:
            self._pools.append(pool)
        add_methods(self._server, service, methods)

    async def start(
        self,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None,
        *,
        describes_itself: bool,
        plaintext_s_max: float = 0,
    ) -> None:
        """Serve there; ``port`` 0: any free one. Raises ``ConfigError``.

        ``describes_itself``: by reflection, to everybody, because tools that use it cannot sign; health is open to
        everybody in any case, for monitoring. ``plaintext_s_max``: not 0: accept plaintext besides TLS, from anyone who
        sends its first byte within so many seconds.
        """
        self._add_health()
        for name in ("", *self._services):
            await self._statuses.set(name, health_pb2.HealthCheckResponse.SERVING)
        if describes_itself:
            self._add_reflection()
        if credentials is not None and plaintext_s_max:
            await self._start_both(host, port, credentials, plaintext_s_max)
        else:
            self.port = options.bind(self._server, host, port, "gRPC", credentials)
            await self._server.start()
        self.connections.watch(self.port, self._calls_max)

    async def _start_both(
        self, host: str, port: int, credentials: grpc.ServerCredentials, first_byte_s_max: float
    ) -> None:
        listening = listen_for_clients(host, port, "gRPC", GRPC_ADVICE)
        self.port = listening[0].getsockname()[1]
        tls_port = options.bind(self._server, PRIVATE_HOST, 0, "private TLS", credentials)
        plaintext_port = options.bind(self._server, PRIVATE_HOST, 0, "private gRPC")
        self._relay = FirstByteRelay("gRPC", tls_port, plaintext_port, first_byte_s_max)
        self.connections.client_of = self._relay.client_of
        await self._server.start()
        self._relay.open(listening)

    async def announce_end(self) -> None:
        """Tell anyone who asks for its health that it stops."""
        await self._statuses.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, and cancel what is under way after ``grace_s``. Idempotent."""
        if self._relay is not None:
            self._relay.stop_listening()
        await self._server.stop(grace_s or None)
        if self._relay is not None:
            await self._relay.close()
        self.connections.close()

    def _add_health(self) -> None:
        """``Check`` and ``Watch``."""
        statuses = self._statuses

        async def check(data: bytes, context: _Context) -> object:
            try:
                asked = _decoded(health_pb2.HealthCheckRequest, data)
            except InvalidRequestError as error:
                await _refuse(context, error)
            return await statuses.Check(asked, context)

        async def watch(data: bytes, context: _Context) -> None:
            try:
                asked = _decoded(health_pb2.HealthCheckRequest, data)
                with self._stream(context):
                    await statuses.Watch(asked, context)
            except (InvalidRequestError, TooManyWaitsError) as error:
                await _refuse(context, error)

        encode = health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(check, None, encode),
            "Watch": grpc.unary_stream_rpc_method_handler(watch, None, encode),
        }
        add_methods(self._server, health.SERVICE_NAME, methods)

    def _add_reflection(self) -> None:
        """Describe the services and their messages."""
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        servicer = reflection.aio.ReflectionServicer(names, _Pools(self._pools))  # type: ignore[attr-defined]  # missing in its stubs

        async def decoded(requests: AsyncIterable[bytes]) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            async for data in requests:
                yield _decoded(reflection_pb2.ServerReflectionRequest, data)

        async def info(requests: AsyncIterable[bytes], context: _Context) -> None:
            try:
                with self._stream(context) as connection:
                    async for answer in servicer.ServerReflectionInfo(decoded(requests), context):
                        with connection.writing():
                            await context.write(answer)
            except (InvalidRequestError, TooManyWaitsError) as error:
                await _refuse(context, error)

        encode = reflection_pb2.ServerReflectionResponse.SerializeToString
        handler = grpc.stream_stream_rpc_method_handler(info, None, encode)
        add_methods(self._server, reflection.SERVICE_NAME, {"ServerReflectionInfo": handler})

    @contextmanager
    def _stream(self, context: _Context) -> Iterator[Connection]:
        """Count a stream while it runs. Raises ``TooManyWaitsError``."""
        with self.connections.call(context) as connection:
            quota = quota_at(connection.host, connection.peer, self._quotas)
            with quota.stream("health and reflection", self._setting):
                yield connection


class _Pools:
    """Several pools, as far as reflection looks into one: the first that knows what is asked for answers."""

    def __init__(self, pools: Sequence[DescriptorPool]) -> None:
        self._pools = pools

    def __getattr__(self, name: str) -> Callable[..., object]:
        def find(*asked: object) -> object:
            for pool in self._pools[:-1]:
                with suppress(KeyError):
                    return getattr(pool, name)(*asked)
            return getattr(self._pools[-1], name)(*asked)

        return find


def _decoded(kind: type[_Asked], data: bytes) -> _Asked:
    """A request. Raises ``InvalidRequestError``."""
    if len(data) > ASKED_BYTES_MAX:
        raise InvalidRequestError(f"a request of {len(data)} bytes: at most {ASKED_BYTES_MAX} are allowed here")
    return parse(kind, data)


async def _refuse(context: _Context, error: InvalidRequestError | TooManyWaitsError) -> NoReturn:
    refused = grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, TooManyWaitsError):
        refused = grpc.StatusCode.RESOURCE_EXHAUSTED
    await context.abort(refused, told(error))
    raise InvariantError("abort raises")
