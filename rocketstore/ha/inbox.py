"""Takes in what arrives from a master, in pieces as large as there are.

Every time that bytes are received, the interpreter is left to other threads, which may take milliseconds; and each
piece that is verified has its costs. ``asyncio``'s streams give pieces of 256 KiB, copied twice.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

ROOM_BYTES: Final = 1024 * 1024
"""The most that is received before some of it is taken."""


class Inbox(asyncio.BufferedProtocol):
    """One connection's."""

    def __init__(self) -> None:
        self._room = memoryview(bytearray(ROOM_BYTES))
        self._filled = 0
        self._has_ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        self._transport = cast("asyncio.Transport", transport)  # of a stream, as asked for

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # as asyncio has it
        """Where the next bytes go; not called while there is no room."""
        return self._room[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        self._filled += nbytes
        if self._filled == len(self._room) and self._transport is not None:
            self._transport.pause_reading()
        self._news.set()

    def eof_received(self) -> bool:
        """Nothing more comes."""
        self._end(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._end(exc)

    async def wait(self) -> None:
        """Return once there is something to take. Raises ``EOFError`` or ``OSError``: there is nothing, for ever."""
        while not self._filled:
            if self._has_ended:
                raise self._error or EOFError("it closed the connection")
            self._news.clear()
            await self._news.wait()

    def take(self) -> memoryview:
        """Everything that has come; valid until the next step of the event loop."""
        data = self._room[: self._filled]
        self._filled = 0
        if self._transport is not None:
            self._transport.resume_reading()
        return data

    def _end(self, error: Exception | None) -> None:
        self._has_ended = True
        self._error = self._error or error
        self._news.set()
