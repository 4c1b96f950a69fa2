"""Begins and ends transactions on a master: each half is committed or rolled back once, or not yet.

**Exactly as the producer said.** What has ended is what the log says: the commit, or the op message. A commit is
written before its op, in one batch. A master that takes over reads the log first, and finishes what lacks only its op.
From then on it knows every open transaction, marks one before its end goes to the log, and forgets it when the log
shows its op; so of two requests to end it, or two answers to a check, only one is written. See docs/messages.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from dledger.clock import Clock
from dledger.conditions import Conditions
from dledger.runtime.supervisor import Supervisor
from rocketstore.broker.transactions.checks import Asker, Askers, Check
from rocketstore.broker.transactions.run import NOT_READY, EndDone, NotReadyError, Run
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import LOOPBACK
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.types import RecordHead


class TransactionService:
    """``start`` on a master, ``stop`` before it is none any more; both may be called any number of times."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        state: BrokerState,
        clock: Clock | None = None,
        *,
        supervisor: Supervisor | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._state = state
        self._clock = clock or Clock()
        self._supervisor = supervisor or Supervisor(lambda _error: None)
        self._conditions = conditions or Conditions("transactions", self._clock)
        self._lifecycle = threading.Lock()  # serializes start and stop
        self._run: Run | None = None
        self._askers = Askers()
        self._ready_listeners: tuple[Callable[[], None], ...] = ()
        self.host = LOOPBACK
        """This broker's address, in op messages."""
        store.add_arrival_listener(self._on_arrival)

    def start(self) -> None:
        """Read which transactions are open, then end and check them. Does nothing if running."""
        with self._lifecycle:
            if self._run is None:
                self._run = run = Run(
                    self._config,
                    self._store,
                    self._state,
                    self._clock,
                    lambda: self.host,
                    self._askers,
                    self._tell_ready,
                )
                run.start(self._supervisor)

    def stop(self) -> None:
        """No end reaches the log any more. Idempotent."""
        with self._lifecycle:
            run, self._run = self._run, None
            if run is not None:
                run.stop()

    @property
    def fatal(self) -> BaseException | None:
        """The error that ended the thread: the broker must stop."""
        return self._supervisor.fatal

    @property
    def is_running(self) -> bool:
        """Whether transactions may begin here; their ends wait until it is ready."""
        return self._run is not None

    @property
    def is_ready(self) -> bool:
        """Whether it knows which transactions are open."""
        run = self._run
        return run is not None and run.is_ready

    @property
    def open_count(self) -> int:
        """How many transactions are open, as far as known."""
        run = self._run
        return 0 if run is None else len(run.halves)

    @property
    def dropped_count(self) -> int:
        """How many messages were to be committed after their topic was deleted, since this broker is the master."""
        run = self._run
        return 0 if run is None else run.dropped

    @property
    def given_up_count(self) -> int:
        """How many transactions were given up, since this broker is the master."""
        run = self._run
        return 0 if run is None else run.given_up

    def runtime_info(self) -> dict[str, str]:
        """For operators; empty on a slave."""
        run = self._run
        if run is None:
            return {}
        return {"transactionsOpen": str(len(run.halves)), "transactionsReady": str(run.is_ready).lower()}

    def refusal(self, group: str, coming: int = 0, coming_of_group: int = 0) -> str:
        """Why a producer group has too many open transactions to begin another; empty if it may. On a master only.

        ``coming``: half messages that the log does not show yet, of all groups and of this one.
        """
        run = self._run
        problem = "" if run is None else run.refusal(group, coming, coming_of_group)
        if problem:
            self._conditions.limit(problem)
        return problem

    def end(self, queue_offset: int, offset: int, group: str, *, commit: bool, done: EndDone) -> None:
        """Commit or roll back the transaction of ``group`` whose half message is there; may wait for a disk.

        Raises ``EndRefusedError`` and ``NotReadyError``: then nothing was done.
        """
        run = self._run
        if run is None:
            raise NotReadyError(NOT_READY)
        run.end(queue_offset, offset, group, commit=commit, done=done)

    def ask_with(self, asker: Asker) -> None:
        """Ask the producers of open transactions with this, too."""
        self._askers.add(asker)

    def add_ready_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener``, on this service's thread, whenever it has become ready."""
        self._ready_listeners = (*self._ready_listeners, listener)

    def _tell_ready(self) -> None:
        for listener in self._ready_listeners:
            listener()

    def is_open(self, check: Check) -> bool:
        """Whether a check is still to be made."""
        run = self._run
        return run is not None and run.is_open(check.queue_offset)

    def step(self) -> int | None:
        """Do what is due; returns when (monotonic ms) the next step is. Tests call it instead of the thread."""
        run = self._run
        return None if run is None else run.step()

    def _on_arrival(self, heads: Sequence[RecordHead]) -> None:
        run = self._run
        if run is not None:
            run.on_arrival(heads)
