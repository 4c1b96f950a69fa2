"""What clients of brokers were told, and whether the queues in the end explain all of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.support.history import Outcome
from tests.support.waiting import PATIENCE_S, wait_until

SHOWN: Final = 5
UNTOLD: Final = -1
Queues = Mapping[int, Sequence[bytes]]
"""By queue id the bodies of a topic, from queue offset 0 on."""


@dataclass(frozen=True, slots=True)
class SendOp:
    """One message and what became of it. ``stream``: whose ordered stream it is of, as its ``number``-th message.

    ``queue_offset`` is -1 for an acknowledged message of which the broker knew that it is stored, but not where.
    """

    body: bytes
    began: float
    ended: float
    outcome: Outcome
    queue_id: int = -1
    queue_offset: int = -1
    stream: str = ""
    number: int = -1
    error: str = ""


@dataclass(slots=True)
class Session:
    """What one consumer got from its first poll to its end, in order, and which commits were acknowledged."""

    starts: dict[int, int]
    got: list[tuple[int, int, bytes]] = field(default_factory=list)
    committed: dict[int, int] = field(default_factory=dict)


class BrokerHistory:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sends: list[SendOp] = []
        self._sessions: dict[str, list[Session]] = {}
        self._counts: Counter[Outcome] = Counter()
        self._delivered = 0

    def record(self, operation: SendOp) -> None:
        """Note the end of a send."""
        with self._lock:
            self._sends.append(operation)
            self._counts[operation.outcome] += 1

    def begin_session(self, consumer: str, starts: Mapping[int, int]) -> Session:
        """A consumer starts (again) at these offsets."""
        session = Session(dict(starts))
        with self._lock:
            self._sessions.setdefault(consumer, []).append(session)
        return session

    def delivered(self, session: Session, messages: Sequence[tuple[int, int, bytes]]) -> None:
        """It got these: queue id, queue offset, body."""
        with self._lock:
            session.got.extend(messages)
            self._delivered += len(messages)

    @property
    def sends(self) -> tuple[SendOp, ...]:
        """In the order of their ends."""
        with self._lock:
            return tuple(self._sends)

    @property
    def sessions(self) -> dict[str, list[Session]]:
        """By consumer, oldest first."""
        with self._lock:
            return {name: list(sessions) for name, sessions in self._sessions.items()}

    @property
    def bodies_delivered(self) -> set[bytes]:
        """What consumers got."""
        with self._lock:
            sessions = [session for one in self._sessions.values() for session in one]
            return {body for session in sessions for _, _, body in session.got}

    def count(self, outcome: Outcome) -> int:
        """How many sends ended so."""
        with self._lock:
            return self._counts[outcome]

    def wait_for_acks(self, more: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until so many more sends have been acknowledged than now."""
        wanted = self.count(Outcome.ACKED) + more
        wait_until(lambda: self.count(Outcome.ACKED) >= wanted, f"{more} more acknowledged messages", timeout_s)

    def complaints(self, queues: Queues) -> list[str]:
        """Everything that ``queues`` does not explain."""
        where = {body: (queue_id, at) for queue_id, one in queues.items() for at, body in enumerate(one)}
        sends = self.sends
        return [
            *_check_outcomes(sends, queues, where),
            *_check_real_time(sends, where),
            *_check_streams(sends, where),
            *_check_sessions(self.sessions, queues),
            *_check_consumed(sends, self.sessions, where),
        ]


def _some(kind: str, found: Iterable[object]) -> list[str]:
    listed = list(found)
    return [f"{len(listed)} {kind}: {listed[:SHOWN]}"] if listed else []


def _check_outcomes(sends: Sequence[SendOp], queues: Queues, where: Mapping[bytes, tuple[int, int]]) -> list[str]:
    known = {one.body: one for one in sends}
    times = Counter(body for one in queues.values() for body in one)
    acked = [one for one in sends if one.outcome is Outcome.ACKED]
    return [
        *_some("acknowledged messages are lost", (one for one in acked if one.body not in times)),
        *_some(
            "messages are not at their acknowledged positions",
            (one for one in acked if one.body in times and not _is_at(one, where[one.body])),
        ),
        *_some("messages are stored more than once", (body for body, count in times.items() if count > 1)),
        *_some(
            "stored messages were refused",
            (known[b] for b in times if b in known and known[b].outcome is Outcome.NOT_APPLIED),
        ),
        *_some("stored messages were never sent", (body for body in times if body not in known)),
    ]


