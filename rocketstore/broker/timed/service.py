"""Delivers timed messages, on a master only: puts each into its topic again when it is due.

**At least once.** Progress is written after the messages it covers, once a second: if a master fails in between, its
successor delivers those of the last second again. A message is never delivered early by the master's clock, unless
that was set back, and never counts as delivered unless it is stored. One that can never be (without a topic, or refused
by the store as illegal) is skipped and logged, and so is one whose topic was deleted while it waited.

**Recall.** A recall is accepted for a message that is not on its way yet; from then on the message waits until the log
holds the recall, and if that fails, it is delivered after all. A new master does not know what was delivered within the
last second before it, and may accept the recall of such a message.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.conditions import Conditions
from dledger.runtime.supervisor import Supervisor
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.timed.run import TimedRun
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import HostAddress
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.files import TimerFiles
from rocketstore.types import PutResult

NOT_RUNNING: Final = "this broker is not quite the master yet"

_log = logging.getLogger("rocketstore")


class TimedCounts(NamedTuple):
    """Timed messages of a broker: ``open`` are not due yet, in ``open_bytes`` of the log; ``late`` are due for more
    than a second and not delivered, the first of them for ``lag_ms``. ``next_due_ms``: -1 if nothing is open.
    """

    open: int = 0
    open_bytes: int = 0
    late: int = 0
    lag_ms: int = 0
    next_due_ms: int = -1
    delivered: int = 0
    skipped: int = 0
    dropped: int = 0


class TimedService:
    """``start`` and ``stop`` may be called any number of times."""

    def __init__(
        self,
        config: BrokerConfig,
        store: MessageStore,
        state: BrokerState,
        clock: Clock | None = None,
        *,
        conditions: Conditions | None = None,
        supervisor: Supervisor | None = None,
        store_host: HostAddress | None = None,
    ) -> None:
        """``store_host`` is stored in delivered records; without it, they keep that of the broker that took them in."""
        self._config = config
        self._store = store
        self._state = state
        self._clock = clock or Clock()
        self._conditions = conditions or Conditions("timed", self._clock)
        self._supervisor = supervisor or Supervisor(lambda _error: None)
        self._store_host = store_host
        self._lifecycle = threading.Lock()  # serializes start and stop
        self._run: TimedRun | None = None
        self.tally: Final[Counter[str]] = Counter()
        """How many messages were ``delivered``, ``skipped``, ``dropped`` since the broker was started."""

    def start(self) -> None:
        """Start at the replicated progress; call after the store became master. Does nothing if running."""
        with self._lifecycle:
            if self._run is None:
                self._run = TimedRun(
                    self._config, self._store, self._state, self._clock, self._conditions, self._store_host, self.tally
                )
                self._run.start(self._supervisor)

    def stop(self) -> None:
        """Stop delivering; a master first writes its progress. Idempotent."""
        with self._lifecycle:
            run, self._run = self._run, None
            if run is not None:
                run.stop()

    @property
    def fatal(self) -> BaseException | None:
        """The error that ended delivery, after which the broker must stop."""
        return self._supervisor.fatal

    @property
    def timers(self) -> TimerFiles:
        """When they are due."""
        return self._store.timers

    @property
    def is_running(self) -> bool:
        """Whether it takes in messages, delivers and recalls."""
        return self._run is not None

    def step(self) -> int | None:
        """Do what is due now; returns when (monotonic ms) the next step is. Tests call it instead of the thread."""
        run = self._run
        return run.step() if run is not None else None

    def recall(self, topic: str, handle: str, done: Callable[[PutResult], None]) -> str:
        """Recall the message of a handle; ``done`` gets what became of it, on any thread. Returns the message's id.

        May wait for a disk. Raises ``Refusal``: ``NO_MESSAGE`` if there is no such message, or not any more.
        """
        run = self._run
        if run is None:
            raise Refusal(RefusalKind.UNAVAILABLE, NOT_RUNNING)
        return run.recall(topic, handle, done)

    @property
    def dropped(self) -> int:
        """The number of messages that waited when their topic was deleted."""
        return self.tally["dropped"]

    def counts(self) -> TimedCounts:
        """On any member; values that only a master knows are 0 elsewhere."""
        now_ms = self._clock.wall_ms()
        after_ms = max(self._state.timed_progress.due_ms, now_ms - 1000) if self._run else now_ms
        found, size = self._store.timers.open_count(after_ms)
        late, lag_ms = self._run.late(now_ms) if self._run is not None else (0, 0)
        next_ms = self._store.timers.next_due_ms(after_ms)
        tally = self.tally
        return TimedCounts(
            found,
            size,
            late,
            lag_ms,
            -1 if next_ms is None else next_ms,
            tally["delivered"],
            tally["skipped"],
            tally["dropped"],
        )
