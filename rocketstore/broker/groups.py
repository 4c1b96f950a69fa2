"""Producer and consumer groups: who is in them, who has which queue to itself, and what becomes of messages that fail.

**Locks** give a client of a group exclusive use of a queue, for ordered consumption. They are in memory, on masters. A
new master knows no locks, as in RocketMQ: clients keep theirs for 30 s without a renewal, so during that time two of
them may receive messages of one queue. A master that is cut off from its group grants locks until it steps down, after
an election timeout without a quorum, like sends that it takes and cannot store.

**Notices** tell the consumers of a group that its members have changed. Each change concerns every member, and makes
every member ask for the list: a thousand consumers that join one by one would cause half a million of both. So changes
that follow each other closely are told together, later the more consumers there are to tell.

**Retries** are messages that could not be consumed: sent back, and dead-lettered after too many attempts.
``%RETRY%group`` is a topic that every consumer of the group subscribes to; a message gets there after a delay that
grows each time. ``%DLQ%group`` holds messages that are no longer retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from random import randrange
from typing import Final, NamedTuple

from dledger.access.quota import Quota
from dledger.access.rules import DEAD_PREFIX, RETRY_PREFIX
from dledger.monitoring import ConditionKind, Conditions
from rocketstore.broker.clients import ClientLink, ClientTables, Heartbeat, Trouble
from rocketstore.broker.mastership import Mastership, StateChanges
from rocketstore.broker.reading import RecordReader
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.sending import MessageSource, SendBatch, Sending
from rocketstore.broker.topics import TopicNews, Topics
from rocketstore.message.checks import properties_bytes
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    HostAddress,
    Message,
)
from rocketstore.message.properties import OF_ONE_DELIVERY, PROPERTIES_BYTES_MAX, PROPERTY_ORIGIN_ID
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.settings import LiveConfig
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import GroupConfig, TopicConfig, check_group
from rocketstore.store.stats import OTHERS
from rocketstore.types import HALF_TOPIC, HIDDEN_TOPICS, OP_TOPIC, SCHEDULE_TOPIC, MessageModel, QueueKey

_FIRST_DELAY_LEVEL: Final = 3
"""For the first retry; each further one uses the next level."""
DEAD_QUEUES: Final = 1
_SENT_BACK_MAX: Final = 4096
"""Pairs of group and topic that are counted by themselves."""
READ_WRITE: Final = 6
_KEPT: Final = frozenset(
    {PROPERTY_RETRY_TOPIC, PROPERTY_ORIGIN_ID, PROPERTY_WAIT, PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY}
)
"""Properties that a dead letter never lacks. They fit: RocketMQ's clients and ours limit keys and tags."""
_NEVER_CONSUMED: Final = HIDDEN_TOPICS | {HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC}
"""A message of these has not been delivered, and may never be."""

_log = logging.getLogger("rocketstore")


