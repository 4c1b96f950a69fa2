"""What a drill writes down while it runs: sends, deliveries, what the nodes said of themselves, what was done to them.

All times are seconds since the drill's load began. ``HistoryRecorder`` is the only object here that threads share.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from dledger.types import NodeId


class SendOutcome(StrEnum):
    """What a producer knows of its message."""

    ACKNOWLEDGED = "acknowledged"
    UNKNOWN = "unknown"
    """It may be stored; it was not sent again."""
    REFUSED = "refused"
    """It is certainly not stored."""


class DrillSend(NamedTuple):
    """One message and what became of it; ``queue_id`` and ``queue_offset`` only if it was acknowledged."""

    number: int
    body: bytes
    sent_s: float
    ended_s: float
    outcome: SendOutcome
    queue_id: int = -1
    queue_offset: int = -1
    error: str = ""


class Delivery(NamedTuple):
    """One message as a consumer got it. ``session`` counts the consumer's lives: a new one begins at its commits."""

    session: int
    at_s: float
    queue_id: int
    queue_offset: int
    body: bytes


class ServedMessage(NamedTuple):
    """One message as a node gave it back."""

    queue_offset: int
    body: bytes
    record_crc: int
    """Over the whole stored record."""


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """Everything that one node holds, read after the group has healed."""

    node: NodeId
    queues: dict[int, tuple[ServedMessage, ...]]
    log: str
    """What its replicated log holds, in words that are equal for equal logs: last index, term and a digest."""


class EventKind(StrEnum):
    """What an event of the timeline is."""

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
    """Something that happened, in words for people."""

    at_s: float
    kind: EventKind
    text: str
    node: NodeId | None = None
    term: int = -1


class NodeView(NamedTuple):
    """What a node says of itself: its Raft role (empty: it does not answer), and whether it takes messages."""

    role: str = ""
    term: int = -1
    is_master: bool = False

    @property
    def words(self) -> str:
        """As a person would say it."""
        if not self.role:
            return "does not answer"
        what = {"LEADER": "leads", "FOLLOWER": "follows", "CANDIDATE": "is a candidate"}.get(self.role, self.role)
        return f"{what} and accepts messages" if self.is_master else what


class SeenChange(NamedTuple):
    """A node was seen to have changed."""

    at_s: float
    node: NodeId
    view: NodeView


@dataclass(slots=True)
class Notes:
    """Everything that was written down; the judges' input."""

    sends: list[DrillSend] = field(default_factory=list)
    attempts_failed: list[tuple[float, str]] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    seen: list[SeenChange] = field(default_factory=list)
    events: list[DrillEvent] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """From when to when the drill's own process stood still."""
    ended_s: float = 0.0


class HistoryRecorder:
    """Thread-safe. ``listener`` hears every event at once."""

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
        """A send has ended."""
        with self._lock:
            self._notes.sends.append(send)
            self._counts[send.outcome] += 1
            if send.outcome is SendOutcome.ACKNOWLEDGED:
                bisect.insort(self._acknowledged_at, send.ended_s)

    def attempt_failed(self, why: str) -> None:
        """A producer's attempt failed; whether it is repeated is the producer's business."""
        with self._lock:
            self._notes.attempts_failed.append((self.now_s, why))

    def delivered(self, deliveries: list[Delivery]) -> None:
        """A consumer got messages."""
        with self._lock:
            self._notes.deliveries += deliveries
            self._delivered.update(one.body for one in deliveries)

    def saw(self, node: NodeId, view: NodeView) -> None:
        """A node's own word has changed."""
        with self._lock:
            self._notes.seen.append(SeenChange(self.now_s, node, view))

    def event(self, kind: EventKind, text: str, *, node: NodeId | None = None, at_s: float | None = None) -> DrillEvent:
        """Something was done or noticed."""
        event = DrillEvent(self.now_s if at_s is None else at_s, kind, text, node)
        with self._lock:
            self._notes.events.append(event)
        self._listener(event)
        return event

    def stalled(self, from_s: float, to_s: float) -> None:
        """The drill itself did not run."""
        with self._lock:
            self._notes.stalls.append((from_s, to_s))
        text = (
            f"the drill itself was stalled for {to_s - from_s:.1f} s: measurements in that time say nothing "
            "about the group"
        )
        self.event(EventKind.STEP, text, at_s=from_s)

    def count(self, outcome: SendOutcome) -> int:
        """How many sends have ended so."""
        with self._lock:
            return self._counts[outcome]

    def acknowledged_since(self, at_s: float) -> int:
        """How many acknowledgements have come after a moment."""
        with self._lock:
            return len(self._acknowledged_at) - bisect.bisect_right(self._acknowledged_at, at_s)

    def undelivered(self) -> int:
        """How many acknowledged messages no consumer has got yet."""
        with self._lock:
            return sum(
                one.outcome is SendOutcome.ACKNOWLEDGED and one.body not in self._delivered for one in self._notes.sends
            )

    def finish(self) -> Notes:
        """Everything, in the order of time; nothing is to be recorded any more."""
        with self._lock:
            notes = self._notes
            notes.ended_s = self.now_s
            notes.sends.sort(key=lambda one: one.number)
            notes.attempts_failed.sort()
            notes.seen.sort(key=lambda one: one.at_s)
            notes.events.sort(key=lambda one: one.at_s)
            return notes
