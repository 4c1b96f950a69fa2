"""A broker's role follows its node's: who leads the log takes puts, everybody else refuses them.

A node starts as slave. When it stops leading, puts are refused before anything else happens. When it is elected, it
first takes stock:

1. Everything in its log is committed, its own term's NOOP last, and dispatched: only then consume queues and broker
   state hold all that any leader before it acknowledged.
2. The broker state has been applied.
3. The next queue offsets are counted anew from the consume queues. Those that this node gave out itself as an earlier
   leader may belong to entries that were lost; those that others gave out it never counted.
4. The log takes puts of this term, and of no other, and the store becomes master.
5. Delayed messages are delivered from here.

No deadline: a leader that cannot commit has no quorum and will hear so. A step that fails is repeated, with growing
pauses, for as long as the node leads. But a leader that is no master keeps the whole group from taking messages, so it
says so (the condition ``stuck_leader``) and offers leadership to the other members in turn: at once if repeating cannot
help, else after some failures. RocketMQ only logs the failure and stays a slave that leads.

Threads: role changes arrive on the node's role-change thread, which only flips the gate and passes the news on; the
rest is done by a thread of this module, one transition after the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
    wait_exponential,
)

from dledger.conditions import ConditionKind
from dledger.core.outbox import RoleChange
from dledger.errors import CorruptLogError
from dledger.rpc.ports import CommitEvent, NodeEvent
from dledger.runtime.supervisor import Supervisor
from dledger.server import DLedgerServer
from dledger.types import Role, Term
from rocketstore.broker.schedule import ScheduleService
from rocketstore.commit_log.replicated import ReplicatedCommitLog
from rocketstore.state.broker_state import BrokerState, StateBlockedError, StateIncompleteError
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole

_log = logging.getLogger("rocketstore")

DISPATCH_WAIT_S: Final = 0.1
"""How long one wait for dispatch lasts before the promotion looks whether it is still wanted."""
JOIN_TIMEOUT_S: Final = 10.0
DISPATCH_PAUSE_S: Final = 0.01
"""Between two such waits: one on a dispatch that has failed ends at once."""
RETRY_PAUSE_S: Final = 0.1
RETRY_PAUSE_MAX_S: Final = 5.0
FAILURES_MAX: Final = 5
"""Of one step, which may be passing ones; then leadership is offered to others (after one and a half seconds)."""
OFFER_PAUSE_S: Final = 3.0
"""Between two offers: the one asked may be away."""
_BROKER: Final = "broker"
"""What of the leader is stuck: its node goes on."""
_LASTING: Final = (CorruptLogError, StateBlockedError, StateIncompleteError)
"""Failures that another attempt does not change soon."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What the broker shall be now; ``cancelled`` is set once that is no longer so."""

    term: Term | None
    """The term to be master in; None: slave."""
    cancelled: threading.Event = field(default_factory=threading.Event)


