"""Figures of a broker: how much came and went, how far groups are, and how old their next messages are.

Metrics are bounded: a broker may have tens of thousands of topics and groups, and metrics systems keep every name
forever. So the first ``metrics_topics_max`` topics and pairs of group and topic are told by themselves.

Statistics per minute, hour and day are bounded likewise, and sampled from the store's totals, so that no message costs
more. The extent of queues and the progress of groups are looked up on read threads, because that may wait for a disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.errors import CorruptLogError
from rocketstore.broker.groups import Retries
from rocketstore.broker.offsets import NONE, Offsets
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.topics import SeenTopic, Topics
from rocketstore.pop.tables import PopPlace
from rocketstore.settings import LiveConfig
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore
from rocketstore.store.stats import OTHERS, GroupTotals, TopicTotals
from rocketstore.types import HIDDEN_TOPICS, SCHEDULE_TOPIC, BrokerRole, QueueUnit


@dataclass(frozen=True, slots=True)
class PopCounters:
    """Messages that are acknowledged singly, since this broker's start, but for the receives that wait now."""

    waiting: int = 0
    delivered: int = 0
    acknowledged: int = 0
    copied: int = 0
    """Messages stored again because nobody acknowledged them in time."""
    dead: int = 0
    """Messages that became dead letters."""
    ticks: int = 0
    """Changes of the broker's state."""


@dataclass(frozen=True, slots=True)
class ServiceCounters:
    """Requests in progress between clients and this broker."""

    messages_pending: int = 0
    bytes_pending: int = 0
    pulls_waiting: int = 0
    filter_errors: int = 0
    """Messages that a pull passed over because its filter had no result."""
    streams: int = 0
    transactions_open: int = 0
    transactions_given_up: int = 0
    """Since this broker is the master."""
    dropped_messages: int = 0
    """Delayed messages and those of transactions whose topic was deleted while they waited, likewise."""
    pop: PopCounters = field(default_factory=PopCounters)
    grpc_clients: int = 0
    """RocketMQ 5's clients that have been heard of lately, at any member."""
    grpc_calls: int = 0
    """Of RocketMQ 5's clients, at this broker."""
    grpc_refused: int = 0
    """Those of them that were answered with an error."""
    grpc_passed_on: int = 0
    """Calls that wait for the leader's answer."""
    grpc_repeated: int = 0
    """Messages of RocketMQ 5's clients that were sent again and not stored again."""


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How many messages of a topic a group has not consumed, over all queues it has ever committed offsets for; and how
    long the oldest of them has been stored, 0 if there is none, None if that was not looked at.
    """

    group: str
    topic: str
    messages: int
    age_ms: int | None = 0


@dataclass(frozen=True, slots=True)
class QueueLag:
    """The same in one queue."""

    group: str
    topic: str
    queue_id: int
    messages: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class BrokerMeasurements:
    """A broker's state at one moment."""

    role: BrokerRole
    service: ServiceCounters
    topics: dict[str, TopicTotals]
    """The first topics that received messages, and the sum of all others as ``OTHERS``."""
    groups: dict[tuple[str, str], GroupTotals]
    """By group and topic, with the same limit."""
    lags: tuple[GroupLag, ...]
    queue_lags: tuple[QueueLag, ...]
    """Of the first queues with any lag, as many as there are topics at most."""
    lags_left_out: int
    """Pairs of group and topic beyond the limit."""
    topic_count: int
    group_count: int
    min_offset: int
    max_offset: int
    end_offset: int
    dispatch_position: int
    dispatch_behind_bytes: int
    flush_behind_bytes: int
    disk_used_ratio: float
    forced_files: int
    """Log files removed before they had expired, since it started; not those of a replicated log."""
    earliest_message_ms: int


_OWN_TOPICS: Final = HIDDEN_TOPICS | {SCHEDULE_TOPIC}
"""Topics that the broker writes and reads itself."""


