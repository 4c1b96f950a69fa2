"""Outgoing remoting connections: one per address, opened on demand. Everything runs on the loop's thread."""

from __future__ import annotations

import asyncio
import itertools
import os
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeVar

from dledger.remoting.codes import FrameError
from dledger.remoting.connection import ByteRoom, DisconnectedError, Owner, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import ANSWER_HEADER_BYTES_MAX, FRAME_BYTES_MAX, Frame
from dledger.rpc import loops
from dledger.values import parse_address

CONNECT_TIMEOUT_S: Final = 3.0
CLOSE_S_MAX: Final = 1.0
"""How long the other side has to end a connection over TLS with us."""
ADDRESSES_MAX: Final = 256
"""Maximum open connections; beyond that, the least recently active one is closed."""
_PART_BYTES_MAX: Final = 4 * FRAME_BYTES_MAX
_UNSENT_BYTES_MAX: Final = 16 * FRAME_BYTES_MAX
_TLS_HANDSHAKE_TIMEOUT_S: Final = 5.0
_T = TypeVar("_T")


class UnreachableError(Exception):
    """Raised when no connection could be established: the request was certainly not sent."""


class _Opening(NamedTuple):
    """A connection that is being established, and what to do with it, in order."""

    task: asyncio.Task[None]
    waiting: list[Callable[[RemotingConnection | Exception], None]]


