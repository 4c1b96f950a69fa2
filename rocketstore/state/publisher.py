"""Writes changes to the state topic: all waiting changes form one message, and one message is in flight at a time.

One at a time costs nothing noticeable, because changes that arrive meanwhile go with the next message, and it
simplifies two things: changes are applied in the order in which they were requested, and a full state written while
nothing else is in flight is exact.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dledger.clock import Clock
from rocketstore.message.message import Message
from rocketstore.state.changes import CHANGES_MAX, EncodedChange, join_changes
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BROKER_STATE_TOPIC, PutMessageStatus, PutResult

StateDone = Callable[[PutResult], None]
"""Called once, on any thread, possibly within the call; must not block or raise. ``ok`` with ``outcome`` ``"stored"``:
the change is stored and applied.
"""

PENDING_MAX: Final = 10_000
PENDING_BYTES_MAX: Final = 16 * 1024 * 1024
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
            full = len(self._waiting) >= PENDING_MAX or self._waiting_bytes + encoded.size > PENDING_BYTES_MAX
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
