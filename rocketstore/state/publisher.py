"""Writes changes to the state topic: all waiting changes form one message, and one message is in flight at a time.

One at a time costs nothing noticeable, because changes that arrive meanwhile go with the next message, and it
simplifies two things: changes are applied in the order in which they were requested, and a full state written while
nothing else is in flight is exact. A master writes a full state when it becomes one, and again before the last one
expires.

Limits on topics, queues, groups and offsets are checked by the master before a change is written. Applying a change
never refuses: all members must behave alike, whatever their limits. So changes that are written and not yet applied are
counted here, too, until they are answered.

``PopState``: the pop tables among the replicated ones, which the leader's engine looks at, and how it writes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from dledger.access.rules import RETRY_PREFIX
from dledger.clock import Backoff, Clock
from dledger.errors import InvalidRequestError
from dledger.monitoring import ConditionKind, Conditions
from rocketstore.message.checks import NO_SEND_TOPICS
from rocketstore.message.message import Message
from rocketstore.pop.operations import PopRules
from rocketstore.pop.tables import LeaseWindow, PopPlace, PopRow
from rocketstore.state.applier import StateApplier
from rocketstore.state.changes import (
    CHANGES_MAX,
    Change,
    CommitOffsets,
    EncodedChange,
    PopRows,
    QueueOffset,
    TopicConfig,
    join_changes,
    split_full,
)
from rocketstore.state.tables import Tables
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BROKER_STATE_TOPIC, SCHEDULE_TOPIC, BrokerRole, PutMessageStatus, PutResult

StateDone = Callable[[PutResult], None]
"""Called once, on any thread, possibly within the call; must not block or raise. ``ok`` with ``outcome`` ``"stored"``:
the change is stored and applied.
"""

PENDING_MAX: Final = 10_000
_PENDING_BYTES_MAX: Final = 16 * 1024 * 1024
BATCH_BYTES_MAX: Final = 64 * 1024
FULL_BYTES_AT_ONCE: Final = 512 * 1024
"""Batches are limited, so a full state is written in several, one after the other."""


@dataclass(slots=True)
class _Waiting:
    encoded: EncodedChange
    done: StateDone
    deadline_ms: int
    incarnation: int
    """Of the store, which is another one after a change of role."""


@dataclass(slots=True)
class _Flight:
    """Submitted messages; ``results`` is set by the log's thread."""

    deadline_ms: int
    waiters: list[StateDone] = field(default_factory=list)
    results: Sequence[PutResult] | None = None
    on_end: Callable[[bool], None] | None = None
    rest: deque[bytes] = field(default_factory=deque)
    """Messages to submit once these are stored."""


