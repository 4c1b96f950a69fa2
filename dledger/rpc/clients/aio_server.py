"""An asyncio gRPC server that no request can bring down, and that takes calls in bursts.

gRPC's own server decodes the path of a request for an unregistered method in the loop that waits for the next request;
invalid UTF-8 there ends that loop, and with it the server, so any client could stop it. Here all methods are
registered, which the core compares as bytes, and any other request is refused without decoding its path.

gRPC's own server takes one call of a method per turn of the loop, and then waits for calls of all methods anew: with
twenty methods that costs as much as everything else that it does for a call, and answers reach their clients one by
one. Here each method has tasks that take its calls, those of a burst in one turn.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

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
        """By path."""
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
        refusal = self.loop.create_task(_refuse(call, code, why))
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


async def _refuse(call: object, code: grpc.StatusCode, why: str) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with suppress(cygrpc.BaseError):  # abort raises one; so does a client that is gone, or a stopping server
        await context.abort(code, why)
