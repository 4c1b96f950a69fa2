"""Receives: finds messages for one, or waits for them, and answers when they are reserved (P1).

``TopicLoader`` looks up what the engine must know before a group can be given messages of a topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from dledger.rpc.clients.connections import Leases
from rocketstore.broker.mastership import QueueKey
from rocketstore.broker.popping.copies import ONE_BYTES, dead_topic_of, origin_of
from rocketstore.broker.popping.driver import EngineDriver, Leadership, Subscribed, WaitingReceives
from rocketstore.broker.popping.requests import ANY_QUEUE, PoppedRecord, Receive, Received
from rocketstore.broker.pull import PULL_BYTES_DEFAULT
from rocketstore.broker.reading import MessageFilter, QueueReading, ReadLimits, SubscriptionFilters
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.topics import Topics
from rocketstore.message.record import QueuePlace, queue_offset_of, reconsume_times_of
from rocketstore.pop.operations import Loading, Origin, PopDelivery, PopFound, PopRead, PopWish, QueueBounds
from rocketstore.pop.tables import PopPlace, retry_topic_of
from rocketstore.pop.windows import COPIES_MAX, NotLoadedError
from rocketstore.settings import LiveConfig
from rocketstore.state.publisher import PopState
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetMessageStatus, GetResult, MessageType

READ_AT_ONCE: Final = 256
"""Copies that are read together."""


class Start(NamedTuple):
    """Where a group begins that is new to a topic (P9): with the first messages, with what was stored at ``since_ms``
    or later, or, if that is 0, at the end.
    """

    from_first: bool = False
    since_ms: int = 0


END: Final = Start()


class TopicLoader:
    """On the loop."""

    def __init__(self, store: MessageStore, topics: Topics, reading: QueueReading) -> None:
        self._store = store
        self._topics = topics
        self._reading = reading

    async def load(self, group: str, topic: str, start: Start) -> Loading:
        """Of a topic that exists. ``start``: where a group begins that is new to it (P9).

        Raises ``Refusal`` and ``CorruptLogError``.
        """
        config = self._topics.require(topic)
        retry, dead = retry_topic_of(group, topic), dead_topic_of(group)
        bounds: dict[int, QueueBounds] = {}
        for queue_id in range(config.queues):
            begin = self._begin(topic, queue_id)
            end = max(await self._reading.end(topic, queue_id), begin)
            bounds[queue_id] = QueueBounds(begin, await self._start(topic, queue_id, begin, end, start), end)
        copied = [one for name in (retry, dead) for one in await self._copied(name, group)]
        retry_begin = None if self._topics.find(retry) is None else self._begin(retry, 0)
        return Loading(group, topic, retry, bounds, retry_begin, copied)

    async def _copied(self, name: str, group: str) -> list[Origin]:
        """The origins of the newest copies in a topic."""
        if self._topics.find(name) is None:
            return []
        end = await self._reading.end(name, 0)
        at = max(self._begin(name, 0), end - COPIES_MAX)
        found: list[Origin] = []
        while at < end:
            result = await self._reading.read(name, 0, at, None, ReadLimits(READ_AT_ONCE, ONE_BYTES))
            origins = map(origin_of, result.records)
            found += [one for one in origins if one is not None and one.place.group == group]
            if result.next_offset <= at:
                break
            at = result.next_offset
        return found

    async def _start(self, topic: str, queue_id: int, begin: int, end: int, start: Start) -> int:
        """``end`` was read before the search: messages that came since are found, too."""
        if start.from_first:
            return begin
        if not start.since_ms or begin == end:
            return end
        found = await self._reading.stored_since(topic, queue_id, start.since_ms)
        return min(max(found, begin), end)

    def _begin(self, topic: str, queue_id: int) -> int:
        return max(self._store.min_offset(topic, queue_id), self._topics.begin_offset(topic, queue_id), 0)


SCAN_S_MAX: Final = 0.1
"""How long a receive looks for messages that pass its filter before it lets others look (P7)."""
LOOK_S: Final = 5.0
"""A receive that waits looks at least this often, though arrivals, leases that end and settled messages wake it: of an
offset that was reset it is not told. Thousands wait, and each look takes 50 µs of the loop.
"""
OWNERS_MAX: Final = 65_536
"""Groups of which it is remembered who receives for them."""
LOADS_MAX: Final = 3
"""A topic may be deleted and made again while it is loaded."""


class _Plan(NamedTuple):
    """A receive that was checked."""

    wish: PopWish
    wanted: MessageFilter | None
    start: Start
    subscribed: Subscribed
    queues: tuple[QueueKey, ...]
    """Those whose messages end its wait."""


class _Got(NamedTuple):
    """The result of one search."""

    messages: tuple[PoppedRecord, ...]
    full: bool
    is_at_end: bool
    """Whether everything was looked at; otherwise it goes on at once."""


class Receiving:
    """On the loop."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        live: LiveConfig,
        topics: Topics,
        reading: QueueReading,
        filters: SubscriptionFilters,
        loader: TopicLoader,
        driver: EngineDriver,
        waiting: WaitingReceives,
        view: PopState,
        take_group: Callable[[str, str], None],
        owners: dict[str, str],
    ) -> None:
        """``take_group``: an owner makes a group, if it is new. ``owners``: by group, of the last who received."""
        self._live = live
        self._topics = topics
        self._reading = reading
        self._filters = filters
        self._loader = loader
        self._driver = driver
        self._waiting = waiting
        self._view = view
        self._take_group = take_group
        self._loading: dict[Subscribed, asyncio.Task[None]] = {}
        self._owners = owners
        self.delivered = 0
        """Messages, since the start."""

    async def receive(self, asked: Receive, leases: Leases, owner: str) -> Received:
        """Of a checked receive. Raises ``Refusal`` and ``CorruptLogError``."""
        plan = self._plan(asked, await self._filters.of(asked.kind, asked.expression), owner)
        if len(self._owners) >= OWNERS_MAX:
            self._owners.clear()
        self._owners[asked.group] = owner
        loop = asyncio.get_running_loop()
        end = loop.time() + min(asked.wait_ms, self._live.now.pull_wait_ms_max) / 1000
        await self._loaded(asked.group, asked.topic, plan.start)  # whose limits bound what is watched
        with self._waiting.entered(plan.subscribed, plan.queues, asked.queue_id, plan.wish.client_id) as waiter:
            while True:
                self._waiting.arm(plan.subscribed, waiter)
                got = await self._look(plan, leases)
                self._waiting.looked(plan.subscribed, waiter, found=bool(got.messages))
                if got.messages:
                    return Received(got.messages, rest=self._rest(plan))
                remaining_s = end - loop.time()
                if remaining_s <= 0 or self._driver.is_closing:
                    return Received((), got.full, self._rest(plan))
                if got.is_at_end:
                    await waiter.wait(min(remaining_s, LOOK_S))

    async def peek(self, group: str, topic: str, queue_id: int, count: int, leases: Leases) -> list[bytes]:
        """The messages of these queues that would be given out next."""
        await self._loaded(group, topic, END)
        await leases.take(PULL_BYTES_DEFAULT)
        found: list[bytes] = []
        for place in self._places(group, topic, queue_id):
            room = ReadLimits(count - len(found), PULL_BYTES_DEFAULT - sum(map(len, found)))
            if min(room) <= 0:
                break
            found += (await self._reading.read(place.topic, place.queue_id, self._next(place), None, room)).records
        leases.resize(sum(map(len, found)))
        return found

    async def await_message(self, group: str, topic: str, queue_id: int, wait_ms: int, client_id: str) -> bool:
        """Whether there is anything, within this time."""
        await self._loaded(group, topic, END)
        loop = asyncio.get_running_loop()
        end, places = loop.time() + wait_ms / 1000, self._places(group, topic, queue_id)
        subscribed, keys = Subscribed(group, topic), [(one.topic, one.queue_id) for one in places]
        with self._waiting.entered(subscribed, keys, queue_id, client_id) as waiter:
            while True:
                self._waiting.arm(subscribed, waiter)
                if any(self._reading.end_at_once(one.topic, one.queue_id) > self._next(one) for one in places):
                    return True
                if loop.time() >= end or self._driver.is_closing:
                    return False
                await waiter.wait(min(end - loop.time(), LOOK_S))
                self._driver.leadership()

    @property
    def waiting(self) -> int:
        """How many wait; for any thread."""
        return len(self._waiting)

    def wake_all(self) -> None:
        """Have all who wait look again."""
        self._waiting.wake_all()

    def waiting_of(self, group: str, topic: str) -> int:
        """How many wait for a topic."""
        return self._waiting.of(Subscribed(group, topic))

    async def load(self, leadership: Leadership, group: str, topic: str, start: Start = END) -> None:
        """Have the engine know a topic of a group, and its windows be stored (P9). Raises ``Refusal``."""
        key = Subscribed(group, topic)
        task = self._loading.get(key)
        if task is None:
            loading = self._load(leadership, key, start)
            task = self._loading[key] = asyncio.get_running_loop().create_task(loading)
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(task)

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _load(self, leadership: Leadership, key: Subscribed, start: Start) -> None:
        self._take_group(self._owners.get(key.group, ""), key.group)
        loading = await self._loader.load(*key, start)
        self._driver.require(leadership)
        with self._view.room(key.group, [(key.topic, one) for one in loading.queues]):
            for queue_id in loading.queues:
                leadership.engine.take_up(loading, queue_id, leadership.now_ms())
                self._driver.look(leadership)
                await asyncio.sleep(0)
                self._driver.require(leadership)
            pending = leadership.engine.load(loading, leadership.now_ms())
            self._driver.look(leadership)
            await self._driver.done(pending)

    async def _loaded(self, group: str, topic: str, start: Start) -> Leadership:
        leadership = self._driver.leadership()
        engine, retry = leadership.engine, retry_topic_of(group, topic)
        is_known = engine.knows(PopPlace(group, retry, 0)) or self._topics.find(retry) is None
        if not is_known or not engine.is_loaded(group, topic):
            await self.load(leadership, group, topic, start)
        return leadership

    def _plan(self, asked: Receive, wanted: MessageFilter | None, owner: str) -> _Plan:
        config = self._topics.require(asked.topic)
        is_any = asked.queue_id == ANY_QUEUE
        queue_ids = tuple(range(config.read_queues)) if is_any else (asked.queue_id,)
        by_priority = config.message_type is MessageType.PRIORITY
        wish = PopWish(
            asked.group,
            asked.topic,
            queue_ids[::-1] if by_priority else queue_ids,
            asked.max_messages,
            asked.invisible_ms,
            client_key(owner, asked.client_id),
            asked.attempt_id,
            asked.auto_renew,
            by_priority,
            owner,
            is_any or asked.with_retries,
        )
        keys = [(asked.topic, one) for one in range(config.read_queues)]
        keys.append((retry_topic_of(asked.group, asked.topic), 0))
        start = Start(asked.from_first, asked.since_ms)
        return _Plan(wish, wanted, start, Subscribed(asked.group, asked.topic), tuple(keys))

    async def _begun(self, plan: _Plan) -> tuple[Leadership, PopDelivery]:
        wish = plan.wish
        for _ in range(LOADS_MAX):
            leadership = await self._loaded(wish.group, wish.topic, plan.start)
            self._driver.require(leadership)
            try:
                delivery = leadership.engine.begin(wish, leadership.now_ms())
            except NotLoadedError:
                await self.load(leadership, wish.group, wish.topic, plan.start)
            else:
                return leadership, delivery
        raise Refusal(RefusalKind.BUSY, f"topic {wish.topic} is changing: try again")

    async def _look(self, plan: _Plan, leases: Leases) -> _Got:
        """Look for messages once, and wait until what was found is reserved."""
        size_max = min(PULL_BYTES_DEFAULT, self._live.now.pull_bytes_max)
        await leases.take(size_max)  # before reading the log
        leadership, delivery = await self._begun(plan)
        engine, driver = leadership.engine, self._driver
        records: dict[PopPlace, dict[int, bytes]] = {}
        began, is_at_end, used = asyncio.get_running_loop().time(), True, 0
        try:
            while (read := engine.next_read(delivery, leadership.now_ms())) is not None:
                limits = ReadLimits(read.count_max, size_max - used)
                found = await self._read(read, plan, limits)
                driver.require(leadership)
                known = [_found(one) for one in found.records]
                there = records.setdefault(read.place, {})
                for one, record in zip(known, found.records, strict=True):
                    there[one.offset] = record
                    used += len(record)
                bounds = {"begin": self._begin(read), "end": found.max_offset}
                engine.took(delivery, known, _next_offset(read, found), leadership.now_ms(), **bounds)
                if not found.records and found.next_offset < found.max_offset:
                    is_at_end = False
                if used >= size_max or asyncio.get_running_loop().time() > began + SCAN_S_MAX:
                    is_at_end = is_at_end and not delivery.places
                    break
            engine.finish(delivery, leadership.now_ms())
            driver.look(leadership)
            if delivery.messages:
                await driver.done(delivery)
        except BaseException:
            engine.cancel(delivery, leadership.now_ms())
            driver.look(leadership)
            raise
        ahead_ms = leadership.ahead_ms()
        messages = tuple(
            PoppedRecord(
                records[one.place][one.offset],
                one.handle,
                one.attempt,
                one.visible_at_ms + ahead_ms,
                QueuePlace(one.place.topic, one.place.queue_id, one.offset),
            )
            for one in delivery.messages
        )
        leases.resize(sum(len(one.record) for one in messages))
        self.delivered += len(messages)
        return _Got(messages, delivery.full, is_at_end)

    async def _read(self, read: PopRead, plan: _Plan, limits: ReadLimits) -> GetResult:
        """Messages of one queue; of the retry topic the group's own copies.

        The filter has let their originals pass, except those that a new leader took for given out ahead of their row.
        """
        (group, topic, queue_id), offset = read.place, read.offset
        if read.only:
            return await self._read_only(read)
        if topic == plan.wish.topic:
            return await self._reading.read(topic, queue_id, offset, plan.wanted, limits, group)
        found = await self._reading.read(topic, queue_id, offset, None, limits, group)
        records = (one for one in found.records if _is_copy_for(group, one) and _passes(plan.wanted, one))
        return replace(found, records=tuple(records))

    async def _read_only(self, read: PopRead) -> GetResult:
        """These messages of an ordered group again, as they were given out together."""
        records: list[bytes] = []
        topic, queue_id = read.place.topic, read.place.queue_id
        low = high = 0
        for offset in read.only:
            one = await self._reading.read(topic, queue_id, offset, None, ReadLimits(1, ONE_BYTES), read.place.group)
            low, high = one.min_offset, one.max_offset
            records += [record for record in one.records if queue_offset_of(record) == offset]
        return GetResult(GetMessageStatus.FOUND, read.offset, low, high, tuple(records))

    def _begin(self, read: PopRead) -> int:
        place = read.place
        return max(self._reading.begin_at_once(place.topic, place.queue_id), self._topics.begin_offset(*place[1:]))

    def _places(self, group: str, topic: str, queue_id: int) -> list[PopPlace]:
        if queue_id != ANY_QUEUE:
            return [PopPlace(group, topic, queue_id)]
        queues = range(self._topics.require(topic).read_queues)
        return [PopPlace(group, retry_topic_of(group, topic), 0), *(PopPlace(group, topic, one) for one in queues)]

    def _next(self, place: PopPlace) -> int:
        """The first message of a queue that was not given out."""
        given = self._driver.next_offset(place)
        if given is not None:
            return given
        window = self._view.pop_window(place)
        return max(self._view.offset(*place), 0) if window is None else window.reserved

    def _rest(self, plan: _Plan) -> int:
        """About how many messages are left."""
        wish = plan.wish
        places = (PopPlace(wish.group, wish.topic, one) for one in wish.queue_ids)
        return sum(max(0, self._reading.end_at_once(one.topic, one.queue_id) - self._next(one)) for one in places)