class Retries:
    """On the loop."""

    def __init__(  # one parameter per neighbour
        self,
        live: LiveConfig,
        state: BrokerState,
        mastership: Mastership,
        topics: Topics,
        sending: Sending,
        records: RecordReader,
        store_host: HostAddress,
    ) -> None:
        self._live = live
        self._state = state
        self._mastership = mastership
        self._topics = topics
        self._sending = sending
        self._records = records
        self._store_host = store_host
        self.sent_back: Final[Counter[tuple[str, str]]] = Counter()
        """How many messages came back, by group and their first topic."""

    async def put_back(
        self, group: str, offset: int, *, delay_level: int, retries_max: int | None, quota: Quota
    ) -> None:
        """Store a message again, to be retried or as a dead one. Raises ``Refusal``.

        It takes up room, as if it were sent: to name a large one costs its client nothing.
        """
        caller, owner = MessageSource(quota), quota.owner
        self._require_room(caller)
        config = self.group(group)
        if not config.retry_queues:
            return
        message = await self._message_at(offset)
        limit = config.retry_times_max if retries_max is None else retries_max
        is_dead = message.reconsume_times >= limit or delay_level < 0
        target = _dead_topic(config) if is_dead else retry_topic(config)
        await self.ensure_topic(target, owner)
        there = self._topics.find(target.name) or target  # nobody reads queues that only the settings have
        again = _copy(message, there, self._store_host)
        if not is_dead:
            again.properties[PROPERTY_DELAY] = str(delay_level or _FIRST_DELAY_LEVEL + message.reconsume_times)
            if properties_bytes(again) > PROPERTIES_BYTES_MAX:  # it would come back to the consumer for ever
                is_dead, target = True, _dead_topic(config)
                await self.ensure_topic(target, owner)
                again = _copy(message, target, self._store_host)
                _log.warning(
                    "group %s: the message at %d has too many properties to be tried again: it is a dead letter now",
                    config.name, offset,
                )  # fmt: skip
        if is_dead and (dropped := trim(again)):
            _log.warning(
                "group %s: the dead letter of the message at %d is without its properties %s: only %d bytes fit",
                config.name, offset, ", ".join(dropped), PROPERTIES_BYTES_MAX,
            )  # fmt: skip
        batch = SendBatch([again], len(again.body), again=True)
        self._require_room(caller)  # which others have taken up while the message was read
        (result,) = await self._sending.send(caller, batch)
        if not result.ok:
            raise Refusal.of(result, self._mastership.leader_address)
        pair = (config.name, again.properties[PROPERTY_RETRY_TOPIC])
        if pair not in self.sent_back and len(self.sent_back) >= _SENT_BACK_MAX:
            pair = (OTHERS, OTHERS)
        self.sent_back[pair] += 1

    def target_of(self, topic: str, reconsume_times: int, retries_max: int) -> TopicConfig:
        """The topic for a message that a client sends to ``%RETRY%group``: that one, or the dead-letter topic.

        ``retries_max``: negative for the group's own limit.
        """
        config = self.group(topic.removeprefix(RETRY_PREFIX))
        if reconsume_times >= (retries_max if retries_max >= 0 else config.retry_times_max):
            return _dead_topic(config)
        return retry_topic(replace(config, retry_queues=max(config.retry_queues, 1)))

    def group(self, name: str) -> GroupConfig:
        """A group's settings. Raises ``Refusal`` if it does not exist, without creating it."""
        state = self._state
        check_group(name)
        if not self._live.now.auto_create_subscription_group and not state.has_group(name):
            reason = f"subscription group not exist, {name}: create it first (autoCreateSubscriptionGroup=false)"
            raise Refusal(RefusalKind.NO_GROUP, reason)
        return state.group(name)

    async def ensure_topic(self, topic: TopicConfig, owner: str) -> None:
        """Create a retry or dead-letter topic if it does not exist. Raises ``Refusal``."""
        if self._topics.find(topic.name) is None:
            result = await self._topics.create(topic, owner)
            if not result.ok:
                raise Refusal(
                    RefusalKind.NO_TOPIC, f"topic[{topic.name}] not exist: {result.reason}", outcome=result.outcome
                )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _require_room(self, caller: MessageSource) -> None:
        problem = self._sending.problem(caller)
        if problem is not None:
            raise Refusal.of(problem, self._mastership.leader_address)

    async def _message_at(self, offset: int) -> Message:
        record = await self._records.at(offset)
        try:
            message = None if record is None else decode_record(record)
        except CorruptRecordError:
            message = None
        if message is None or message.topic in _NEVER_CONSUMED:
            raise Refusal(RefusalKind.NO_MESSAGE, f"look message by offset failed, {offset}")
        return message


def retry_topic(group: GroupConfig) -> TopicConfig:
    """The topic for a group's messages to be retried."""
    return TopicConfig(f"{RETRY_PREFIX}{group.name}", group.retry_queues, group.retry_queues, READ_WRITE)


def _dead_topic(group: GroupConfig) -> TopicConfig:
    """The topic for a group's messages that are no longer retried."""
    return TopicConfig(f"{DEAD_PREFIX}{group.name}", DEAD_QUEUES, DEAD_QUEUES, READ_WRITE)


