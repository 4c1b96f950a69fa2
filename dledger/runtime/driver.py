"""Carries out the core's decisions: takes its outbox under the lock, and acts on it outside, in the contract's order.

Threads of one node: ``dledger-dispatcher-<peer>-<node>`` and ``dledger-flush-<node>``; its timers run on the process's
``dledger-timers-<node>``. Peers come and go with the group's members. Any thread, including a transport's, may ``call``
into the node; the effects are carried out by the thread that caused them.

A part to which an event gives work is stepped at once by the thread that delivered the event, in the same hold of the
lock: passing it to the part's own thread costs a thread switch, and an append would need four of them. The part's own
thread, or task, handles timers, and the dispatchers' threads also what is too much for the caller: while a follower has
pushes in flight, the next ones are gathered and read there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final, Generic, NoReturn, TypeVar

from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.core.dispatcher import EntryDispatcher
from dledger.core.membership import Membership
from dledger.core.messages import (
    LoadRun,
    Message,
    Outbox,
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushTruncate,
    RoleChange,
    SnapshotFetch,
    Wake,
)
from dledger.core.node import Node
from dledger.core.ports import Log
from dledger.errors import (
    CorruptLogError,
    DLedgerError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    NodeBusyError,
    ShutdownError,
    UnknownMemberError,
)
from dledger.runtime.threads import JOIN_TIMEOUT_S, Flusher, NodeFailedError, Supervisor, Task, TaskThread, Worker
from dledger.types import HardState, LogIndex, NodeId

Result = TypeVar("Result")

SHARED_PATIENCE_S: Final = 0.01
"""How long a thread that other groups need, too, waits for a node's lock."""
_BUSY_PAUSE_MS: Final = 10
"""After a timer found the lock taken."""
_IN_FLIGHT_WHEN_IDLE = 1
"""Pushes in flight to the slower follower of an idle group when the next append comes."""
_STEPPED_AT_ONCE = Wake.HANDLER | Wake.QUORUM_ACK
_PUSHES: Final = frozenset({LoadRun, PushAppend, PushCommit, PushCompare, PushInstall, PushTruncate})
Effect = TypeVar("Effect")


class _Running(Enum):
    """How far the driver has come."""

    NOT_YET = auto()
    YES = auto()
    NO_MORE = auto()


class _Part:
    """A steppable part, and what steps it for its timers. All methods under the node's lock."""

    worker: Worker | Task

    def __init__(self, step: Callable[[int], int | None]) -> None:
        self._step = step
        self._planned_ms: int | None = None  # when the thread next wakes by itself

    def run(self, now_ms: int) -> int | None:
        """Step by the part's own worker, which wakes again at the due time returned."""
        self._planned_ms = self._step(now_ms)
        return self._planned_ms

    def run_early(self, now_ms: int) -> None:
        """Step on another thread; the part's own one is woken only if it would now wake too late."""
        due_ms = self._step(now_ms)
        if due_ms is not None and (self._planned_ms is None or due_ms < self._planned_ms):
            self._planned_ms = due_ms
            self.worker.wake()


def _ignore(_fetch: SnapshotFetch) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Effects:
    """The callbacks that carry out a node's effects, always outside its lock."""

    save: Callable[[HardState], None]
    """Returns only when a hard state is durable."""
    send: Callable[[NodeId, Message], None]
    role_change: Callable[[RoleChange], None]
    """For one change at a time and in order, once everything that it depends on is durable; must only queue."""
    commit: Callable[[LogIndex], None]
    """By the thread that moved the commit index, so that indexes may arrive out of order."""
    damage: Callable[[CorruptLogError], None]
    """Damage in the own log keeps a part from its work, which will retry."""
    fenced: Callable[[str], None]
    """Most members were found to have another history."""
    flushed: Callable[[], None]
    """More of the log is durable."""
    members: Callable[[Membership, frozenset[NodeId]], None]
    """Other members count or are known to be committed, or messages go to others (their ids); in order, and before the
    messages of the same step."""
    fetch_snapshot: Callable[[SnapshotFetch], None] = _ignore
    """This member's state machine needs a snapshot; must only record it. Nodes without a machine need none."""


