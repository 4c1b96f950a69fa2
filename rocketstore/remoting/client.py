"""Outgoing remoting connections: one per address, opened on demand. Everything runs on the loop's thread."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final

from dledger.values import parse_address
from rocketstore.remoting.connection import ByteRoom, DisconnectedError, Owner, RemotingConnection
from rocketstore.remoting.frame import FRAME_BYTES_MAX, Frame

CONNECT_TIMEOUT_S: Final = 3.0
ADDRESSES_MAX: Final = 256
"""Maximum open connections; beyond that, the least recently active one is closed."""
_PART_BYTES_MAX: Final = 4 * FRAME_BYTES_MAX
_UNSENT_BYTES_MAX: Final = 16 * FRAME_BYTES_MAX
TLS_HANDSHAKE_TIMEOUT_S: Final = 5.0


class UnreachableError(Exception):
    """Raised when no connection could be established: the request was certainly not sent."""


class RemotingClient:
    """Sends requests to other programs. ``requests`` receives theirs (None: refused); ``tls`` connects with TLS."""

    def __init__(
        self,
        *,
        requests: Callable[[RemotingConnection, Frame], None] | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._owner = Owner(lambda _: None, requests or _refuse, self._forget)
        self._tls = tls
        self._room = ByteRoom(_PART_BYTES_MAX, _PART_BYTES_MAX)
        self._unsent_room = ByteRoom(_UNSENT_BYTES_MAX, _UNSENT_BYTES_MAX)
        self._open: dict[str, RemotingConnection] = {}
        self._opening: dict[str, asyncio.Task[RemotingConnection]] = {}
        self._is_closed = False

    async def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        """The response of ``address``, whatever its code; the timeout includes connecting.

        Raises ``UnreachableError``, ``DisconnectedError`` and ``TimeoutError``; after the last two, the request may
        have been carried out.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        connection = await self._connection(address, min(timeout_s, CONNECT_TIMEOUT_S))
        return await connection.call(request, max(deadline - loop.time(), 0.001))

    async def tell(self, address: str, request: Frame) -> None:
        """Send a request without a response. Raises ``UnreachableError``."""
        connection = await self._connection(address, CONNECT_TIMEOUT_S)
        if not connection.tell(request):
            raise UnreachableError(f"{address} does not take what it has been sent")

    async def close(self) -> None:
        """Close all connections; requests in progress fail. Idempotent."""
        self._is_closed = True
        opening = tuple(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in tuple(self._open.values()):
            connection.finish()

    async def _connection(self, address: str, timeout_s: float) -> RemotingConnection:
        if self._is_closed:
            raise UnreachableError("this client is closed")
        found = self._open.get(address)
        if found is not None and not found.is_closed:
            return found
        opening = self._opening.get(address)
        if opening is None:
            opening = asyncio.get_running_loop().create_task(self._connect(address))
            self._opening[address] = opening
            opening.add_done_callback(lambda _: self._opening.pop(address, None))
        try:  # a caller that gives up must not cancel the connection that others are waiting for
            return await asyncio.wait_for(asyncio.shield(opening), timeout_s)
        except TimeoutError as error:
            raise UnreachableError(f"{address} did not accept a connection within {timeout_s:g} s") from error

    async def _connect(self, address: str) -> RemotingConnection:
        if len(self._open) >= ADDRESSES_MAX:
            min(self._open.values(), key=lambda one: one.heard_at).finish()
        try:
            host, port = parse_address(address)
            context = self._tls() if self._tls is not None else None
            async with asyncio.timeout(CONNECT_TIMEOUT_S + TLS_HANDSHAKE_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: RemotingConnection(self._owner, self._room, self._unsent_room),
                    host,
                    port,
                    ssl=context,
                    ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S if context is not None else None,
                )
        except (OSError, ValueError) as error:  # TLS errors and time-outs are OS errors, too
            raise UnreachableError(f"cannot connect to {address}: {error or type(error).__name__}") from error
        self._open[address] = connection
        return connection

    def _forget(self, connection: RemotingConnection) -> None:
        for address, one in tuple(self._open.items()):
            if one is connection:
                del self._open[address]


def _refuse(connection: RemotingConnection, request: Frame) -> None:
    """Refuse requests from the other side."""
    connection.done(request, request.answer(3, f" request type {request.code} not supported"))


__all__ = ["DisconnectedError", "RemotingClient", "UnreachableError"]