def _copy(message: Message, target: TopicConfig, store_host: HostAddress) -> Message:
    """The copy of the message to be stored; it records its origin."""
    properties = {name: value for name, value in message.properties.items() if name not in OF_ONE_DELIVERY}
    properties.pop(PROPERTY_DELAY, None)
    properties.setdefault(PROPERTY_RETRY_TOPIC, message.topic)
    properties.setdefault(PROPERTY_ORIGIN_ID, offset_message_id(message.store_host, message.offset))
    properties[PROPERTY_WAIT] = "false"
    return Message(
        target.name,
        message.body,
        randrange(target.write_queues),
        properties,
        message.flag,
        message.sys_flag & ~(SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6),
        message.born_timestamp,
        message.born_host,
        store_host,
        message.reconsume_times + 1,
    )


def trim(dead: Message) -> list[str]:
    """Drop a dead letter's longest properties until the others can be stored; returns their names."""
    dropped = []
    while properties_bytes(dead) > PROPERTIES_BYTES_MAX:
        name = max(
            (one for one in dead.properties if one not in _KEPT),
            key=lambda one: len(one.encode()) + len(dead.properties[one].encode()),
            default="",
        )
        if not name:
            break
        del dead.properties[name]
        dropped.append(name)
    return dropped


_NOTICE_INTERVAL_S: Final = 0.1
"""The least time between two rounds."""
_NOTICES_PER_S: Final = 2000
"""Of all groups, on average."""
NOTICES_AT_ONCE_MAX: Final = 500
"""How many are told before others get their turn."""


class Notices:
    """On the loop. ``links_of`` gives the consumers of a group that are to be told."""

    def __init__(self, links_of: Callable[[str], Iterable[ClientLink]]) -> None:
        self._links_of = links_of
        self._changed: dict[str, None] = {}  # in the order of their changes
        self._links: deque[ClientLink] = deque()  # the rest of one group
        self._group = ""
        """The group of ``_links``."""
        self._timer: asyncio.Handle | None = None

    def changed(self, group: str) -> None:
        """Tell this group's consumers: in the next turn of the loop, unless others were told just now."""
        self._changed[group] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_soon(self._tell)

    def close(self) -> None:
        """Tell nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        if not self._changed and not self._links:
            self._timer = None
            return
        told = 0
        while told < NOTICES_AT_ONCE_MAX and (self._links or self._changed):
            if not self._links:
                self._group = next(iter(self._changed))
                del self._changed[self._group]
                self._links.extend(self._links_of(self._group))
            while self._links and told < NOTICES_AT_ONCE_MAX:
                self._links.popleft().members_changed(self._group)
                told += 1
        self._timer = asyncio.get_running_loop().call_later(max(_NOTICE_INTERVAL_S, told / _NOTICES_PER_S), self._tell)


LOCK_S: Final = 60.0
"""RocketMQ's: a lock not renewed for this long is free."""
LOCKS_MAX: Final = 500_000
_FORGOTTEN: Final = 2
"""Expired locks that go for each one that is asked for, of the same owner and of all: faster than new ones come."""
_NAME_CHARS_MAX: Final = 1024


class _Lock(NamedTuple):
    client_id: str
    renewed_at: float
    owner: str
    """Whose share of the locks it takes up: an account, or an address."""


_Key = tuple[str, str, int]
"""Group, topic and queue."""


