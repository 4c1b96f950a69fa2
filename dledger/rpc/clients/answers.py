"""Room for answers: how many bytes may be on their way to clients, taken before the log is read for them.

gRPC takes an answer however large, and keeps it until the client reads it. So a handler takes room first, and waits if
there is none: for the connection, for its account or address, or in all. It is given back when the client has taken
the answer, or has gone. Connections that wait are served in turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from dledger.access.quota import Quota, TooManyWaitsError
from dledger.rpc.clients.connections import Connection

SMALL_BYTES: Final = 64 * 1024
"""Answers up to this size are counted as calls only."""


class Leases:
    """The room of one call, which has one answer or message of a stream at a time. On the loop; also a context."""

    __slots__ = ("_connection", "_quota", "_room", "_size")

    def __init__(self, room: AnswerRoom, quota: Quota, connection: Connection | None = None) -> None:
        self._room = room
        self._quota = quota
        self._connection = connection
        self._size = 0

    async def take(self, size: int) -> None:
        """Take room for an answer of about ``size`` bytes, as soon as there is some, instead of what was taken.

        Raises ``TooManyWaitsError`` once the connection was hung up on: the room of each call that ends would go to the
        next one, and the log be read for nobody.
        """
        self.end()
        await self._room.wait(self._quota, size)
        self._size = size
        if self._connection is not None and self._connection.hung_up:
            self.end()
            raise TooManyWaitsError(f"{self._quota.name} was disconnected")

    def take_now(self, size: int) -> None:
        """The same, if there is some now. Raises ``TooManyWaitsError``."""
        if not self._quota.try_answer(size):
            raise TooManyWaitsError(
                f"{self._quota.name} has {self._quota.answer_bytes} bytes of unread answers: no room for another "
                f"{size} (answer_bytes_max)"
            )
        self._size = size

    def resize(self, size: int) -> None:
        """The answer is made: now its size is known."""
        more, self._size = size - self._size, size
        self._quota.change_answer(more)
        if more < 0:
            self._room.grown()

    def end(self) -> None:
        """The client has the answer, or has gone. Idempotent."""
        if self._size:
            self.resize(0)

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class AnswerRoom:
    """All the room of one server."""

    def __init__(self) -> None:
        # The oldest of each connection is the next to get room; connections take turns.
        self._waiting: dict[Quota, deque[tuple[int, asyncio.Future[None]]]] = {}

    async def wait(self, quota: Quota, size: int) -> None:
        """Return once room for an answer of ``size`` bytes is taken."""
        if quota not in self._waiting and quota.try_answer(size):
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(quota, deque()).append((size, ready))
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():  # given just now
                quota.change_answer(-size)
            self.grown()  # whoever waits behind it may be next
            raise

    def grown(self) -> None:
        """Something was given back: let those go on for whom there is room now."""
        served = True
        while served:
            served = False
            for quota in tuple(self._waiting):
                line = self._waiting[quota]
                while line and line[0][1].done():  # cancelled
                    line.popleft()
                if line and not quota.try_answer(line[0][0]):
                    continue
                del self._waiting[quota]
                if line:
                    line.popleft()[1].set_result(None)
                    served = True
                if line:
                    self._waiting[quota] = line  # at the end: its next one waits until the others had theirs
