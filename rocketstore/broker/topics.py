"""The broker's topics: which queues clients may use, and topics that are created because somebody sends to them.

The messages of a topic can be read for a shorter time than the log keeps them (``retention``). All topics share the
log's files, so the messages stay there until the log's own retention removes them: it is the queues that begin later.
The master decides where, and writes it to the broker's state: every member, and every later master, lets them begin at
the same place, whatever its clock says. A retention that is raised or removed afterwards brings nothing back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.errors import DLedgerError, InvalidRequestError
from rocketstore.broker.mastership import Mastership, StateChanges
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker_config import PERMISSION_READ, PERMISSION_WRITE, BrokerConfig
from rocketstore.message.checks import check_client_topic
from rocketstore.message.message import DelayLevels
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.settings import LiveConfig
from rocketstore.state.attributes import TopicAttributes, format_retention
from rocketstore.state.broker_state import BrokerState
from rocketstore.state.changes import TopicConfig
from rocketstore.state.publisher import LimitReachedError
from rocketstore.store.message_store import MessageStore
from rocketstore.types import HALF_TOPIC, HIDDEN_TOPICS, SCHEDULE_TOPIC, MessageType, PutMessageStatus, PutResult

_CURSORS_MAX: Final = 65_536
"""Topics for which the round-robin position is remembered."""
FAILURES_MAX: Final = 1024
"""How many topics that could not be created are remembered, with the reason."""
_HOUR_MS: Final = 3_600_000
_ILLEGAL: Final = frozenset({PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED})
OWNERS_MAX: Final = 10_000
"""How many clients are remembered; beyond that, the least recently active one is forgotten."""
_DEFAULT_TOPIC: Final = "TBW102"
"""Producers look up the route of this topic if theirs is unknown: brokers that have it create topics."""
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT: Final = "OFFSET_MOVED_EVENT"
_REPLY_TOPIC_SUFFIX: Final = "REPLY_TOPIC"
_INHERIT: Final = 1
"""Permission bit: topics may be created from this one."""
_CLUSTER_QUEUES: Final = 16
_READ_WRITE: Final = 6


class SeenTopic(NamedTuple):
    """A topic as others see it: a stored one with what this broker permits of it, or one that every broker has."""

    name: str
    read_queues: int
    write_queues: int
    permission: int
    order: bool = False
    sys_flag: int = 0
    attributes: TopicAttributes = TopicAttributes()

    @property
    def message_type(self) -> MessageType:
        """The type of message that may be sent to it."""
        return self.attributes.message_type


class TopicNews:
    """Tells listeners of topics that were created, changed or deleted here. On the loop."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[], None], ...] = ()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it after every change."""
        self._listeners = (*self._listeners, listener)

    def tell(self) -> None:
        """A topic has changed."""
        for listener in self._listeners:
            listener()


