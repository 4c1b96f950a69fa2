"""Carries out the core's decisions: takes its outbox under the lock, and acts on it outside, in the contract's order.

Threads of one node (all named ``dledger-<part>-<node>``): elector, dispatcher-<peer>, handler, quorum-ack, flush. Any
thread, including a transport's, may ``call`` into the node; the effects are carried out by the thread that caused them.

A part to which an event gives work is stepped at once by the thread that delivered the event, in the same hold of the
lock: passing it to the part's own thread costs a thread switch, and an append would need four of them. The part's own
thread handles timers, and the dispatchers' threads also what is too much for the caller: while a follower has pushes in
flight, the next ones are gathered and read there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, NoReturn, TypeVar

from dledger.clock import Clock
from dledger.config import FlushMode, ServerConfig
from dledger.core.messages import (
    LoadRun,
    Message,
    PushAppend,
    PushCommit,
    PushCompare,
    PushInstall,
    PushTruncate,
)
from dledger.core.node import Node
from dledger.core.outbox import Outbox, RoleChange, Wake
from dledger.core.ports import Log
from dledger.errors import (
    CorruptLogError,
    DLedgerError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    ShutdownError,
    UnknownMemberError,
)
from dledger.runtime.supervisor import NodeFailedError, Supervisor
from dledger.runtime.worker import Worker
from dledger.types import HardState, LogIndex, NodeId

Result = TypeVar("Result")
Effect = TypeVar("Effect")

JOIN_TIMEOUT_S = 10.0
_IN_FLIGHT_WHEN_IDLE = 1
"""Pushes in flight to the slower follower of an idle group when the next append comes."""
_STEPPED_AT_ONCE = Wake.HANDLER | Wake.QUORUM_ACK
_PUSHES: Final = frozenset({LoadRun, PushAppend, PushCommit, PushCompare, PushInstall, PushTruncate})


class _Part:
    """A steppable part and the thread for its timers. All methods under the node's lock."""

    worker: Worker

    def __init__(self, step: Callable[[int], int | None]) -> None:
        self._step = step
        self._planned_ms: int | None = None  # when the thread next wakes by itself

    def run(self, now_ms: int) -> int | None:
        """Step on the part's own thread, which wakes again at the due time returned."""
        self._planned_ms = self._step(now_ms)
        return self._planned_ms

    def run_early(self, now_ms: int) -> None:
        """Step on another thread; the part's own one is woken only if it would now wake too late."""
        due_ms = self._step(now_ms)
        if due_ms is not None and (self._planned_ms is None or due_ms < self._planned_ms):
            self._planned_ms = due_ms
            self.worker.wake()


class _Lane(Generic[Effect]):
    """Queued effects of one kind; ``queue`` is filled under the node's lock, emptied under ``sending``."""

    def __init__(self) -> None:
        self.queue: deque[Effect] = deque()
        self.sending = threading.Lock()


class _PushLane(_Lane[Message]):
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
        if len(self.queue) < self._pushes_max:
            self.queue.append(push)
        else:
            self.overflowed = True


