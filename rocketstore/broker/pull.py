"""Pulls: return messages of one queue, at once or as soon as there are some.

Waiting pulls are woken when a matching message arrives, without polling. They live on the event loop. Only ``arrived``
runs on the dispatch thread, once per batch of stored records: for a queue without waiting pulls it costs one dictionary
lookup, otherwise it notes the records' tags once. The loop iterates over the waiting pulls, so their number costs the
dispatch thread nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.rpc.clients.connections import Leases
from dledger.rpc.loops import LoopBridge
from rocketstore.broker.mastership import QueueKey
from rocketstore.broker.reading import ALL, TAG, MessageFilter, QueueReading, ReadLimits, SubscriptionFilters
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.topics import Topics
from rocketstore.config import MIB
from rocketstore.message.columns import RecordColumns
from rocketstore.settings import LiveConfig
from rocketstore.state.changes import check_name
from rocketstore.types import GetMessageStatus, GetResult, RecordHead


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


PULL_BYTES_DEFAULT: Final = MIB
_PULL_MESSAGES_DEFAULT: Final = 32
SCAN_MS_MAX: Final = 1000
"""How long a pull searches for messages that pass its filter; then it returns its progress, and the client continues.
"""
SQL_PAUSE_S: Final = 0.05
"""After a pull with a condition has examined the newest messages in vain, it looks again after this time at the
earliest: every new message would wake it, because only records tell whether it suits.
"""

_NOTHING_YET: Final = frozenset(
    {
        GetMessageStatus.NO_MATCHED_LOGIC_QUEUE,
        GetMessageStatus.NO_MESSAGE_IN_QUEUE,
        GetMessageStatus.OFFSET_OVERFLOW_ONE,
        GetMessageStatus.NO_MATCHED_MESSAGE,
    }
)
"""Statuses for which waiting may help; the others would not change."""


class Pull(NamedTuple):
    """A pull request; ``expression`` says which messages are wanted, ``kind`` what it consists of."""

    group: str
    topic: str
    queue_id: int
    offset: int
    max_messages: int
    max_bytes: int
    expression: str
    wait_ms: int
    kind: str = TAG


@dataclass(frozen=True, slots=True)
class _Wish:
    pull: Pull
    filter: MessageFilter | None
    wait_ms: int
    limits: ReadLimits
    begin_offset: int
    """Messages before it belong to a deleted topic of the same name."""


class PullService:
    """Lives on the event loop. Every node answers, from what is committed and dispatched there."""

    def __init__(
        self,
        live: LiveConfig,
        topics: Topics,
        reading: QueueReading,
        waiting: WaitingPulls,
        clock: Clock,
        filters: SubscriptionFilters,
    ) -> None:
        self._live = live
        self._topics = topics
        self._reading = reading
        self.waiting: Final = waiting
        self._clock = clock
        self._filters = filters

    async def pull(self, pull: Pull, leases: Leases) -> GetResult:
        """The requested messages, whose bytes are accounted for in ``leases``.

        Raises ``InvalidRequestError`` and ``Refusal``.
        """
        self._check(pull)
        wish = self._wish(pull, await self._filters.of(pull.kind, pull.expression))
        if pull.offset < wish.begin_offset:
            begin = wish.begin_offset
            end = await self._reading.end(pull.topic, pull.queue_id)
            return GetResult(GetMessageStatus.OFFSET_TOO_SMALL, begin, begin, max(end, begin))
        if not wish.wait_ms:
            return await self._get(wish, pull.offset, leases)
        codes = wish.filter.codes if wish.filter else None
        waiter = self.waiting.enter((pull.topic, pull.queue_id), codes)
        try:
            began_ms = self._clock.monotonic_ms()
            deadline_ms, offset = began_ms + wish.wait_ms, pull.offset
            while True:
                waiter.arm()  # before reading, so that no arrival in between is missed
                result = await self._get(wish, offset, leases)
                if result.records or result.status not in _NOTHING_YET:
                    return result
                skipped = result.status is GetMessageStatus.NO_MATCHED_MESSAGE
                if skipped:
                    offset = result.next_offset
                now_ms = self._clock.monotonic_ms()
                at_end = not skipped or offset >= result.max_offset
                end_ms = deadline_ms if at_end else min(deadline_ms, began_ms + SCAN_MS_MAX)
                if now_ms >= end_ms or self.waiting.closed:
                    return _with_progress(result, pull.offset, offset)
                if at_end:
                    if skipped and codes is None:
                        await asyncio.sleep(min(SQL_PAUSE_S, (deadline_ms - now_ms) / 1000))
                    await waiter.wait(max(0, deadline_ms - self._clock.monotonic_ms()) / 1000)
        finally:
            self.waiting.leave(waiter)

    def pull_at_once(self, pull: Pull, leases: Leases) -> GetResult | None:
        """Like ``pull`` if there are messages in memory and room for them, without waiting; None if ``pull`` must
        decide.
        """
        self._check(pull)
        if pull.kind not in ("", TAG) or pull.expression not in ALL:  # a filter may have to read much
            return None
        wish = self._wish(pull, None)
        end = self._reading.end_at_once(pull.topic, pull.queue_id)
        if not wish.begin_offset <= pull.offset < end or not leases.take_at_once(wish.limits.size_bytes):
            return None
        result = self._reading.at_once(pull.topic, pull.queue_id, pull.offset, wish.limits, pull.group)
        return None if result is None or not result.records else self._answer(wish, result, leases)

    def _check(self, pull: Pull) -> None:
        self._topics.check_readable(pull.topic, pull.queue_id)
        if pull.group:  # it becomes a name in the statistics
            check_name(pull.group, "group")

    def _wish(self, pull: Pull, wanted: MessageFilter | None) -> _Wish:
        config = self._live.now
        return _Wish(
            pull,
            wanted,
            0 if self.waiting.closed else min(pull.wait_ms, config.pull_wait_ms_max),
            ReadLimits(
                pull.max_messages or _PULL_MESSAGES_DEFAULT,
                min(pull.max_bytes or PULL_BYTES_DEFAULT, config.pull_bytes_max),
            ),
            self._topics.begin_offset(pull.topic, pull.queue_id),
        )

    async def _get(self, wish: _Wish, offset: int, leases: Leases) -> GetResult:
        await leases.take(wish.limits.size_bytes)  # before reading the log
        topic, queue_id = wish.pull.topic, wish.pull.queue_id
        result = await self._reading.read(topic, queue_id, offset, wish.filter, wish.limits, wish.pull.group)
        return self._answer(wish, result, leases)

    @staticmethod
    def _answer(wish: _Wish, result: GetResult, leases: Leases) -> GetResult:
        leases.resize(sum(map(len, result.records)))
        if result.min_offset >= wish.begin_offset:
            return result
        return replace(result, min_offset=wish.begin_offset)


def _with_progress(result: GetResult, asked_offset: int, offset: int) -> GetResult:
    """Messages that were examined and did not match are skipped next time."""
    if offset == asked_offset or result.status is GetMessageStatus.NO_MATCHED_MESSAGE:
        return result
    return replace(result, status=GetMessageStatus.NO_MATCHED_MESSAGE, next_offset=offset)