class Topics:
    """Lives on the event loop."""

    def __init__(self, live: LiveConfig, state: BrokerState, mastership: Mastership, changes: StateChanges) -> None:
        self._live = live
        self._state = state
        self._mastership = mastership
        self._changes = changes
        config = live.now
        most = config.queues_max * config.access.account_share_percent // 100
        self._quota = CreationQuota("queues", "queues_max", most, lambda name: state.topic(name) is not None)
        self.find: Final[Callable[[str], TopicConfig | None]] = state.topic
        """The topic of this name, or None."""
        self.begin_offset: Final = state.begin_offset
        """A queue's first offset that does not belong to a deleted topic of the same name."""
        self.news: Final = TopicNews()
        self._cursors: dict[str, itertools.count[int]] = {}
        self._creating: dict[str, asyncio.Task[PutResult]] = {}
        self._not_created: dict[str, PutResult] = {}

    # -- what others see: on any thread --------------------------------------------------------------------------------

    def seen(self, name: str) -> SeenTopic | None:
        """A topic, stored or not; None if there is none for others."""
        stored = self.find(name) if name not in HIDDEN_TOPICS else None
        return self._seen(stored) if stored is not None else self._systems().get(name)

    def require_seen(self, name: str) -> SeenTopic:
        """The same. Raises ``Refusal``."""
        topic = self.seen(name)
        if topic is None:
            raise Refusal(RefusalKind.NO_TOPIC, f"topic[{name}] not exist")
        return topic

    def all_seen(self) -> dict[str, SeenTopic]:
        """All of them, by name."""
        stored = {one.name: self._seen(one) for one in self._state.topics() if one.name not in HIDDEN_TOPICS}
        return dict(sorted((self._systems() | stored).items()))

    def _systems(self) -> dict[str, SeenTopic]:
        found = system_topics(self._live.now).items()
        return {name: SeenTopic(name, one.queues, one.queues, one.permission) for name, one in found}

    def _seen(self, one: TopicConfig) -> SeenTopic:
        permission = one.permission & (self._live.now.broker_permission | _INHERIT)
        return SeenTopic(
            one.name, one.read_queues, one.write_queues, permission, one.order, one.sys_flag, one.attributes
        )

    # -- administration ------------------------------------------------------------------------------------------------

    async def put(self, topics: Sequence[TopicConfig]) -> None:
        """Create or change topics. Raises ``Refusal``: nothing was changed if one of them may not be."""
        self._mastership.require()
        for one in topics:
            self._check_name(one.name)
            self._check_retention(one)
        await self._changes.make(*[partial(self._state.put_topic, one) for one in topics])

    async def delete(self, name: str) -> bool:
        """Delete a topic; returns whether there was one. Raises ``Refusal``."""
        self._mastership.require()
        self._check_name(name)
        if self.find(name) is None:
            return False
        await self._changes.make(partial(self._state.delete_topic, name))
        return True

    def _check_retention(self, topic: TopicConfig) -> None:
        hours = self._live.now.store.file_reserved_time
        if topic.retention_ms > hours * _HOUR_MS:
            raise Refusal(
                RefusalKind.INVALID,
                f"retention {format_retention(topic.retention_ms)} of topic {topic.name}: the log, which all topics "
                f"share, keeps messages for {hours} h (fileReservedTime): give less, or raise the setting",
            )

    def _check_name(self, topic: str) -> None:
        problem = check_client_topic(topic)
        if not problem and topic in system_topics(self._live.now):
            problem = f"the topic {topic} is one of the system's: it can be neither changed nor deleted"
        if problem:
            raise Refusal(RefusalKind.INVALID, problem)

    # -- use -----------------------------------------------------------------------------------------------------------

    def write_problem(self, topic: TopicConfig, queue_id: int) -> str:
        """Why nothing may be sent to this queue (negative, as in RocketMQ: to any); empty if allowed."""
        if not self._live.now.broker_permission & PERMISSION_WRITE:
            return "this broker does not allow writes (brokerPermission)"
        if not topic.permission & PERMISSION_WRITE:
            return f"topic {topic.name} does not allow writes (permission {topic.permission})"
        if queue_id >= topic.write_queues:
            return (
                f"topic {topic.name} has {topic.write_queues} write queues, numbered from 0: there is no queue "
                f"{queue_id}"
            )
        return ""

    def next_queue(self, topic: TopicConfig) -> int:
        """The next queue in turn."""
        cursor = self._cursors.get(topic.name)
        if cursor is None:
            if len(self._cursors) >= _CURSORS_MAX:
                self._cursors.clear()
            cursor = self._cursors[topic.name] = itertools.count()
        return next(cursor) % topic.write_queues

    def check_readable(self, name: str, queue_id: int) -> None:
        """Raises ``Refusal`` unless it is readable."""
        topic = self.find(name) or self._delayed(name)
        if topic is None:
            raise Refusal(RefusalKind.NO_TOPIC, f"topic {name!r} does not exist")
        if not self._live.now.broker_permission & topic.permission & PERMISSION_READ:
            raise Refusal(RefusalKind.NOT_PERMITTED, f"topic {name} or this broker does not allow reads")
        # Queues removed from writing stay readable until `read_queues` is lowered.
        if not 0 <= queue_id < topic.read_queues:
            raise Refusal(
                RefusalKind.NO_QUEUE,
                f"topic {name} has {topic.read_queues} read queues, numbered from 0: there is no queue {queue_id}",
            )

    def _delayed(self, name: str) -> TopicConfig | None:
        """The topic in which delayed messages wait, a queue per level: administrators look at them."""
        found = system_topics(self._live.now).get(name) if name == SCHEDULE_TOPIC else None
        return None if found is None else TopicConfig(name, found.queues, found.queues, found.permission)

    def require(self, name: str) -> TopicConfig:
        """The topic. Raises ``Refusal`` if it does not exist."""
        topic = self.find(name)
        if topic is None:
            raise Refusal(RefusalKind.NO_TOPIC, f"topic {name!r} does not exist")
        return topic

    def may_be_seen(self, record: bytes, *, is_damaged_seen: bool = False) -> bool:
        """Whether a message is neither one of the broker's own, nor from a deleted topic of the same name."""
        try:
            message = decode_record(record, check_crc=False)
        except CorruptRecordError:  # its topic is unknown; access control, where it is on, decides
            return is_damaged_seen
        if message.topic in HIDDEN_TOPICS:
            return False
        return message.queue_offset >= self.begin_offset(message.topic, message.queue_id)

    # -- creation ------------------------------------------------------------------------------------------------------

    def may_create(self, name: str) -> bool:
        """Whether a send may create this topic here."""
        return self._live.now.auto_create_topic_enable and self._mastership.is_master and not check_client_topic(name)

    async def create(self, topic: TopicConfig, owner: str) -> PutResult:
        """Create a topic that ``owner`` did not ask for by name."""
        try:
            self._quota.take(owner, topic.name, topic.write_queues)
            result = await self._changes.outcome(partial(self._put, topic))
        except InvalidRequestError as error:
            return PutResult(PutMessageStatus.MESSAGE_ILLEGAL, outcome="not_applied", reason=str(error))
        self.news.tell()
        return result

    async def create_default(self, name: str, owner: str, queues_max: int = 0) -> None:
        """Create a topic because ``owner`` sent to it, of at most ``queues_max`` queues (0: the broker's default),
        unless that is under way; if it could not be, ``missing`` says why.
        """
        task = self._creating.get(name)
        if task is None:
            config = self._live.now
            default = config.default_topic_queue_nums
            queues = min(queues_max, default) if queues_max > 0 else default
            topic = TopicConfig(name, queues, queues, config.broker_permission)
            task = self._creating[name] = asyncio.ensure_future(self.create(topic, owner))
            task.add_done_callback(partial(self._created, name))
        await asyncio.shield(task)

    def missing(self, name: str) -> PutResult:
        """Why there is no such topic to send to."""
        problem = check_client_topic(name)
        if not problem and not self._live.now.auto_create_topic_enable:
            problem = (
                f"topic {name} does not exist, and sending does not create it (autoCreateTopicEnable=false): "
                "create it first"
            )
        failure = self._not_created.get(name)
        if not problem and failure is not None and failure.status in _ILLEGAL:
            problem = failure.reason
        if problem:
            return PutResult(PutMessageStatus.TOPIC_NOT_FOUND, outcome="not_applied", reason=problem)
        # Resending helps: the topic could not be created just now, or another broker has deleted it meanwhile.
        why = failure.reason if failure is not None else "it is being deleted"
        reason = f"cannot create topic {name}: {why}"
        return PutResult(PutMessageStatus.TOPIC_NOT_CREATED, outcome="not_applied", reason=reason)

    def _put(self, topic: TopicConfig, done: Callable[[PutResult], None]) -> None:
        self._state.put_topic(topic, done, automatic=True)

    def _created(self, name: str, task: asyncio.Task[PutResult]) -> None:
        self._creating.pop(name, None)
        self._not_created.pop(name, None)
        if not task.cancelled() and not task.result().ok:
            if len(self._not_created) >= FAILURES_MAX:
                self._not_created.clear()
            self._not_created[name] = task.result()


