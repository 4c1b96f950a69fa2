"""Limits the bytes of answers on their way to clients; the room is taken before the log is read for them.

gRPC accepts an answer of any size and keeps it until the client reads it. So a handler first takes room, and waits if
there is none: for the connection, for its account or address, or in total. The room is returned when the client has
read the answer, or is gone. Waiting connections are served in turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from dledger.access.quota import Quota, TooManyWaitsError
from dledger.rpc.clients.connections import Connection

SMALL_BYTES: Final = 64 * 1024
"""Answers up to this size count as calls only."""


class Leases:
    """The room of one call, which has one answer or stream message at a time. On the loop; also a context manager."""

    __slots__ = ("_connection", "_quota", "_room", "_size")

    def __init__(self, room: AnswerRoom, quota: Quota, connection: Connection | None = None) -> None:
        self._room = room
        self._quota = quota
        self._connection = connection
        self._size = 0

    async def take(self, size: int) -> None:
        """Wait for room for an answer of about ``size`` bytes, replacing the room taken before.

        Raises ``TooManyWaitsError`` once the connection was hung up on: otherwise each call that ends would pass its
        room to the connection's next call, and the log would be read for nobody.
        """
        self.end()
        await self._room.wait(self._quota, size)
        self._size = size
        if self._connection is not None and self._connection.hung_up:
            self.end()
            raise TooManyWaitsError(f"{self._quota.name} was disconnected")

    def take_now(self, size: int) -> None:
        """Take room without waiting. Raises ``TooManyWaitsError``."""
        if not self._quota.try_answer(size):
            raise TooManyWaitsError(
                f"{self._quota.name} has {self._quota.answer_bytes} bytes of unread answers: no room for another "
                f"{size} (answer_bytes_max)"
            )
        self._size = size

    def take_at_once(self, size: int) -> bool:
        """Take room if that needs no waiting; whether it did."""
        taken = self._room.try_take(self._quota, size)
        if taken:
            self._size = size
        return taken

    def move(self) -> Leases:
        """The room in the hands of another call, which returns it."""
        moved = Leases(self._room, self._quota, self._connection)
        moved._size, self._size = self._size, 0
        return moved

    def resize(self, size: int) -> None:
        """Adjust the room to the answer's actual size."""
        more, self._size = size - self._size, size
        self._quota.change_answer(more)
        if more < 0:
            self._room.grown()

    def end(self) -> None:
        """Return the room: the client has read the answer, or is gone. Idempotent."""
        if self._size:
            self.resize(0)

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class AnswerRoom:
    """The room of one server."""

    def __init__(self) -> None:
        # The oldest waiter of each connection gets room first; connections take turns.
        self._waiting: dict[Quota, deque[tuple[int, asyncio.Future[None]]]] = {}

    def try_take(self, quota: Quota, size: int) -> bool:
        """Take room for an answer of ``size`` bytes, unless the quota's earlier calls wait for it or there is none."""
        return quota not in self._waiting and quota.try_answer(size)

    async def wait(self, quota: Quota, size: int) -> None:
        """Return once room for an answer of ``size`` bytes is taken."""
        if self.try_take(quota, size):
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(quota, deque()).append((size, ready))
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():  # granted just now
                quota.change_answer(-size)
            self.grown()  # the next waiter may fit
            raise

    def grown(self) -> None:
        """Room was returned: wake the waiters that now fit."""
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
                    self._waiting[quota] = line  # at the end: its next waiter comes after the other connections'