class BrokerRoleChange:
    """A ``RoleChangeHandler`` that makes a store master and slave. Register it before the node starts.

    ``listener`` hears of every change of the broker's role, once, after it is complete, on this object's thread.
    """

    def __init__(
        self,
        member: DLedgerServer,
        log: ReplicatedCommitLog,
        store: MessageStore,
        state: BrokerState,
        schedule: ScheduleService,
        *,
        name: str = "",
        listener: Callable[[BrokerRole], None] = lambda _role: None,
    ) -> None:
        self._offers = 0  # of leadership, since this leads; of this object's thread, like the next one
        self._offered_s = 0.0
        self._member = member
        self._gate = log
        self._store = store
        self._state = state
        self._schedule = schedule
        self._listener = listener
        self._changed = threading.Condition()  # guards the fields up to the blank line; a commit wakes it, too
        self._target = _Target(None)
        self._role = BrokerRole.SLAVE
        self._stopping = False

        self._told = BrokerRole.SLAVE  # what the listener heard last; of this object's thread
        self._supervisor = Supervisor(lambda _error: None)
        self._thread = self._supervisor.thread(f"rocketstore-role-{name}", partial(self._run, self._target))
        self._refuse_puts()

    @property
    def role(self) -> BrokerRole:
        """``SYNC_MASTER`` or ``SLAVE``."""
        return self._role

    @property
    def fatal(self) -> BaseException | None:
        """Why the thread ended, if it failed: the node would lead for ever and take no messages, so it must stop."""
        return self._supervisor.fatal

    # -- RoleChangeHandler: on the node's role-change thread ------------------------------------------------------

    def startup(self) -> None:
        """See ``RoleChangeHandler.startup``."""
        self._thread.start()

    def role_changed(self, change: RoleChange) -> None:
        """See ``RoleChangeHandler.role_changed``: refuses puts at once, or has the promotion begin."""
        term = change.term if change.role is Role.LEADER else None
        with self._changed:
            if term != self._target.term:  # a follower may hear of a new term or leader; it stays what it is
                self._aim(_Target(term))

    def shutdown(self) -> None:
        """See ``RoleChangeHandler.shutdown``: the store is a slave from here on, the thread ends. Idempotent."""
        with self._changed:
            self._stopping = True
            self._aim(_Target(None))
            self._target.cancelled.set()  # one attempt each at what is left to do
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _aim(self, target: _Target) -> None:
        """What was before ends here: puts are refused before anybody hears of the change. Under ``_changed``."""
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
            # Also before the next promotion: a quick fall and rise may show only the rise.
            self._complete(done, self._schedule.stop)
            self._complete(done, lambda: self._tell(BrokerRole.SLAVE))
            if done.term is not None:
                self._promote(done, done.term)

    def _promote(self, target: _Target, term: Term) -> None:
        _log.info("elected in term %d: waiting for the log to be committed and dispatched", term)
        steps: tuple[Callable[[], None], ...] = (
            lambda: self._wait_committed(target, term),
            lambda: self._wait_dispatched(target),
            lambda: self._state.catch_up(cancelled=target.cancelled),
            self._store.rebuild_queue_offsets,
            lambda: self._take_puts(target, term),
            self._schedule.start,
            lambda: self._tell(BrokerRole.SYNC_MASTER),
        )

        def attempt(step: Callable[[], None]) -> None:
            if not target.cancelled.is_set():  # a pause between two attempts may have ended with the leadership
                step()

        self._offers = 0

        def failed(state: RetryCallState) -> None:
            self._cannot(target, term, state)

        try:
            done = all(self._complete(target, partial(attempt, step), failed) for step in steps)
        finally:
            self._member.conditions.clear(ConditionKind.STUCK_LEADER, _BROKER)
        if done:
            _log.info("master in term %d", term)
        else:
            _log.info("not master in term %d: this node no longer leads", term)

    def _cannot(self, target: _Target, term: Term, attempt: RetryCallState) -> None:
        """A step of the promotion failed: say so, and offer leadership to the next member unless that was just done."""
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
        others = sorted(one.node_id for one in status.members if one.node_id != status.node_id)
        if target.cancelled.is_set() or not others or (self._offers and now_s - self._offered_s < OFFER_PAUSE_S):
            return
        following = [one for one in others if one > status.node_id] + [one for one in others if one < status.node_id]
        chosen = following[self._offers % len(following)]  # in a ring, so that every member gets its turn
        self._offers += 1
        self._offered_s = now_s
        _log.error("this node leads in term %d but cannot become master: offering leadership to %s", term, chosen)
        self._member.submit_transfer(chosen, lambda result: _log.info("leadership offered to %s: %s", chosen, result))

    def _complete(
        self,
        target: _Target,
        step: Callable[[], None],
        failed: Callable[[RetryCallState], None] | None = None,
    ) -> bool:
        """Do a step until it succeeds or ``target`` is no longer wanted (once at least); whether to go on."""
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
        """Whether all of a leader's log is; its own NOOP is in it, so nothing of it can be lost any more."""
        status = self._member.status()
        return (status.role, status.term, status.committed_index) == (Role.LEADER, term, status.end_index)

    def _wait_dispatched(self, target: _Target) -> None:
        while not self._store.wait_dispatched(DISPATCH_WAIT_S):
            if target.cancelled.wait(DISPATCH_PAUSE_S):
                return
            damage = self._store.dispatch_damage
            if damage is not None:  # others may be sound
                raise damage

    def _take_puts(self, target: _Target, term: Term) -> None:
        with self._changed:  # so that a change of role comes wholly before this or wholly after it
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
