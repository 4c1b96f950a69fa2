"""An asyncio gRPC server that no request can end.

gRPC's own decodes the path of a request that no registered method has while it waits for the next one; one that is no
UTF-8 ends that loop, and with it the server, for whoever can connect. So here all methods are registered, which the
core then compares as bytes, and whatever else is asked for is refused before anybody decodes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

Methods = Mapping[str, "grpc.RpcMethodHandler[bytes, bytes]"]
"""The methods of a service by name."""


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Not a header that is no text, which gRPC tells with a traceback, each of any number in one request: whoever can
    connect could fill the disk with them.
    """
    return not str(record.msg).startswith("Invalid encoding on ")


logging.getLogger(cygrpc.__name__).addFilter(_is_worth_a_line)


def aio_server(options: Sequence[tuple[str, Any]] = (), maximum_concurrent_rpcs: int | None = None) -> grpc.aio.Server:
    """As ``grpc.aio.server``, for services whose methods are added by ``add_methods``."""
    return _Server(options, maximum_concurrent_rpcs)  # type: ignore[return-value]  # the stubs' base is another


def add_methods(server: grpc.aio.Server, service: str, methods: Methods) -> None:
    """Serve these, before the server is started."""
    server.add_registered_method_handlers(service, methods)  # type: ignore[attr-defined]  # missing in grpc-stubs


class _Server(Server):
    def __init__(self, options: Sequence[tuple[str, Any]], maximum_concurrent_rpcs: int | None) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), (), tuple(options), maximum_concurrent_rpcs)


class _Core(cygrpc.AioServer):  # type: ignore[misc]  # no stubs
    """Hands on registered methods only."""

    async def _request_call(self) -> object:
        """The next call of a method that is not registered: never, for each is refused here."""
        refusals: set[asyncio.Task[None]] = set()
        while True:
            refusal = asyncio.ensure_future(_refuse(await super()._request_call()))
            refusals.add(refusal)
            refusal.add_done_callback(refusals.discard)


async def _refuse(call: object) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with suppress(cygrpc.BaseError):  # how abort ends, and what a client that is gone, or a stop, makes of it
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
