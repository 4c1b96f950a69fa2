"""Drives the engine: its ticks go to the broker state, its copies to the log, its times to a timer; and wakes receives.

There is an engine per leadership. One that has ended is told so, and everybody who waits for it with it.

Receives wait for messages by group and topic. An arrival wakes the receive that has waited longest, and that one, if it
got messages, the next: a hundred that wait for the same queue do not all look at it. One that waits for a certain queue
is woken by that queue's messages only.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.errors import DLedgerError
from dledger.rpc.loops import LoopBridge
from rocketstore.broker.mastership import Mastership, QueueKey
from rocketstore.broker.popping.copies import Copies
from rocketstore.broker.popping.requests import ANY_QUEUE
from rocketstore.broker.pull import QueueWatch, WaitingPulls
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.message.record import QueuePlace
from rocketstore.pop.engine import PopEngine
from rocketstore.pop.operations import CopyResult, Pending, PopCopy, Tick, Verdict
from rocketstore.pop.tables import PopPlace
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.types import PutMessageStatus, PutResult

CLIENT_WAITS_MAX: Final = 1024
"""Receives of one client that may wait (P10)."""


class Subscribed(NamedTuple):
    """A topic as a group receives it."""

    group: str
    topic: str


class WaitingReceive:
    """One receive that may wait. News counts from ``arm`` on, so arm, look, and only then wait."""

    __slots__ = ("_event", "queue_id", "seen")

    def __init__(self, queue_id: int) -> None:
        self.queue_id = queue_id
        self.seen = 0
        """The count of news when it was armed."""
        self._event = asyncio.Event()

    def wake(self) -> None:
        """There may be something for it."""
        self._event.set()

    @property
    def is_woken(self) -> bool:
        """Whether it was woken since it was armed."""
        return self._event.is_set()

    def reset(self) -> None:
        """Forget that it was woken."""
        self._event.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait for news or the timeout."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()


class _Line:
    """Those that wait for one topic of one group."""

    def __init__(self) -> None:
        self.news = 0
        self.entered = 0
        self.watches: dict[QueueKey, QueueWatch] = {}
        self.waiting: dict[int, deque[WaitingReceive]] = {}

    def wake_one(self, queue_id: int) -> None:
        line = self.waiting.get(queue_id)
        if line:
            line.popleft().wake()


class WaitingReceives:
    """On the loop."""

    def __init__(self, pulls: WaitingPulls, waiting_max: int) -> None:
        self._pulls = pulls
        self._waiting_max = waiting_max
        self._lines: dict[Subscribed, _Line] = {}
        self._clients: Counter[str] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, subscribed: Subscribed) -> int:
        """How many wait for a topic."""
        line = self._lines.get(subscribed)
        return 0 if line is None else line.entered

    @contextmanager
    def entered(
        self, subscribed: Subscribed, queues: Iterable[QueueKey], queue_id: int, client_id: str
    ) -> Iterator[WaitingReceive]:
        """A receive that may wait for these queues. Raises ``Refusal``: there are too many."""
        if self._count >= self._waiting_max:
            raise Refusal(RefusalKind.TOO_MANY, f"{self._count} receives are waiting, the limit (pulls_waiting_max)")
        if self._clients[client_id] >= CLIENT_WAITS_MAX:
            why = f"client {client_id} has {CLIENT_WAITS_MAX} waiting receives, and may have no more"
            raise Refusal(RefusalKind.TOO_MANY, why)
        line = self._lines.get(subscribed)
        if line is None:
            line = self._lines[subscribed] = _Line()
        for key in queues:
            if key not in line.watches:  # those who came before wait for one queue, or the topic has got more
                line.watches[key] = self._pulls.watch(key, partial(self._arrived, subscribed, key))
        line.entered += 1
        self._clients[client_id] += 1
        self._count += 1
        waiter = WaitingReceive(queue_id)
        try:
            yield waiter
        finally:
            self._withdraw(line, waiter)
            line.entered -= 1
            self._clients[client_id] -= 1
            self._count -= 1
            if not self._clients[client_id]:
                del self._clients[client_id]
            if not line.entered:
                for watch in line.watches.values():
                    self._pulls.unwatch(watch)
                self._lines.pop(subscribed, None)
            elif waiter.is_woken:  # in vain
                line.wake_one(queue_id)

    def arm(self, subscribed: Subscribed, waiter: WaitingReceive) -> None:
        """It looks now, and waits behind the others if there is nothing."""
        line = self._lines[subscribed]
        self._withdraw(line, waiter)
        waiter.seen = line.news
        waiter.reset()
        line.waiting.setdefault(waiter.queue_id, deque()).append(waiter)

    def looked(self, subscribed: Subscribed, waiter: WaitingReceive, *, found: bool) -> None:
        """It has looked: if there was something, or there is by now, the next one shall look, too."""
        line = self._lines[subscribed]
        if found or line.news != waiter.seen:
            if found:
                self._withdraw(line, waiter)
            line.wake_one(waiter.queue_id)

    def wake(self, subscribed: Subscribed, queue_id: int = ANY_QUEUE) -> None:
        """There may be messages of a queue, or of any: to be tried again, or because a queue is free again."""
        line = self._lines.get(subscribed)
        if line is None:
            return
        line.news += 1
        line.wake_one(ANY_QUEUE)
        for one in tuple(line.waiting) if queue_id == ANY_QUEUE else (queue_id,):
            if one != ANY_QUEUE:
                line.wake_one(one)

    def wake_all(self) -> None:
        """Have all look: the role has changed, or the broker stops."""
        for line in self._lines.values():
            line.news += 1
            for waiting in line.waiting.values():
                while waiting:
                    waiting.popleft().wake()

    def _arrived(self, subscribed: Subscribed, key: QueueKey) -> None:
        """Something arrived in a queue of the topic, or in the retry topic."""
        self.wake(subscribed, key[1] if key[0] == subscribed.topic else ANY_QUEUE)

    @staticmethod
    def _withdraw(line: _Line, waiter: WaitingReceive) -> None:
        waiting = line.waiting.get(waiter.queue_id)
        if waiting is None:
            return
        with suppress(ValueError):  # it was woken
            waiting.remove(waiter)
        if not waiting:
            del line.waiting[waiter.queue_id]


SLEEP_S_MAX: Final = 5.0
"""The engine is looked at this often at least."""
STEP_MS_MIN: Final = 1000
"""By so much the wall clock was set, and does not only drift."""


class Leadership:
    """One leadership's engine and its time."""

    __slots__ = ("_ahead_ms", "_began_ms", "_clock", "_wall_ms", "engine", "incarnation")

    def __init__(self, engine: PopEngine, incarnation: int, clock: Clock, wall_ms: int) -> None:
        self.engine = engine
        self.incarnation = incarnation
        self._clock = clock
        self._wall_ms, self._began_ms = wall_ms, clock.monotonic_ms()
        self._ahead_ms = 0

    def now_ms(self) -> int:
        """Wall-clock time that does not jump."""
        return self._wall_ms + self._clock.monotonic_ms() - self._began_ms

    def ahead_ms(self) -> int:
        """How far the wall clock, by which clients are told when leases end, is ahead of this time, because it was set.
        The same until it is set again: some clients name a delivery by its end.
        """
        ahead_ms = self._clock.wall_ms() - self.now_ms()
        if abs(ahead_ms - self._ahead_ms) >= STEP_MS_MIN:
            self._ahead_ms = ahead_ms
        return self._ahead_ms


