"""The records of a running drill: sends, deliveries, the nodes' statuses, and the actions on them.

All times are seconds since the drill's load started. Only ``HistoryRecorder`` is shared by threads.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Callable
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
