"""Takes in timed messages: before the store sees them, they become messages of the hidden topic in which they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.rpc.bridge import LoopBridge, LoopCallback
from rocketstore.broker.live_config import LiveConfig
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.timed.service import TimedCounts, TimedService
from rocketstore.message.message import PROPERTY_UNIQUE_KEY, Message
from rocketstore.message.properties import find_property_bytes
from rocketstore.message.timed import WrongTimeError, due_of, make_timed
from rocketstore.timer.handles import RecallHandle
from rocketstore.types import PutMessageStatus, PutResult

COUNT_S: Final = 1.0
"""How often to count the messages that wait."""
_UNIQUE_KEY: Final = f"{PROPERTY_UNIQUE_KEY}\x01".encode()
MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
EXACT_MS: Final = 2 * HOUR_MS
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
        self._counted_at = -COUNT_S
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
        if now - self._counted_at >= COUNT_S:
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
        """One more, stored."""
        self._forget(now_ms)
        period_ms = MINUTE_MS if due_ms - now_ms <= EXACT_MS else HOUR_MS
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
        """About how many."""
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
