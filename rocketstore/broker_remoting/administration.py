"""Administration of topics and subscription groups: create, change, delete, list; and messages by key, by a producer's
unique id, and by position in the log.

All of it reads on few threads, changes only on the master, and has responses of limited size (``Administration``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, ParamSpec, TypeVar

from dledger.access.quota import HostQuota
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import FRAME_BYTES_MAX, Frame
from dledger.remoting.server import LITTLE, Answer, Handler
from rocketstore.broker.broker import Broker
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.topics import SeenTopic, system_topics
from rocketstore.message.message import DelayLevels
from rocketstore.remoting.groups import (
    ConsumerOffsetTable,
    DelayOffsetTable,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    SubscriptionGroupTable,
)
from rocketstore.remoting.headers import (
    DeleteGroupHeader,
    GroupConfigHeader,
    PutTopicHeader,
    QueryMessageAnswer,
    QueryMessageHeader,
    RouteHeader,
    TopicHeader,
    ViewMessageHeader,
    read_header,
    write_header,
)
from rocketstore.remoting.pop import RequestModesBody, SetRequestModeBody
from rocketstore.remoting.topics import (
    MASTER_ID,
    BrokerData,
    ClusterInfo,
    DataVersion,
    QueueData,
    TopicConfigData,
    TopicConfigList,
    TopicConfigTable,
    TopicList,
    TopicRouteData,
)
from rocketstore.state.attributes import (
    TopicAttributes,
    TopicRequestMode,
    body_of_policy,
    parse_changes,
    policy_of_body,
)
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.types import HIDDEN_TOPICS

READS_WAITING_MAX: Final = 256
"""Maximum reads of administrators waiting for a thread."""
REQUESTS_MAX: Final = 4 * READS_WAITING_MAX
"""Maximum requests of administrators in progress; some wait for clients for up to 10 s."""
_P = ParamSpec("_P")
_T = TypeVar("_T")
_BEGIN, _END = b'{"offsetTable":{', b"}}"


class Administration:
    """On the loop. It uses at most half of the read threads, so that pulls always find one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._room = asyncio.Semaphore(max(1, broker.config.read_threads // 2))
        self.waiting = 0
        """Reads that wait for a thread."""
        percent = broker.config.access.account_share_percent
        self._quota = HostQuota(REQUESTS_MAX, max(1, READS_WAITING_MAX * percent // 100))

    def shared(self, handler: Handler) -> Handler:
        """``handler``, for at most a host's share of these requests at once: other administrators also have some."""

        async def handle(connection: RemotingConnection, frame: Frame) -> Answer:
            host = connection.counted_as
            if not self._quota.has_room(host, little=connection.under_way <= LITTLE):
                reason = f"[OVERLOAD] {self._quota.of(host)} such requests of {host} are in progress, try again later"
                raise RequestError(reason, AnswerCode.SYSTEM_BUSY)
            self._quota.change(host, 1)
            try:
                return await handler(connection, frame)
            finally:
                self._quota.change(host, -1)

        return handle

    async def read(self, read: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The result of ``read``, which may be slow or wait for a disk. Raises ``RequestError`` if too many are
        waiting.
        """
        if self.waiting >= READS_WAITING_MAX:
            reason = f"[OVERLOAD] {self.waiting} requests of administrators wait already, try again later"
            raise RequestError(reason, AnswerCode.SYSTEM_BUSY)
        self.waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.waiting -= 1
        reading = asyncio.ensure_future(self._broker.loop.readers.run(read, *args, **kwargs))
        reading.add_done_callback(self._has_read)  # not sooner, even if nobody waits any more: the thread is busy
        return await asyncio.shield(reading)

    def _has_read(self, reading: asyncio.Future[_T]) -> None:
        self._room.release()
        if not reading.cancelled():
            reading.exception()  # taken note of, if nobody waits any more


class SlaveSource:
    """The tables that RocketMQ's slaves fetch besides topics and groups: offsets of groups, progress of delay levels.

    On the loop.
    """

    def __init__(self, broker: Broker, admin: Administration) -> None:
        self._broker = broker
        self._admin = admin

    async def offsets(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_CONSUMER_OFFSET."""
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._offsets))

    async def delays(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_DELAY_OFFSET."""
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._delays))

    def _offsets(self) -> bytes:
        """Group by group: to encode half a million offsets at once would hold up every other thread for a second."""
        pieces = [self._offsets_of(group) for group in self._broker.state.groups()]
        return _BEGIN + b",".join(piece for piece in pieces if piece) + _END

    def _offsets_of(self, group: str) -> bytes:
        table: dict[str, dict[int, int]] = {}
        for one in self._broker.state.offsets(group):
            table.setdefault(f"{one.topic}@{group}", {})[one.queue_id] = one.offset
        return ConsumerOffsetTable(table).encode().removeprefix(_BEGIN).removesuffix(_END)

    def _delays(self) -> bytes:
        levels = DelayLevels.parse(self._broker.config.store.message_delay_level).level_max
        delivered = {level: self._broker.state.delay_offset(level) for level in range(1, levels + 1)}
        return DelayOffsetTable({level: offset for level, offset in delivered.items() if offset}).encode()


SINGLE_TAG: Final = "SINGLE_TAG"


class TopicRequests:
    """On the loop. ``announce`` returns once the name servers know of a change, or after a short timeout."""

    def __init__(self, broker: Broker, admin: Administration, announce: Callable[[], Awaitable[None]]) -> None:
        self._broker = broker
        self._admin = admin
        self._announce = announce
        self._table = TopicTable(broker)

    async def put(self, _: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_AND_CREATE_TOPIC: clients look up the route right after the response."""
        header = read_header(PutTopicHeader, frame.fields)
        self._broker.mastership.require()
        topic = TopicConfigData(
            header.topic,
            header.read_queue_nums,
            header.write_queue_nums,
            header.perm,
            header.topic_filter_type,
            header.topic_sys_flag,
            header.order,
            parse_changes(header.attributes),
        )
        return await self._put(frame, [topic])

    async def put_all(self, _: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_AND_CREATE_TOPIC_LIST."""
        self._broker.mastership.require()
        wanted = await self._admin.read(TopicConfigList.decode, frame.body)
        return await self._put(frame, wanted.topic_config_list)

    async def one(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_TOPIC_CONFIG."""
        name = read_header(TopicHeader, frame.fields).topic
        return frame.answer(body=topic_data(self._broker.topics.require_seen(name)).encode())

    async def delete(self, _: RemotingConnection, frame: Frame) -> Frame:
        """DELETE_TOPIC_IN_BROKER: an unknown topic counts as deleted."""
        if await self._broker.topics.delete(read_header(TopicHeader, frame.fields).topic):
            await self._announce()
        return frame.answer()

    async def all(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_TOPIC_CONFIG."""
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(lambda: self._table.now().encode()))

    async def of_the_system(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_SYSTEM_TOPIC_LIST_FROM_BROKER."""
        return frame.answer(body=TopicList(tuple(sorted(system_topics(self._broker.config)))).encode())

    async def _put(self, frame: Frame, topics: Sequence[TopicConfigData]) -> Frame:
        await self._broker.topics.put([self._config_of(one) for one in topics])
        await self._announce()
        return frame.answer()

    def _config_of(self, wanted: TopicConfigData) -> TopicConfig:
        """Attributes that the request does not name stay as they are.

        Raises ``Refusal`` and ``InvalidRequestError``.
        """
        if wanted.topic_filter_type != SINGLE_TAG:
            why = f"topicFilterType {wanted.topic_filter_type[:64]!r} is not supported: use {SINGLE_TAG}"
            raise Refusal(RefusalKind.INVALID, why)
        now = self._broker.topics.find(wanted.topic_name)
        return TopicConfig(
            wanted.topic_name,
            wanted.read_queue_nums,
            wanted.write_queue_nums,
            wanted.perm,
            wanted.order,
            wanted.topic_sys_flag,
            *(TopicAttributes() if now is None else now.attributes).changed(wanted.attributes),
        )


def topic_data(topic: SeenTopic) -> TopicConfigData:
    """As brokers and tools exchange it."""
    name, read_queues, write_queues, permission, order, sys_flag, attributes = topic
    found = TopicConfigData(name, read_queues, write_queues, permission, topic_sys_flag=sys_flag, order=order)
    return dataclasses.replace(found, attributes=attributes.texts())


class TopicTable:
    """All topics visible to others, with a version that changes whenever they do."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()  # guards the last result
        self._last = TopicConfigTable()

    def now(self) -> TopicConfigTable:
        """The current table. Callable from any thread."""
        broker = self._broker
        with self._lock:
            table = {name: topic_data(one) for name, one in broker.topics.all_seen().items()}
            if table != self._last.topic_config_table:  # others only compare versions for equality
                version = DataVersion(self._last.data_version.counter + 1, broker.loop.clock.wall_ms())
                self._last = TopicConfigTable(version, table)
            return self._last


class Routes:
    """Routes to this broker's own group, for clients that have no name server: as one would answer them.

    On the loop. The master is whom this broker takes for it now; without one, broker id 0 is missing.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def of_topic(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ROUTEINFO_BY_TOPIC. Raises ``Refusal`` for a topic that does not exist."""
        topic = self._broker.topics.require_seen(read_header(RouteHeader, frame.fields).topic)
        group = self._group()
        queues = QueueData(group.broker_name, topic.read_queues, topic.write_queues, topic.permission, topic.sys_flag)
        return frame.answer(body=TopicRouteData((queues,), (group,)).encode())

    async def of_cluster(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_BROKER_CLUSTER_INFO."""
        group = self._group()
        info = ClusterInfo({group.broker_name: group}, {group.cluster: (group.broker_name,)})
        return frame.answer(body=info.encode())

    def _group(self) -> BrokerData:
        config, view = self._broker.config, self._broker.mastership.view()
        addresses = {MASTER_ID: view.leader_address} if view.leader_address else {}
        others = sorted((node, address) for node, address in view.members.items() if node not in view.learners)
        copies = [address for node, address in others if address and node != view.leader]
        addresses |= dict(enumerate(copies, MASTER_ID + 1))
        return BrokerData(config.cluster_name, config.name, addresses)


class GroupAdministration:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration) -> None:
        self._broker = broker
        self._admin = admin
        self._lock = threading.Lock()  # guards the last list: lists are made on several threads
        self._listed: dict[str, SubscriptionGroupConfig] = {}
        self._version = DataVersion()

    async def put(self, _: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP."""
        self._broker.mastership.require()
        await self._broker.groups.put([_config_of(SubscriptionGroupConfig.decode(frame.body))])
        return frame.answer()

    async def put_all(self, _: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST."""
        self._broker.mastership.require()
        wanted = await self._admin.read(SubscriptionGroupList.decode, frame.body)
        await self._broker.groups.put([_config_of(one) for one in wanted.group_config_list])
        return frame.answer()

    async def one(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_SUBSCRIPTIONGROUP_CONFIG: where any group may consume, one that does not exist has the defaults."""
        name = read_header(GroupConfigHeader, frame.fields).group
        return frame.answer(body=_data_of(self._broker.groups.retries.group(name)).encode())

    async def delete(self, _: RemotingConnection, frame: Frame) -> Frame:
        """DELETE_SUBSCRIPTIONGROUP: an unknown group counts as deleted."""
        header = read_header(DeleteGroupHeader, frame.fields)
        with_offsets = header.remove_offset or header.clean_offset
        if await self._broker.groups.delete(header.group_name, with_offsets=with_offsets):
            return frame.answer()
        kept = f"the offsets of {header.group_name} stay, and so does the group, with the default settings"
        return frame.answer(remark=kept)

    async def all(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._encoded))

    async def set_request_mode(self, _: RemotingConnection, frame: Frame) -> Frame:
        """SET_MESSAGE_REQUEST_MODE."""
        self._broker.mastership.require()
        wanted = SetRequestModeBody.decode(frame.body)
        mode = TopicRequestMode(wanted.topic, wanted.consumer_group, wanted.mode, wanted.pop_share_queue_num)
        await self._broker.groups.set_request_mode(mode)
        return frame.answer()

    async def request_modes(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_MESSAGE_REQUEST_MODE."""
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._encoded_modes))

    def _encoded_modes(self) -> bytes:
        found: dict[str, dict[str, SetRequestModeBody]] = {}
        for one in self._broker.state.request_modes():
            found.setdefault(one.topic, {})[one.group] = SetRequestModeBody(
                one.topic, one.group, one.mode, one.share_queues
            )
        return RequestModesBody(found).encode()

    def _encoded(self) -> bytes:
        state = self._broker.state
        with self._lock:
            table = {name: _data_of(state.group(name)) for name in state.groups()}
            if table != self._listed:  # others only compare versions for equality
                self._listed = table
                self._version = DataVersion(self._version.counter + 1, self._broker.loop.clock.wall_ms())
            listed = SubscriptionGroupTable(self._version, table)
        return listed.encode()


def _config_of(data: SubscriptionGroupConfig) -> GroupConfig:
    return GroupConfig(
        data.group_name,
        data.consume_enable,
        data.consume_from_min_enable,
        data.consume_broadcast_enable,
        data.retry_queue_nums,
        data.retry_max_times,
        data.broker_id,
        data.which_broker_when_consume_slowly,
        data.notify_consumer_ids_changed_enable,
        data.consume_message_orderly,
        policy_of_body(data.group_retry_policy),
    )


def _data_of(group: GroupConfig) -> SubscriptionGroupConfig:
    return SubscriptionGroupConfig(
        group.name,
        group.consume_enable,
        group.consume_from_min_enable,
        group.consume_broadcast_enable,
        group.retry_queues,
        group.retry_times_max,
        group.broker_id,
        group.broker_id_when_slow,
        group.notify_changes,
        group.ordered,
        body_of_policy(group.retry_policy),
    )


UNIQUE_FIELD: Final = "_UNIQUE_KEY_QUERY"


"""Marks the key as a producer's unique id; not part of any header class."""


ANSWER_BYTES_MAX: Final = FRAME_BYTES_MAX - (64 << 10)


"""For the records of one response; the rest is for its header."""


class Queries:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration) -> None:
        self._broker = broker
        self._admin = admin

    async def by_key(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_MESSAGE: the newest messages, as many as fit; clients compare the keys themselves."""
        header = read_header(QueryMessageHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        unique = frame.fields.get(UNIQUE_FIELD, "").lower() == "true"
        found, fields = await self._admin.read(self._find, header, unique)
        if not found:
            reason = "can not find message, maybe time range not correct"
            raise RequestError(reason, AnswerCode.QUERY_NOT_FOUND)
        return frame.answer(fields=fields, body=b"".join(found))

    async def by_offset(self, _: RemotingConnection, frame: Frame) -> Frame:
        """VIEW_MESSAGE_BY_ID: clients extract the offset from the id."""
        header = read_header(ViewMessageHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        record = await self._admin.read(self.record_at, header.offset)
        if record is None:
            raise RequestError(f"can not find message by the offset, {header.offset}")
        return frame.answer(body=record)

    def record_at(self, offset: int) -> bytes | None:
        """The message at an untrusted offset, if clients may see it. May wait for a disk."""
        record = self._broker.store.read_record(offset) if offset >= 0 else None
        return record if record is not None and self._broker.topics.may_be_seen(record) else None

    def _find(self, header: QueryMessageHeader, unique: bool) -> tuple[list[bytes], dict[str, str]]:
        broker, found = self._broker, list[bytes]()
        if header.topic not in HIDDEN_TOPICS and header.max_num > 0:
            found = broker.store.query(
                header.topic,
                header.key,
                header.max_num,
                header.begin_timestamp,
                header.end_timestamp,
                unique=unique,
                max_bytes=min(broker.config.pull_bytes_max, ANSWER_BYTES_MAX),
            )
        end = broker.store.index_end()
        fields = write_header(QueryMessageAnswer(end.store_ms, end.offset))
        return [record for record in found if self._broker.topics.may_be_seen(record)], fields
