"""The records of a running drill: sends, deliveries, the nodes' statuses, and the actions on them.

All times are seconds since the drill's load started. Only ``HistoryRecorder`` is shared by threads.

The timeline is computed of it, without clocks: role changes, failed and acknowledged appends around faults, the time
without service.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from dledger.types import NodeId


class SendOutcome(StrEnum):
    """A producer's knowledge of its message."""

    ACKNOWLEDGED = "acknowledged"
    UNKNOWN = "unknown"
    """It may be stored; it was not sent again."""
    REFUSED = "refused"
    """It is certainly not stored."""


class DrillSend(NamedTuple):
    """One message and its outcome; ``queue_id`` and ``queue_offset`` only if it was acknowledged."""

    number: int
    body: bytes
    sent_s: float
    ended_s: float
    outcome: SendOutcome
    queue_id: int = -1
    queue_offset: int = -1
    error: str = ""


class DrillDelivery(NamedTuple):
    """One message as received by a consumer. ``session`` counts the consumer's restarts: each starts at its commits."""

    session: int
    at_s: float
    queue_id: int
    queue_offset: int
    body: bytes


class ServedMessage(NamedTuple):
    """One message as returned by a node."""

    queue_offset: int
    body: bytes
    record_crc: int
    """CRC of the whole stored record."""


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """Everything one node holds, read after the group has healed."""

    node: NodeId
    queues: dict[int, tuple[ServedMessage, ...]]
    log: str
    """A text that is equal for equal logs: last index, term and a digest."""


class EventKind(StrEnum):
    """Kinds of events in the timeline."""

    STEP = "step"
    FAULT = "fault"
    HEAL = "heal"
    ROLE = "role"
    FIRST_FAILED = "first failed"
    FIRST_ACKNOWLEDGED = "first acknowledged"
    RECOVERED = "recovered"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class DrillEvent:
    """An event, in words for people."""

    at_s: float
    kind: EventKind
    text: str
    node: NodeId | None = None
    term: int = -1


_ROLE_WORDS: Final = {
    "LEADER": "leads",
    "FOLLOWER": "follows",
    "CANDIDATE": "is a candidate",
    "SYNC_MASTER": "is a plain master",
    "ASYNC_MASTER": "is a plain master",
    "SLAVE": "is a plain slave",
}


class NodeView(NamedTuple):
    """A node's reported role (empty: no response), Raft's or a plain broker's, and whether it accepts messages."""

    role: str = ""
    term: int = -1
    is_master: bool = False

    @property
    def words(self) -> str:
        """In words for people."""
        if not self.role:
            return "does not answer"
        what = _ROLE_WORDS.get(self.role, self.role)
        return f"{what} and accepts messages" if self.is_master else what


class SeenChange(NamedTuple):
    """A change of a node's reported state."""

    at_s: float
    node: NodeId
    view: NodeView


@dataclass(slots=True)
class Notes:
    """The complete records, from which the verdict is derived."""

    sends: list[DrillSend] = field(default_factory=list)
    attempts_failed: list[tuple[float, str]] = field(default_factory=list)
    deliveries: list[DrillDelivery] = field(default_factory=list)
    seen: list[SeenChange] = field(default_factory=list)
    events: list[DrillEvent] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """Periods in which the drill's own process was stalled."""
    ended_s: float = 0.0