class CreationQuota:
    """Limits how many topics and groups, which persist, one client can create, to leave room for others.

    Counts only in this broker's memory, since its start; ``rocketstore.state.publisher`` has the limits on totals.

    Lives on the event loop. Only names for which ``exists`` is still true count.
    """

    def __init__(self, what: str, setting: str, most: int, exists: Callable[[str], bool]) -> None:
        self._what = what
        self._setting = setting
        self._most = max(1, most)
        self._exists = exists
        self._made: OrderedDict[str, dict[str, int]] = OrderedDict()

    def take(self, owner: str, name: str, amount: int) -> None:
        """Record that ``owner`` creates this now. Raises ``LimitReachedError``."""
        made = self._made.setdefault(owner, {})
        self._made.move_to_end(owner)
        if len(self._made) > OWNERS_MAX:
            self._made.popitem(last=False)
        if sum(made.values()) + amount > self._most:
            for gone in [one for one in made if one != name and not self._exists(one)]:
                del made[gone]
        have = sum(made.values()) - made.get(name, 0)
        if have + amount > self._most:
            raise LimitReachedError(
                f"{owner} has made {have} {self._what} since this broker started, the limit per account or "
                f"address is {self._most} ({self._setting}, account_share_percent): delete some, or raise the "
                "settings"
            )
        made[name] = amount


