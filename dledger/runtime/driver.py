"""Carries out what the core decides: takes its outbox under the lock, and acts on it outside, in the contract's order.

Threads of one node (all named ``dledger-<part>-<node>``): elector, dispatcher-<peer>, handler, quorum-ack, flush. Any
thread, also a transport's, may ``call`` into the node; the effects are carried out by the thread that caused them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from dledger.clock import Clock
from dledger.config import FlushMode, ServerConfig
from dledger.core.messages import LoadRun, Message, PushAppend
from dledger.core.node import Node
from dledger.core.outbox import Outbox, RoleChange, Wake
from dledger.core.ports import HardStateStore, Log
from dledger.errors import IndexBeforeBeginError, IndexOutOfRangeError, ShutdownError
from dledger.runtime.supervisor import NodeFailedError, Supervisor
from dledger.runtime.worker import Worker
from dledger.types import HardState, LogIndex, NodeId

Result = TypeVar("Result")

JOIN_TIMEOUT_S = 10.0


class NodeDriver:
    """Owns a node's lock, its workers and the order of its effects."""

    def __init__(
        self,
        config: ServerConfig,
        node: Node,
        log: Log,
        hard_states: HardStateStore,
        clock: Clock,
        supervisor: Supervisor,
        send: Callable[[NodeId, Message], None],
    ) -> None:
        self._config = config
        self._node = node
        self._log = log
        self._hard_states = hard_states
        self._clock = clock
        self._supervisor = supervisor
        self._send = send
        self._lock = threading.Lock()  # guards node and log writes: the node's one lock
        self._persist_lock = threading.Lock()  # guards _durable_version and orders the saves; taken without _lock
        self._durable_version = 0  # what the node was started with; it may have changed that already
        self._stopped = False
        self.on_role_change: Callable[[RoleChange], None] = lambda _change: None
        """Called under the lock, in order; must only queue."""
        self.on_commit: Callable[[LogIndex], None] = lambda _index: None
        """Called outside the lock by the thread that moved the commit index; indexes may arrive out of order."""
        self._elector = self._worker("elector", node.elector.step)
        self._handler = self._worker("handler", node.handler.step)
        self._quorum_ack = self._worker("quorum-ack", node.quorum_ack.step)
        self._dispatchers = [
            self._worker(f"dispatcher-{peer}", dispatcher.step) for peer, dispatcher in node.dispatchers.items()
        ]
        self._flusher = Worker(f"dledger-flush-{config.node_id}", self._flush, clock, supervisor)
        self._workers = [self._elector, self._handler, self._quorum_ack, *self._dispatchers, self._flusher]

    def _worker(self, part: str, step: Callable[[int], int | None]) -> Worker:
        name = f"dledger-{part}-{self._config.node_id}"
        return Worker(name, lambda: self._step(step), self._clock, self._supervisor)

    def _step(self, step: Callable[[int], int | None]) -> int | None:
        """Step a part; a node that stops meanwhile is no failure of its worker."""
        try:
            return self.call(step)
        except (ShutdownError, NodeFailedError):
            return None

    def start(self) -> None:
        """Start all workers."""
        for worker in self._workers:
            worker.start()

    def stop(self) -> None:
        """Stop all workers and join them; later calls raise ``ShutdownError``. Idempotent."""
        with self._lock:
            self._stopped = True
        for worker in self._workers:
            worker.stop(JOIN_TIMEOUT_S)

    def call(self, action: Callable[[int], Result]) -> Result:
        """Run ``action(now_ms)`` under the node's lock, then carry out what it caused.

        Raises ``NodeFailedError`` after a fatal error and ``ShutdownError`` after ``stop``.
        """
        with self._lock:
            self._require_alive()
            result = action(self._clock.monotonic_ms())
            outbox = self._node.state.outbox
            hard_state, version = self._node.state.hard_state, self._node.state.hard_state_version
            if not outbox and version == self._durable_version:
                return result  # an answer depends on the hard state, too: without effects it may still have to wait
            effects = outbox.take()
            for change in effects.role_changes:
                self.on_role_change(change)
        self._carry_out(effects, hard_state, version)
        return result

    def look(self, query: Callable[[Node], Result]) -> Result:
        """Read from the node under its lock; ``query`` must not change anything."""
        with self._lock:
            return query(self._node)

    def _require_alive(self) -> None:
        if self._supervisor.fatal is not None:
            raise NodeFailedError(f"this node has stopped itself: {self._supervisor.fatal}")
        if self._stopped:
            raise ShutdownError("this node is stopping")

    def _carry_out(self, effects: Outbox, hard_state: HardState, version: int) -> None:
        if effects.wake:
            self._wake(effects.wake)
        if version != self._durable_version:
            self._persist(hard_state, version)
        for target, message in effects.messages:
            if isinstance(message, LoadRun):
                self._send_run(target, message)
            else:
                self._send(target, message)
        if effects.committed is not None:
            self.on_commit(effects.committed)
        for completion in effects.completions:
            completion()

    def _wake(self, wake: Wake) -> None:
        if Wake.FLUSH in wake:
            self._flusher.wake()
        if Wake.DISPATCHERS in wake:
            for dispatcher in self._dispatchers:
                dispatcher.wake()
        if Wake.HANDLER in wake:
            self._handler.wake()
        if Wake.QUORUM_ACK in wake:
            self._quorum_ack.wake()
        if Wake.ELECTOR in wake:
            self._elector.wake()

    def _persist(self, hard_state: HardState, version: int) -> None:
        """Return only when a hard state at least as new as ``version`` is durable."""
        with self._persist_lock:
            if version > self._durable_version:
                self._hard_states.save(hard_state)
                self._durable_version = version

    def _send_run(self, target: NodeId, message: LoadRun) -> None:
        """Read a run outside the lock and send it, unless its term has passed meanwhile.

        A leader never changes its own entries, so bytes read while its term lasted are what it meant to send; after the
        term they may already be another leader's.
        """
        try:
            run = self._log.read_run(message.first_index, message.last_index)
        except (IndexBeforeBeginError, IndexOutOfRangeError):
            self._step(lambda _now: self._node.connection_lost(target))
            return
        if self._node.state.term == message.term:
            self._send(target, PushAppend(message.term, message.epoch, message.commit_index, run))

    def _flush(self) -> int | None:
        """One round of group commit: whatever was written so far becomes durable with one flush."""
        if self._log.write_sequence > self._log.flushed.sequence:
            self._log.flush()
            self._step(lambda _now: self._node.flushed())
        if self._config.store.flush_mode is FlushMode.ASYNC:
            return self._clock.monotonic_ms() + self._config.store.flush_interval_ms
        return None