class HistoryRecorder:
    """Thread-safe. ``listener`` receives every event at once."""

    def __init__(self, listener: Callable[[DrillEvent], None] = lambda _event: None) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._zero = time.monotonic()
        self._notes = Notes()
        self._counts: Counter[SendOutcome] = Counter()
        self._acknowledged_at: list[float] = []
        self._delivered: set[bytes] = set()
        self._listener = listener

    @property
    def now_s(self) -> float:
        """Seconds since the start of the load."""
        return time.monotonic() - self._zero

    def sent(self, send: DrillSend) -> None:
        """Record a finished send."""
        with self._lock:
            self._notes.sends.append(send)
            self._counts[send.outcome] += 1
            if send.outcome is SendOutcome.ACKNOWLEDGED:
                bisect.insort(self._acknowledged_at, send.ended_s)

    def attempt_failed(self, why: str) -> None:
        """Record a producer's failed attempt, whether or not it is retried."""
        with self._lock:
            self._notes.attempts_failed.append((self.now_s, why))

    def delivered(self, deliveries: list[DrillDelivery]) -> None:
        """Record messages received by a consumer."""
        with self._lock:
            self._notes.deliveries += deliveries
            self._delivered.update(one.body for one in deliveries)

    def saw(self, node: NodeId, view: NodeView) -> None:
        """Record a change of a node's reported state."""
        with self._lock:
            self._notes.seen.append(SeenChange(self.now_s, node, view))

    def event(self, kind: EventKind, text: str, *, node: NodeId | None = None, at_s: float | None = None) -> DrillEvent:
        """Record an action or observation."""
        event = DrillEvent(self.now_s if at_s is None else at_s, kind, text, node)
        with self._lock:
            self._notes.events.append(event)
        self._listener(event)
        return event

    def stalled(self, from_s: float, to_s: float) -> None:
        """Record that the drill itself was stalled."""
        with self._lock:
            self._notes.stalls.append((from_s, to_s))
        text = (
            f"the drill itself was stalled for {to_s - from_s:.1f} s: measurements in that time say nothing "
            "about the group"
        )
        self.event(EventKind.STEP, text, at_s=from_s)

    def count(self, outcome: SendOutcome) -> int:
        """The number of sends with this outcome."""
        with self._lock:
            return self._counts[outcome]

    def acknowledged_since(self, at_s: float) -> int:
        """The number of acknowledgements since some time."""
        with self._lock:
            return len(self._acknowledged_at) - bisect.bisect_right(self._acknowledged_at, at_s)

    def finished(self) -> int:
        """The number of sends that have ended, whatever their outcome."""
        with self._lock:
            return self._counts.total()

    def undelivered(self) -> int:
        """The number of acknowledged messages that no consumer has received yet."""
        with self._lock:
            return sum(
                one.outcome is SendOutcome.ACKNOWLEDGED and one.body not in self._delivered for one in self._notes.sends
            )

    def finish(self) -> Notes:
        """Everything in order of time; nothing may be recorded afterwards."""
        with self._lock:
            notes = self._notes
            notes.ended_s = self.now_s
            notes.sends.sort(key=lambda one: one.number)
            notes.attempts_failed.sort()
            notes.seen.sort(key=lambda one: one.at_s)
            notes.events.sort(key=lambda one: one.at_s)
            return notes


BUCKET_S: Final = 0.1


@dataclass(slots=True)
class Round:
    """One fault from its start to the end of the recovery; times are NaN for what never happened."""

    number: int
    fault: str
    victim: NodeId | None
    fault_s: float
    healed_s: float = math.nan
    recovered_s: float = math.nan
    """When every node is up and has caught up."""
    ends_s: float = math.inf
    """When the next round starts."""


@dataclass(frozen=True, slots=True)
class FaultEffects:
    """The effects of a fault."""

    round: Round
    first_failed_s: float
    """A producer's first failed attempt, retried or not; NaN if none failed."""
    first_failed_why: str
    first_acknowledged_s: float
    """The first acknowledgement after the longest gap."""
    without_service_s: float
    """The longest time between two acknowledgements of which the second came after the fault."""
    leader_before: NodeId | None
    leader_after: NodeId | None
    term_before: int
    term_after: int
    failed: int
    """Messages sent in this round that failed, refused or of unknown outcome."""


def effects_of(one: Round, notes: Notes) -> FaultEffects:
    """Evaluate one round. ``notes`` are in order of time."""
    failed = [(at, why) for at, why in notes.attempts_failed if one.fault_s <= at < one.ends_s]
    gap, resumed = _longest_gap(_acknowledgements(notes), one.fault_s, min(one.ends_s, notes.ended_s))
    before = _leader_at(notes.seen, one.fault_s)
    after = _leader_at(notes.seen, min(one.ends_s, notes.ended_s))
    return FaultEffects(
        round=one,
        first_failed_s=failed[0][0] if failed else math.nan,
        first_failed_why=failed[0][1] if failed else "",
        first_acknowledged_s=resumed,
        without_service_s=gap,
        leader_before=before[0],
        leader_after=after[0],
        term_before=before[1],
        term_after=after[1],
        failed=sum(
            send.outcome is not SendOutcome.ACKNOWLEDGED and one.fault_s <= send.ended_s < one.ends_s
            for send in notes.sends
        ),
    )


def _acknowledgements(notes: Notes) -> list[float]:
    return sorted(one.ended_s for one in notes.sends if one.outcome is SendOutcome.ACKNOWLEDGED)