def measure(
    store: MessageStore, state: BrokerState, service: ServiceCounters, *, topics_max: int, now_ms: int
) -> BrokerMeasurements:
    """Measure everything; may wait for a disk, so not on an event loop."""
    groups = state.groups()
    lags: list[GroupLag] = []
    queue_lags: list[QueueLag] = []
    left_out = 0
    for lag in _lags(_Queues(store, state, now_ms, topics_max, queue_lags), groups[:topics_max]):
        if len(lags) < topics_max:
            lags.append(lag)
        else:
            left_out += 1
    left_out += max(0, len(groups) - topics_max)
    return BrokerMeasurements(
        role=store.role,
        service=service,
        topics=first_topics(store.stats.topics(), topics_max),
        groups=first_groups(store.stats.groups(), topics_max),
        lags=tuple(lags),
        queue_lags=tuple(queue_lags),
        lags_left_out=left_out,
        topic_count=state.topic_count(),
        group_count=len(groups),
        min_offset=store.log.min_offset,
        max_offset=store.log.max_offset,
        end_offset=store.log.end_offset,
        dispatch_position=store.dispatch_position,
        dispatch_behind_bytes=store.dispatch_behind_bytes,
        flush_behind_bytes=store.log.remaining_to_flush(),
        disk_used_ratio=store.disk_used_ratio(),
        forced_files=store.forced_files,
        earliest_message_ms=store.earliest_message_time(),
    )


class _Queues:
    """Looks at queues; at when a message was stored, which may take a read of the disk, in ``timed_max`` of them."""

    def __init__(
        self, store: MessageStore, state: BrokerState, now_ms: int, timed_max: int, found: list[QueueLag]
    ) -> None:
        self._store = store
        self.state = state
        self._now_ms = now_ms
        self._timed_max = timed_max
        self._found = found

    def lag(self, group: str, noted: QueueOffset) -> tuple[int, int | None]:
        """Messages, and the age of the first; those that can be read no more count as consumed."""
        topic, queue_id, offset = noted
        begin = max(offset, self._store.min_offset(topic, queue_id), self.state.begin_offset(topic, queue_id))
        messages = max(0, self._store.max_offset(topic, queue_id) - begin)
        if not messages:
            return 0, 0
        if len(self._found) >= self._timed_max:
            return messages, None
        try:
            stored_ms = self._store.store_time(topic, queue_id, begin)
        except CorruptLogError:  # who reads it is told so
            return messages, None
        age_ms = max(0, self._now_ms - stored_ms) if stored_ms > 0 else 0
        self._found.append(QueueLag(group, topic, queue_id, messages, age_ms))
        return messages, age_ms


def _lags(queues: _Queues, groups: list[str]) -> Iterator[GroupLag]:
    for group in groups:
        behind: dict[str, tuple[int, int | None]] = {}
        for noted in queues.state.offsets(group):
            before, oldest_ms = behind.get(noted.topic, (0, 0))
            messages, age_ms = queues.lag(group, noted)
            known = oldest_ms is not None and age_ms is not None
            behind[noted.topic] = before + messages, max(oldest_ms or 0, age_ms or 0) if known else None
        for topic, (messages, age_ms) in behind.items():
            yield GroupLag(group, topic, messages, age_ms)


def first_topics(totals: dict[str, TopicTotals], topics_max: int) -> dict[str, TopicTotals]:
    """The first topics by arrival, which remain the first, so that no counter decreases; the others are summed."""
    found: dict[str, TopicTotals] = {}
    messages = size_bytes = 0
    for topic, total in totals.items():
        if topic in _OWN_TOPICS:
            continue
        if len(found) < topics_max:
            found[topic] = total
        else:
            messages += total.messages
            size_bytes += total.size_bytes
    if messages:
        found[OTHERS] = TopicTotals(messages, size_bytes)
    return found


def first_groups(totals: dict[tuple[str, str], GroupTotals], pairs_max: int) -> dict[tuple[str, str], GroupTotals]:
    """The first pairs of group and topic to which messages were delivered; the others are summed."""
    counted = [(pair, total) for pair, total in totals.items() if pair[1] not in _OWN_TOPICS]
    found = dict(counted[:pairs_max])
    rest = [total for _, total in counted[pairs_max:]]
    if rest:
        found[OTHERS, OTHERS] = GroupTotals(
            sum(total.messages for total in rest), sum(total.size_bytes for total in rest)
        )
    return found