def client_key(owner: str, client_id: str) -> str:
    """A client among those of all owners: nobody else's receives and leases can be meant by its id."""
    return f"{owner} {client_id}" if client_id else ""


def _found(record: bytes) -> PopFound:
    """The place of a record, and its attempt."""
    return PopFound(queue_offset_of(record), reconsume_times_of(record) + 1)


def _passes(wanted: MessageFilter | None, copy: bytes) -> bool:
    """Whether a copy was given out before, or passes the filter, which nobody has asked about its original."""
    return wanted is None or reconsume_times_of(copy) > 0 or wanted.matches_record(copy)


def _is_copy_for(group: str, record: bytes) -> bool:
    """Two groups may have one retry topic: ``a`` for messages of ``b_c``, and ``a_b`` for those of ``c``."""
    origin = origin_of(record)
    return origin is not None and origin.place.group == group


def _next_offset(read: PopRead, found: GetResult) -> int:
    """Up to where a read has looked: nowhere, if it could not."""
    if found.status in (GetMessageStatus.FOUND, GetMessageStatus.NO_MATCHED_MESSAGE):
        return max(found.next_offset, read.offset)
    if found.status is GetMessageStatus.MESSAGE_WAS_REMOVING:
        return max(found.next_offset, read.offset)
    return read.offset