class StatePublisher:
    """The queue of changes, and those in flight. ``offer`` on any thread, the rest on the state's thread."""

    def __init__(self, store: MessageStore, clock: Clock, *, timeout_ms: int, wake: Callable[[], None]) -> None:
        self._store = store
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._wake = wake
        self._lock = threading.Lock()  # guards _waiting, _waiting_bytes, _closed
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._closed = ""
        self._flight: _Flight | None = None

    def offer(self, encoded: EncodedChange, done: StateDone) -> None:
        """Queue an encoded change; refused at once if too many wait."""
        with self._lock:
            closed = self._closed
            full = len(self._waiting) >= PENDING_MAX or self._waiting_bytes + encoded.size > _PENDING_BYTES_MAX
            if not closed and not full:
                deadline_ms = self._clock.monotonic_ms() + self._timeout_ms
                self._waiting.append(_Waiting(encoded, done, deadline_ms, self._store.incarnation))
                self._waiting_bytes += encoded.size
        if closed:
            done(_refusal(PutMessageStatus.SERVICE_NOT_AVAILABLE, closed))
        elif full:
            done(_refusal(PutMessageStatus.OS_PAGECACHE_BUSY, "too many broker state changes are waiting: retry later"))
        else:
            self._wake()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return self._flight is None

    def due_ms(self) -> int | None:
        """When ``step`` is due without an event."""
        return self._flight.deadline_ms if self._flight else None

    def step(self, applied_next: int) -> None:
        """Complete what is in flight if its result is known, and start the next."""
        while True:
            if self._flight is not None and not self._land(self._flight, applied_next):
                return
            batch = self._next_batch()
            if not batch:
                return
            waiters = [one.done for one in batch]
            self._submit([join_changes(one.encoded for one in batch)], _Flight(batch[0].deadline_ms, waiters))

    def publish(self, bodies: Sequence[bytes], on_end: Callable[[bool], None]) -> None:
        """Write these messages, which must be a full state; only while ``idle``. ``on_end``: whether all are stored.

        Nothing else is written between them, so they are consecutive in the topic.
        """
        self._submit_some(deque(bodies), on_end)

    def _submit_some(self, rest: deque[bytes], on_end: Callable[[bool], None]) -> None:
        some = [rest.popleft()]
        size = len(some[0])
        while rest and size + len(rest[0]) <= FULL_BYTES_AT_ONCE:
            size += len(rest[0])
            some.append(rest.popleft())
        self._submit(some, _Flight(self._clock.monotonic_ms() + self._timeout_ms, on_end=on_end, rest=rest))

    def close(self, reason: str) -> None:
        """Answer everything waiting, and accept nothing more."""
        with self._lock:
            self._closed = reason
            waiting, self._waiting = self._waiting, deque()
            self._waiting_bytes = 0
        flight, self._flight = self._flight, None
        if flight is not None:
            _end(flight, _unknown(reason))
        for one in waiting:
            one.done(_refusal(PutMessageStatus.SERVICE_NOT_AVAILABLE, reason))

    def _submit(self, bodies: Sequence[bytes], flight: _Flight) -> None:
        self._flight = flight
        born_ms = self._clock.wall_ms()
        messages = [Message(BROKER_STATE_TOPIC, body, born_timestamp=born_ms) for body in bodies]

        def done(results: Sequence[PutResult]) -> None:
            flight.results = results
            self._wake()

        self._store.submit(messages, done)

    def _land(self, flight: _Flight, applied_next: int) -> bool:
        """Whether the messages in flight are done; then their callers were answered."""
        if flight.results is None:
            answer = _unknown("broker state: the log did not answer in time")
        else:
            failed = [result for result in flight.results if result.outcome != "stored" or result.stored is None]
            answer = failed[0] if failed else flight.results[-1]
            if flight.rest and flight.on_end is not None and not failed:
                self._submit_some(flight.rest, flight.on_end)
                return False
            if failed or answer.stored is None or applied_next > answer.stored.queue_offset:
                self._flight = None
                _end(flight, answer)
                return True
            answer = _unknown("broker state: the change is stored, but was not applied in time")
        if self._clock.monotonic_ms() < flight.deadline_ms:
            return False
        self._flight = None
        _end(flight, answer)
        return True

    def _next_batch(self) -> list[_Waiting]:
        """The changes for the next message; those that have waited too long are refused.

        So are those from before this broker was a slave: a master in between may have decided otherwise.
        """
        now_ms, incarnation = self._clock.monotonic_ms(), self._store.incarnation
        batch: list[_Waiting] = []
        late: list[_Waiting] = []
        used = 0
        with self._lock:
            while self._waiting and len(batch) < CHANGES_MAX:
                one = self._waiting[0]
                if batch and used + one.encoded.size > BATCH_BYTES_MAX:
                    break
                self._waiting.popleft()
                self._waiting_bytes -= one.encoded.size
                if one.deadline_ms <= now_ms or one.incarnation != incarnation:
                    late.append(one)
                else:
                    batch.append(one)
                    used += one.encoded.size + 1
        for one in late:
            reason = "waited too long" if one.incarnation == incarnation else "another master has led since"
            one.done(_refusal(PutMessageStatus.OS_PAGECACHE_BUSY, f"broker state: {reason}; not written"))
        return batch


def _end(flight: _Flight, answer: PutResult) -> None:
    if flight.on_end is not None:
        flight.on_end(answer.outcome == "stored")
    for done in flight.waiters:
        done(answer)


def _refusal(status: PutMessageStatus, reason: str) -> PutResult:
    return PutResult(status, outcome="not_applied", reason=reason)


def _unknown(reason: str) -> PutResult:
    return PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome="unknown", reason=reason)


_AUTOMATIC_PERCENT: Final = 90
"""The share of all queues available to topics created by sends."""
_TOLD_MS: Final = 60_000
_DELETE_GROUPS: Final = "delete groups (dledger consumer delete) or raise the setting"


@dataclass(frozen=True, slots=True)
class StateLimits:
    """The limits; existing objects beyond them stay."""

    queues_max: int = 16_384
    groups_max: int = 10_000
    offsets_max: int = 500_000


