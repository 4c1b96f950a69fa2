"""``Popping``: what every protocol's adapter asks pop for (``rocketstore.broker.pop_types.PopPort``)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Final, TypeVar

from dledger.rpc.clients.answers import Leases
from rocketstore.broker.groups import Groups
from rocketstore.broker.measurements import PopCounters
from rocketstore.broker.pop_types import (
    ANY_QUEUE,
    ATTEMPT_ID_MAX,
    CLIENT_ID_MAX,
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    MESSAGES_MAX,
    WAIT_MS_MAX,
    Ack,
    ChangedInvisible,
    ChangeInvisible,
    DeadLetter,
    PopResult,
    Receive,
    Received,
)
from rocketstore.broker.popping.driver import EngineDriver
from rocketstore.broker.popping.receiving import LOADS_MAX, Receiving, client_key
from rocketstore.broker.popping.use import GroupUse
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.topics import Topics
from rocketstore.message.checks import check_client_topic
from rocketstore.message.record import TOPIC_BYTES_MAX, QueuePlace
from rocketstore.pop.engine import OWNER_PERCENT, PopEngine
from rocketstore.pop.operations import Settling, Verdict
from rocketstore.pop.tables import retry_topic_of
from rocketstore.pop.windows import NotLoadedError

ACKS_MAX: Final = 4096
"""Acknowledgements of one call."""
ACKED_AT_ONCE: Final = 512
"""Of these, in one turn of the loop: they take about 5 ms, and a whole call would hold up everybody for 40."""
AT_ONCE_MAX: Final = 65_536
"""Acknowledgements, and the like, that wait for the log, of all clients together; of one owner ``OWNER_PERCENT``."""
_T = TypeVar("_T")


class Popping:
    """On the loop, of every member; only the master answers."""

    def __init__(
        self,
        topics: Topics,
        groups: Groups,
        driver: EngineDriver,
        receiving: Receiving,
        use: GroupUse,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._driver = driver
        self._receiving = receiving
        self.use: Final = use
        """Which groups are consumed by pop, and which by pulls."""
        self._settling: Counter[str] = Counter()  # by owner
        self.acknowledged = 0
        """Messages, since the start."""

    # -- messages ------------------------------------------------------------------------------------------------------

    async def receive(self, wish: Receive, leases: Leases, owner: str = "") -> Received:
        """Messages, at once or as soon as there are some; their bytes are accounted for in ``leases``.

        ``owner``: whose share the topics count for that messages come again in. Raises as ``PopPort``.
        """
        wish = self._checked(wish)
        self._use(wish.group, wish.topic, wish.queue_id)
        self.use.popped(wish.group, wish.client_id)
        return await self._receiving.receive(wish, leases, owner)

    async def peek(self, group: str, topic: str, queue_id: int, count: int, leases: Leases) -> list[bytes]:
        """The records that would be given out next, about: nothing is taken. Raises ``Refusal``."""
        self._use(group, topic, queue_id)
        return await self._receiving.peek(group, topic, queue_id, count, leases)

    async def await_message(self, group: str, topic: str, queue_id: int, wait_ms: int, client_id: str) -> bool:
        """Whether there is something to receive, at once or within this time. Raises ``Refusal``."""
        self._use(group, topic, queue_id)
        return await self._receiving.await_message(group, topic, queue_id, min(wait_ms, WAIT_MS_MAX), client_id)

    def waiting_of(self, group: str, topic: str) -> int:
        """How many receives wait for a topic."""
        return self._receiving.waiting_of(group, topic)

    # -- what became of them -------------------------------------------------------------------------------------------

    async def ack(self, acks: Sequence[Ack], owner: str = "") -> Sequence[PopResult]:
        """See ``PopPort``."""
        if len(acks) > ACKS_MAX:
            raise Refusal(RefusalKind.INVALID, f"{len(acks)} acknowledgements in one call: at most {ACKS_MAX}")
        with self._room(len(acks), owner):
            found: list[Settling] = []
            for (group, topic), some in groupby(acks, itemgetter(0, 1)):
                handles = [one.handle for one in some]
                for begin in range(0, len(handles), ACKED_AT_ONCE):
                    if found:
                        await asyncio.sleep(0)
                    found += await self._asked(partial(_ack, group, topic, handles[begin : begin + ACKED_AT_ONCE]))
            for one in dict.fromkeys(found):
                await self._driver.done(one)
            results = [PopResult.OK if one.verdict is Verdict.OK else PopResult.INVALID_HANDLE for one in found]
        self.acknowledged += sum(one is PopResult.OK for one in results)
        return results

    async def change_invisible(self, change: ChangeInvisible, owner: str = "") -> ChangedInvisible:
        """See ``PopPort``."""
        group, topic, handle, duration_ms, suspend, push = change
        if not 0 <= duration_ms <= INVISIBLE_MS_MAX:
            why = f"a message can be invisible for 0 to {INVISIBLE_MS_MAX} ms, not for {duration_ms}"
            raise Refusal(RefusalKind.INVALID, why)
        if push:
            duration_ms = max(duration_ms, INVISIBLE_MS_MIN)
        with self._room(1, owner):
            changing = await self._asked(
                lambda engine, now_ms: engine.change(group, topic, handle, duration_ms, now_ms, suspend=suspend)
            )
            verdict = await self._driver.done(changing)
        if verdict is Verdict.FULL:
            why = f"group {group} has as many messages that are invisible for long as it may have: try again later"
            raise Refusal(RefusalKind.TOO_MANY, why)
        if verdict is not Verdict.OK:
            return ChangedInvisible(PopResult.INVALID_HANDLE)
        return ChangedInvisible(PopResult.OK, changing.handle, self._driver.told_ms(changing.visible_at_ms))

    async def dead_letter(self, dead: DeadLetter, owner: str = "") -> PopResult:
        """See ``PopPort``."""
        with self._room(1, owner):
            settling = await self._asked(
                lambda engine, now_ms: engine.dead_letter(dead.group, dead.topic, dead.handle, now_ms), dead.reason
            )
            verdict = await self._driver.done(settling)
        if verdict is Verdict.FULL:
            why = f"group {dead.group} has as many messages of {dead.topic} on their way to others as it may have"
            raise Refusal(RefusalKind.TOO_MANY, f"{why}: try again later")
        return _result(verdict)

    def give_back(self, group: str, topic: str, handles: Sequence[str]) -> None:
        """See ``PopPort``."""
        leadership = self._driver.leadership()
        leadership.engine.give_back(group, topic, handles, leadership.now_ms())
        self._driver.look(leadership)

    def client_gone(self, client_id: str, owner: str = "") -> None:
        """See ``PopPort``."""
        if client_id:
            self._driver.client_gone(client_key(owner, client_id))

    def handle_at(self, group: str, place: QueuePlace, visible_at_ms: int) -> str:
        """The handle of a message that is out until then; empty if there is none here. ``place``: of its record.

        For clients that send back numbers only. Raises ``Refusal``.
        """
        return self._driver.handle_at(group, place, visible_at_ms)

    # -- life ----------------------------------------------------------------------------------------------------------

    def role_changed(self) -> None:
        """The store's role may have changed: callers that wait at a slave are told so."""
        self._driver.role_changed()

    def stop_waiting(self) -> None:
        """Have waiting receives answered now, and let none wait any more."""
        self._driver.is_closing = True
        self._driver.role_changed()
        self._receiving.wake_all()

    async def close(self) -> None:
        """Answer nobody any more."""
        await self._driver.close()

    def counters(self) -> PopCounters:
        """For any thread."""
        copies = self._driver.copies
        return PopCounters(
            self._receiving.waiting,
            self._receiving.delivered,
            self.acknowledged,
            copies.stored,
            copies.dead,
            self._driver.ticks,
        )

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for messages or for the log; for any thread."""
        return self._receiving.waiting > 0 or self._driver.is_busy

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _asked(self, ask: Callable[[PopEngine, int], _T], reason: str = "") -> _T:
        """The engine's answer; it may have to load a topic first."""
        for _ in range(LOADS_MAX):
            leadership = self._driver.leadership()
            self._driver.reason = reason
            try:
                answer = ask(leadership.engine, leadership.now_ms())
            except NotLoadedError as error:
                await self._receiving.load(leadership, error.group, error.topic)
                continue
            finally:
                self._driver.look(leadership)
            return answer
        raise Refusal(RefusalKind.BUSY, "the topic is changing: try again")

    @contextmanager
    def _room(self, count: int, owner: str) -> Iterator[None]:
        """For what waits for the log. Raises ``Refusal``."""
        owned, total = self._settling[owner], self._settling.total()
        if owner and owned + count > AT_ONCE_MAX * OWNER_PERCENT // 100:
            why = f"{owned} acknowledgements of {owner} wait for the log, half of all that may: try again"
            raise Refusal(RefusalKind.TOO_MANY, why)
        if total + count > AT_ONCE_MAX:
            raise Refusal(RefusalKind.TOO_MANY, f"{total} acknowledgements wait for the log: try again")
        self._settling[owner] += count
        try:
            yield
        finally:
            self._settling[owner] -= count
            if not self._settling[owner]:
                del self._settling[owner]

    def _checked(self, wish: Receive) -> Receive:
        """Within what is allowed. Raises ``Refusal``."""
        problem = ""
        if not 1 <= wish.max_messages <= MESSAGES_MAX:
            problem = f"1 to {MESSAGES_MAX} messages are received at a time, not {wish.max_messages}"
        elif not wish.auto_renew and not 1 <= wish.invisible_ms <= INVISIBLE_MS_MAX:
            problem = f"a message can be invisible for 1 to {INVISIBLE_MS_MAX} ms, not for {wish.invisible_ms}"
        elif wish.queue_id < ANY_QUEUE:
            problem = f"queue {wish.queue_id}: queues are numbered from 0, and {ANY_QUEUE} stands for any"
        elif len(wish.attempt_id) > ATTEMPT_ID_MAX:
            problem = f"an attempt id has at most {ATTEMPT_ID_MAX} characters, this one {len(wish.attempt_id)}"
        elif len(wish.client_id) > CLIENT_ID_MAX:
            problem = f"a client id has at most {CLIENT_ID_MAX} characters, this one {len(wish.client_id)}"
        elif wish.auto_renew and not wish.client_id:
            problem = "leases are prolonged for a client with an id only"
        if problem:
            raise Refusal(RefusalKind.INVALID, problem)
        invisible_ms = max(wish.invisible_ms, INVISIBLE_MS_MIN)
        return wish._replace(wait_ms=min(max(wish.wait_ms, 0), WAIT_MS_MAX), invisible_ms=invisible_ms)

    def _use(self, group: str, topic: str, queue_id: int) -> None:
        """Raises ``Refusal`` unless the group may consume the queue by pop, here."""
        self._driver.leadership()
        config = self._groups.retries.group(group)
        if not config.consume_enable:
            reason = f"subscription group no permission, {group}: it is not allowed to consume (consumeEnable)"
            raise Refusal(RefusalKind.NOT_PERMITTED, reason)
        if problem := check_client_topic(topic):
            raise Refusal(RefusalKind.INVALID, problem)
        self._topics.check_readable(topic, max(queue_id, 0))
        if len(retry_topic_of(group, topic)) > TOPIC_BYTES_MAX:
            raise Refusal(
                RefusalKind.INVALID,
                f"the names of group {group} and topic {topic} have {len(group) + len(topic)} characters together, too "
                f"many for the topic {retry_topic_of(group, topic)} of messages that come again, whose name may have "
                f"{TOPIC_BYTES_MAX}: take shorter ones",
            )


def _ack(group: str, topic: str, handles: Sequence[str], engine: PopEngine, now_ms: int) -> list[Settling]:
    return engine.ack(group, topic, handles, now_ms)


def _result(verdict: Verdict) -> PopResult:
    return PopResult.OK if verdict is Verdict.OK else PopResult.INVALID_HANDLE
