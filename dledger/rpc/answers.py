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

SMALL_BYTES: Final = 64 * 1024
"""Answers up to this size are counted as calls only."""


class Lease:
    """Room that one answer has. On the loop."""

    __slots__ = ("_quota", "_room", "size")

    def __init__(self, room: AnswerRoom, quota: Quota, size: int) -> None:
        self._room = room
        self._quota = quota
        self.size = size

    def resize(self, size: int) -> None:
        """The answer is made: now its size is known."""
        more, self.size = size - self.size, size
        self._quota.change_answer(more)
        if more < 0:
            self._room.grown()

    def end(self) -> None:
        """The client has the answer, or has gone. Idempotent."""
        if self.size:
            self.resize(0)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class AnswerRoom:
    """All the room of one server."""

    def __init__(self) -> None:
        # The oldest of each connection is the next to get room; connections take turns.
        self._waiting: dict[Quota, deque[tuple[int, asyncio.Future[None]]]] = {}

    async def lease(self, quota: Quota, size: int) -> Lease:
        """Room for an answer of about ``size`` bytes, as soon as there is some."""
        if quota in self._waiting or not quota.try_answer(size):
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(quota, deque()).append((size, ready))
            try:
                await ready
            except asyncio.CancelledError:
                if ready.done() and not ready.cancelled():  # given just now
                    Lease(self, quota, size).end()
                else:
                    self.grown()  # whoever waits behind it may be next
                raise
        return Lease(self, quota, size)

    def lease_made(self, quota: Quota, size: int) -> Lease:
        """Room for an answer that is there already. Raises ``TooManyWaitsError``: then it must be dropped."""
        if not quota.try_answer(size):
            raise TooManyWaitsError(f"{quota.name} has {quota.answer_bytes} bytes of answers that were not taken yet")
        return Lease(self, quota, size)

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