def _longest_gap(times: Sequence[float], after_s: float, until_s: float) -> tuple[float, float]:
    """The longest gap and its end: infinite and NaN if nothing was acknowledged after ``after_s``."""
    best, ends = 0.0, math.nan
    previous = max((at for at in times if at <= after_s), default=after_s)
    for at in times:
        if after_s < at <= until_s:
            if at - previous >= best:
                best, ends = at - previous, at
            previous = at
    return (best, ends) if not math.isnan(ends) else (math.inf, math.nan)


def _leader_at(seen: Iterable[SeenChange], at_s: float) -> tuple[NodeId | None, int]:
    """The leader at a time, as reported by the nodes until then; of several, the one of the highest term."""
    latest: dict[NodeId, NodeView] = {}
    for one in seen:
        if one.at_s > at_s:
            break
        latest[one.node] = one.view
    leaders = [(view.term, node) for node, view in latest.items() if view.role == "LEADER" or view.is_master]
    return (max(leaders)[1], max(leaders)[0]) if leaders else (None, -1)


# --- the timeline ----------------------------------------------------------------------------------------------------


def timeline(notes: Notes, rounds: Sequence[FaultEffects]) -> tuple[DrillEvent, ...]:
    """All relevant events in order of time."""
    events = [*notes.events, *_role_events(notes.seen)]
    for one in rounds:
        if not math.isnan(one.first_failed_s):
            # The producer sends again what has failed, so that no message need have failed for good.
            what = "first failed attempt" if one.failed else "first failed attempt, all sent again in time"
            events.append(DrillEvent(one.first_failed_s, EventKind.FIRST_FAILED, f"{what}: {one.first_failed_why}"))
        if not math.isnan(one.first_acknowledged_s):
            text = f"first append acknowledged again, after {one.without_service_s:.2f} s without service"
            events.append(DrillEvent(one.first_acknowledged_s, EventKind.FIRST_ACKNOWLEDGED, text))
    return tuple(sorted(events, key=lambda event: event.at_s))


def _role_events(seen: Iterable[SeenChange]) -> list[DrillEvent]:
    latest: dict[NodeId, NodeView] = {}
    events: list[DrillEvent] = []
    for one in seen:
        before = latest.get(one.node)
        latest[one.node] = one.view
        # A follower that only learns of a new term is no news.
        if before is None or (before.role, before.is_master) == (one.view.role, one.view.is_master) == (
            "FOLLOWER",
            False,
        ):
            continue
        term = f" in term {one.view.term}" if one.view.term >= 0 else ""
        events.append(
            DrillEvent(one.at_s, EventKind.ROLE, f"{one.node} {one.view.words}{term}", one.node, one.view.term)
        )
    return events


class StatePeriod(NamedTuple):
    """A period in which a node's reported state did not change."""

    begin_s: float
    end_s: float
    view: NodeView


def state_periods(seen: Iterable[SeenChange], end_s: float) -> dict[NodeId, list[StatePeriod]]:
    """The states of each node from start to end."""
    changes: dict[NodeId, list[SeenChange]] = defaultdict(list)
    for one in seen:
        changes[one.node].append(one)
    found: dict[NodeId, list[StatePeriod]] = {}
    for node in sorted(changes):
        mine = changes[node]
        ends = [*(max(0.0, one.at_s) for one in mine[1:]), max(end_s, 0.0)]
        found[node] = [
            StatePeriod(max(0.0, one.at_s), end, one.view)
            for one, end in zip(mine, ends, strict=True)
            if end > max(0.0, one.at_s)
        ]
    return found


# --- throughput and latency ------------------------------------------------------------------------------------------


class Bucket(NamedTuple):
    """A tenth of a second: acknowledgements per second, failures per second, and latencies (NaN if none)."""

    at_s: float
    acknowledged_per_s: float
    failed_per_s: float
    p50_ms: float
    p99_ms: float


def series(notes: Notes, *, bucket_s: float = BUCKET_S) -> tuple[Bucket, ...]:
    """Throughput and latency over the whole drill, by time of the response."""
    latencies: dict[int, list[float]] = defaultdict(list)
    failures: dict[int, int] = defaultdict(int)
    for one in notes.sends:
        number = int(one.ended_s / bucket_s)
        if one.outcome is SendOutcome.ACKNOWLEDGED:
            latencies[number].append((one.ended_s - one.sent_s) * 1000)
        else:
            failures[number] += 1
    last = max([*latencies, *failures, 0])
    return tuple(
        Bucket(
            number * bucket_s,
            len(latencies[number]) / bucket_s,
            failures[number] / bucket_s,
            quantile(latencies[number], 0.5),
            quantile(latencies[number], 0.99),
        )
        for number in range(last + 1)
    )


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed; NaN if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