class LimitChecks:
    """The checks of one master. Each ``take`` raises ``LimitReachedError``, or returns a ``done`` to call with the
    result.

    Thread-safe; the caller guards the tables.
    """

    def __init__(self, limits: StateLimits, conditions: Conditions) -> None:
        self._limits = limits
        self._conditions = conditions
        self._lock = threading.Lock()  # guards changes in progress; acquired after the applier's
        self._queues: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()
        self._offsets = 0

    def take_queues(
        self, tables: Tables, topic: TopicConfig, stored: Iterable[tuple[str, int]], done: StateDone, *, automatic: bool
    ) -> StateDone:
        """Before a topic is created or changed. ``stored`` are the queues that have files, including those of deleted
        topics.
        """
        old = tables.topics.get(topic.name)
        more = topic.queues - (old.queues if old is not None else 0)
        if more <= 0:
            return done
        most = self._limits.queues_max
        allowed = most * _AUTOMATIC_PERCENT // 100 if automatic else most
        with self._lock:
            under_way = sum(count for name, count in self._queues.items() if name != topic.name)
            self._queues[topic.name] += more

        def answered(result: PutResult) -> None:
            self._forget_queues(topic.name, more)
            done(result)

        deleted = sum(name not in tables.topics and name not in NO_SEND_TOPICS for name, _ in stored)
        if tables.queue_count + under_way + more > allowed:
            self._forget_queues(topic.name, more)
            why = f"the topics have {tables.queue_count} queues, and at most {most} are allowed (queues_max)"
            if automatic and allowed < most:
                why += f", of which {most - allowed} are reserved for topics created by an administrator"
            raise self._reached("queues_max", f"{why}: delete topics or raise the setting")
        if deleted + tables.queue_count + under_way + more > 2 * most:
            self._forget_queues(topic.name, more)
            why = f"queues of deleted topics, {deleted} now, count until their files are removed"
            raise self._reached("queues_max", f"{why}: wait, or raise queues_max, which limits them separately")
        return answered

    def _forget_queues(self, topic: str, count: int) -> None:
        with self._lock:
            self._queues[topic] -= count
            if self._queues[topic] <= 0:
                del self._queues[topic]

    def take_offsets(self, tables: Tables, change: CommitOffsets, done: StateDone) -> StateDone:
        """Before offsets are committed."""
        group, limits = change.group, self._limits
        more = tables.new_offsets(change)
        is_new = group not in tables.groups
        if not more and not is_new:
            return done
        with self._lock:
            groups = len(tables.groups) + len(self._groups.keys() - {group})
            offsets = tables.offset_count + self._offsets
            if is_new and groups >= limits.groups_max:
                why = f"there are {groups} consumer groups, the limit (groups_max)"
                raise self._reached("groups_max", f"{why}: {_DELETE_GROUPS}")
            if offsets + more > limits.offsets_max:
                why = f"{offsets} group offsets are stored, and at most {limits.offsets_max} are allowed (offsets_max)"
                raise self._reached("offsets_max", f"{why}: {_DELETE_GROUPS}")
            self._offsets += more
            self._groups[group] += is_new

        def answered(result: PutResult) -> None:
            with self._lock:
                self._offsets -= more
                self._groups[group] -= is_new
                if self._groups[group] <= 0:
                    del self._groups[group]
            done(result)

        return answered

    def _reached(self, setting: str, why: str) -> LimitReachedError:
        self._conditions.set(ConditionKind.AT_LIMIT, why, subject=setting, for_ms=_TOLD_MS)
        return LimitReachedError(why)


class LimitReachedError(InvalidRequestError):
    """Raised when the maximum number of topics, groups or offsets is reached."""


FULL_PART_BYTES: Final = 128 * 1024
RETRY_MS: Final = 1000
RETRY_MS_MAX: Final = 60_000
"""A failed full state is retried after a second, then after two, and so on up to this."""

_log = logging.getLogger("rocketstore")


def is_past(store: MessageStore, tables: Tables, topic: str, queue_id: int, offset: int) -> bool:
    """Whether no message waits before an offset of one of the broker's own queues any more."""
    if topic == SCHEDULE_TOPIC:
        return tables.delay_offsets.get(queue_id + 1, 0) >= offset
    return store.min_offset(topic, queue_id) >= offset


