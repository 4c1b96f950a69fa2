"""``Popping``: what every protocol's adapter asks pop for.

A group is consumed either by pop or by pulls (P11): both move its offset, and know nothing of each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Final, TypeVar

from dledger.access.rules import RETRY_PREFIX
from dledger.clock import Clock
from dledger.rpc.clients.connections import Leases
from dledger.rpc.loops import LoopBridge
from rocketstore.broker.groups import Groups
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.offsets import Offsets
from rocketstore.broker.permissions import TOOLS_GROUP
from rocketstore.broker.popping.copies import Copies
from rocketstore.broker.popping.driver import EngineDriver, WaitingReceives
from rocketstore.broker.popping.receiving import LOADS_MAX, Receiving, TopicLoader, client_key
from rocketstore.broker.popping.requests import (
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
from rocketstore.broker.pull import WaitingPulls
from rocketstore.broker.reading import QueueReading, SubscriptionFilters
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.sending import Sending
from rocketstore.broker.statistics import PopCounters
from rocketstore.broker.topics import Topics
from rocketstore.message.checks import check_client_topic
from rocketstore.message.message import HostAddress
from rocketstore.message.record import TOPIC_BYTES_MAX, QueuePlace
from rocketstore.pop.engine import OWNER_PERCENT, PopEngine
from rocketstore.pop.operations import Settling, Verdict
from rocketstore.pop.tables import retry_topic_of
from rocketstore.pop.windows import NotLoadedError
from rocketstore.settings import LiveConfig
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore

RECENT_S: Final = 20.0
"""A group was used in the one way if it was within this time: consumers that wait ask again after 15 s."""
GROUPS_MAX: Final = 65_536
"""Groups that are remembered in either way."""
NAMED_MAX: Final = 8
"""Clients that a refusal names."""


class GroupUse:
    """On the loop, of the master. ``clients_of`` a group: those that pull or pop over remoting, by their heartbeats.

    ``parked_of``: how many of its messages are invisible for long, which a group's offset has passed.
    """

    def __init__(self, clients_of: Callable[[str], tuple[str, ...]], parked_of: Callable[[str], int]) -> None:
        self._clients_of = clients_of
        self._parked_of = parked_of
        self._pulled: OrderedDict[str, float] = OrderedDict()
        self._popped: OrderedDict[str, dict[str, float]] = OrderedDict()

    def pulled(self, group: str, topic: str) -> None:
        """A consumer pulls. Raises ``Refusal`` if others of its group pop."""
        if not group or group == TOOLS_GROUP or topic == f"{RETRY_PREFIX}{group}":
            return  # it moves nothing; and retry topics are always pulled
        now = asyncio.get_running_loop().time()
        if self._pulled.get(group, now - 2 * RECENT_S) <= now - RECENT_S:
            self._begin_to_pull(group, now)
        self._pulled[group] = now
        self._pulled.move_to_end(group)
        if len(self._pulled) > GROUPS_MAX:
            self._pulled.popitem(last=False)

    def _begin_to_pull(self, group: str, now: float) -> None:
        recent = [one for one, at in self._popped.get(group, {}).items() if at > now - RECENT_S]
        if recent:
            raise Refusal(
                RefusalKind.NOT_PERMITTED,
                f"group {group} is consumed by pop, and cannot be by pulls at the same time: clients "
                f"{_named(recent)}. Give these consumers a group of their own, or stop those for {RECENT_S:g} s",
            )
        parked = self._parked_of(group)
        if parked:
            raise Refusal(
                RefusalKind.NOT_PERMITTED,
                f"group {group} was consumed by pop, and {parked} of its messages are invisible for a while: pulls "
                "would never get them. Consume those by pop, or reset the group's offsets",
            )
        self._popped.pop(group, None)

    def popped(self, group: str, client_id: str) -> None:
        """A consumer receives by pop. Raises ``Refusal`` if others of its group pull."""
        now = asyncio.get_running_loop().time()
        if self._pulled.get(group, now - 2 * RECENT_S) > now - RECENT_S:
            ids = self._clients_of(group)
            named = f": clients {_named(ids)}" if ids else ""
            raise Refusal(
                RefusalKind.NOT_PERMITTED,
                f"group {group} is consumed by pulls, and cannot be by pop at the same time{named}. Give these "
                f"consumers a group of their own, or stop those for {RECENT_S:g} s",
            )
        self._pulled.pop(group, None)
        clients = self._popped.setdefault(group, {})
        if client_id in clients or len(clients) < NAMED_MAX:
            clients[client_id] = now
        else:  # any of them will do
            clients.pop(next(iter(clients)))
            clients[client_id] = now
        self._popped.move_to_end(group)
        if len(self._popped) > GROUPS_MAX:
            self._popped.popitem(last=False)


def _named(ids: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    return ", ".join(ids[:NAMED_MAX]) + more


ACKS_MAX: Final = 4096
"""Acknowledgements of one call."""
ACKED_AT_ONCE: Final = 512
"""Of these, in one turn of the loop: they take about 5 ms, and a whole call would hold up everybody for 40."""
AT_ONCE_MAX: Final = 65_536
"""Acknowledgements, and the like, that wait for the log, of all clients together; of one owner ``OWNER_PERCENT``."""
_T = TypeVar("_T")


class Popping:
    """On the loop, of every member; only the master answers. Each method raises ``Refusal`` as
    ``rocketstore.broker.popping.requests`` says. ``owner``: whose share of what waits for the log it counts for; empty:
    nobody's.

    A call that is cancelled (its client is gone) leaves nothing undone: messages that it had already reserved become
    visible again after ``INVISIBLE_MS_MIN``, an ack that is under way counts.
    """

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
        """Messages, at once or as soon as there are some; those that are answered are reserved on a majority (P1).

        Their bytes are accounted for in ``leases``. ``owner``: whose share the topics count for that messages come
        again in.
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
        """A result for each, in order, once all that are ``OK`` are settled on a majority (P2). If that fails the call
        as a whole is refused.
        """
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
        """The old handle is not valid any more if this is ``OK`` (P6)."""
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
        """``OK`` once the copy is stored and the original settled. Repeated after an unknown outcome it may store a
        second copy, but loses none (P4).
        """
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
        """The answer with these messages did not reach the client: as if the receive had been cancelled before. Their
        handles stay valid until they are given out again.
        """
        leadership = self._driver.leadership()
        leadership.engine.give_back(group, topic, handles, leadership.now_ms())
        self._driver.look(leadership)

    def client_gone(self, client_id: str, owner: str = "") -> None:
        """The messages that ``owner`` received in its name become visible after ``INVISIBLE_MS_MIN``."""
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