class QueueLocks:
    """On the loop. ``now`` in seconds; ``share_percent``: of all locks, what one owner may have."""

    def __init__(self, now: Callable[[], float], share_percent: int = 100) -> None:
        self._now = now
        self._share_max = max(1, LOCKS_MAX * share_percent // 100)
        self._locks: OrderedDict[_Key, _Lock] = OrderedDict()  # the one renewed last is the last
        self._owned: dict[str, OrderedDict[_Key, None]] = {}  # in the same order

    def lock(self, group: str, client_id: str, queues: Iterable[QueueKey], owner: str = "") -> tuple[QueueKey, ...]:
        """Lock or renew; returns what the client has locked now. Raises ``Refusal`` if there are too many."""
        queues = tuple(queues)
        names = {group, client_id, *(topic for topic, _ in queues)}
        if max(map(len, names)) > _NAME_CHARS_MAX:
            raise Refusal(RefusalKind.INVALID, f"a name has more than {_NAME_CHARS_MAX} characters")
        now, got = self._now(), []
        for queue in queues:
            self._forget(now, self._locks)
            self._forget(now, self._owned.get(owner, ()))
            key = group, *queue
            held = self._locks.get(key)
            if held is not None and held.client_id != client_id and now - held.renewed_at <= LOCK_S:
                continue
            if held is None or held.owner != owner:
                self._check_room(owner)
            self._put(key, _Lock(client_id, now, owner))
            got.append(queue)
        return tuple(got)

    def unlock(self, group: str, client_id: str, queues: Iterable[QueueKey]) -> None:
        """Unlock the client's queues."""
        for queue in queues:
            key = group, *queue
            held = self._locks.get(key)
            if held is not None and held.client_id == client_id:
                self._drop(key)

    def _check_room(self, owner: str) -> None:
        """Raises ``Refusal``."""
        if len(self._locks) >= LOCKS_MAX:
            raise Refusal(RefusalKind.TOO_MANY, f"{LOCKS_MAX} queues are locked, the most there may be")
        if len(self._owned.get(owner, ())) >= self._share_max:
            reason = f"{self._share_max} queues are locked by this client's account or address, the most it may"
            raise Refusal(RefusalKind.TOO_MANY, f"{reason} (account_share_percent)")

    def _forget(self, now: float, oldest: Iterable[_Key]) -> None:
        for key in tuple(islice(oldest, _FORGOTTEN)):
            if now - self._locks[key].renewed_at <= LOCK_S:
                return
            self._drop(key)

    def _put(self, key: _Key, lock: _Lock) -> None:
        if key in self._locks:
            self._drop(key)
        self._locks[key] = lock
        self._owned.setdefault(lock.owner, OrderedDict())[key] = None

    def _drop(self, key: _Key) -> None:
        owner = self._locks.pop(key).owner
        owned = self._owned[owner]
        del owned[key]
        if not owned:
            del self._owned[owner]


_TROUBLES_MAX: Final = 16
"""Groups with troubles that are conditions at a time: anybody may make groups, and a node has room for few."""
_TROUBLE_S: Final = 90.0
"""RocketMQ's clients send a heartbeat every 30 s."""
_KINDS: Final = {
    Trouble.SUBSCRIPTIONS: ConditionKind.DIFFERENT_SUBSCRIPTIONS,
    Trouble.CLIENT_ID: ConditionKind.SHARED_CLIENT_ID,
}
LOCKED_AT_ONCE: Final = 256
"""Queues that are locked, or unlocked, in one turn of the loop: 0.005 s."""
COMPLAINTS_MAX: Final = 64
"""The limit of groups named in logs because they have no retry topic: every heartbeat may name thousands."""


class Groups:
    """On the loop. Every node has its own members; queues are locked, and messages sent back, on the master."""

    def __init__(
        self,
        live: LiveConfig,
        state: BrokerState,
        mastership: Mastership,
        retries: Retries,
        news: TopicNews,
        changes: StateChanges,
        conditions: Conditions,
    ) -> None:
        """``news``: of topics, for a deleted group takes its retry topic along."""
        now, percent = asyncio.get_running_loop().time, live.now.access.account_share_percent
        self._state = state
        self._mastership = mastership
        self._news = news
        self._changes = changes
        self._conditions = conditions
        self._notices = Notices(self._links_to_tell)
        self._locks = QueueLocks(now, percent)
        self.retries: Final = retries
        self.clients: Final = ClientTables(now, self._notices.changed, percent, self._report)
        self._complaints: set[str] = set()
        self._troubles: dict[tuple[Trouble, str], float] = {}  # until when, in the loop's time

    async def join(self, link: ClientLink, owner: str, beat: Heartbeat) -> None:
        """Record a heartbeat, and make the retry topics of the groups it names.

        Raises ``Refusal``: the client may not be in so many groups, or in one that does not exist.
        """
        for data in beat.consumers:
            check_group(data.group)
        self.clients.heartbeat(link, beat, owner)
        if self._mastership.is_master:
            await self._make_retry_topics(owner, beat)

    async def _make_retry_topics(self, owner: str, beat: Heartbeat) -> None:
        """Consumers subscribe to them, and pull from them, before any message was sent back."""
        for data in beat.consumers:
            group = self.retries.group(data.group)
            if group.retry_queues and data.message_model is not MessageModel.BROADCASTING:
                try:
                    await self.retries.ensure_topic(retry_topic(group), owner)
                except Refusal as error:
                    if len(self._complaints) < COMPLAINTS_MAX and group.name not in self._complaints:
                        self._complaints.add(group.name)
                        _log.warning("no topic for what %s sends back: %s", group.name, error)

    async def lock(self, group: str, client_id: str, queues: Sequence[QueueKey], owner: str) -> list[QueueKey]:
        """Lock or renew; returns what the client has locked now. Raises ``Refusal``: this is no master, or there are
        too many.
        """
        got: list[QueueKey] = []
        for some in batched(queues):
            self._mastership.require()
            got += self._locks.lock(group, client_id, some, owner)
            await asyncio.sleep(0)
        return got

    async def unlock(self, group: str, client_id: str, queues: Sequence[QueueKey]) -> None:
        """Unlock the client's queues."""
        for some in batched(queues):
            self._locks.unlock(group, client_id, some)
            await asyncio.sleep(0)

    async def put(self, groups: Sequence[GroupConfig]) -> None:
        """Create or change groups. Raises ``Refusal``."""
        self._mastership.require()
        await self._changes.make(*[partial(self._state.put_group, one) for one in groups])

    async def delete(self, name: str, *, with_offsets: bool) -> bool:
        """Delete a group; returns whether it is gone. Raises ``Refusal``.

        A group exists as long as it has offsets, so without ``with_offsets`` it keeps them, and the default settings.
        Else what it has to try again and its dead letters are removed, too.
        """
        self._mastership.require()
        if not self._state.has_group(name) and all(one.group != name for one in self._state.request_modes()):
            return True
        if with_offsets or not self._state.offsets(name):
            await self._changes.make(partial(self._state.delete_group, name))
            self._news.tell()
            return True
        await self._changes.make(partial(self._state.put_group, GroupConfig(name)))
        return False

    async def set_request_mode(self, mode: TopicRequestMode) -> None:
        """Have a group's consumers pull a topic, or pop it. Raises ``Refusal``."""
        self._mastership.require()
        if mode.topic.startswith(RETRY_PREFIX):
            raise Refusal(RefusalKind.NOT_PERMITTED, "retry topic is not allowed to set mode: it is always pulled")
        await self._changes.make(partial(self._state.set_request_mode, mode))

    def hang_up_on_the_silent(self) -> None:
        """Close connections of clients without a recent heartbeat."""
        for link in self.clients.silent():
            link.close("it sent no heartbeat for too long")

    def close(self) -> None:
        """Tell nobody about others any more."""
        self._notices.close()

    def _report(self, trouble: Trouble, group: str, message: str) -> None:
        """A heartbeat shows what is wrong with a group's members: it holds until no heartbeat has shown it for long."""
        now = asyncio.get_running_loop().time()
        key = (trouble, group)
        self._troubles = {one: until for one, until in self._troubles.items() if until > now}
        if key in self._troubles or len(self._troubles) < _TROUBLES_MAX:
            self._troubles[key] = now + _TROUBLE_S
            self._conditions.set(_KINDS[trouble], message, subject=group, for_ms=round(_TROUBLE_S * 1000))

    def _links_to_tell(self, name: str) -> tuple[ClientLink, ...]:
        group = self.clients.consumers(name)
        if group is None or not self._state.group(name).notify_changes:
            return ()
        return tuple(group.clients)


def batched(queues: Iterable[QueueKey]) -> Iterable[tuple[QueueKey, ...]]:
    """Some at a time; at least once, perhaps none."""
    rest = iter(queues)
    yield tuple(islice(rest, LOCKED_AT_ONCE))
    while some := tuple(islice(rest, LOCKED_AT_ONCE)):
        yield some