def _is_at(send: SendOp, place: tuple[int, int]) -> bool:
    queue_id, offset = place
    return queue_id == send.queue_id and send.queue_offset in (offset, UNTOLD)


def _check_real_time(sends: Sequence[SendOp], where: Mapping[bytes, tuple[int, int]]) -> list[str]:
    """What was sent after another message of its queue was acknowledged comes after it, also if nobody was told."""
    found: list[str] = []
    moments: dict[int, list[tuple[float, bool, int, SendOp]]] = {}
    for one in sends:
        if one.outcome is Outcome.ACKED and (one.queue_offset != UNTOLD or one.body in where):
            queue_id, offset = one.queue_id, one.queue_offset
            if offset == UNTOLD:
                queue_id, offset = where[one.body]
            moments.setdefault(queue_id, []).append((one.ended, False, offset, one))
        elif one.body in where:
            queue_id, offset = where[one.body]
        else:
            continue
        moments.setdefault(queue_id, []).append((one.began, True, offset, one))
    for queue_id, mine in moments.items():
        highest = -1
        for _, begins, offset, one in sorted(mine, key=lambda moment: moment[:2]):
            if begins and offset < highest:
                found.append(f"{one} was sent after offset {highest} of queue {queue_id} was acknowledged")
            if not begins:
                highest = max(highest, offset)
    return _some("messages are before others that were acknowledged before they were sent", found)


def _check_streams(sends: Sequence[SendOp], where: Mapping[bytes, tuple[int, int]]) -> list[str]:
    """An ordered sender's messages are in each queue as it sent them."""
    found: list[str] = []
    ordered = sorted(
        (one for one in sends if one.stream and one.body in where), key=lambda one: (one.stream, one.number)
    )
    last: dict[tuple[str, int], tuple[int, int]] = {}
    for one in ordered:
        queue_id, offset = where[one.body]
        number, before = last.get((one.stream, queue_id), (-1, -1))
        if offset < before:
            found.append(f"queue {queue_id}: number {one.number} of {one.stream} at {offset}, {number} at {before}")
        last[one.stream, queue_id] = (one.number, offset)
    return _some("messages are not in the order of their sender", found)


def _check_sessions(sessions: Mapping[str, Sequence[Session]], queues: Queues) -> list[str]:
    found: list[str] = []
    for name, mine in sessions.items():
        reached: dict[int, int] = {}
        committed: dict[int, int] = {}
        for number, session in enumerate(mine):
            for queue_id, start in session.starts.items():
                if start > reached.get(queue_id, 0):
                    found.append(f"{name}/{number} skips queue {queue_id} from {reached.get(queue_id, 0)} to {start}")
                if start < committed.get(queue_id, 0):
                    found.append(f"{name}/{number}: queue {queue_id} goes back from {committed[queue_id]} to {start}")
            found += _check_session(f"{name}/{number}", session, queues)
            for queue_id, offset, _ in session.got:
                reached[queue_id] = max(reached.get(queue_id, 0), offset + 1)
            committed.update(session.committed)
    return _some("complaints about consumers", found)


def _check_consumed(
    sends: Sequence[SendOp], sessions: Mapping[str, Sequence[Session]], where: Mapping[bytes, tuple[int, int]]
) -> list[str]:
    if not sessions:
        return []
    consumed = {body for mine in sessions.values() for session in mine for _, _, body in session.got}
    missed = (one for one in sends if one.outcome is Outcome.ACKED and one.body not in consumed and one.body in where)
    return _some("acknowledged messages were never consumed", missed)


def _check_session(name: str, session: Session, queues: Queues) -> list[str]:
    found = []
    expected = dict(session.starts)
    for queue_id, offset, body in session.got:
        if offset != expected[queue_id]:
            found.append(f"{name}: queue {queue_id} continues at {offset} instead of {expected[queue_id]}")
        expected[queue_id] = offset + 1
        stored = queues.get(queue_id, ())
        if offset >= len(stored) or stored[offset] != body:
            found.append(f"{name}: offset {offset} of queue {queue_id} was {body!r}")
    return found