class _Peer:
    """Another member to which the node sends: its dispatcher, and what waits to be sent."""

    def __init__(self, dispatcher: EntryDispatcher, part: _Part, pushes_max: int) -> None:
        self.dispatcher: Final = dispatcher
        self.part: Final = part
        self.control: EffectQueue[Message] = EffectQueue()
        self.pushes: Final = PeerPushes(pushes_max)


class NodeDriver:
    """Owns a node's lock, its workers and the order of its effects."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        config: ServerConfig,
        node: Node,
        log: Log,
        clock: Clock,
        supervisor: Supervisor,
        effects: Effects,
        timers: TaskThread,
        timers_patience_s: float | None = None,
    ) -> None:
        """``timers`` steps the parts that need no thread of their own; for ``timers_patience_s`` see ``call``."""
        self._config = config
        self._node = node
        self._log = log
        self._clock = clock
        self._supervisor = supervisor
        self._effects = effects
        self._lock = threading.Lock()  # guards node and log writes: the node's one lock
        self._persist_lock = threading.Lock()  # guards _durable_version and orders the saves; taken without _lock
        self._durable_version = 0  # of the state at start, which the node may already have changed
        self._unsaved: deque[tuple[Outbox, HardState, int]] = deque()
        """Effects that threads in a hurry have left to the saver; filled under the lock, removed once carried out."""
        self._saver = Worker(f"dledger-saver-{config.node_id}", self._save_unsaved, clock, supervisor)
        self._timers_patience_s = timers_patience_s
        self._running = _Running.NOT_YET
        self._elector, self._handler, self._quorum_ack = (
            self._timed(step, timers) for step in (node.elector.step, node.handler.step, node.quorum_ack.step)
        )
        self._flusher = Flusher(config, log, clock, supervisor, self._tell_flushed)
        self._peers: Mapping[NodeId, _Peer] = {}  # replaced as a whole, under the lock
        self._ended: list[Worker | Task] = []  # of peers that are gone, to be joined
        self._follow_dispatchers()
        self._strangers: EffectQueue[tuple[NodeId, Message]] = EffectQueue()
        """Answers and questions to senders that are no members here, or not any more."""
        self._role_changes: EffectQueue[RoleChange] = EffectQueue()
        self._members: EffectQueue[tuple[Membership, frozenset[NodeId]]] = EffectQueue()

    def _timed(self, step: Callable[[int], int | None], timers: TaskThread) -> _Part:
        part = _Part(step)

        def run() -> int | None:
            try:
                return self.call(part.run, patience_s=self._timers_patience_s)
            except NodeBusyError:
                return self._clock.monotonic_ms() + _BUSY_PAUSE_MS
            except ShutdownError:
                return None

        part.worker = Task(timers, run, self._supervisor)
        return part

    def _pushing(self, peer: NodeId, dispatcher: EntryDispatcher) -> tuple[_Part, Worker]:
        part = _Part(dispatcher.step)

        def run() -> int | None:
            due_ms = self._step(part.run)
            self._read_for(peer)
            return due_ms

        name = f"dledger-dispatcher-{peer}-{self._config.node_id}"
        part.worker = worker = Worker(name, run, self._clock, self._supervisor)
        return part, worker

    def _step(self, step: Callable[[int], int | None]) -> int | None:
        """Step a part; a node that stops meanwhile is not a failure of its worker."""
        try:
            return self.call(step)
        except ShutdownError:
            return None

    def _follow_dispatchers(self) -> None:
        """Make what the node's new dispatchers need, and end what those need that are gone. Under the lock.

        Nothing is joined here: a thread that ends may be waiting for the lock, or be this one.
        """
        pushes_max = 2 * self._config.replication.inflight_pushes_max + 16
        peers: dict[NodeId, _Peer] = {}
        for one, dispatcher in self._node.dispatchers.items():
            known = self._peers.get(one)
            if known is not None and known.dispatcher is dispatcher:
                peers[one] = known
                continue
            part, reader = self._pushing(one, dispatcher)
            peers[one] = peer = _Peer(dispatcher, part, pushes_max)
            peer.pushes.reader = reader
            if self._running is _Running.YES:
                reader.start()
        gone = [peer.part.worker for one, peer in self._peers.items() if peers.get(one) is not peer]
        self._peers = peers
        for worker in gone:
            worker.end()
        self._ended = [worker for worker in (*self._ended, *gone) if worker.is_alive]

    def _workers(self) -> list[Worker | Task]:
        parts = [self._elector, self._handler, self._quorum_ack, *(peer.part for peer in self._peers.values())]
        saver = () if self._timers_patience_s is None else (self._saver,)
        return [*(part.worker for part in parts), self._flusher.worker, *saver, *self._ended]

    def start(self) -> None:
        with self._lock:
            self._running = _Running.YES
            workers = self._workers()
        for worker in workers:
            worker.start()

    def stop(self) -> None:
        """Stop all workers and join them; later calls raise ``ShutdownError``. Idempotent.

        Waiting appends and reads fail with that error, too: nothing will step what they wait for.
        """
        with self._lock:
            self._running = _Running.NO_MORE
            workers = self._workers()
        ended = [worker.stop(JOIN_TIMEOUT_S) for worker in workers]
        if all(ended):  # else the saver may be at it, on a disk that hangs
            self._supervisor.run(self._save_unsaved)
        with self._lock:
            self._node.abandon(ShutdownError("this node has stopped: the entries may still be committed"))
            left = self._node.state.outbox.take()
        for completion in left.completions:
            completion()

    def call(
        self, action: Callable[[int], Result], *, flush_here: bool = False, patience_s: float | None = None
    ) -> Result:
        """Run ``action(now_ms)`` under the node's lock, then carry out its effects.

        ``flush_here``: if they include a flush that somebody waits for, do it on this thread, not on the flusher's.

        ``patience_s``: of a thread that others need: how long to wait for the lock, before ``NodeBusyError`` is raised.
        It waits for no disk either: if the hard state must be saved, another thread does, and carries out the effects,
        and that error is raised, too. None: wait any time.

        Raises ``NodeFailedError`` after a fatal error and ``ShutdownError`` after ``stop``; passes on errors of the
        request itself. Any other error is fatal for the node, whichever thread it occurs on.
        """
        self._enter(patience_s)
        begun = False
        try:
            try:
                if self._running is _Running.NO_MORE or self._supervisor.fatal is not None:
                    self._refuse()
                if patience_s is not None and self._unsaved:
                    raise NodeBusyError(f"the hard state of node {self._config.node_id} is being saved")
                begun = True
                now_ms = self._clock.monotonic_ms()
                result = action(now_ms)
                effects, hard_state, version = self._take_effects(now_ms)
                if patience_s is not None and effects is not None and version != self._durable_version:
                    self._unsaved.append((effects, hard_state, version))
                    self._saver.wake()
                    raise NodeBusyError(f"the hard state of node {self._config.node_id} must be saved")
            finally:
                self._lock.release()
            if effects is not None:
                flush_here = flush_here and self._flusher.at_once and bool(effects.wake & Wake.FLUSH)
                if flush_here:
                    effects.wake &= ~Wake.FLUSH
                self._carry_out(effects, hard_state, version)
                if flush_here:
                    self._flusher.flush()
        except ShutdownError as error:
            if begun:  # it may be the refusal of another call, made while carrying this one out
                error.outcome = "unknown"
            raise
        except (UnknownMemberError, InvalidRequestError, NodeBusyError):
            raise
        except BaseException as error:
            self._supervisor.report(error)
            raise NodeFailedError(f"this node is shutting down: {error}") from error
        return result

    def _take_effects(self, now_ms: int) -> tuple[Outbox | None, HardState, int]:
        """Step the parts with new work, and take the effects of all of it; under the lock."""
        state = self._node.state
        outbox = state.outbox
        if outbox.wake:
            self._step_woken(outbox, now_ms)
        hard_state, version = state.hard_state, state.hard_state_version
        if not outbox and version == self._durable_version:
            return None, hard_state, version
        # An answer depends on the hard state, too: even without other effects it may have to wait for it.
        effects = outbox.take()
        self._role_changes.effects.extend(effects.role_changes)
        if effects.membership is not None:
            self._follow_dispatchers()
            self._members.effects.append((effects.membership, frozenset(self._peers)))
        for target, message in effects.messages:
            peer = self._peers.get(target)
            if peer is None:
                self._strangers.effects.append((target, message))
            elif type(message) in _PUSHES:
                peer.pushes.put(message)
            else:
                peer.control.effects.append(message)
        return effects, hard_state, version

    def _save_unsaved(self) -> None:
        """On the saver's thread."""
        while self._unsaved:
            effects, hard_state, version = self._unsaved[0]
            with suppress(ShutdownError):
                self._carry_out(effects, hard_state, version)
            self._unsaved.popleft()

    def look(self, query: Callable[[Node], Result], *, patience_s: float | None = None) -> Result:
        """Read from the node under its lock; ``query`` must not change anything. ``patience_s``: see ``call``."""
        self._enter(patience_s)
        try:
            return query(self._node)
        finally:
            self._lock.release()

    def _enter(self, patience_s: float | None) -> None:
        if not self._lock.acquire(timeout=-1 if patience_s is None else patience_s):
            raise NodeBusyError(f"the lock of node {self._config.node_id} is not free")

    def _refuse(self) -> NoReturn:
        """Refuse a call before any of it is done: its caller may repeat it elsewhere."""
        refusal: DLedgerError = ShutdownError("this node is stopping")
        if self._supervisor.fatal is not None:
            refusal = NodeFailedError(f"this node has shut down: {self._supervisor.fatal}")
        refusal.outcome = "not_applied"
        raise refusal

    def _step_woken(self, outbox: Outbox, now_ms: int) -> None:
        """Step the parts with new work (under the lock); what is left in ``outbox.wake`` is for their threads."""
        while outbox.wake & _STEPPED_AT_ONCE:
            wake, outbox.wake = outbox.wake, outbox.wake & ~_STEPPED_AT_ONCE
            if wake & Wake.HANDLER:
                while self._handler.run(now_ms) is not None:
                    pass
            if wake & Wake.QUORUM_ACK:
                self._quorum_ack.run_early(now_ms)
        if outbox.wake & Wake.DISPATCHERS:
            outbox.wake &= ~Wake.DISPATCHERS
            for peer in self._peers.values():
                if peer.dispatcher.in_flight > _IN_FLIGHT_WHEN_IDLE:
                    peer.part.worker.wake()
                else:
                    peer.part.run_early(now_ms)

    def _carry_out(self, effects: Outbox, hard_state: HardState, version: int) -> None:
        if version != self._durable_version:
            self._persist(hard_state, version)
        if effects.membership is not None:
            self._drain(self._members, lambda members: self._effects.members(*members))
        for target, message in effects.messages:
            self._send_queued(target, is_push=type(message) in _PUSHES)
        if effects.wake:  # after the pushes: the flusher would take the interpreter from this thread
            self._wake(effects.wake)
        if effects.role_changes:
            self._drain(self._role_changes, self._effects.role_change)
        if effects.committed is not None:
            self._effects.commit(effects.committed)
        for damage in effects.damage:
            self._effects.damage(damage)
        if effects.fenced:
            self._effects.fenced(effects.fenced)
        if effects.fetch_snapshot is not None:
            self._effects.fetch_snapshot(effects.fetch_snapshot)
        for completion in effects.completions:
            completion()

    def _wake(self, wake: int) -> None:
        if wake & Wake.FLUSH:
            self._flusher.wake()
        if wake & Wake.DISPATCHERS:
            for peer in self._peers.values():
                peer.part.worker.wake()
        if wake & Wake.ELECTOR:
            self._elector.worker.wake()

    def _persist(self, hard_state: HardState, version: int) -> None:
        """Return only when a hard state at least as new as ``version`` is durable."""
        with self._persist_lock:
            if version > self._durable_version:
                self._effects.save(hard_state)
                self._durable_version = version

    def _drain(self, pending: EffectQueue[Effect], act: Callable[[Effect], None]) -> None:
        """Carry out queued effects in the core's order, whichever thread does it.

        A thread that finds another one doing so leaves its part to that one.
        """
        while pending.effects and pending.sending.acquire(blocking=False):
            try:
                while pending.effects:
                    effect = pending.effects.popleft()
                    self._await_hard_state()
                    act(effect)
            finally:
                pending.sending.release()

    def _await_hard_state(self) -> None:
        """Wait for the current hard state: queued effects may depend on one that another thread has yet to save."""
        if self._node.state.hard_state_version != self._durable_version:
            hard_state, version = self.look(lambda node: (node.state.hard_state, node.state.hard_state_version))
            self._persist(hard_state, version)

    def _send_queued(self, target: NodeId, *, is_push: bool) -> None:
        """Send what is queued for a target, whose peer may have come or gone since: then this finds nothing."""
        if self._strangers.effects:
            self._drain(self._strangers, lambda sent: self._effects.send(*sent))
        peer = self._peers.get(target)
        if peer is None:
            return
        if is_push:
            self._push(target, peer.pushes)
        else:
            self._drain(peer.control, partial(self._effects.send, target))

    def _push(self, target: NodeId, pending: PeerPushes) -> None:
        """``_drain`` for pushes, up to the first that must be read from the disk."""
        while pending.effects and not pending.is_reading and pending.sending.acquire(blocking=False):
            try:
                while pending.effects and not pending.is_reading:
                    push = pending.effects[0]  # removed only by the holder of `sending`
                    if isinstance(push, LoadRun) and push.cold:
                        pending.is_reading = True
                        pending.reader.wake()
                        return
                    pending.effects.popleft()
                    self._await_hard_state()
                    self._send_push(target, push)
            finally:
                pending.sending.release()
        if pending.overflowed and not pending.is_reading:
            pending.overflowed = False
            self._node_lost(target)

    def _read_for(self, target: NodeId) -> None:
        """On the thread of the target's dispatcher: send the pushes left to it, and all queued since."""
        peer = self._peers.get(target)
        if peer is None or not peer.pushes.is_reading:
            return
        pending = peer.pushes
        try:
            with pending.sending:
                while pending.effects:
                    push = pending.effects.popleft()
                    if isinstance(push, LoadRun) and push.epoch < peer.dispatcher.epoch:
                        continue  # given up meanwhile; the new attempt follows it
                    self._await_hard_state()
                    self._send_push(target, push)
                # From here on other threads may push again. Check now for what they queued before they could see that.
                pending.is_reading = False
            self._push(target, pending)
        except ShutdownError:
            return

    def _node_lost(self, target: NodeId) -> None:
        self._step(lambda _now: self._node.connection_lost(target))

    def _send_push(self, target: NodeId, push: Message) -> None:
        """Send a push; a run is read first, outside the lock, and sent unless its term has passed meanwhile.

        Runs written before this stream began are verified: damage here must not reach a follower, nor look like its
        own. A leader never changes its own entries, so bytes read while its term lasted are what it meant to send;
        after the term they may be another leader's.
        """
        if not isinstance(push, LoadRun):
            self._effects.send(target, push)
            return
        try:
            run = self._log.read_run(push.first_index, push.last_index, verified=push.cold)
        except (IndexBeforeBeginError, IndexOutOfRangeError):
            self._node_lost(target)
            return
        except CorruptLogError as damage:
            self._effects.damage(damage)
            self._node_lost(target)
            return
        if self._node.state.term == push.term:
            self._effects.send(target, PushAppend(push.term, push.epoch, push.commit_index, run))

    def _tell_flushed(self) -> None:
        self._step(lambda _now: self._node.flushed())
        self._effects.flushed()


class EffectQueue(Generic[Effect]):
    """Queues of effects that several threads carry out in one order: filled under the node's lock, emptied outside it.

    Queued effects of one kind; ``effects`` is filled under the node's lock, emptied under ``sending``.
    """

    def __init__(self) -> None:
        self.effects: deque[Effect] = deque()
        self.sending = threading.Lock()


class PeerPushes(EffectQueue[Message]):
    """Pushes to one peer. One that must be read from the disk is left to ``reader``, with all behind it."""

    reader: Worker

    def __init__(self, pushes_max: int) -> None:
        super().__init__()
        self._pushes_max = pushes_max
        self.is_reading = False
        """The reader is processing the queue, or will."""
        self.overflowed = False
        """The reader took too long, and pushes were dropped: the dispatcher must compare again."""

    def put(self, push: Message) -> None:
        """Queue a push; under the node's lock."""
        if len(self.effects) < self._pushes_max:
            self.effects.append(push)
        else:
            self.overflowed = True
