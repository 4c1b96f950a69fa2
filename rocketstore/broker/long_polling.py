"""Waiting pulls, which are woken when a matching message arrives, without polling.

Lives on the event loop. Only ``arrived`` runs on the dispatch thread, once per batch of stored records: for a queue
without waiting pulls it costs one dictionary lookup, otherwise it notes the records' tags once. The loop iterates over
the waiting pulls, so their number costs the dispatch thread nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence

from dledger.rpc.bridge import LoopBridge
from rocketstore.broker.ports import QueueKey
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.message.columns import RecordColumns
from rocketstore.types import RecordHead


class Waiter:
    """One pull that may wait. Arrivals count from ``arm`` on, so call ``arm``, read, and only then wait."""

    __slots__ = ("_event", "codes", "key")

    def __init__(self, key: QueueKey, codes: frozenset[int] | None) -> None:
        self.key = key
        self.codes = codes
        """The wanted tags codes; None: all."""
        self._event = asyncio.Event()

    def arm(self) -> None:
        """Forget earlier arrivals."""
        self._event.clear()

    @property
    def woken(self) -> bool:
        """Whether a message has arrived since ``arm``."""
        return self._event.is_set()

    def wake(self) -> None:
        """End the wait. Called on the loop."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for an arrival or the timeout; may return spuriously, so check the clock."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()


class QueueWatch(Waiter):
    """Calls a function at each arrival, on the loop, instead of waking somebody who waits."""

    __slots__ = ("_news",)

    def __init__(self, key: QueueKey, news: Callable[[], None]) -> None:
        super().__init__(key, None)
        self._news = news

    def wake(self) -> None:
        """A message has arrived."""
        self._news()


class WaitingPulls:
    """All waiting pulls, by queue."""

    def __init__(self, bridge: LoopBridge, *, waiting_max: int) -> None:
        self.closed = False
        """The broker is stopping: no pull waits any more."""
        self._bridge = bridge
        self._waiting_max = waiting_max
        self._count = 0
        self.watches = 0
        """Queues that somebody watches, besides pulls."""
        self._by_queue: dict[QueueKey, dict[Waiter, None]] = {}
        self._lock = threading.Lock()  # guards _news
        self._news: dict[QueueKey, set[int]] = {}
        """Tags codes by queue that arrived and were not yet passed to the loop, which receives them together."""

    def __len__(self) -> int:
        return self._count

    def enter(self, key: QueueKey, codes: frozenset[int] | None) -> Waiter:
        """Register a pull; pass the waiter to ``leave`` afterwards. Raises ``Refusal``."""
        if self._count >= self._waiting_max:
            why = f"{self._count} pulls are waiting, the limit (pulls_waiting_max)"
            raise Refusal(RefusalKind.TOO_MANY, why)
        waiter = Waiter(key, codes)
        self._by_queue.setdefault(key, {})[waiter] = None
        self._count += 1
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Unregister a pull."""
        self._remove(waiter)
        self._count -= 1

    def watch(self, key: QueueKey, news: Callable[[], None]) -> QueueWatch:
        """Call ``news`` at each arrival in a queue, until ``unwatch``; who watches limits how many."""
        watch = QueueWatch(key, news)
        self._by_queue.setdefault(key, {})[watch] = None
        self.watches += 1
        return watch

    def unwatch(self, watch: QueueWatch) -> None:
        """Call it no more."""
        self._remove(watch)
        self.watches -= 1

    def _remove(self, waiter: Waiter) -> None:
        waiters = self._by_queue[waiter.key]
        del waiters[waiter]
        if not waiters:
            del self._by_queue[waiter.key]

    def close(self) -> None:
        """Have every waiting pull answered now."""
        self.closed = True
        for waiters in tuple(self._by_queue.values()):
            for waiter in tuple(waiters):
                waiter.wake()

    def arrived(self, heads: Sequence[RecordHead]) -> None:
        """Records have become readable. Called on the dispatch thread."""
        waited_for = self._by_queue  # only read on this thread
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
            for waiter in tuple(self._by_queue.get(key, ())):
                if waiter.codes is None or not waiter.codes.isdisjoint(codes):
                    waiter.wake()
