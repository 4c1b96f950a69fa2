"""A link to one peer for one purpose: a TCP connection that this member makes, kept, and made again, on an event loop.

The links for pushes run on the loop that also serves clients, so that on an idle group an append crosses no thread on
its way from the client to the followers and back: every crossing costs a wake-up and contention for the interpreter's
lock. Those for control messages run on the peer port's loop, which neither clients nor pushes can delay.

Nothing is retried here: the protocol repeats itself. A peer that connects to this member cuts the pause between two
attempts short, so that one that comes back is reached at once. The task that connects ends only when it is cancelled:
without it a leader could never reach this peer again, while its heartbeats keep it the leader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Final

from dledger.backoff import Backoff
from dledger.config import Member
from dledger.core.messages import Envelope, HeartbeatRequest, HeartbeatResponse, Message
from dledger.errors import DLedgerError, InvalidRequestError, NodeBusyError
from dledger.rpc import options
from dledger.rpc.bridge import LoopBridge, Report, log_failure, supervise
from dledger.rpc.peers import codec
from dledger.rpc.peers.coalescing import PATIENCE_S, HeartbeatCoalescer, HeartbeatLink, Process, Settle
from dledger.rpc.peers.dialling import DialledConnection, PeerDialler
from dledger.rpc.peers.frames import FrameKind, Purpose
from dledger.rpc.peers.identity import Introduction, Reasons
from dledger.rpc.peers.outgoing import ControlQueue, Outgoing
from dledger.rpc.ports import Receiver

PAUSE_S_MIN: Final = 0.01
"""The least time from a lost connection, or a failed attempt, to the next one: two members that make each other hurry
must not become a load, whatever ends their connections.
"""
SEARCHES_MAX: Final = 10
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
            self._searches_left = SEARCHES_MAX
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