class SystemTopic(NamedTuple):
    """Topics that every broker has without storing them; a stored one of the same name takes precedence.

    How many queues it has, and RocketMQ's bits of its permission. Its name may be none that a client may use.
    """

    queues: int
    permission: int = _READ_WRITE


def system_topics(config: BrokerConfig) -> dict[str, SystemTopic]:
    levels = DelayLevels.parse(config.store.message_delay_level).level_max
    found = {
        SELF_TEST_TOPIC: SystemTopic(1),
        config.cluster_name: SystemTopic(_CLUSTER_QUEUES, _READ_WRITE | _INHERIT),
        config.name: SystemTopic(1, _READ_WRITE | _INHERIT),
        OFFSET_MOVED_EVENT: SystemTopic(1),
        SCHEDULE_TOPIC: SystemTopic(levels),
        HALF_TOPIC: SystemTopic(1),
        f"{config.cluster_name}_{_REPLY_TOPIC_SUFFIX}": SystemTopic(1),
    }
    if config.auto_create_topic_enable:
        found[_DEFAULT_TOPIC] = SystemTopic(config.default_topic_queue_nums, _READ_WRITE | _INHERIT)
    return found


def sendable_system_topic(config: BrokerConfig, name: str) -> TopicConfig | None:
    """Such a topic as it is stored once a message is sent to it; None if it is none, or not for clients."""
    one = None if check_client_topic(name) else system_topics(config).get(name)
    return None if one is None else TopicConfig(name, one.queues, one.queues, one.permission)


_ROUND_S: Final = 30.0
"""How often the begins are looked at, and so the longest time that a message can be read beyond its retention."""
_LOG: Final = logging.getLogger("rocketstore")


class TopicRetention:
    """On the loop, where ``start`` begins its task; ``close`` ends it."""

    def __init__(
        self,
        store: MessageStore,
        state: BrokerState,
        mastership: Mastership,
        changes: StateChanges,
        readers: ReadThreads,
        clock: Clock,
    ) -> None:
        self._store = store
        self._state = state
        self._mastership = mastership
        self._changes = changes
        self._readers = readers
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="topic retention")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """One round, on the master; elsewhere nothing."""
        for topic in self._state.topics():
            if not self._mastership.is_master:
                return
            if topic.retention_ms:
                await self._expire(topic)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_ROUND_S)
            try:
                await self.look()
            except (DLedgerError, Refusal) as error:  # the next round says it again
                _LOG.warning("messages of a topic that are past its retention can still be read: %s", error)

    async def _expire(self, topic: TopicConfig) -> None:
        """One change of the state at most for all queues of a topic."""
        before_ms = self._clock.wall_ms() - topic.retention_ms
        begins: list[tuple[int, int]] = []
        for queue_id in range(topic.queues):
            begin = await self._readers.run(self._store.offset_by_time, topic.name, queue_id, before_ms)
            now = max(self._state.begin_offset(topic.name, queue_id), self._store.min_offset(topic.name, queue_id))
            if begin > now:
                begins.append((queue_id, begin))
        if begins and self._state.topic(topic.name) == topic:  # neither deleted nor changed meanwhile
            await self._changes.make(partial(self._state.expire_messages, topic.name, begins))