class NodeDriver:
    """Owns a node's lock, its workers and the order of its effects."""

    def __init__(  # noqa: PLR0913  # one parameter per effect
        self,
        config: ServerConfig,
        node: Node,
        log: Log,
        clock: Clock,
        supervisor: Supervisor,
        *,
        save: Callable[[HardState], None],
        send: Callable[[NodeId, Message], None],
        on_role_change: Callable[[RoleChange], None],
        on_commit: Callable[[LogIndex], None],
        on_damage: Callable[[CorruptLogError], None],
        on_fenced: Callable[[str], None],
    ) -> None:
        """``save`` returns only when a hard state is durable.

        ``on_role_change`` is called once everything that the change depends on is durable, for one change at a time and
        in order, and must only queue. All others are called outside the lock: ``on_commit`` by the thread that moved
        the commit index, so that indexes may arrive out of order; ``on_damage`` when damage in the own log keeps a part
        from its work, which will retry; ``on_fenced`` when most members were found to have another history.
        """
        self._config = config
        self._node = node
        self._log = log
        self._save = save
        self._clock = clock
        self._supervisor = supervisor
        self._send = send
        self._lock = threading.Lock()  # guards node and log writes: the node's one lock
        self._persist_lock = threading.Lock()  # guards _durable_version and orders the saves; taken without _lock
        self._durable_version = 0  # of the state at start, which the node may already have changed
        self._stopped = False
        self._told_flushed = log.flushed.sequence  # what the node knows; threads that race report it twice at worst
        self._on_role_change = on_role_change
        self._on_commit = on_commit
        self._on_damage = on_damage
        self._on_fenced = on_fenced
        self._elector = self._part("elector", node.elector.step)
        self._handler = self._part("handler", node.handler.step)
        self._quorum_ack = self._part("quorum-ack", node.quorum_ack.step)
        pushes_max = 2 * config.replication.inflight_pushes_max + 16
        self._push_lanes = {peer: _PushLane(pushes_max) for peer in node.dispatchers}
        self._dispatchers = [
            (self._part(f"dispatcher-{peer}", dispatcher.step, partial(self._read_for, peer)), dispatcher)
            for peer, dispatcher in node.dispatchers.items()
        ]
        for (part, _), lane in zip(self._dispatchers, self._push_lanes.values(), strict=True):
            lane.reader = part.worker
        self._flushes_at_once = config.store.flush_mode is FlushMode.SYNC
        self._flush_planned = False  # with flush_mode=async: the flusher will wake by itself
        self._flush_due_ms = 0
        flush = self._flush if self._flushes_at_once else self._flush_in_time
        self._flusher = Worker(f"dledger-flush-{config.node_id}", flush, clock, supervisor)
        parts = [self._elector, self._handler, self._quorum_ack, *(part for part, _ in self._dispatchers)]
        self._workers = [*(part.worker for part in parts), self._flusher]
        self._lanes: dict[NodeId, _Lane[Message]] = {peer: _Lane() for peer in node.state.peers}
        self._role_changes: _Lane[RoleChange] = _Lane()

    def _part(self, name: str, step: Callable[[int], int | None], then: Callable[[], None] = lambda: None) -> _Part:
        part = _Part(step)

        def run() -> int | None:
            due_ms = self._step(part.run)
            then()
            return due_ms

        part.worker = Worker(f"dledger-{name}-{self._config.node_id}", run, self._clock, self._supervisor)
        return part

    def _step(self, step: Callable[[int], int | None]) -> int | None:
        """Step a part; a node that stops meanwhile is not a failure of its worker."""
        try:
            return self.call(step)
        except (ShutdownError, NodeFailedError):
            return None

    def start(self) -> None:
        """Start all workers."""
        for worker in self._workers:
            worker.start()

    def stop(self) -> None:
        """Stop all workers and join them; later calls raise ``ShutdownError``. Idempotent.

        Waiting appends and reads fail with that error, too: nothing will step what they wait for.
        """
        with self._lock:
            self._stopped = True
        for worker in self._workers:
            worker.stop(JOIN_TIMEOUT_S)
        with self._lock:
            self._node.abandon(ShutdownError("this node has stopped: the entries may still be committed"))
            left = self._node.state.outbox.take()
        for completion in left.completions:
            completion()

    def call(self, action: Callable[[int], Result], *, flush_here: bool = False) -> Result:
        """Run ``action(now_ms)`` under the node's lock, then carry out its effects.

        ``flush_here``: if they include a flush that somebody waits for, do it on this thread, not on the flusher's.

        Raises ``NodeFailedError`` after a fatal error and ``ShutdownError`` after ``stop``; passes on errors of the
        request itself. Any other error is fatal for the node, whichever thread it occurs on.
        """
        begun = False
        try:
            with self._lock:
                if self._stopped or self._supervisor.fatal is not None:
                    self._refuse()
                begun = True
                now_ms = self._clock.monotonic_ms()
                result = action(now_ms)
                effects, hard_state, version = self._take_effects(now_ms)
            if effects is not None:
                flush_here = flush_here and self._flushes_at_once and bool(effects.wake & Wake.FLUSH)
                if flush_here:
                    effects.wake &= ~Wake.FLUSH
                self._carry_out(effects, hard_state, version)
                if flush_here:
                    self._flush()
        except (ShutdownError, NodeFailedError) as error:
            if begun:  # it may be the refusal of another call, made while carrying this one out
                error.outcome = "unknown"
            raise
        except (UnknownMemberError, InvalidRequestError):
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
        self._role_changes.queue.extend(effects.role_changes)
        for target, message in effects.messages:
            if type(message) in _PUSHES:
                self._push_lanes[target].put(message)
            else:
                self._lanes[target].queue.append(message)
        return effects, hard_state, version

    def look(self, query: Callable[[Node], Result]) -> Result:
        """Read from the node under its lock; ``query`` must not change anything."""
        with self._lock:
            return query(self._node)

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
            for part, dispatcher in self._dispatchers:
                if dispatcher.in_flight > _IN_FLIGHT_WHEN_IDLE:
                    part.worker.wake()
                else:
                    part.run_early(now_ms)

    def _carry_out(self, effects: Outbox, hard_state: HardState, version: int) -> None:
        if version != self._durable_version:
            self._persist(hard_state, version)
        for target, message in effects.messages:
            if type(message) in _PUSHES:
                self._push(target)
            else:
                self._drain(self._lanes[target], partial(self._send, target))
        if effects.wake:  # after the pushes: the flusher would take the interpreter from this thread
            self._wake(effects.wake)
        if effects.role_changes:
            self._drain(self._role_changes, self._on_role_change)
        if effects.committed is not None:
            self._on_commit(effects.committed)
        for damage in effects.damage:
            self._on_damage(damage)
        if effects.fenced:
            self._on_fenced(effects.fenced)
        for completion in effects.completions:
            completion()

    def _wake(self, wake: int) -> None:
        if wake & Wake.FLUSH and not self._flush_planned:
            self._flush_planned = not self._flushes_at_once
            self._flusher.wake()
        if wake & Wake.DISPATCHERS:
            for part, _ in self._dispatchers:
                part.worker.wake()
        if wake & Wake.ELECTOR:
            self._elector.worker.wake()

    def _persist(self, hard_state: HardState, version: int) -> None:
        """Return only when a hard state at least as new as ``version`` is durable."""
        with self._persist_lock:
            if version > self._durable_version:
                self._save(hard_state)
                self._durable_version = version

    def _drain(self, lane: _Lane[Effect], act: Callable[[Effect], None]) -> None:
        """Carry out queued effects in the core's order, whichever thread does it.

        A thread that finds another one doing so leaves its part to that one.
        """
        while lane.queue and lane.sending.acquire(blocking=False):
            try:
                while lane.queue:
                    effect = lane.queue.popleft()
                    self._await_hard_state()
                    act(effect)
            finally:
                lane.sending.release()

    def _await_hard_state(self) -> None:
        """Wait for the current hard state: queued effects may depend on one that another thread has yet to save."""
        if self._node.state.hard_state_version != self._durable_version:
            hard_state, version = self.look(lambda node: (node.state.hard_state, node.state.hard_state_version))
            self._persist(hard_state, version)

    def _push(self, target: NodeId) -> None:
        """``_drain`` for pushes, up to the first that must be read from the disk."""
        lane = self._push_lanes[target]
        while lane.queue and not lane.is_reading and lane.sending.acquire(blocking=False):
            try:
                while lane.queue and not lane.is_reading:
                    push = lane.queue[0]  # removed only by the holder of `sending`
                    if isinstance(push, LoadRun) and push.cold:
                        lane.is_reading = True
                        lane.reader.wake()
                        return
                    lane.queue.popleft()
                    self._await_hard_state()
                    self._send_push(target, push)
            finally:
                lane.sending.release()
        if lane.overflowed and not lane.is_reading:
            lane.overflowed = False
            self._node_lost(target)

    def _read_for(self, target: NodeId) -> None:
        """On the thread of the target's dispatcher: send the pushes left to it, and all queued since."""
        lane = self._push_lanes[target]
        if not lane.is_reading:
            return
        try:
            with lane.sending:
                while lane.queue:
                    push = lane.queue.popleft()
                    if isinstance(push, LoadRun) and push.epoch < self._node.dispatchers[target].epoch:
                        continue  # given up meanwhile; the new attempt follows it
                    self._await_hard_state()
                    self._send_push(target, push)
                # From here on other threads may push again. Check now for what they queued before they could see that.
                lane.is_reading = False
            self._push(target)
        except (ShutdownError, NodeFailedError):
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
            self._send(target, push)
            return
        try:
            run = self._log.read_run(push.first_index, push.last_index, verified=push.cold)
        except (IndexBeforeBeginError, IndexOutOfRangeError):
            self._node_lost(target)
            return
        except CorruptLogError as damage:
            self._on_damage(damage)
            self._node_lost(target)
            return
        if self._node.state.term == push.term:
            self._send(target, PushAppend(push.term, push.epoch, push.commit_index, run))

    def _flush_in_time(self) -> int | None:
        """``flush_mode=async``: flush at once after a pause, then once per period while anything is written."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._flush_due_ms:
            return self._flush_due_ms
        if not self._is_flush_wanted():
            self._flush_planned = False  # from here on a write wakes this thread
            if not self._is_flush_wanted():
                return None
            self._flush_planned = True
        self._flush()
        self._flush_due_ms = now_ms + self._config.store.flush_interval_ms
        return self._flush_due_ms

    def _is_flush_wanted(self) -> bool:
        flushed = self._log.flushed.sequence
        return self._log.write_sequence > flushed or flushed != self._told_flushed

    def _flush(self) -> None:
        """One round of group commit: one flush makes everything written so far durable.

        An application that owns the log may have flushed it itself. The node must be notified all the same, or it would
        wait for ever to count what is already durable.
        """
        if self._log.write_sequence > self._log.flushed.sequence:
            self._log.flush()
        flushed = self._log.flushed.sequence
        if flushed != self._told_flushed:
            self._told_flushed = flushed
            self._step(lambda _now: self._node.flushed())