class RemotingClient:
    """Sends requests to other programs. ``requests`` receives theirs (None: refused); ``tls`` connects with TLS;
    ``lost`` is told the address of each connection that ends before ``close``.
    """

    def __init__(
        self,
        *,
        requests: Callable[[RemotingConnection, Frame], None] | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self._owner = Owner(lambda _: None, requests or _refuse, self._forget)
        self._tls = tls
        self._lost = lost
        self._room = ByteRoom(_PART_BYTES_MAX, _PART_BYTES_MAX)
        self._unsent_room = ByteRoom(_UNSENT_BYTES_MAX, _UNSENT_BYTES_MAX)
        self._open: dict[str, RemotingConnection] = {}
        self._numbers: dict[RemotingConnection, int] = {}
        self._count = itertools.count(1)
        self._opening: dict[str, _Opening] = {}
        self._is_closed = False

    async def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        """The response of ``address``, whatever its code; the timeout includes connecting. Requests to one address are
        sent in the order of the calls.

        Raises ``UnreachableError``, ``DisconnectedError`` and ``TimeoutError``; after the last two, the request may
        have been carried out.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        answered = await self._send(address, lambda link: link.ask(request), min(timeout_s, CONNECT_TIMEOUT_S))
        async with asyncio.timeout_at(deadline):
            return await answered

    async def connection(self, address: str, timeout_s: float) -> RemotingConnection:
        """The connection to ``address``, opened if there is none. Raises ``UnreachableError``."""
        return await self._send(address, lambda link: link, min(timeout_s, CONNECT_TIMEOUT_S))

    async def tell(self, address: str, request: Frame) -> None:
        """Send a request without a response. Raises ``UnreachableError``."""
        if not await self._send(address, lambda link: link.tell(request), CONNECT_TIMEOUT_S):
            raise UnreachableError(f"{address} does not take what it has been sent")

    def number(self, address: str) -> int:
        """The number of the open connection to an address, 0 if there is none: each connection has another one.

        As long as it stays the same, everything sent there has gone to one process.
        """
        found = self._open.get(address)
        return 0 if found is None or found.is_closed else self._numbers.get(found, 0)

    def protocol(self, address: str) -> int | None:
        """The version of our own requests that the server has announced over the open connection, 0 if none; None if it
        has answered nothing there.
        """
        found = self._open.get(address)
        return None if found is None or found.is_closed else found.protocol

    async def close(self, *, at_once: bool = False) -> None:
        """Close all connections; requests in progress fail. Idempotent.

        ``at_once``: what is unsent is dropped, and TLS is not ended in an orderly way, which takes the other side.
        """
        self._is_closed = True
        opening = tuple(one.task for one in self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        connections = tuple(self._open.values())
        for connection in connections:
            if at_once:
                connection.close("this client is closed")
            else:
                connection.finish()
        if not at_once:
            await asyncio.gather(*(one.lost(CLOSE_S_MAX) for one in connections))

    async def _send(self, address: str, send: Callable[[RemotingConnection], _T], timeout_s: float) -> _T:
        """The result of ``send``, which is called in turn: nothing overtakes what waits for the connection."""
        if self._is_closed:
            raise UnreachableError("this client is closed")
        found = self._open.get(address)
        if found is not None and not found.is_closed:
            return send(found)
        loop = asyncio.get_running_loop()
        opening = self._opening.get(address)
        if opening is None:
            opening = self._opening[address] = _Opening(loop.create_task(self._open_for_all(address)), [])
        sent: asyncio.Future[_T] = loop.create_future()
        opening.waiting.append(partial(_settle, sent, send))
        try:  # a caller that gives up must not cancel the connection that others are waiting for
            async with asyncio.timeout(timeout_s):
                return await sent
        except TimeoutError as error:
            if sent.done() and not sent.cancelled():  # at the last moment
                return sent.result()
            raise UnreachableError(f"{address} did not accept a connection within {timeout_s:g} s") from error

    async def _open_for_all(self, address: str) -> None:
        """Connect, and send what waits for it, or let that fail."""
        found: RemotingConnection | Exception = UnreachableError("this client is closed")
        try:
            found = self._open[address] = await self._connect(address)
            self._numbers[found] = next(self._count)
        except Exception as error:  # noqa: BLE001  # it is for those who wait
            found = error
        finally:
            for settle in self._opening.pop(address).waiting:
                settle(found)

    async def _connect(self, address: str) -> RemotingConnection:
        if len(self._open) >= ADDRESSES_MAX:
            min(self._open.values(), key=lambda one: one.heard_at).finish()
        try:
            host, port = parse_address(address)
            context = self._tls() if self._tls is not None else None
            async with asyncio.timeout(CONNECT_TIMEOUT_S + _TLS_HANDSHAKE_TIMEOUT_S):
                _, connection = await loops.connect(
                    lambda: RemotingConnection(self._owner, self._room, self._unsent_room, ANSWER_HEADER_BYTES_MAX),
                    host,
                    port,
                    context=context,
                    handshake_s_max=_TLS_HANDSHAKE_TIMEOUT_S if context is not None else None,
                )
        except (OSError, ValueError) as error:  # TLS errors and time-outs are OS errors, too
            raise UnreachableError(f"cannot connect to {address}: {reason_of(error)}") from error
        return connection

    def _forget(self, connection: RemotingConnection) -> None:
        self._numbers.pop(connection, None)
        for address, one in tuple(self._open.items()):
            if one is connection:
                del self._open[address]
                if self._lost is not None and not self._is_closed:
                    self._lost(address)


def _settle(
    sent: asyncio.Future[_T], send: Callable[[RemotingConnection], _T], link: RemotingConnection | Exception
) -> None:
    """Send, unless nobody waits for it any more."""
    if sent.done():
        return
    if isinstance(link, Exception):
        sent.set_exception(link)
        return
    try:
        sent.set_result(send(link))
    except (DisconnectedError, TooManyCallsError, FrameError) as error:
        sent.set_exception(error)


def reason_of(error: Exception) -> str:
    """The system's words for an error of its own, which asyncio puts differently; without its number."""
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _refuse(connection: RemotingConnection, request: Frame) -> None:
    """Refuse requests from the other side."""
    connection.done(request, request.answer(3, f" request type {request.code} not supported"))


__all__ = ["DisconnectedError", "RemotingClient", "UnreachableError"]
