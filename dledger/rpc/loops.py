"""The event loop of servers, and of clients that have none: uvloop's.

It runs the same code as asyncio's own loop in less processor time; what it does otherwise is in docs/decisions.md.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import TypeVar

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
    """The loop's ``create_connection``, which may be given up while the name is resolved. Raises ``OSError``.

    uvloop's own would then log its error, whenever it comes, as one that nobody has asked for.
    """
    loop = asyncio.get_running_loop()
    name = host if context is not None else None
    addresses = [host]
    if not _is_address(host):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    failures: list[OSError] = []
    for address in addresses:
        try:
            return await loop.create_connection(
                factory, address, port, ssl=context, server_hostname=name, ssl_handshake_timeout=handshake_s_max
            )
        except ssl.SSLError:
            raise
        except OSError as error:
            failures.append(error)
    raise failures[0] if failures else OSError(f"{host} has no address")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