class EngineDriver:
    """On the loop. ``look`` after every call of the engine."""

    def __init__(  # one parameter per neighbour
        self,
        store: MessageStore,
        state: BrokerState,
        mastership: Mastership,
        bridge: LoopBridge,
        clock: Clock,
        waiting: WaitingReceives,
        make_copies: Callable[[Callable[[PopCopy, CopyResult], None]], Copies],
    ) -> None:
        self._store = store
        self._state = state
        self._mastership = mastership
        self._bridge = bridge
        self._clock = clock
        self._waiting = waiting
        self.copies: Final = make_copies(self._copied)
        self._now: Leadership | None = None
        self._awaited: dict[Pending, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.reason = ""
        """Why the message is dead that a client is giving up now."""
        self.ticks = 0
        """Changes of the state so far."""
        self.rows = 0
        """Rows of them."""
        self.is_closing = False
        """Nobody waits for messages any more."""
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for a tick or a copy; may be read on any thread."""
        return bool(self._awaited) or len(self.copies) > 0

    def leadership(self) -> Leadership:
        """Of this moment. Raises ``Refusal``: this is no master."""
        incarnation = self._store.incarnation
        self._mastership.require()
        current = self._now
        if current is not None and current.incarnation == incarnation:
            return current
        self.end()
        if self._is_closed:
            raise Refusal.of(_stopping())
        wall_ms = self._clock.wall_ms()
        runs_ahead = self._store.log.is_replicated  # otherwise a power cut may take away what was given out
        engine = PopEngine(self._state.pop, Random(incarnation).randrange, runs_ahead=runs_ahead)
        self._now = current = Leadership(engine, incarnation, self._clock, wall_ms)
        self.look(current)
        return current

    def is_current(self, leadership: Leadership) -> bool:
        """Whether it has not ended."""
        return (
            leadership is self._now and self._mastership.is_master and leadership.incarnation == self._store.incarnation
        )

    def require(self, leadership: Leadership) -> None:
        """Raises ``Refusal`` if it has ended."""
        if not self.is_current(leadership):
            raise Refusal.of(self._mastership.refusal()._replace(outcome="unknown"))

    def end(self) -> None:
        """End the leadership, if there is one: waiting callers are refused."""
        ended, self._now = self._now, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if ended is not None:
            self._tell(ended.engine.close(self._mastership.refusal()._replace(outcome="unknown")))
            self.copies.drop()
        self._waiting.wake_all()

    def role_changed(self) -> None:
        """See whether this leadership has ended."""
        if self._now is not None and not self.is_current(self._now):
            self.end()

    def client_gone(self, client_id: str) -> None:
        """Make messages that are prolonged for a client visible soon."""
        leadership = self._now
        if leadership is not None and self.is_current(leadership):
            leadership.engine.client_gone(client_id, leadership.now_ms())
            self.look(leadership)

    def next_offset(self, place: PopPlace) -> int | None:
        """The first message of a queue that was not given out; None if nobody has asked for any here."""
        return None if self._now is None else self._now.engine.next_offset(place)

    def handle_at(self, group: str, place: QueuePlace, visible_at_ms: int) -> str:
        """The handle of a message that is out until then; empty if there is none here. Raises ``Refusal``."""
        where = PopPlace(group, place.topic, place.queue_id)
        leadership = self.leadership()
        end_ms = visible_at_ms - leadership.ahead_ms()
        return leadership.engine.handle_at(where, place.queue_offset, end_ms)

    def told_ms(self, end_ms: int) -> int:
        """When a lease of this leadership ends, by the wall clock."""
        return end_ms if self._now is None else end_ms + self._now.ahead_ms()

    async def close(self) -> None:
        self.is_closing = self._is_closed = True
        self.end()
        await self.copies.close()

    async def done(self, operation: Pending) -> Verdict:
        """How it ended; ``FAILED`` becomes a ``Refusal``, with what the log said."""
        if operation.verdict is None:
            future = self._awaited[operation] = asyncio.get_running_loop().create_future()
            try:
                await future
            finally:
                self._awaited.pop(operation, None)
        assert operation.verdict is not None
        if operation.verdict is Verdict.FAILED:
            failure = operation.failure if isinstance(operation.failure, PutResult) else _NOT_STORED
            raise Refusal.of(failure, self._mastership.leader_address)
        return operation.verdict

    def look(self, leadership: Leadership) -> None:
        """Carry out what the engine wants now.

        If this broker is the master again meanwhile, another one has led since, whose rows a row of this leadership
        would undo.
        """
        if leadership is not self._now:
            return
        if leadership.incarnation != self._store.incarnation:
            self.end()
            return
        engine, now_ms = leadership.engine, leadership.now_ms()
        reason, self.reason = self.reason, ""
        for copy in engine.take_copies():
            self.copies.make(copy, reason if copy.forced else "")
        for group, topic in engine.take_woken():
            self._waiting.wake(Subscribed(group, topic))
        tick = engine.take_tick(now_ms)
        if tick is not None:
            self._write(leadership, tick)
        self._tell(engine.take_done(now_ms))
        self._set_timer(leadership, now_ms)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tell(self, done: Sequence[Pending]) -> None:
        for operation in done:
            future = self._awaited.get(operation)
            if future is not None and not future.done():
                future.set_result(None)

    def _write(self, leadership: Leadership, tick: Tick) -> None:
        self.ticks += 1
        self.rows += len(tick.rows)
        post, ticked = self._bridge.post, partial(self._ticked, leadership, tick)
        try:
            self._state.pop.write(tick.rows, lambda result: post(partial(ticked, result)))
        except DLedgerError as error:
            post(partial(ticked, _refused(error)))

    def _ticked(self, leadership: Leadership, tick: Tick, result: PutResult) -> None:
        if leadership is not self._now:
            return
        leadership.engine.ticked(tick, None if result.ok else result, leadership.now_ms())
        self.look(leadership)

    def _copied(self, copy: PopCopy, result: CopyResult) -> None:
        leadership = self._now
        if leadership is not None:
            leadership.engine.copied(copy, result, leadership.now_ms())
            self.look(leadership)

    def _set_timer(self, leadership: Leadership, now_ms: int) -> None:
        loop, due_ms = asyncio.get_running_loop(), leadership.engine.due_ms()
        delay_s = SLEEP_S_MAX if due_ms is None else min(max(due_ms - now_ms, 0) / 1000, SLEEP_S_MAX)
        at = loop.time() + delay_s
        if self._timer is not None:
            if self._timer_at <= at + 0.0005:
                return  # it comes soon enough
            self._timer.cancel()
        self._timer_at = at
        self._timer = loop.call_at(at, self._due, leadership)

    def _due(self, leadership: Leadership) -> None:
        self._timer = None
        if leadership is not self._now:
            return
        if not self.is_current(leadership):
            self.end()
            return
        leadership.engine.expire(leadership.now_ms())
        self.look(leadership)


def _stopping() -> PutResult:
    return PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason="this broker is stopping")


def _refused(error: DLedgerError) -> PutResult:
    return PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome=error.outcome, reason=str(error))


_NOT_STORED: Final = PutResult(
    PutMessageStatus.UNKNOWN_ERROR, outcome="not_applied", reason="the copy of the message could not be stored: retry"
)
