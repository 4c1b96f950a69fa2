"""Makes a broker's role follow its node's: the leader of the log accepts puts, all others refuse them.

A node starts as slave. When it stops leading, it refuses puts before anything else happens. When it is elected, it
first:

1. Waits until its whole log is committed, its own term's NOOP last, and dispatched: only then do consume queues and
   broker state contain everything that earlier leaders acknowledged.
2. Waits until the broker state has been applied.
3. Recounts the next queue offsets from the consume queues. Those it assigned itself as an earlier leader may belong to
   entries that were lost; those that others assigned it never counted.
4. Opens the log for puts of this term only, and makes the store master.
5. Starts what only a master does: delivering delayed messages, ending transactions.

There is no deadline: a leader that cannot commit has no quorum, and will step down. A failing step is retried, with
growing pauses, as long as the node leads. But a leader that is not master keeps the whole group from accepting
messages, so it reports the condition ``stuck_leader`` and offers leadership to the other members in turn: at once if
retrying cannot help, otherwise after some failures. RocketMQ only logs the failure and stays a slave that leads.

Threads: role changes arrive on the node's role-change thread, which only closes the gate and passes them on; a thread
of this module does the rest, one transition after the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
    wait_exponential,
)

from dledger.core.messages import RoleChange
from dledger.errors import CorruptLogError
from dledger.monitoring import ConditionKind
from dledger.rpc.ports import CommitEvent, NodeEvent
from dledger.runtime.threads import Supervisor
from dledger.server import DLedgerServer
from dledger.types import MemberRole, Role, Term
from rocketstore.commit_log.replicated import ReplicatedCommitLog
from rocketstore.state.broker_state import BrokerState, StateBlockedError, StateIncompleteError
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole

_log = logging.getLogger("rocketstore")

DISPATCH_WAIT_S: Final = 0.1
"""How long one wait for dispatch lasts before the promotion checks whether it is still wanted."""
JOIN_TIMEOUT_S: Final = 10.0
_DISPATCH_PAUSE_S: Final = 0.01
"""Between two such waits, because one on a failed dispatch ends at once."""
DISPATCH_TOLD_S: Final = 10.0
"""How often the log says how much is left to dispatch."""
RETRY_PAUSE_S: Final = 0.1
RETRY_PAUSE_MAX_S: Final = 5.0
FAILURES_MAX: Final = 5
"""Failures of one step, which may be temporary, before leadership is offered to others (after one and a half seconds).
"""
OFFER_PAUSE_S: Final = 3.0
"""Between two offers, because the member asked may be down."""
_BROKER: Final = "broker"
"""The subject of the condition: the broker is stuck, its node is not."""
_LASTING: Final = (CorruptLogError, StateBlockedError, StateIncompleteError)
"""Failures that retrying soon does not change."""


@dataclass(frozen=True, slots=True)
class _Target:
    """The broker's target role; ``cancelled`` is set when the target changes."""

    term: Term | None
    """The term in which to be master; None: slave."""
    cancelled: threading.Event = field(default_factory=threading.Event)


class MasterService(Protocol):
    """A service that only a master runs. Both methods may be called any number of times."""

    def start(self) -> None:
        """The store is master now."""

    def stop(self) -> None:
        """It is none any more; when this returns, nothing more is put."""


