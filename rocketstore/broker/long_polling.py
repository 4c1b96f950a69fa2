"""Pulls that wait for messages: woken by the arrival of one that may suit them, never by a clock that looks again.

Lives on the event loop. Only ``arrived`` runs elsewhere, on the dispatch thread, once per stored record: for a queue
that nobody waits for it costs one look into a dictionary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dledger.rpc.bridge import LoopBridge
from rocketstore.broker.ports import QueueKey
from rocketstore.message.columns import RecordColumns
from rocketstore.types import RecordHead


class TooManyPullsError(Exception):
    """Raised when more pulls want to wait than ``pulls_waiting_max`` allows."""


class Waiter:
    """One pull that may wait. Arrivals count from ``arm`` on, so: arm, look, and only then wait."""

    __slots__ = ("_event", "codes", "key", "told")

    def __init__(self, key: QueueKey, codes: frozenset[int] | None) -> None:
        self.key = key
        self.codes = codes
        """Tags codes of interest; None: all."""
        self.told = False
        """Set by the dispatch thread with the first arrival after ``arm``, so that a burst is told of once."""
        self._event = asyncio.Event()

    def arm(self) -> None:
        """Forget earlier arrivals."""
        self._event.clear()
        self.told = False

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
        # The tuples are replaced, never changed: the dispatch thread may be going through one.
        self._by_queue: dict[QueueKey, tuple[Waiter, ...]] = {}

    def __len__(self) -> int:
        return self._count

    def enter(self, key: QueueKey, codes: frozenset[int] | None) -> Waiter:
        """Take part; give the waiter back to ``leave``. Raises ``TooManyPullsError``."""
        if self._count >= self._waiting_max:
            raise TooManyPullsError(f"{self._count} pulls are waiting, the most that may (pulls_waiting_max)")
        waiter = Waiter(key, codes)
        self._by_queue[key] = (*self._by_queue.get(key, ()), waiter)
        self._count += 1
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Take no part any more."""
        rest = tuple(one for one in self._by_queue[waiter.key] if one is not waiter)
        self._count -= 1
        if rest:
            self._by_queue[waiter.key] = rest
        else:
            del self._by_queue[waiter.key]

    def close(self) -> None:
        """Have every waiting pull answered now."""
        self.closed = True
        for waiters in self._by_queue.values():
            for waiter in waiters:
                waiter.wake()

    def arrived(self, heads: Sequence[RecordHead]) -> None:
        """Records can be read; on the dispatch thread."""
        if not self._by_queue:
            return
        if isinstance(heads, RecordColumns):
            for units in heads.by_queue:
                for waiter in self._by_queue.get((units.topic, units.queue_id), ()):
                    if waiter.codes is None or not waiter.codes.isdisjoint(units.tags_codes.tolist()):
                        self._tell(waiter)
            return
        for head in heads:
            for waiter in self._by_queue.get(head[:2], ()):
                if waiter.codes is None or head.tags_code in waiter.codes:
                    self._tell(waiter)

    def _tell(self, waiter: Waiter) -> None:
        if not waiter.told:
            waiter.told = True
            self._bridge.post(waiter.wake)
