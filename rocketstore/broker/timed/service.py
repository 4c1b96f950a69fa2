"""Takes in timed messages, and delivers them on a master only: puts each into its topic again when it is due.

Before the store sees a timed message, it becomes a message of the hidden topic in which it waits (``TimedSends``).

**At least once.** Progress is written after the messages it covers, once a second: if a master fails in between, its
successor delivers those of the last second again. A message is never delivered early by the master's clock, unless
that was set back, and never counts as delivered unless it is stored. One that can never be (without a topic, or refused
by the store as illegal) is skipped and logged, and so is one whose topic was deleted while it waited.

**Recall.** A recall is accepted for a message that is not on its way yet; from then on the message waits until the log
holds the recall, and if that fails, it is delivered after all. A new master does not know what was delivered within the
last second before it, and may accept the recall of such a message.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.monitoring import Conditions
from dledger.rpc.loops import LoopBridge, LoopCallback
from dledger.runtime.threads import Supervisor
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.timed.run import TimedRun
from rocketstore.broker_config import BrokerConfig
from rocketstore.message.message import PROPERTY_UNIQUE_KEY, HostAddress, Message
from rocketstore.message.properties import find_property_bytes
from rocketstore.message.timed import RecallHandle, WrongTimeError, due_of, make_timed
from rocketstore.settings import LiveConfig
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.files import TimerFiles
from rocketstore.types import PutMessageStatus, PutResult

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


_COUNT_S: Final = 1.0
"""How often to count the messages that wait."""
_UNIQUE_KEY: Final = f"{PROPERTY_UNIQUE_KEY}\x01".encode()
MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
_EXACT_MS: Final = 2 * HOUR_MS
PERIODS_MAX: Final = 65_536
"""Of all owners. One has at most 1,100 for 40 days; beyond this, a message counts for the owner's last period."""


class TimedPlace(NamedTuple):
    """A timed message on its way to the store: its place in the request, what it was before, and whose it is."""

    place: int
    topic: str
    queue_id: int
    due_ms: int
    message_id: str
    owner: str


