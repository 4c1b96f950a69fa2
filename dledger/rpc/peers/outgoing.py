"""Messages to a peer that wait to be sent, or were sent and are not answered: one queue per connection's purpose.

The queues have limits, because a peer may be down, stopped or slow for any time. What a limit drops is counted; nothing
is repeated, because the protocol repeats itself. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import deque
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
    """Pushes, in order and without a gap: once one was dropped, nothing is sent until the queue has been cleared."""

    purpose: Purpose = Purpose.PUSH

    def __init__(self, pushes_max: int) -> None:
        self.dropped = 0
        self.is_stuck = False
        self._pushes_max = pushes_max
        self._queue: deque[Envelope] = deque()

    def add(self, envelope: Envelope) -> None:
        """See ``Outgoing.add``."""
        if len(self._queue) < self._pushes_max:
            self._queue.append(envelope)
        else:
            self.dropped += 1
            self.is_stuck = True

    def next(self) -> tuple[FrameKind, Envelope] | None:
        """See ``Outgoing.next``."""
        return (FrameKind.PUSH, self._queue.popleft()) if self._queue else None

    def take_answer(self, kind: FrameKind, payload: bytes | memoryview) -> Message | None:
        """See ``Outgoing.take_answer``."""
        if kind is not FrameKind.PUSH_ANSWER:
            raise InvalidRequestError(f"expected an answer to a push, got {kind.name}")
        return pushes.decode_answer(payload)

    def clear(self) -> None:
        """See ``Outgoing.clear``."""
        self.dropped += len(self._queue)
        self._queue.clear()
        self.is_stuck = False


class _Budget:
    """Messages of one kind: those that may be sent, the one that waits for a free place, those without an answer."""

    def __init__(self, unanswered_max: int) -> None:
        self._unanswered_max = unanswered_max
        self.ready: deque[Envelope] = deque()
        self.sent_at: deque[float] = deque()
        """When those were sent whose answers are owed, oldest first."""
        self._waiting: Envelope | None = None

    def add(self, envelope: Envelope) -> int:
        """Returns how many messages were dropped for this one."""
        if len(self.ready) + len(self.sent_at) < self._unanswered_max:
            self.ready.append(envelope)
            return 0
        replaced, self._waiting = self._waiting, envelope
        return replaced is not None

    def answered(self) -> bool:
        """An answer has come; returns whether one was owed."""
        if not self.sent_at:
            return False
        self.sent_at.popleft()
        if self._waiting is not None:
            self.ready.append(self._waiting)
            self._waiting = None
        return True

    def clear(self) -> int:
        """Returns how many messages were dropped."""
        count = len(self.ready) + len(self.sent_at) + (self._waiting is not None)
        self.ready.clear()
        self.sent_at.clear()
        self._waiting = None
        return count


class ControlQueue:
    """Votes, heartbeats and take-leadership. A peer answers each, in the order in which they were sent."""

    purpose: Purpose = Purpose.CONTROL

    def __init__(self) -> None:
        self.dropped = 0
        self._lock = threading.Lock()  # guards the budgets
        self._heartbeats, self._others = _Budget(HEARTBEATS_MAX), _Budget(OTHERS_MAX)

    @property
    def is_stuck(self) -> bool:
        """See ``Outgoing.is_stuck``."""
        owed_since = [budget.sent_at[0] for budget in (self._heartbeats, self._others) if budget.sent_at]
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
            for budget in (self._others, self._heartbeats):
                if budget.ready:
                    envelope = budget.ready.popleft()
                    budget.sent_at.append(time.monotonic())
                    return _KINDS[type(envelope.message)], envelope
        return None

    def take_answer(self, kind: FrameKind, payload: bytes | memoryview) -> Message | None:
        """See ``Outgoing.take_answer``."""
        with self._lock:
            budget = self._heartbeats if kind is FrameKind.HEARTBEAT_ANSWER else self._others
            owed = kind in _ANSWERS and budget.answered()
        if not owed:
            raise InvalidRequestError(f"expected no {kind.name}")
        match kind:
            case FrameKind.HEARTBEAT_ANSWER:
                return codec.decode_heartbeat_response(payload)
            case FrameKind.VOTE_ANSWER:
                return codec.decode_vote_response(payload)
            case _:
                return None

    def clear(self) -> None:
        """See ``Outgoing.clear``."""
        with self._lock:
            self.dropped += self._heartbeats.clear() + self._others.clear()


_KINDS: Final = {
    VoteRequest: FrameKind.VOTE,
    HeartbeatRequest: FrameKind.HEARTBEAT,
    TakeLeadership: FrameKind.TAKE_LEADERSHIP,
}
_ANSWERS: Final = frozenset({FrameKind.VOTE_ANSWER, FrameKind.HEARTBEAT_ANSWER, FrameKind.TAKE_LEADERSHIP_ANSWER})