_SAMPLE_S: Final = 10.0
_STEPS_MS: Final = (10_000, 600_000, 3_600_000)
"""How far apart samples are that are kept for the minute, the hour and the day."""
_KEPT: Final = (7, 7, 25)
"""How many of each, so that they span a minute, an hour and a day."""
_SLACK_MS: Final = 5_000
"""A timer that is early by less counts as in time."""


class Total(NamedTuple):
    """A total since the start, in the unit of the statistic and in messages."""

    amount: int
    messages: int


class Sample(NamedTuple):
    """All totals at one moment, by name of the statistic and key."""

    at_ms: int
    totals: Mapping[tuple[str, str], Total]


class BrokerTotals(NamedTuple):
    """Messages that arrived, also on a slave, and were given out, since the start; without the broker's own state."""

    puts: int
    gets: int


class StatsSpan(NamedTuple):
    """The count of a span of time."""

    amount: int
    per_s: float
    per_message: float


class Statistic(NamedTuple):
    """Of one name and key: in the last minute, hour and day."""

    minute: StatsSpan
    hour: StatsSpan
    day: StatsSpan


class Statistics:
    """On the loop; ``start`` and ``close`` it."""

    def __init__(
        self, live: LiveConfig, store: MessageStore, retries: Retries, readers: ReadThreads, clock: Clock
    ) -> None:
        self._live = live
        self._store = store
        self._retries = retries
        self._readers = readers
        self._clock = clock
        self._kept: tuple[deque[Sample], ...] = tuple(deque(maxlen=count) for count in _KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._day: tuple[int, ...] = ()
        nothing = BrokerTotals(0, 0)
        self.this_morning = nothing
        """At midnight, local time; at the start if that is later."""
        self.yesterday_morning = nothing

    def start(self) -> None:
        self.take(self._sample())
        self._timer = asyncio.get_running_loop().call_later(_SAMPLE_S, self._begin)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sampling is not None:
            self._sampling.cancel()

    def now(self) -> BrokerTotals:
        """Of the whole broker."""
        stats = self._store.stats
        return BrokerTotals(stats.arrived, stats.transferred)

    def of(self, name: str, key: str) -> Statistic | None:
        """One statistic; None if nothing was counted."""
        newest = self._kept[0][-1]
        if (name, key) not in newest.totals:
            return None
        return Statistic(*(_between(kept[0], newest, (name, key)) for kept in self._kept))

    def get_tps(self, group: str, topic: str) -> float:
        """Messages per second that a group got of a topic, over the last minute."""
        found = self.of("GROUP_GET_NUMS", f"{topic}@{group}")
        return 0.0 if found is None else found.minute.per_s

    # -- inside --------------------------------------------------------------------------------------------------------

    def take(self, sample: Sample) -> None:
        """Keep a sample wherever the last one is old enough."""
        for kept, step_ms in zip(self._kept, _STEPS_MS, strict=True):
            if not kept or sample.at_ms - kept[-1].at_ms >= step_ms - _SLACK_MS:
                kept.append(sample)
        day = time.localtime(self._clock.wall_ms() / 1000)[:3]
        if day != self._day:
            self._day = day
            self.yesterday_morning, self.this_morning = self.this_morning, self.now()

    def _begin(self) -> None:
        self._sampling = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        self.take(await self._readers.run(self._sample))
        self._timer = asyncio.get_running_loop().call_later(_SAMPLE_S, self._begin)

    def _sample(self) -> Sample:
        """On any thread."""
        config, totals = self._live.now, dict[tuple[str, str], Total]()
        limit, stats = config.metrics_topics_max, self._store.stats
        for topic, one in first_topics(stats.topics(), limit).items():
            totals["TOPIC_PUT_NUMS", topic] = Total(one.messages, one.messages)
            totals["TOPIC_PUT_SIZE", topic] = Total(one.size_bytes, one.messages)
        for (group, topic), got in first_groups(stats.groups(), limit).items():
            totals["GROUP_GET_NUMS", f"{topic}@{group}"] = Total(got.messages, got.messages)
            totals["GROUP_GET_SIZE", f"{topic}@{group}"] = Total(got.size_bytes, got.messages)
        for (group, topic), count in self._retries.sent_back.copy().items():
            totals["SNDBCK_PUT_NUMS", f"{topic}@{group}"] = Total(count, count)
        puts, gets = self.now()
        totals["BROKER_PUT_NUMS", config.cluster_name] = Total(puts, puts)
        totals["BROKER_GET_NUMS", config.cluster_name] = Total(gets, gets)
        return Sample(self._clock.monotonic_ms(), totals)


def _between(first: Sample, last: Sample, key: tuple[str, str]) -> StatsSpan:
    before = first.totals.get(key, Total(0, 0))
    after = last.totals[key]
    took_ms, amount = last.at_ms - first.at_ms, after.amount - before.amount
    messages = after.messages - before.messages
    return StatsSpan(
        amount,
        amount * 1000 / took_ms if took_ms > 0 else 0.0,
        amount / messages if messages else 0.0,
    )


QUEUES_MAX: Final = 20_000
"""Maximum queues in one answer: each costs up to two reads, and about 150 bytes of a frame's 16 MiB."""
NEVER: Final = (1 << 63) - 1
"""RocketMQ's offset for a queue that needs no correction."""
LATEST: Final = -1
"""In the place of a time: the end of every queue."""


class QueueEnds(NamedTuple):
    """A queue's bounds, and when its last message was stored (0: there is none)."""

    queue_id: int
    begin: int
    end: int
    last_ms: int


class StoredUnits(NamedTuple):
    """A queue's bounds, and units of it as they are stored."""

    begin: int
    end: int
    units: list[QueueUnit]


class GroupPosition(NamedTuple):
    """A group's offset in a queue (0 without one), the queue's end, and when the last consumed message was stored.

    Of a group that pops, what lies before ``given_out`` was given out.
    """

    topic: str
    queue_id: int
    consumed: int
    end: int
    consumed_ms: int
    given_out: int


class QueueAges(NamedTuple):
    """When a queue's first and last messages were stored, and the last consumed one, and how old the next one is."""

    queue_id: int
    first_ms: int
    last_ms: int
    consumed_ms: int
    delay_ms: int


class Stats:
    """Each method raises ``Refusal`` if the answer would be about too many queues."""

    def __init__(self, store: MessageStore, state: BrokerState, topics: Topics, offsets: Offsets, clock: Clock) -> None:
        self._store = store
        self._state = state
        self._topics = topics
        self._offsets = offsets
        self._clock = clock

    def of_topic(self, topic: SeenTopic) -> list[QueueEnds]:
        """Of all queues that can be written."""
        found = []
        for queue_id in _queues(topic.write_queues):
            begin, end = self._offsets.bounds_of(topic.name, queue_id)
            found.append(
                QueueEnds(queue_id, begin, end, self._time(topic.name, queue_id, end - 1) if end > begin else 0)
            )
        return found

    def units(self, topic: str, queue_id: int, first: int, count: int) -> StoredUnits | None:
        """``count`` units from ``first`` on, as far as there are any; None if there is no such queue."""
        store = self._store
        begin, end = self._offsets.bounds_of(topic, queue_id)
        if not end and (topic, queue_id) not in store.queues():
            return None
        first = max(first, begin)
        found = (store.unit(topic, queue_id, offset) for offset in range(first, min(first + count, end)))
        return StoredUnits(begin, end, [unit for unit in found if unit is not None])

    def topics_of(self, group: str) -> list[SeenTopic]:
        """The topics in which a group has offsets."""
        names = sorted({one.topic for one in self._state.offsets(group)})
        return [topic for one in names if (topic := self._topics.seen(one)) is not None]

    def of_group(self, group: str, topics: Collection[SeenTopic]) -> list[GroupPosition]:
        """Its progress in all queues of these topics."""
        check_queues(sum(one.read_queues for one in topics))
        return [self._progress(group, one.name, queue_id) for one in topics for queue_id in range(one.read_queues)]

    def ages(self, group: str, topic: SeenTopic) -> list[QueueAges]:
        """Of a topic's messages, and of those that a group comes to next."""
        now_ms, name = self._clock.wall_ms(), topic.name
        found = []
        for queue_id in _queues(topic.write_queues):
            begin, end = self._offsets.bounds_of(name, queue_id)
            first_ms = self._time(name, queue_id, begin)
            consumed = self._state.offset(group, name, queue_id)
            consumed_ms = self._time(name, queue_id, consumed - 1) if consumed > 0 else first_ms
            next_ms = self._time(name, queue_id, max(consumed, begin)) if consumed < end else 0
            delay_ms = max(0, now_ms - next_ms) if next_ms > 0 else 0
            found.append(QueueAges(queue_id, first_ms, self._time(name, queue_id, end - 1), consumed_ms, delay_ms))
        return found

    def lowest_offsets(self, topic: str, left_out: Collection[str], compared: str) -> dict[int, int]:
        """By queue, the lowest offset of all groups but some; ``NEVER`` where that of ``compared`` is lower still."""
        lowest: dict[int, int] = {}
        begins: dict[int, int] = {}
        for group in self._state.groups():
            for one in () if group in left_out else self._state.offsets(group, topic):
                if one.queue_id not in begins:
                    begins[one.queue_id] = self._offsets.bounds_of(topic, one.queue_id)[0]
                if one.offset >= begins[one.queue_id]:
                    lowest[one.queue_id] = min(lowest.get(one.queue_id, NEVER), one.offset)
        for one in self._state.offsets(compared, topic):
            if lowest.get(one.queue_id, -1) > one.offset:
                lowest[one.queue_id] = NEVER
        return lowest

    def reset_targets(self, group: str, topic: SeenTopic, time_ms: int, *, is_forced: bool) -> dict[int, int]:
        """By queue, where a group goes on from a time (or ``LATEST``): not forward, unless that is forced.

        Raises ``Refusal`` if it has no offset in one of them.
        """
        targets: dict[int, int] = {}
        for queue_id in _queues(topic.write_queues):
            consumed = self._state.offset(group, topic.name, queue_id)
            if consumed == NONE:
                why = f"THe consumer group <{group}> not exist: no offset in queue {queue_id}"
                raise Refusal(RefusalKind.INVALID, why)
            begin, end = self._offsets.bounds_of(topic.name, queue_id)
            target = end
            if time_ms != LATEST:
                target = min(max(self._store.offset_by_time(topic.name, queue_id, time_ms), begin), end)
            targets[queue_id] = target if is_forced else min(target, consumed)
        return targets

    def _progress(self, group: str, topic: str, queue_id: int) -> GroupPosition:
        end = self._offsets.bounds_of(topic, queue_id)[1]
        consumed = max(self._state.offset(group, topic, queue_id), 0)
        consumed_ms = self._time(topic, queue_id, consumed - 1) if consumed else 0
        window = self._state.pop.pop_window(PopPlace(group, topic, queue_id))
        given_out = consumed if window is None else max(consumed, window.reserved)
        return GroupPosition(topic, queue_id, consumed, end, consumed_ms, given_out)

    def _time(self, topic: str, queue_id: int, offset: int) -> int:
        """When a message was stored; 0 if it does not exist, or is damaged: reading it reports that."""
        if offset < 0:
            return 0
        try:
            return max(self._store.store_time(topic, queue_id, offset), 0)
        except CorruptLogError:
            return 0


def check_queues(count: int) -> None:
    """Raises ``Refusal`` if an answer would be about too many queues."""
    if count > QUEUES_MAX:
        why = f"{count} queues: an answer may be about {QUEUES_MAX} at most, ask for one topic"
        raise Refusal(RefusalKind.INVALID, why)


def _queues(count: int) -> Iterable[int]:
    check_queues(count)
    return range(count)