class TimedSends:
    """On the loop."""

    def __init__(
        self,
        live: LiveConfig,
        timed: TimedService,
        mastership: Mastership,
        readers: ReadThreads,
        bridge: LoopBridge,
        clock: Clock,
        confirm: Callable[[Callable[[PutResult], None]], None],
    ) -> None:
        """``confirm`` calls back, on any thread, once the log has shown that this broker is the master, or is not."""
        self._live = live
        self._timed = timed
        self._timers: Final = timed.timers
        self._mastership = mastership
        self._readers = readers
        self._bridge = bridge
        self._clock = clock
        self._confirm = confirm
        self._counted_at = -_COUNT_S
        self._open = 0
        self._quota = TimedQuota()

    def begin(self, message: Message, place: int, owner: str, *, together: bool) -> TimedPlace | PutResult | None:
        """Turn a message whose queue is chosen into one that waits; or the reason for a refusal. None: it asks for no
        time, or for one that has passed. ``owner``: whose share it counts for, the account or address; empty: nobody's.
        ``together``: it is of a batch that is stored in one run.
        """
        now_ms = self._clock.wall_ms()
        try:
            due_ms = due_of(message, now_ms)
        except WrongTimeError as error:
            return _refusal(PutMessageStatus.MESSAGE_ILLEGAL, str(error))
        if due_ms is None:
            return None
        problem = self._problem(now_ms, due_ms, owner, together=together)
        if problem is not None:
            return problem
        text = message.property_string
        unique = find_property_bytes(text, _UNIQUE_KEY) if text else message.unique_key.encode()
        made = TimedPlace(
            place, message.topic, message.queue_id, due_ms, (unique or b"").decode(errors="replace"), owner
        )
        make_timed(message, due_ms)
        self._open += 1
        return made

    def _problem(self, now_ms: int, due_ms: int, owner: str, *, together: bool) -> PutResult | None:
        config, delay_ms = self._live.now, due_ms - now_ms
        if together:
            reason = "a message of a batch has no time of its own: send it alone"
            return _refusal(PutMessageStatus.MESSAGE_ILLEGAL, reason)
        if delay_ms > config.timer_max_delay_sec * 1000:
            reason = (
                f"the message shall be delivered {delay_ms // 1000} s from now; at most {config.timer_max_delay_sec} s "
                "are allowed (timerMaxDelaySec)"
            )
            return _refusal(PutMessageStatus.MESSAGE_ILLEGAL, reason)
        waiting = self._count()
        if waiting >= config.timed_messages_max:
            reason = f"{config.timed_messages_max} messages wait for their time already (timed_messages_max)"
            return _refusal(PutMessageStatus.FLOW_CONTROL, f"{reason}: try again later")
        share = max(1, config.timed_messages_max * config.access.account_share_percent // 100)
        if owner and waiting >= share and self._quota.waiting(owner, now_ms) >= share:
            reason = f"{share} messages of {owner} wait for their time (timed_messages_max, account_share_percent)"
            return _refusal(PutMessageStatus.FLOW_CONTROL, f"{reason}: try again later")
        if self._timers.due_in(due_ms) >= config.timed_messages_per_s_max:
            reason = f"{config.timed_messages_per_s_max} messages are due in that second (timed_messages_per_s_max)"
            return _refusal(PutMessageStatus.FLOW_CONTROL, f"{reason}: choose another one")
        return None

    def _count(self) -> int:
        """About how many wait."""
        now = asyncio.get_running_loop().time()
        if now - self._counted_at >= _COUNT_S:
            self._counted_at = now
            self._open, _ = self._timers.open_count(self._clock.wall_ms())
        return self._open

    def all_stored(self, timed: Sequence[TimedPlace], results: Sequence[PutResult]) -> list[PutResult]:
        """The store has answered a request: its results, with the queues that the messages are for, and handles."""
        found = list(results)
        now_ms = self._clock.wall_ms()
        for one in timed:
            stored = found[one.place].stored
            if stored is not None:
                handle = RecallHandle(one.topic, self._live.now.name, one.due_ms, one.message_id, stored.queue_offset)
                if one.owner:
                    self._quota.add(one.owner, one.due_ms, now_ms)
                found[one.place] = found[one.place]._replace(
                    stored=stored._replace(queue_id=one.queue_id), handle=handle.encode()
                )
        return found

    async def recall(self, topic: str, handle: str) -> str:
        """Have a timed message not delivered; returns its id once that is stored.

        Raises ``Refusal``: ``NO_MESSAGE`` for one that was delivered or recalled, ``INVALID`` for a handle of another
        topic or broker, or none of ours.
        """
        self._mastership.require()
        outcome: LoopCallback[PutResult] = LoopCallback(self._bridge)
        try:
            message_id = await self._readers.run(self._timed.recall, topic, handle, outcome.done)
        except Refusal as refusal:
            if refusal.kind is RefusalKind.NO_MESSAGE:
                await self._require_still_master()
            raise
        result = await outcome.future
        if not result.ok:
            raise Refusal.of(result, self._mastership.leader_address)
        return message_id

    async def _require_still_master(self) -> None:
        """One that was replaced without knowing lacks the newest messages: it must not say that there is none."""
        outcome: LoopCallback[PutResult] = LoopCallback(self._bridge)
        self._confirm(outcome.done)
        result = await outcome.future
        if not result.ok:
            raise Refusal.of(result._replace(outcome="not_applied"), self._mastership.leader_address)

    def counts(self) -> TimedCounts:
        """For any thread."""
        return self._timed.counts()


def _refusal(status: PutMessageStatus, reason: str) -> PutResult:
    return PutResult(status, outcome="not_applied", reason=reason)


class TimedQuota:
    """How many timed messages each account, or address without access control, has waiting. On the loop.

    Counted are those that this broker has taken in since it started, by when they are due: to the minute, and to the
    hour those that are due in more than two hours. One that is recalled counts until it was due.

    By owner.
    """

    def __init__(self) -> None:
        self._due: dict[str, dict[int, int]] = {}  # by owner, by the end of a period (ms)
        self.periods = 0
        """Of all owners, as of the last call."""
        self._next_ms = 0  # no period ends earlier

    def add(self, owner: str, due_ms: int, now_ms: int) -> None:
        self._forget(now_ms)
        period_ms = MINUTE_MS if due_ms - now_ms <= _EXACT_MS else HOUR_MS
        end_ms = (due_ms // period_ms + 1) * period_ms
        found = self._due.setdefault(owner, {})
        if end_ms not in found:
            if self.periods < PERIODS_MAX or not found:
                self.periods += 1
            else:
                end_ms = max(found)
        found[end_ms] = found.get(end_ms, 0) + 1
        self._next_ms = min(self._next_ms or end_ms, end_ms)

    def waiting(self, owner: str, now_ms: int) -> int:
        self._forget(now_ms)
        return sum(self._due.get(owner, {}).values())

    def _forget(self, now_ms: int) -> None:
        """Forget the messages that are due by now."""
        if now_ms < self._next_ms or not self._due:
            return
        left = {
            owner: kept
            for owner, found in self._due.items()
            if (kept := {end_ms: count for end_ms, count in found.items() if end_ms > now_ms})
        }
        self._due, self.periods = left, sum(map(len, left.values()))
        self._next_ms = min((min(found) for found in left.values()), default=0)
