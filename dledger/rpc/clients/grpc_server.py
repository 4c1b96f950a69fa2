"""A port of gRPC: its services, health and reflection, and the limits of calls and connections.

Anyone who can connect may call health and reflection, without an account, and keep a stream open. So each address has
its share of these streams, and requests, which name a service or a symbol, are short: gRPC keeps the request of a
stream in memory, several times, as long as the stream. They are decoded here, because gRPC would log a traceback for
each that is malformed.

One port takes TLS and plaintext: gRPC's own ports are of one kind each, so both are private, and bytes are passed on.
Clients of either kind wait for nothing before they send, and the first byte tells which they are: TLS begins with a
handshake record, HTTP/2 with its preface. gRPC cannot take over a connection that somebody else has accepted.

No request can bring the server down, and it takes calls in bursts. gRPC's own server decodes the path of a request for
an unregistered method in the loop that waits for the next request; invalid UTF-8 there ends that loop, and with it the
server, so any client could stop it. Here all methods are registered, which the core compares as bytes, and any other
request is refused without decoding its path.

gRPC's own server takes one call of a method per turn of the loop, and then waits for calls of all methods anew: with
twenty methods that costs as much as everything else that it does for a call, and answers reach their clients one by
one. Here each method has tasks that take its calls, those of a burst in one turn.

Access control at the port: authentication, the form of refusals, and the end of streams of revoked keys.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import grpc
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.protobuf.message import Message
from grpc._cython import cygrpc
from grpc.aio._server import Server
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from dledger.access.guard import (
    AUDIENCE,
    BUSY,
    CHALLENGE,
    DENIED,
    REFUSAL,
    AccessGuard,
    Caller,
    NotAuthenticatedError,
    OtherAudienceError,
    SessionsFullError,
    quota_at,
)
from dledger.access.quota import Quotas, TooManyWaitsError
from dledger.errors import AccessDeniedError, DLedgerError, InvalidRequestError, InvariantError, told
from dledger.rpc import options
from dledger.rpc.clients.connections import Connection, Connections
from dledger.rpc.fields import parse
from dledger.rpc.listening import GRPC_ADVICE, TLS_HANDSHAKE, Acceptor, Arrival, listen_for_clients, peek
from dledger.rpc.options import Options
from dledger.values import address_text

TAKEN_AT_ONCE: Final = 16
"""Calls of one method that are taken in one turn of the loop."""
Methods = Mapping[str, "grpc.RpcMethodHandler[bytes, bytes]"]
"""The methods of a service, by name."""


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Reject gRPC's tracebacks for undecodable headers: one request may have any number, which would fill the disk."""
    return not str(record.msg).startswith("Invalid encoding on ")


logging.getLogger(cygrpc.__name__).addFilter(_is_worth_a_line)


def aio_server(options: Sequence[tuple[str, Any]] = (), maximum_concurrent_rpcs: int | None = None) -> grpc.aio.Server:
    """``grpc.aio.server`` for services whose methods are added by ``add_methods``."""
    return _Server(options, maximum_concurrent_rpcs)  # type: ignore[return-value]  # the stubs' base is another


def add_methods(server: grpc.aio.Server, service: str, methods: Methods) -> None:
    """Serve these methods; call it before the server is started."""
    server.add_registered_method_handlers(service, methods)  # type: ignore[attr-defined]  # missing in grpc-stubs


class _Server(Server):
    def __init__(self, options: Sequence[tuple[str, Any]], maximum_concurrent_rpcs: int | None) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, options, maximum_concurrent_rpcs)