def make_popping(  # noqa: PLR0913  # one parameter per neighbour
    live: LiveConfig,
    store: MessageStore,
    state: BrokerState,
    mastership: Mastership,
    bridge: LoopBridge,
    clock: Clock,
    pulls: WaitingPulls,
    reading: QueueReading,
    filters: SubscriptionFilters,
    topics: Topics,
    groups: Groups,
    offsets: Offsets,
    sending: Sending,
    store_host: HostAddress,
) -> Popping:
    """On the loop's thread."""
    waiting = WaitingReceives(pulls, live.now.pulls_waiting_max)
    owners: dict[str, str] = {}
    copies = partial(Copies, store, reading, sending, groups.retries, store_host, lambda group: owners.get(group, ""))
    driver = EngineDriver(store, state, mastership, bridge, clock, waiting, copies)
    loader = TopicLoader(store, topics, reading)
    receiving = Receiving(
        live, topics, reading, filters, loader, driver, waiting, state.pop, offsets.take_group, owners
    )

    def clients_of(group: str) -> tuple[str, ...]:
        consumers = groups.clients.consumers(group)
        return () if consumers is None else consumers.ids

    use = GroupUse(clients_of, lambda group: state.pop.parked_of(group))
    return Popping(topics, groups, driver, receiving, use)
