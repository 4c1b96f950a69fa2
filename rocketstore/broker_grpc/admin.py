"""Queries, offsets, topics and groups: requests and responses as bytes, on the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Final

from dledger.errors import InvalidRequestError
from dledger.values import parse_address
from rocketstore.broker.broker import Broker
from rocketstore.broker.creation_quota import CreationQuota
from rocketstore.broker.hosts import host_text
from rocketstore.broker.positions import COMMITTED_AT_ONCE, LogPositions
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker_grpc.codec import parse
from rocketstore.broker_grpc.delayed import DelayedMessages
from rocketstore.broker_grpc.newest import NewestMessages
from rocketstore.broker_grpc.surveys import Surveys
from rocketstore.message.checks import check_client_topic
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import HostAddress
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import TopicConfig, check_group
from rocketstore.types import HIDDEN_TOPICS

QUERY_MESSAGES_MAX: Final = 256
_FOREVER_MS: Final = 1 << 60


AdminHandler = Callable[[bytes, str], Awaitable[bytes]]
"""Receives the request and its owner: the account's name, or the address."""


class AdminService:
    """Every node answers reads, the master makes changes. Handlers raise the errors that ``refusals`` maps."""

    def __init__(self, broker: Broker, positions: LogPositions) -> None:
        self._broker = broker
        self._store = store = broker.store
        self._state = state = broker.state
        self._topics = topics = broker.topics
        self._readers = readers = broker.loop.readers
        self._mastership = broker.mastership
        self._changes = broker.changes
        config = broker.config
        most = config.groups_max * config.access.account_share_percent // 100
        self._made_groups = CreationQuota("groups", "groups_max", most, state.has_group)
        self._positions = positions
        self._delayed = DelayedMessages(config, store, state, readers)
        self._surveys = Surveys(store, state, topics, readers)
        self._newest = NewestMessages(store, topics, readers, self._surveys)

    def handlers(self) -> dict[str, AdminHandler]:
        """Handlers by method name."""
        return {
            "Newest": _of_anybody(self._newest.answer),
            "QueryById": _of_anybody(self._query_by_id),
            "QueryByKey": _of_anybody(self._query_by_key),
            "QueueRange": _of_anybody(self._queue_range),
            "TopicRanges": _of_anybody(self._surveys.topic_ranges),
            "OffsetByTime": _of_anybody(self._offset_by_time),
            "CommitOffsets": self._commit_offsets,
            "CommitPosition": self._commit_position,
            "FetchOffsets": _of_anybody(self._fetch_offsets),
            "GroupOffsets": _of_anybody(self._surveys.group_offsets),
            "PutTopic": _of_anybody(self._put_topic),
            "DeleteTopic": _of_anybody(self._delete_topic),
            "DeleteGroup": _of_anybody(self._delete_group),
            "ListTopics": _of_anybody(self._list_topics),
            "ListGroups": _of_anybody(self._list_groups),
            "Delayed": _of_anybody(self._delayed.answer),
        }

    # -- queries ---------------------------------------------------------------------------------------------------

    async def _query_by_id(self, data: bytes) -> bytes:
        message_id = parse(pb.QueryByIdRequest, data).message_id
        host, offset = parse_offset_message_id(message_id)
        record = await self._readers.run(self._store.read_record, offset)
        found = [] if record is None else self._visible([record])
        if found:
            self._check_is_ours(message_id, host, found[0])
        return _records(found)

    async def _query_by_key(self, data: bytes) -> bytes:
        wire = parse(pb.QueryByKeyRequest, data)
        if wire.max_messages < 0 or wire.begin_ms < 0 or wire.end_ms < 0:
            raise InvalidRequestError("max_messages, begin_ms and end_ms must not be negative")
        self._topics.require(wire.topic)
        found = await self._readers.run(
            self._store.query,
            wire.topic,
            wire.key,
            min(wire.max_messages or self._broker.config.store.default_query_max_num, QUERY_MESSAGES_MAX),
            wire.begin_ms,
            wire.end_ms or _FOREVER_MS,  # clocks may have been ahead of ours
            unique=wire.unique,
            max_bytes=self._broker.config.pull_bytes_max,
        )
        return _records(self._visible(found))

    async def _queue_range(self, data: bytes) -> bytes:
        wire = parse(pb.QueueRequest, data)
        self._topics.check_readable(wire.topic, wire.queue_id)
        found = await self._readers.run(self._surveys.range_of, wire.topic, wire.queue_id)
        return found.SerializeToString()

    async def _offset_by_time(self, data: bytes) -> bytes:
        wire = parse(pb.OffsetByTimeRequest, data)
        self._topics.check_readable(wire.topic, wire.queue_id)
        offset = await self._readers.run(self._store.offset_by_time, wire.topic, wire.queue_id, wire.timestamp_ms)
        offset = max(offset, self._topics.begin_offset(wire.topic, wire.queue_id))
        return pb.OffsetResponse(offset=offset).SerializeToString()

    # -- state -----------------------------------------------------------------------------------------------------

    async def _commit_offsets(self, data: bytes, owner: str) -> bytes:
        wire = parse(pb.CommitOffsetsRequest, data)
        self._mastership.require()
        self._take_group(owner, wire.group)
        incarnation = self._store.incarnation
        if wire.incarnation in (0, incarnation):
            offsets = [(one.topic, one.queue_id, one.offset) for one in wire.offsets]
            await self._changes.make(lambda done: self._state.commit_offsets(wire.group, offsets, wire.reset, done))
        return pb.CommitOffsetsResponse(incarnation=incarnation).SerializeToString()

    async def _commit_position(self, data: bytes, owner: str) -> bytes:
        wire = parse(pb.CommitPositionRequest, data)
        if wire.index < 0 or wire.position < 0:
            raise InvalidRequestError("index and position must not be negative")
        self._mastership.require()
        self._take_group(owner, wire.group)
        match wire.WhichOneof("before"):
            case "index":
                reached = await self._readers.run(self._positions.of_index, wire.index, wire.topics)
            case "position":
                reached = await self._readers.run(self._positions.of_position, wire.position, wire.topics)
            case _:
                raise InvalidRequestError("give the index or the position of the first unconsumed entry")
        noted = {(one.topic, one.queue_id): one.offset for one in self._state.offsets(wire.group)}
        news = [one for one in reached.offsets if one.offset > noted.get((one.topic, one.queue_id), -1)]
        for start in range(0, len(news), COMMITTED_AT_ONCE):
            some = news[start : start + COMMITTED_AT_ONCE]
            await self._changes.make(lambda done, some=some: self._state.commit_offsets(wire.group, some, False, done))  # type: ignore[misc]
        offsets = [pb.ConsumerOffset(topic=topic, queue_id=queue, offset=at) for topic, queue, at in reached.offsets]
        return pb.CommitPositionResponse(position=reached.position, offsets=offsets).SerializeToString()

    async def _fetch_offsets(self, data: bytes) -> bytes:
        wire = parse(pb.FetchOffsetsRequest, data)
        found = self._state.offsets(wire.group, wire.topic)
        return pb.FetchOffsetsResponse(
            offsets=[pb.ConsumerOffset(topic=topic, queue_id=queue, offset=offset) for topic, queue, offset in found],
            incarnation=self._store.incarnation,
        ).SerializeToString()

    async def _put_topic(self, data: bytes) -> bytes:
        wire = parse(pb.PutTopicRequest, data).topic
        _check_not_ours(wire.name)
        default = self._broker.config.default_topic_queue_nums
        topic = TopicConfig(
            wire.name,
            wire.read_queues or default,
            wire.write_queues or default,
            wire.permission if wire.HasField("permission") else self._broker.config.broker_permission,
        )
        self._mastership.require()
        await self._changes.make(lambda done: self._state.put_topic(topic, done))
        self._topics.news.tell()
        return pb.PutTopicResponse().SerializeToString()

    async def _delete_topic(self, data: bytes) -> bytes:
        name = parse(pb.DeleteTopicRequest, data).name
        _check_not_ours(name)
        self._mastership.require()
        self._topics.require(name)
        await self._changes.make(lambda done: self._state.delete_topic(name, done))
        self._topics.news.tell()
        return pb.DeleteTopicResponse().SerializeToString()

    async def _delete_group(self, data: bytes) -> bytes:
        name = parse(pb.DeleteGroupRequest, data).name
        self._mastership.require()
        if not self._state.has_group(name):
            raise Refusal(RefusalKind.NO_GROUP, f"group {name!r} does not exist")
        await self._changes.make(lambda done: self._state.delete_group(name, done))
        self._topics.news.tell()
        return pb.DeleteGroupResponse().SerializeToString()

    async def _list_topics(self, data: bytes) -> bytes:
        parse(pb.ListTopicsRequest, data)
        topics = [
            pb.Topic(
                name=one.name, read_queues=one.read_queues, write_queues=one.write_queues, permission=one.permission
            )
            for one in self._state.topics()
            if one.name not in HIDDEN_TOPICS
        ]
        return pb.ListTopicsResponse(topics=topics).SerializeToString()

    async def _list_groups(self, data: bytes) -> bytes:
        parse(pb.ListGroupsRequest, data)
        return pb.ListGroupsResponse(groups=self._state.groups()).SerializeToString()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take_group(self, owner: str, group: str) -> None:
        """Raises ``LimitReachedError`` if the group would be new, and exceed this client's limit."""
        if not self._state.has_group(group):
            check_group(group)
            self._made_groups.take(owner, group, 1)

    def _visible(self, records: Sequence[bytes]) -> list[bytes]:
        """Those that clients may see; a forged id may point to any."""
        return [one for one in records if self._topics.may_be_seen(one, is_damaged_seen=True)]

    def _hosts(self) -> frozenset[HostAddress] | None:
        """As records name them: this broker's and its group's; None if one has a name instead of an address."""
        try:
            places = [parse_address(one) for one in self._mastership.view().members.values() if one]
            return frozenset(
                {self._broker.store_host, *(HostAddress(ip_address(host).packed, port) for host, port in places)}
            )
        except ValueError:
            return None

    def _check_is_ours(self, message_id: str, host: HostAddress, record: bytes) -> None:
        """An id names a broker and a place in its log. A record there says which broker stored it; what was stored once
        although it was sent twice, to two masters of a group, may be known by either.
        """
        try:
            stored_by = decode_record(record, check_crc=False).store_host
        except CorruptRecordError:
            return
        known = self._hosts()
        if host != stored_by and known is not None and host not in known:
            raise Refusal(
                RefusalKind.NO_MESSAGE,
                f"message {message_id} is one of the broker at {host_text(host)}: ask that one. At this place of this "
                f"broker's log is another message, stored by {host_text(stored_by)}",
            )


def _of_anybody(handler: Callable[[bytes], Awaitable[bytes]]) -> AdminHandler:
    """Wrap a handler that does not depend on the caller."""
    return lambda data, _owner: handler(data)


def _check_not_ours(topic: str) -> None:
    problem = check_client_topic(topic)
    if problem:
        raise InvalidRequestError(problem)


def _records(records: Sequence[bytes]) -> bytes:
    return pb.RecordsResponse(records=records).SerializeToString()
