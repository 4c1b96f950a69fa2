"""A broker's measurements for metrics, besides those of its node.

Bounded: a broker may have tens of thousands of topics and groups, and metrics systems keep every name forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from dledger.errors import CorruptLogError
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import QueueOffset
from rocketstore.store.message_store import MessageStore
from rocketstore.store.stats import OTHERS, GroupTotals, TopicTotals
from rocketstore.types import HIDDEN_TOPICS, SCHEDULE_TOPIC, BrokerRole


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