class _Core(cygrpc.AioServer):  # type: ignore[misc]  # no stubs
    """Carries out calls of registered methods only."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: Sequence[tuple[str, Any]], calls_max: int | None
    ) -> None:
        super().__init__(loop, None, (), (), tuple(options), None)
        self.loop = loop
        self._calls_max = math.inf if calls_max is None else calls_max
        self._handlers: dict[bytes, grpc.RpcMethodHandler[bytes, bytes]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._refusals: set[asyncio.Task[None]] = set()

    def add_registered_method_handlers(self, handlers: Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]) -> None:
        super().add_registered_method_handlers(handlers)
        self._handlers.update({path.encode(): handler for path, handler in handlers.items()})

    def _make_request_call_future(self, path: bytes | None) -> asyncio.Future[Any]:  # Any: never done without an error
        """Take the calls of a method, or (None) of all others, until the server stops; fails then."""
        if path is None:
            return self.loop.create_task(self._refuse_unknown())
        return asyncio.gather(*(self._take(path) for _ in range(TAKEN_AT_ONCE)))

    async def _take(self, path: bytes) -> None:
        name, handler, loop, calls = path.decode(), self._handlers[path], self.loop, self._calls
        handle = _HANDLE.get((handler.request_streaming, handler.response_streaming), self._answer_by_stream)
        while True:
            call = await self._request_registered_call(path)
            if len(calls) >= self._calls_max:
                self._refuse(call, grpc.StatusCode.RESOURCE_EXHAUSTED, "the server has too many calls in progress")
                continue
            task = loop.create_task(cygrpc._schedule_rpc_coro(handle(handler, call, loop), call, loop, name))
            calls.add(task)
            task.add_done_callback(calls.discard)

    async def _answer_by_stream(
        self, handler: grpc.RpcMethodHandler[bytes, bytes], call: object, loop: asyncio.AbstractEventLoop
    ) -> None:
        request = await cygrpc._receive_message(call, loop)
        if request is not None:  # otherwise the client has given up
            context = AnswerStream(call, None, handler.response_serializer, loop)
            context.server = self
            await cygrpc._finish_handler_with_stream_responses(call, handler.unary_stream, request, context, loop)

    async def _refuse_unknown(self) -> None:
        while True:
            call = await self._request_call()
            self._refuse(call, grpc.StatusCode.UNIMPLEMENTED, "there is no such method")

    def _refuse(self, call: object, code: grpc.StatusCode, why: str) -> None:
        refusal = self.loop.create_task(_refuse_call(call, code, why))
        self._refusals.add(refusal)
        refusal.add_done_callback(self._refusals.discard)


class AnswerStream(cygrpc._ServicerContext):  # type: ignore[misc]  # no stubs
    """The context of a call that is answered by several messages."""

    server: _Core

    def __init__(self, call: object, *_: object) -> None:
        self._call = call
        self._has_begun = False

    async def write_more(self, message: bytes) -> None:
        """Write a message that goes to the client with the one that ``write`` is given next, which must follow soon: to
        go alone costs each side a system call, and the client a wake-up. gRPC keeps no more than 64 KiB back.
        """
        if self._has_begun and self.server.is_running():
            await cygrpc._send_message(self._call, message, None, cygrpc.WriteFlag.buffer_hint, self.server.loop)
        else:  # the headers go first, and gRPC's own looks whether the server has stopped
            self._has_begun = True
            await self.write(message)


_HANDLE: Final = {
    (False, False): cygrpc._handle_unary_unary_rpc,
    (True, False): cygrpc._handle_stream_unary_rpc,
    (True, True): cygrpc._handle_stream_stream_rpc,
}
"""By whether the request streams, and whether the answer does; one that alone does is ours."""


async def _refuse_call(call: object, code: grpc.StatusCode, why: str) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with suppress(cygrpc.BaseError):  # abort raises one; so does a client that is gone, or a stopping server
        await context.abort(code, why)


PRIVATE_HOST: Final = "127.0.0.1"


class FirstByteRelay:
    """Accepts from ``open`` to ``close``, on the event loop that calls them.

    gRPC limits how many connections there are at once, and how long a handshake takes. Its private ports can be reached
    from this machine, which gains nothing: anyone who connects there is treated like a client at the public port.
    """

    def __init__(self, whose: str, tls_port: int, plaintext_port: int, first_byte_s_max: float) -> None:
        self._ports: Final = (plaintext_port, tls_port)
        self._acceptor = Acceptor(whose, self._identify, first_byte_s_max)
        self._peers: dict[str, str] = {}
        self._links: set[asyncio.Transport] = set()
        self.open = self._acceptor.open
        self.stop_listening = self._acceptor.stop_listening

    def client_of(self, peer: str) -> str:
        """gRPC's name of the client behind a connection that it names ``peer``."""
        return self._peers.get(peer, peer)

    async def close(self) -> None:
        """Accept nothing more, and hang up on everybody. Idempotent."""
        await self._acceptor.close()
        for one in tuple(self._links):
            one.abort()

    async def _identify(self, arrival: Arrival) -> None:
        is_tls = await peek(arrival.link) == TLS_HANDSHAKE
        loop = asyncio.get_running_loop()
        inner, outer = _Side(), _Side()
        private, _ = await loop.create_connection(lambda: inner, PRIVATE_HOST, self._ports[is_tls])
        peer = f"ipv4:{address_text(*private.get_extra_info('sockname')[:2])}"
        self._peers[peer] = peer_name(arrival.link)
        self._links.add(private)
        inner.on_end = partial(self._ended, peer, private)
        outer.other = private
        try:
            arrival.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client, _ = await loop.connect_accepted_socket(lambda: outer, arrival.take())
        except BaseException:
            private.abort()
            raise
        inner.meets(client)

    def _ended(self, peer: str, private: asyncio.Transport) -> None:
        self._peers.pop(peer, None)
        self._links.discard(private)


