"""A link to one peer for one purpose: a TCP connection that this member makes, kept, and made again, on an event loop.

The links for pushes run on the loop that also serves clients, so that on an idle group an append crosses no thread on
its way from the client to the followers and back: every crossing costs a wake-up and contention for the interpreter's
lock. Those for control messages run on the peer port's loop, which neither clients nor pushes can delay.

Nothing is retried here: the protocol repeats itself. A peer that connects to this member cuts the pause between two
attempts short, so that one that comes back is reached at once. The task that connects ends only when it is cancelled:
without it a leader could never reach this peer again, while its heartbeats keep it the leader.

Messages to a peer that wait to be sent, or were sent and are not answered, are in one queue per connection's purpose.
The queues have limits, because a peer may be down, stopped or slow for any time. Messages dropped by a limit are
counted; nothing is repeated, because the protocol repeats itself. Thread-safe.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Final, Protocol

from dledger.clock import Backoff
from dledger.config import Member
from dledger.core.messages import Envelope, HeartbeatRequest, HeartbeatResponse, Message, TakeLeadership, VoteRequest
from dledger.errors import DLedgerError, InvalidRequestError, InvariantError, NodeBusyError
from dledger.rpc import options
from dledger.rpc.loops import LoopBridge, Report, log_failure, supervise
from dledger.rpc.peers import codec, frames
from dledger.rpc.peers.frames import FrameKind, Purpose
from dledger.rpc.peers.identity import DialledConnection, Introduction, PeerDialler, Reasons
from dledger.rpc.peers.port import PATIENCE_S, HeartbeatCoalescer, HeartbeatLink, Process, Settle
from dledger.rpc.ports import Receiver

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
        return frames.decode_answer(payload)

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


PAUSE_S_MIN: Final = 0.01
"""The least time from a lost connection, or a failed attempt, to the next one: two members that make each other hurry
must not become a load, whatever ends their connections.
"""
_SEARCHES_MAX: Final = 10
"""How many failed attempts to reach a peer that was heard are a reason to ask others where it is."""


class PeerLink(PeerDialler):
    """Sends what is in ``queue`` to a peer, and its answers to ``receiver``. A ``HeartbeatLink``.

    ``members``: the peer's addresses, tried in turn. ``send`` is thread-safe, never blocks and never raises for a dead
    peer; all else is for the loop. ``lost`` is called once per broken connection, or failed attempt, and ``search``
    after an attempt to reach a peer that has been heard: it is at another address.
    """

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        introduction: Introduction,
        members: tuple[Member, ...],
        queue: Outgoing,
        receiver: Receiver,
        bridge: LoopBridge,
        reasons: Reasons,
        lost: Callable[[], None],
        search: Callable[[], None] = lambda: None,
        coalescer: HeartbeatCoalescer | None = None,
    ) -> None:
        """``coalescer``: of a process of several groups, for a link of control messages."""
        super().__init__(introduction, members, queue.purpose, reasons)
        self._given = members
        self._queue = queue
        self._receiver = receiver
        self._bridge = bridge
        self._lost = lost
        self._search = search
        self._coalescer = coalescer
        self._carried: deque[tuple[Settle, ...]] = deque()  # of each message for several groups that is not answered
        self._searches_left = 0
        self._is_flush_due = False  # posted, and not run yet
        self._wanted = asyncio.Event()  # set while there is something to send, or a peer to greet
        self._hurried = asyncio.Event()  # set if the peer was heard of since the last attempt began
        self._connection: DialledConnection | None = None
        self._backoff = Backoff(options.RECONNECT_MS_MIN / 1000, options.RECONNECT_MS_MAX / 1000)
        self._task: asyncio.Task[None] | None = None

    @property
    def dropped(self) -> int:
        """Messages known here as not delivered."""
        return self._queue.dropped

    def send(self, envelope: Envelope) -> None:
        """Queue a message, within the limits of the queue, and send it soon."""
        self._queue.add(envelope)
        # As in ``LoopBridge.post``: `_flush` clears the flag first, so it finds whatever a thread added that saw True.
        if not self._is_flush_due:
            self._is_flush_due = True
            self._bridge.post(self._flush)

    def hurry(self) -> None:
        """The peer has connected to this member: it is there, so try again now if an attempt has failed.

        A link for control messages connects even if there is nothing to send yet: votes are in a hurry. Thread-safe.
        """
        self._bridge.post(self._hurry)

    def heard(self) -> None:
        """The peer has connected to this member, perhaps from another address than is known. Thread-safe."""
        self._bridge.post(self._note_heard)

    def _note_heard(self) -> None:
        if self._connection is None:
            self._searches_left = _SEARCHES_MAX
            self._hurry()

    def _hurry(self) -> None:
        if self._connection is None:
            self._hurried.set()
            if self._queue.purpose is Purpose.CONTROL:
                self._wanted.set()

    def start(self, report: Report = log_failure) -> None:
        """Start; connects when there is something to send. ``report`` is called if the task fails."""
        name = f"dledger-{self._queue.purpose.name.lower()}-{self._introduction.identity.node_id}"
        self._task = asyncio.create_task(self._run(), name=f"{name}-{self._peer}")
        supervise(self._task, report)

    def move(self, members: tuple[Member, ...]) -> None:
        """The peer has other addresses: a connection to one that is not the first of them ends."""
        if members == self._given:
            return
        left = self._members[0] != members[0]
        self._given = self._members = members
        if left and self._connection is not None:
            self._connection.abort()

    def end(self) -> None:
        """Drop the connection, and make no other; without waiting."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Drop the connection, and make no other."""
        self.end()
        if self._task is not None:
            with suppress(asyncio.CancelledError, Exception):  # a failure has been reported already
                await self._task

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._hurried.clear()
            try:
                await self._connect()
            except DLedgerError as error:
                self.on_refusal(error)
            except RuntimeError as error:  # no thread was available to resolve the peer's name: later, perhaps
                self._complain(f"cannot connect to {self.address}: {error}; retrying")
            self._queue.clear()
            self._wanted.clear()
            if self._searches_left:
                self._searches_left -= 1
                self._search()
            try:
                self._lost()
            except DLedgerError as error:  # the node has stopped itself; its transport is closed next
                self._complain(str(error))
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(PAUSE_S_MIN)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._backoff.pause() - PAUSE_S_MIN):
                await self._hurried.wait()
                self._hurry()  # whatever was wanted before the pause is forgotten

    async def _connect(self) -> None:
        """Connect; returns when the connection has ended, or could not be made."""
        connection = DialledConnection(self, self._introduction.tls_keeper)
        try:
            if not await self._shake_hands(connection):
                return
            self._connection = connection
            self._searches_left = 0
            self._hurried.clear()
            self._flush()
            await connection.ended
        except (OSError, TimeoutError):
            return  # a dead or slow peer: that passes, and is not worth a line per attempt
        finally:
            self._connection = None
            connection.abort()
            while self._carried:
                _settle(self._carried.popleft())

    def _flush(self) -> None:
        """Write what is queued, as far as the connection accepts it. On the loop."""
        self._is_flush_due = False
        connection, queue = self._connection, self._queue
        if connection is None:
            self._wanted.set()
        elif queue.is_stuck:
            connection.abort()
        else:
            while connection.writable and (found := queue.next()) is not None:
                kind, envelope = found
                connection.write(kind, *codec.encode_pieces(envelope.message))
            if self._coalescer is not None and isinstance(queue, ControlQueue) and queue.has_repetition:
                self._coalescer.add(self)

    # -- heartbeats of several groups: see ``HeartbeatLink`` -------------------------------------------------------

    @property
    def process(self) -> Process | None:
        connection = self._connection
        if connection is None or not connection.writable:
            return None
        address = self._members[0]
        return address.host, address.port

    @property
    def answers_owed(self) -> int:
        return len(self._carried)

    def beat_alone(self) -> None:
        connection, found = self._connection, self._next_repetition()
        if connection is not None and found is not None:
            connection.write(FrameKind.HEARTBEAT, *codec.encode_pieces(found[0].message))

    def take_repetition(self) -> tuple[codec.GroupHeartbeat, Settle] | None:
        connection, found = self._connection, self._next_repetition()
        if connection is None or found is None:
            return None
        envelope, said = found
        number = envelope.message.read_sequence if isinstance(envelope.message, HeartbeatRequest) else 0
        heartbeat = codec.GroupHeartbeat(envelope.group, envelope.sender, said.read_sequence, number)
        return heartbeat, partial(self._repetition_answered, connection)

    def carry(self, links: Sequence[HeartbeatLink]) -> None:
        taken = [one for link in links if (one := link.take_repetition()) is not None]
        if self._connection is not None and taken:
            self._carried.append(tuple(settle for _, settle in taken))
            payload = codec.encode_heartbeats([heartbeat for heartbeat, _ in taken])
            self._connection.write(FrameKind.HEARTBEATS, payload)

    def _next_repetition(self) -> tuple[Envelope, HeartbeatRequest] | None:
        return self._queue.next_repetition() if isinstance(self._queue, ControlQueue) else None

    def _repetition_answered(self, asked: DialledConnection, answer: HeartbeatResponse | None) -> None:
        if self._connection is asked and isinstance(self._queue, ControlQueue):  # otherwise its end has settled that
            self._queue.repetition_answered(heard=answer is not None)
            if answer is not None:
                self._hear(answer)
            self._flush()  # one that waited for this one, of a read perhaps

    def _take_heartbeats_answer(self, payload: bytes | memoryview) -> None:
        answers = codec.decode_heartbeats_answer(payload)
        if not self._carried or len(answers) != len(self._carried[0]):
            raise InvalidRequestError(f"expected no answers to {len(answers)} heartbeats")
        _settle(self._carried.popleft(), answers)

    # -- what the connection reports -----------------------------------------------------------------------------

    def on_writable(self) -> None:
        """The connection accepts more."""
        self._flush()

    def _take(self, kind: FrameKind, payload: bytes | memoryview) -> None:
        if kind is FrameKind.HEARTBEATS_ANSWER:
            self._take_heartbeats_answer(payload)
        elif (answer := self._queue.take_answer(kind, payload)) is not None:
            self._hear(answer)
        self._backoff.succeeded()
        if kind is not FrameKind.PUSH_ANSWER and self._connection is not None:
            self._flush()  # the answer may have made room for a control message that waits

    def _hear(self, answer: Message) -> None:
        peer, introduction = self._peer, self._introduction
        if isinstance(answer, HeartbeatResponse):
            introduction.learn(peer, answer.client_address)
        envelope = introduction.identity.envelope_from(peer, answer)
        if self._coalescer is None:
            self._receiver.receive(envelope)
            return
        with suppress(NodeBusyError):  # the protocol repeats itself; other groups need this loop
            self._receiver.receive(envelope, PATIENCE_S)

    def on_refusal(self, error: DLedgerError) -> None:
        """Log a refusal, which needs a person, once, and wait longer before the next attempt."""
        self._backoff.calm_down()
        super().on_refusal(error)


def _settle(settles: Sequence[Settle], answers: Sequence[HeartbeatResponse | None] = ()) -> None:
    """Tell each the answer to its heartbeat; without ``answers``, that there is none.

    A group that has failed meanwhile, or stops, must not keep the others from theirs.
    """
    for settle, answer in zip_longest(settles, answers):
        with suppress(DLedgerError):
            settle(answer)
