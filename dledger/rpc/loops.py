"""The event loop of servers, and of clients that have none: uvloop's.

It runs the same code as asyncio's own loop in less processor time; differences are in docs/decisions.md.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar, cast

import uvloop

_T = TypeVar("_T")
_P = TypeVar("_P", bound=asyncio.BaseProtocol)


def run(main: Coroutine[object, object, _T]) -> _T:
    """``asyncio.run`` on that loop; on any thread."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def connect(
    factory: Callable[[], _P],
    host: str,
    port: int,
    *,
    context: ssl.SSLContext | None = None,
    handshake_s_max: float | None = None,
) -> tuple[asyncio.Transport, _P]:
    """The loop's ``create_connection``, which may be given up at any time. Raises ``OSError``.

    uvloop's own would log an error of a look-up that was given up, whenever it comes, as one that nobody has asked for;
    and a connection that is given up in the turn in which its handshake ends would wait for the other side's end of
    TLS, perhaps until the loop is closed under it.
    """
    loop = asyncio.get_running_loop()
    addresses = [host]
    if not _is_address(host):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    failures: list[OSError] = []
    for address in addresses:
        try:
            if context is None:
                return await loop.create_connection(factory, address, port)
            return await _connect_tls(factory, address, port, context, host, handshake_s_max)
        except ssl.SSLError:
            raise
        except OSError as error:
            failures.append(error)
    raise failures[0] if failures else OSError(f"{host} has no address")


async def _connect_tls(
    factory: Callable[[], _P],
    address: str,
    port: int,
    context: ssl.SSLContext,
    name: str,
    handshake_s_max: float | None,
) -> tuple[asyncio.Transport, _P]:
    first = _FirstProtocol(factory())
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: first, address, port, ssl=context, server_hostname=name, ssl_handshake_timeout=handshake_s_max
        )
    except BaseException:
        if first.transport is not None:
            first.transport.abort()
        raise
    return transport, first.successor


class _FirstProtocol(asyncio.Protocol, Generic[_P]):
    """Of a connection until its handshake is done: keeps the transport, and puts its successor in its place."""

    def __init__(self, successor: _P) -> None:
        self.successor = successor
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is done."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's classes are not asyncio's
        self.transport.set_protocol(self.successor)
        self.successor.connection_made(transport)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