class BrokerRoleChange:
    """A ``RoleChangeHandler`` that makes a store master or slave. Register it before the node starts.

    ``services`` run while the broker is master. ``listener`` is called once after every completed change of the
    broker's role, on this object's thread.
    """

    def __init__(
        self,
        member: DLedgerServer,
        log: ReplicatedCommitLog,
        store: MessageStore,
        state: BrokerState,
        *services: MasterService,
        name: str = "",
        listener: Callable[[BrokerRole], None] = lambda _role: None,
    ) -> None:
        self._name = name
        self._offers = 0  # leadership offers since this node leads; used by this object's thread, like the next field
        self._offered_s = 0.0
        self._member = member
        self._gate = log
        self._store = store
        self._state = state
        self._services = services
        self._listener = listener
        self._changed = threading.Condition()  # guards the fields up to the blank line; also notified by commits
        self._target = _Target(None)
        self._role = BrokerRole.SLAVE
        self._stopping = False

        self._told = BrokerRole.SLAVE  # the last role passed to the listener; used by this object's thread
        self._supervisor = Supervisor(lambda _error: None)
        self._thread = self._supervisor.thread(f"rocketstore-role-{name}", partial(self._run, self._target))
        self._refuse_puts()

    @property
    def role(self) -> BrokerRole:
        """``SYNC_MASTER`` or ``SLAVE``."""
        return self._role

    @property
    def fatal(self) -> BaseException | None:
        """The error that ended the thread: the node must stop, because it would lead forever without accepting
        messages.
        """
        return self._supervisor.fatal

    # -- RoleChangeHandler: on the node's role-change thread ------------------------------------------------------

    def startup(self) -> None:
        self._thread.start()

    def role_changed(self, change: RoleChange) -> None:
        """See ``RoleChangeHandler.role_changed``: refuses puts at once, or starts the promotion."""
        term = change.term if change.role is Role.LEADER else None
        with self._changed:
            if term != self._target.term:  # a follower that learns of a new term or leader does not change its role
                self._aim(_Target(term))

    def shutdown(self) -> None:
        """See ``RoleChangeHandler.shutdown``: makes the store a slave and ends the thread. Idempotent."""
        with self._changed:
            self._stopping = True
            self._aim(_Target(None))
            self._target.cancelled.set()  # remaining steps get one attempt each
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _aim(self, target: _Target) -> None:
        """End the previous target: puts are refused before anybody learns of the change. Requires ``_changed``."""
        self._target.cancelled.set()
        self._target = target
        self._changed.notify_all()
        self._refuse_puts()

    def _refuse_puts(self) -> None:
        self._role = BrokerRole.SLAVE
        self._gate.close_term()
        self._store.become_slave()

    # -- transitions: on a thread of our own ----------------------------------------------------------------------

    def _run(self, done: _Target) -> None:
        stopping = False
        while not stopping:
            with self._changed:
                while self._target is done:
                    self._changed.wait()
                done, stopping = self._target, self._stopping
            # Also before the next promotion: after a quick loss and regain, only the latter may be visible.
            for service in self._services:
                self._complete(done, service.stop)
            self._complete(done, lambda: self._tell(BrokerRole.SLAVE))
            if done.term is not None:
                self._promote(done, done.term)

    def _promote(self, target: _Target, term: Term) -> None:
        _log.info("%s: elected in term %d: waiting for the log to be committed and dispatched", self._name, term)
        steps: tuple[Callable[[], None], ...] = (
            lambda: self._wait_committed(target, term),
            lambda: self._wait_dispatched(target),
            lambda: self._state.catch_up(cancelled=target.cancelled),
            self._store.rebuild_queue_offsets,
            lambda: self._take_puts(target, term),
            *(service.start for service in self._services),
            lambda: self._tell(BrokerRole.SYNC_MASTER),
        )

        def attempt(step: Callable[[], None]) -> None:
            if not target.cancelled.is_set():  # the pause between two attempts may have ended with the leadership
                step()

        self._offers = 0

        def failed(state: RetryCallState) -> None:
            self._cannot(target, term, state)

        try:
            done = all(self._complete(target, partial(attempt, step), failed) for step in steps)
        finally:
            self._member.conditions.clear(ConditionKind.STUCK_LEADER, _BROKER)
        if done:
            _log.info("%s: master in term %d", self._name, term)
        else:
            _log.info("%s: not master in term %d: this node no longer leads", self._name, term)

    def _cannot(self, target: _Target, term: Term, attempt: RetryCallState) -> None:
        """A step of the promotion failed: report it, and offer leadership to the next member unless just done."""
        _log_failure(attempt)
        error = attempt.outcome.exception() if attempt.outcome is not None else None
        if not isinstance(error, _LASTING) and attempt.attempt_number < FAILURES_MAX:
            return
        self._member.conditions.set(
            ConditionKind.STUCK_LEADER,
            f"leads the group but cannot become master, so there is no master: {error}",
            subject=_BROKER,
        )
        now_s = time.monotonic()
        status = self._member.status()
        voters = (one.node_id for one in status.members if one.role is MemberRole.VOTER)
        others = sorted(one for one in voters if one != status.node_id)
        if target.cancelled.is_set() or not others or (self._offers and now_s - self._offered_s < OFFER_PAUSE_S):
            return
        following = [one for one in others if one > status.node_id] + [one for one in others if one < status.node_id]
        chosen = following[self._offers % len(following)]  # in a ring, so that every member gets its turn
        self._offers += 1
        self._offered_s = now_s
        told = "%s: leads in term %d but cannot become master: offering leadership to %s"
        _log.error(told, self._name, term, chosen)
        self._member.submit_transfer(
            chosen, lambda result: _log.info("%s: leadership offered to %s: %s", self._name, chosen, result)
        )

    def _complete(
        self,
        target: _Target,
        step: Callable[[], None],
        failed: Callable[[RetryCallState], None] | None = None,
    ) -> bool:
        """Retry a step until it succeeds or ``target`` is cancelled (at least once); returns whether to continue."""
        retrying = Retrying(
            retry=retry_if_exception_type(Exception),
            wait=wait_exponential(RETRY_PAUSE_S, RETRY_PAUSE_MAX_S),
            stop=stop_when_event_set(target.cancelled),
            sleep=sleep_using_event(target.cancelled),
            before_sleep=failed or _log_failure,
            retry_error_callback=_log_failure,
        )
        retrying(step)
        return not target.cancelled.is_set()

    def _wait_committed(self, target: _Target, term: Term) -> None:
        unsubscribe = self._member.subscribe(self._on_event)
        try:
            with self._changed:
                while not target.cancelled.is_set() and not self._is_committed(term):
                    self._changed.wait()
        finally:
            unsubscribe()

    def _on_event(self, event: NodeEvent) -> None:
        if isinstance(event, CommitEvent):
            with self._changed:
                self._changed.notify_all()

    def _is_committed(self, term: Term) -> bool:
        """Whether the leader's whole log is committed; it includes its own NOOP, so nothing in it can be lost."""
        status = self._member.status()
        return (status.role, status.term, status.committed_index) == (Role.LEADER, term, status.end_index)

    def _wait_dispatched(self, target: _Target) -> None:
        told_at = time.monotonic()
        while not self._store.wait_dispatched(DISPATCH_WAIT_S):
            if time.monotonic() >= told_at + DISPATCH_TOLD_S:
                told_at = time.monotonic()
                _log.warning(
                    "%s: elected in term %d, but not master yet: %d bytes of the log are not dispatched",
                    self._name,
                    target.term,
                    self._store.dispatch_behind_bytes,
                )
            if target.cancelled.wait(_DISPATCH_PAUSE_S):
                return
            damage = self._store.dispatch_damage
            if damage is not None:  # others may be sound
                raise damage

    def _take_puts(self, target: _Target, term: Term) -> None:
        with self._changed:  # so that a change of role happens entirely before or after this
            if not target.cancelled.is_set():
                self._gate.open_term(term)
                self._store.become_master(BrokerRole.SYNC_MASTER)
                self._role = BrokerRole.SYNC_MASTER

    def _tell(self, role: BrokerRole) -> None:
        if role is not self._told:
            self._listener(role)
            self._told = role


def _log_failure(attempt: RetryCallState) -> None:
    error = attempt.outcome.exception() if attempt.outcome is not None else None
    _log.error("a role change step failed (attempt %d): %r", attempt.attempt_number, error)
