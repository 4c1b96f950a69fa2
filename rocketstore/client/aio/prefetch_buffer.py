"""Popped messages that the application has not asked for yet.

Each is invisible to other consumers. One that was not asked for in time goes back, and that is no attempt: otherwise a
message could become a dead letter that nobody was ever given.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from rocketstore.client.aio.cluster import at_once
from rocketstore.client.aio.errors import ClientError
from rocketstore.client.aio.popped import PoppedMessage

KEPT_SHARE: Final = 0.5
"""For this share of its time a message waits for the application; then others may have it."""


class PrefetchBuffer:
    """For one event loop. ``invisible_s``: of each message; ``release`` makes one visible again at once."""

    def __init__(self, invisible_s: float, release: Callable[[PoppedMessage], Awaitable[None]]) -> None:
        self._spare_s = invisible_s * (1 - KEPT_SHARE)
        self._release = release
        self._messages: deque[PoppedMessage] = deque()
        self._returns: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, messages: Sequence[PoppedMessage]) -> None:
        """Keep these until they are taken."""
        self._messages.extend(messages)
        self._set_timer()

    def take(self, count: int) -> list[PoppedMessage]:
        """Up to ``count`` messages whose time is not nearly over, the oldest first."""
        self._return_stale()
        return [self._messages.popleft() for _ in range(min(count, len(self._messages)))]

    async def close(self) -> None:
        """Give back all. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        left, self._messages = self._messages, deque()
        await self._give_back(left)
        await asyncio.gather(*self._returns)

    def _set_timer(self) -> None:
        if self._messages and self._timer is None:
            at = self._messages[0].expires_at - self._spare_s
            self._timer = asyncio.get_running_loop().call_at(at, self._due)

    def _due(self) -> None:
        self._timer = None
        self._return_stale()
        self._set_timer()

    def _return_stale(self) -> None:
        loop = asyncio.get_running_loop()
        stale_at = loop.time() + self._spare_s
        stale = [one for one in self._messages if one.expires_at <= stale_at]
        if stale:
            self._messages = deque(one for one in self._messages if one.expires_at > stale_at)
            task = loop.create_task(self._give_back(stale))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    async def _give_back(self, messages: Iterable[PoppedMessage]) -> None:
        async def release(one: PoppedMessage) -> None:
            with suppress(ClientError):  # it comes again when its time is over
                await self._release(one)

        await at_once(map(release, messages))
