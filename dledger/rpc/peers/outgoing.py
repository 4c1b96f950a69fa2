"""Messages to a peer that wait to be sent, or were sent and are not answered: one queue per connection's purpose.

The queues have limits, because a peer may be down, stopped or slow for any time. Messages dropped by a limit are
counted; nothing is repeated, because the protocol repeats itself. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import fields
from operator import attrgetter
from typing import Final, Protocol

from dledger.core.messages import Envelope, HeartbeatRequest, Message, TakeLeadership, VoteRequest
from dledger.errors import InvalidRequestError, InvariantError
from dledger.rpc.peers import codec, pushes
from dledger.rpc.peers.frames import FrameKind, Purpose

HEARTBEATS_MAX: Final = 4
"""The limit of unanswered heartbeats per peer. Beyond it, only the newest is kept until an answer: it says all that
earlier ones said.
"""
OTHERS_MAX: Final = 2
"""The same limit for votes and take-leadership, which heartbeats thus never delay."""
ANSWER_TIMEOUT_S: Final = 10.0
"""A peer that owes an answer for longer is dialled again. A dead one is noticed sooner (``frames.tune``), but not one
behind a proxy that is alive.
"""


class Outgoing(Protocol):
    """A queue of a ``PeerLink``."""

    purpose: Purpose
    dropped: int
    """How many messages are known here as not delivered. For monitoring: updates may race."""

    @property
    def is_stuck(self) -> bool:
        """Whether the connection must be ended: the peer takes or answers nothing, or something was dropped between."""

    def add(self, envelope: Envelope) -> None:
        """Queue a message, or drop it, or an earlier one, at a limit."""

    def next(self) -> tuple[FrameKind, Envelope] | None:
        """Remove and return the next message that may be sent."""

    def take_answer(self, kind: FrameKind, payload: bytes | memoryview) -> Message | None:
        """Decode an answer; None if it only says that a message has arrived. Raises ``InvalidRequestError``."""

    def clear(self) -> None:
        """Drop everything: the connection is over, or there was none."""


class PushQueue:
    """An ``Outgoing`` of pushes, in order and without a gap.

    Once one was dropped, nothing is sent until the queue has been cleared.
    """

    purpose: Purpose = Purpose.PUSH

    def __init__(self, pushes_max: int) -> None:
        self.dropped = 0
        self.is_stuck = False
        self._pushes_max = pushes_max
        self._queue: deque[Envelope] = deque()

    def add(self, envelope: Envelope) -> None:
        if len(self._queue) < self._pushes_max:
            self._queue.append(envelope)
        else:
            self.dropped += 1
            self.is_stuck = True

    def next(self) -> tuple[FrameKind, Envelope] | None:
        return (FrameKind.PUSH, self._queue.popleft()) if self._queue else None

    def take_answer(self, kind: FrameKind, payload: bytes | memoryview) -> Message | None:
        if kind is not FrameKind.PUSH_ANSWER:
            raise InvalidRequestError(f"expected an answer to a push, got {kind.name}")
        return pushes.decode_answer(payload)

    def clear(self) -> None:
        self.dropped += len(self._queue)
        self._queue.clear()
        self.is_stuck = False


class _Budget:
    """Messages of one kind: those that may be sent, the one that waits for a free place, those without an answer."""

    def __init__(self, unanswered_max: int) -> None:
        self._unanswered_max = unanswered_max
        self.ready: deque[Envelope] = deque()
        self.sent: deque[tuple[float, Envelope]] = deque()
        """Those whose answers are owed, oldest first, with the time."""
        self._waiting: Envelope | None = None

    def add(self, envelope: Envelope) -> int:
        """Returns how many messages were dropped for this one."""
        if len(self.ready) + len(self.sent) < self._unanswered_max:
            self.ready.append(envelope)
            return 0
        replaced, self._waiting = self._waiting, envelope
        return replaced is not None

    def take(self) -> Envelope | None:
        """The next message, which is sent now."""
        if not self.ready:
            return None
        envelope = self.ready.popleft()
        self.sent.append((time.monotonic(), envelope))
        return envelope

    def answered(self) -> Envelope | None:
        """An answer has come; returns what it answers, if one was owed."""
        if not self.sent:
            return None
        _, envelope = self.sent.popleft()
        if self._waiting is not None:
            self.ready.append(self._waiting)
            self._waiting = None
        return envelope

    def clear(self) -> int:
        """Returns how many messages were dropped."""
        count = len(self.ready) + len(self.sent) + (self._waiting is not None)
        self.ready.clear()
        self.sent.clear()
        self._waiting = None
        return count


class ControlQueue:
    """An ``Outgoing`` of votes, heartbeats and take-leadership. A peer answers each, in the order of sending."""

    purpose: Purpose = Purpose.CONTROL

    def __init__(self, *, sets_apart: bool = False) -> None:
        """``sets_apart``: ``next`` leaves heartbeats that may be sent with those of other groups."""
        self.dropped = 0
        self._sets_apart = sets_apart
        self._lock = threading.Lock()  # guards what follows
        self._answered: HeartbeatRequest | None = None  # the last one that was; None: the next one goes alone
        self._heartbeats, self._others = _Budget(HEARTBEATS_MAX), _Budget(OTHERS_MAX)

    @property
    def is_stuck(self) -> bool:
        owed_since = [budget.sent[0][0] for budget in (self._heartbeats, self._others) if budget.sent]
        return bool(owed_since) and min(owed_since) < time.monotonic() - ANSWER_TIMEOUT_S

    def add(self, envelope: Envelope) -> None:
        """See ``Outgoing.add``. Raises ``InvariantError`` for any other message."""
        if type(envelope.message) not in _KINDS:
            raise InvariantError(f"{type(envelope.message).__name__} is not a control message")
        with self._lock:
            is_heartbeat = isinstance(envelope.message, HeartbeatRequest)
            self.dropped += (self._heartbeats if is_heartbeat else self._others).add(envelope)

    def next(self) -> tuple[FrameKind, Envelope] | None:
        """See ``Outgoing.next``: votes before heartbeats."""
        with self._lock:
            envelope = self._others.take()
            if envelope is None and not (self._sets_apart and self._repeats):
                envelope = self._heartbeats.take()
        return None if envelope is None else (_KINDS[type(envelope.message)], envelope)

    @property
    def _repeats(self) -> bool:
        """Whether the next heartbeat says what the last one said, and that one is answered, as all before; locked."""
        ready, said = self._heartbeats.ready, self._answered
        return said is not None and bool(ready) and not self._heartbeats.sent and _is_repetition(ready[0].message, said)

    @property
    def has_repetition(self) -> bool:
        """Whether ``next_repetition`` returns one."""
        with self._lock:
            return self._sets_apart and self._repeats

    def next_repetition(self) -> tuple[Envelope, HeartbeatRequest] | None:
        """Remove and return the next heartbeat and the one it repeats, if it may be sent with other groups'."""
        with self._lock:
            said = self._answered
            envelope = self._heartbeats.take() if self._repeats else None
        return None if envelope is None or said is None else (envelope, said)

    def repetition_answered(self, *, heard: bool) -> None:
        """One that was sent with others has its answer, or will have none: then the next one goes alone."""
        with self._lock:
            self._heartbeats.answered()
            if not heard:
                self._answered = None

    def take_answer(self, kind: FrameKind, payload: bytes | memoryview) -> Message | None:
        with self._lock:
            budget = self._heartbeats if kind is FrameKind.HEARTBEAT_ANSWER else self._others
            answered = budget.answered() if kind in _ANSWERS else None
            if answered is not None and isinstance(answered.message, HeartbeatRequest):
                self._answered = answered.message
        if answered is None:
            raise InvalidRequestError(f"expected no {kind.name}")
        match kind:
            case FrameKind.HEARTBEAT_ANSWER:
                return codec.decode_heartbeat_response(payload)
            case FrameKind.VOTE_ANSWER:
                return codec.decode_vote_response(payload)
            case _:
                return None

    def clear(self) -> None:
        with self._lock:
            self.dropped += self._heartbeats.clear() + self._others.clear()
            self._answered = None


def _is_repetition(message: Message, said: HeartbeatRequest) -> bool:
    """Whether a heartbeat differs from another one in nothing but its number."""
    return isinstance(message, HeartbeatRequest) and _WITHOUT_NUMBER(message) == _WITHOUT_NUMBER(said)


_WITHOUT_NUMBER: Final = attrgetter(*(one.name for one in fields(HeartbeatRequest) if one.name != "read_sequence"))


_KINDS: Final = {
    VoteRequest: FrameKind.VOTE,
    HeartbeatRequest: FrameKind.HEARTBEAT,
    TakeLeadership: FrameKind.TAKE_LEADERSHIP,
}
_ANSWERS: Final = frozenset({FrameKind.VOTE_ANSWER, FrameKind.HEARTBEAT_ANSWER, FrameKind.TAKE_LEADERSHIP_ANSWER})
