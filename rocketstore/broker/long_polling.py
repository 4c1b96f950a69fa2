"""Pulls that wait for messages: woken by the arrival of one that may suit them, never by a clock that looks again.

Lives on the event loop. Only ``arrived`` runs elsewhere, on the dispatch thread, once per batch of stored records: for
a queue that nobody waits for it costs one look into a dictionary, for others the tags of its records are noted once.
The loop goes through the waiting pulls, whose number costs the dispatch thread nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence

from dledger.rpc.bridge import LoopBridge
from rocketstore.broker.ports import QueueKey
from rocketstore.message.columns import RecordColumns
from rocketstore.types import RecordHead


class TooManyPullsError(Exception):
    """Raised when more pulls want to wait than ``pulls_waiting_max`` allows."""


class Waiter:
    """One pull that may wait. Arrivals count from ``arm`` on, so: arm, look, and only then wait."""

    __slots__ = ("_event", "codes", "key")

    def __init__(self, key: QueueKey, codes: frozenset[int] | None) -> None:
        self.key = key
        self.codes = codes
        """Tags codes of interest; None: all."""
        self._event = asyncio.Event()

    def arm(self) -> None:
        """Forget earlier arrivals."""
        self._event.clear()

    @property
    def woken(self) -> bool:
        """Whether something arrived since ``arm``."""
        return self._event.is_set()

    def wake(self) -> None:
        """End the wait; on the loop."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for an arrival or the end of the time; now and then it ends for nothing, so look at the clock."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()


class WaitingPulls:
    """All pulls that wait, by queue."""

    def __init__(self, bridge: LoopBridge, *, waiting_max: int) -> None:
        self.closed = False
        """No pull waits any more: the broker stops."""
        self._bridge = bridge
        self._waiting_max = waiting_max
        self._count = 0
        self._by_queue: dict[QueueKey, dict[Waiter, None]] = {}
        self._lock = threading.Lock()  # guards _news
        self._news: dict[QueueKey, set[int]] = {}
        """Tags codes that arrived per queue and the loop has not heard of; it is told of them together."""

    def __len__(self) -> int:
        return self._count

    def enter(self, key: QueueKey, codes: frozenset[int] | None) -> Waiter:
        """Take part; give the waiter back to ``leave``. Raises ``TooManyPullsError``."""
        if self._count >= self._waiting_max:
            raise TooManyPullsError(f"{self._count} pulls are waiting, the limit (pulls_waiting_max)")
        waiter = Waiter(key, codes)
        self._by_queue.setdefault(key, {})[waiter] = None
        self._count += 1
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Take no part any more."""
        waiters = self._by_queue[waiter.key]
        del waiters[waiter]
        self._count -= 1
        if not waiters:
            del self._by_queue[waiter.key]

    def close(self) -> None:
        """Have every waiting pull answered now."""
        self.closed = True
        for waiters in self._by_queue.values():
            for waiter in waiters:
                waiter.wake()

    def arrived(self, heads: Sequence[RecordHead]) -> None:
        """Records can be read; on the dispatch thread."""
        waited_for = self._by_queue  # here it is only looked into
        if not waited_for:
            return
        if isinstance(heads, RecordColumns):
            for units in heads.by_queue:
                if (units.topic, units.queue_id) in waited_for:
                    self._tell((units.topic, units.queue_id), units.tags_codes.tolist())
            return
        found: dict[QueueKey, list[int]] = {}
        for head in heads:
            if head[:2] in waited_for:
                found.setdefault(head[:2], []).append(head.tags_code)
        for key, codes in found.items():
            self._tell(key, codes)

    def _tell(self, key: QueueKey, codes: Iterable[int]) -> None:
        with self._lock:
            first = not self._news
            self._news.setdefault(key, set()).update(codes)
        if first:
            self._bridge.post(self._wake)

    def _wake(self) -> None:
        with self._lock:
            news, self._news = self._news, {}
        for key, codes in news.items():
            for waiter in self._by_queue.get(key, ()):
                if waiter.codes is None or not waiter.codes.isdisjoint(codes):
                    waiter.wake()
