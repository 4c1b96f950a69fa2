"""An asyncio gRPC server that no request can bring down.

gRPC's own server decodes the path of a request for an unregistered method in the loop that waits for the next request;
invalid UTF-8 there ends that loop, and with it the server, so any client could stop it. Here all methods are
registered, which the core compares as bytes, and any other request is refused without decoding its path.
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
        self._server = _Core(self._loop, None, (), (), tuple(options), maximum_concurrent_rpcs)


class _Core(cygrpc.AioServer):  # type: ignore[misc]  # no stubs
    """Returns calls of registered methods only."""

    async def _request_call(self) -> object:
        """The next call of an unregistered method: never returns, because each is refused here."""
        refusals: set[asyncio.Task[None]] = set()
        while True:
            refusal = asyncio.ensure_future(_refuse(await super()._request_call()))
            refusals.add(refusal)
            refusal.add_done_callback(refusals.discard)


async def _refuse(call: object) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with suppress(cygrpc.BaseError):  # abort raises one; so does a client that is gone, or a stopping server
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