class _Side(asyncio.Protocol):
    """One of the two connections: received data go to the other one, as fast as that takes them."""

    def __init__(self) -> None:
        self.other: asyncio.Transport | None = None
        """None: not there yet."""
        self.is_lost = False
        self.on_end: Callable[[], None] = _nothing
        self._early = b""

    def meets(self, other: asyncio.Transport) -> None:
        """The other connection is there."""
        self.other = other
        if self._early and not other.is_closing():
            other.write(self._early)
        self._early = b""
        if self.is_lost:
            other.close()

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data  # gRPC's settings, which it sends at once: some dozen bytes
        elif not self.other.is_closing():
            self.other.write(data)

    def eof_received(self) -> bool:
        """The other side learns it, too, and may go on sending."""
        if self.other is not None and not self.other.is_closing():
            with suppress(OSError):  # it is gone
                self.other.write_eof()
        return True

    def pause_writing(self) -> None:
        """This connection does not take what the other one receives."""
        if self.other is not None and not self.other.is_closing():
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        """The end of both."""
        self.is_lost = True
        self.on_end()
        if self.other is not None and not self.other.is_closing():
            self.other.close()


def _nothing() -> None:
    pass


def peer_name(link: socket.socket) -> str:
    """gRPC's name of who is at the other end."""
    host, port = link.getpeername()[:2]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


_ASKED_BYTES_MAX: Final = 1024
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
    if len(data) > _ASKED_BYTES_MAX:
        raise InvalidRequestError(f"a request of {len(data)} bytes: at most {_ASKED_BYTES_MAX} are allowed here")
    return parse(kind, data)


async def _refuse(context: _Context, error: InvalidRequestError | TooManyWaitsError) -> NoReturn:
    refused = grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, TooManyWaitsError):
        refused = grpc.StatusCode.RESOURCE_EXHAUSTED
    await context.abort(refused, told(error))
    raise InvariantError("abort raises")


Context = grpc.aio.ServicerContext[bytes, bytes]

REFUSALS: Final = (AccessDeniedError, SessionsFullError, TooManyWaitsError)
"""The errors that a guard raises and ``refusal_of`` understands."""


def admit(guard: AccessGuard, quotas: Quotas, method: str, context: Context, peer: str, body: bytes | None) -> Caller:
    """Authenticate and authorize a call; ``body`` None: a stream of requests. Raises ``REFUSALS``."""
    return guard.admit(method, context.invocation_metadata() or (), peer, body, quotas)


def _always() -> bool:
    return True


@contextmanager
def open_stream(guard: AccessGuard, caller: Caller, still_allowed: Callable[[], bool] = _always) -> Iterator[None]:
    """Wraps a stream's handler, on its task: ends it when the key is revoked or ``still_allowed`` returns False."""
    task = asyncio.current_task()
    revoked: list[str] = []

    def end(why: str) -> None:
        revoked.append(why)
        if task is not None:
            task.cancel()

    guard.enter(caller, end, still_allowed)
    try:
        yield
    except asyncio.CancelledError:
        if not revoked or task is None:
            raise
        task.uncancel()
        raise guard.ended(caller, revoked[0]) from None
    finally:
        guard.leave(caller)


def refusal_of(guard: AccessGuard | None, error: DLedgerError) -> tuple[grpc.StatusCode, tuple[tuple[str, str], ...]]:
    """The status and trailing metadata of an error of ``REFUSALS``."""
    match error:
        case OtherAudienceError() if guard is not None:
            told = ((REFUSAL, CHALLENGE), (AUDIENCE, guard.audience))
            return grpc.StatusCode.UNAUTHENTICATED, told
        case NotAuthenticatedError():
            return grpc.StatusCode.UNAUTHENTICATED, ((REFUSAL, DENIED),)
        case AccessDeniedError():
            return grpc.StatusCode.PERMISSION_DENIED, ((REFUSAL, DENIED),)
        case _:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, ((REFUSAL, BUSY),)