class FullStates:
    """For the state's thread, but for ``wanted``."""

    def __init__(
        self, store: MessageStore, applier: StateApplier, publisher: StatePublisher, clock: Clock, interval_ms: int
    ) -> None:
        self._store = store
        self._applier = applier
        self._publisher = publisher
        self._clock = clock
        self._interval_ms = interval_ms
        self.wanted = False
        """Whether one is to be written as soon as that may be."""
        self._was_master = False
        self._due_ms = 0
        self._not_before_ms = 0
        self._backoff = Backoff(RETRY_MS, RETRY_MS_MAX)

    def step(self, now_ms: int) -> None:
        """Publish the full state if this is a master and it is due; the last one must not expire unreplaced."""
        applier = self._applier
        master = self._store.role is not BrokerRole.SLAVE
        if master and not self._was_master:
            self.wanted = True
        self._was_master = master
        if not master or not self._publisher.idle or applier.blocked or not applier.is_complete:
            return
        minimum = self._store.min_offset(BROKER_STATE_TOPIC, 0)
        expired = applier.full_offset < minimum and minimum > 0  # from 0 on, the messages themselves are the state
        if applier.next_offset > 0 and (now_ms >= self._due_ms or expired):
            self.wanted = True
        if not self.wanted or applier.next_offset != applier.end_offset or now_ms < self._not_before_ms:
            return
        if self._store.refusal is not None:
            return  # it has not been started yet, or its disk is full: wanted until it takes messages
        with applier.lock:
            tables = applier.tables.copy()
        tables.forget_begins(lambda topic, queue_id, begin: self._store.min_offset(topic, queue_id) >= begin)
        tables.forget_waits(partial(is_past, self._store, tables))
        changes = list(tables.as_changes())
        self.wanted = False
        self._due_ms = now_ms + self._interval_ms
        if not changes and applier.next_offset == 0:
            return  # there never was any state
        full_id = f"{self._clock.wall_ms()}-{applier.next_offset}"
        bodies = split_full(changes, full_id=full_id, upto=applier.next_offset, bytes_max=FULL_PART_BYTES)
        self._publisher.publish(bodies, self._on_end)

    def _on_end(self, stored: bool) -> None:
        if stored:
            self._backoff.succeeded()
            return
        pause_ms = round(self._backoff.pause())
        _log.warning("broker state: the full state was not written; retrying in %d s", pause_ms // 1000)
        self.wanted = True
        self._not_before_ms = self._clock.monotonic_ms() + pause_ms


_MADE = PutResult(PutMessageStatus.PUT_OK)


class PopState:
    """A ``rocketstore.pop.operations.PopView``. Thread-safe: each look at one dictionary needs no lock, since windows
    are never changed in place. ``change`` writes a change.
    """

    def __init__(self, applier: StateApplier, limits: LimitChecks, change: Callable[[Change, StateDone], None]) -> None:
        self._applier = applier
        self._limits = limits
        self._change = change

    def pop_window(self, place: PopPlace) -> LeaseWindow | None:
        """The window of a queue."""
        return self._applier.tables.pop.windows.get(place)

    def pop_epoch(self) -> int:
        """The highest generation there ever was."""
        return self._applier.tables.pop.epoch

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        """A group's offset in a queue; -1: it has none."""
        return self._applier.tables.groups.get(group, {}).get((topic, queue_id), -1)

    def pop_rules(self, group: str) -> PopRules:
        """A group's settings; a group without retry queues tries nothing again."""
        config = self._applier.tables.group_configs.get(group)
        if config is None:
            return PopRules()
        retries = max(config.retry_times_max, 0) if config.retry_queues else 0
        return PopRules(config.ordered, retries + 1)

    def parked_of(self, group: str) -> int:
        """How many messages of a group are invisible for long: its offsets have passed them (P11)."""
        with self._applier.lock:
            return self._applier.tables.pop.parked_of(group)

    def has_windows(self, group: str) -> bool:
        """Whether the group has consumed by pop, and its offsets were not all reset since."""
        with self._applier.lock:
            return any(place.group == group for place in self._applier.tables.pop.windows)

    def retry_topics(self, group: str) -> list[str]:
        """The topics for what the group gets again, one for each topic that it has consumed by pop."""
        with self._applier.lock:
            topics = {place.topic for place in self._applier.tables.pop.windows if place.group == group}
        return sorted(one for one in topics if one.startswith(RETRY_PREFIX) and one != f"{RETRY_PREFIX}{group}")

    @contextmanager
    def room(self, group: str, queues: Collection[tuple[str, int]]) -> Iterator[None]:
        """Take room for the group, and its offsets in these queues, while their windows are made.

        Raises ``LimitReachedError``.
        """
        change = CommitOffsets(group, tuple(QueueOffset(*one, 0) for one in queues))
        with self._applier.lock:
            made = self._limits.take_offsets(self._applier.tables, change, lambda _result: None)
        try:
            yield
        finally:
            made(_MADE)

    def write(self, rows: Iterable[PopRow], done: StateDone) -> None:
        """Write one tick; ``done`` once it is stored and applied here. One that a later leader has, or nobody, is told
        with outcome ``unknown``.
        """
        self._change(PopRows(tuple(rows)), done)
