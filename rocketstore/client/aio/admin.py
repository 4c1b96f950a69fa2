"""``Admin``: topics, groups, offsets, brokers and single messages, for tools and operators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, TypeVar

from dledger.errors import ConfigError
from dledger.records import record
from dledger.remoting.codes import AnswerCode
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.admin_answers import body_of, broker_of, decoded, header_of, parsed_id, settings_of
from rocketstore.client.aio.admin_records import (
    BrokerStatus,
    DelayLevelStatus,
    GroupInfo,
    GroupMembers,
    QueuePart,
    QueueProgress,
    QueueRange,
    TopicInfo,
)
from rocketstore.client.aio.cluster import Cluster, at_once
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, Deadline
from rocketstore.client.aio.consumed_message import split_pulled
from rocketstore.client.aio.delayed import read_levels
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerFailedError,
    ClientError,
    ForbiddenError,
    MessageRefusedError,
    NotFoundError,
    refusal_of,
)
from rocketstore.client.aio.newest import PAGE_MAX, Page, QueueSpan, read_page, span_of
from rocketstore.client.aio.outgoing import CREATING_TOPIC
from rocketstore.client.aio.received import sent_expression, tags_of_expression
from rocketstore.client.aio.routes import RoutedBroker
from rocketstore.message.checks import check_client_topic, check_group_name
from rocketstore.message.message import Message
from rocketstore.remoting.bodies.clients import (
    ClientConnection,
    ConsumerConnectionList,
    ProducerConnectionList,
    ProducerInfo,
    ProducersByGroup,
)
from rocketstore.remoting.bodies.groups import (
    GroupList,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
)
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.bodies.routes import KVTable, TopicList
from rocketstore.remoting.bodies.runtime import RuntimeInfo
from rocketstore.remoting.bodies.stats import ConsumeStats, TopicStatsTable
from rocketstore.remoting.bodies.topics import TopicConfigTable
from rocketstore.remoting.body import Body
from rocketstore.remoting.codes import OwnCode
from rocketstore.remoting.codes import RequestCode as Code
from rocketstore.remoting.group_offsets import CommitPosition, decode_reached
from rocketstore.remoting.headers import (
    BrokerNameHeader,
    ConsumeStatsHeader,
    GroupHeader,
    OffsetAnswer,
    OffsetByTimeHeader,
    ProducerGroupHeader,
    PullAnswer,
    PullHeader,
    PutTopicHeader,
    QueryMessageHeader,
    QueueHeader,
    ResetClientOffsetHeader,
    ResumeCheckHeader,
    SendBackHeader,
    TopicHeader,
    UpdateOffsetHeader,
    ViewMessageHeader,
    write_header,
)
from rocketstore.types import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dledger.client.security import ClientSecurity

TIMEOUT_S: Final = 5.0
Start = Literal["first", "last"] | int
"""Where to begin: the first message, after the last one, or the first one stored at a time (ms since 1970) or later.

RocketMQ 4's brokers answer a time with the nearest message, also an older one.
"""
QUERIED_MAX: Final = 64
"""Messages of one query by key, from each broker."""
_TOOLS_GROUP: Final = "TOOLS_CONSUMER"
"""The group in whose name RocketMQ's tools read; every broker has it."""
_SUBSCRIPTION_FLAG: Final = 0x4
"""Of a pull: it brings its own subscription."""
_UNIQUE_QUERY: Final = "_UNIQUE_KEY_QUERY"
FOREVER_MS: Final = (1 << 63) - 1
_B = TypeVar("_B", bound=Body)
_T = TypeVar("_T")
_NOTHING_THERE: Final = frozenset(
    {AnswerCode.PULL_NOT_FOUND, AnswerCode.PULL_RETRY_IMMEDIATELY, AnswerCode.PULL_OFFSET_MOVED}
)


class Admin:
    """Administers a group of brokers, or all brokers that name servers know.

    Give either ``addresses`` of brokers of this project, or ``name_servers``, which works with Apache RocketMQ's
    brokers, too. Every call has ``timeout_s``, and is repeated until then as long as that may help; changes go to
    masters, and reads to a copy while there is none. Where a method takes ``broker`` (a name), an empty one means all
    of them.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str | None = None,
        *,
        name_servers: Sequence[str] | str | None = None,
        timeout_s: float = TIMEOUT_S,
        security: ClientSecurity | None = None,
    ) -> None:
        self._cluster = Cluster(addresses, name_servers, timeout_s=timeout_s, security=security)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._cluster.close()

    # -- brokers -------------------------------------------------------------------------------------------------------

    async def brokers(self) -> tuple[RoutedBroker, ...]:
        """All brokers, by name: their cluster, and their addresses by broker id (0 is the master)."""
        return await self._named("", self._deadline())

    async def status(self, address: str) -> BrokerStatus:
        """The runtime information of one broker (GET_BROKER_RUNTIME_INFO)."""
        return await self._status(address, self._deadline())

    async def statuses(self) -> dict[str, BrokerStatus | ClientError]:
        """Every broker's status by address, or why it does not tell. Raises ``ClientError`` if there are no brokers."""
        deadline = self._deadline()
        addresses = [address for one in await self._named("", deadline) for address in one.readable]
        found = await asyncio.gather(*(self._status(one, deadline) for one in addresses), return_exceptions=True)
        statuses: dict[str, BrokerStatus | ClientError] = {}
        for address, one in zip(addresses, found, strict=True):
            if not isinstance(one, BrokerStatus | ClientError):
                raise one
            statuses[address] = one
        return statuses

    async def topics_at(self, address: str) -> list[str]:
        """The topics that one broker knows, whatever its role."""
        deadline = self._deadline()

        async def attempt() -> Frame:
            return await self._ask(address, Code.GET_ALL_TOPIC_CONFIG, deadline)

        answer = await self._cluster.repeat(attempt, deadline, harmless=True)
        return sorted(body_of(TopicConfigTable, answer, address).topic_config_table)

    async def read_at(
        self, address: str, topic: str, queue_id: int, offset: int, *, max_messages: int = 1000
    ) -> QueuePart:
        """The part of a queue at one broker from ``offset`` on, whatever its role: to compare copies.

        Waits until it knows what is committed. Raises ``NotFoundError`` for a topic that it does not know.
        """
        deadline = self._deadline()
        header = PullHeader(
            _TOOLS_GROUP, topic, queue_id, offset, max_messages, _SUBSCRIPTION_FLAG, 0, 0, 0, "*", "TAG"
        )
        request = Frame(Code.PULL_MESSAGE, 0, write_header(header))

        async def attempt() -> Frame:
            timeout_s = min(ATTEMPT_S_MAX, deadline.remaining_s)
            answer = await self._cluster.connections.call(address, request, timeout_s)
            if answer.code != AnswerCode.SUCCESS and answer.code not in _NOTHING_THERE:
                raise refusal_of(answer, address)
            return answer

        answer = await self._cluster.repeat(attempt, deadline, harmless=True)
        told = header_of(PullAnswer, answer)
        records = answer.body if answer.code == AnswerCode.SUCCESS else b""
        messages = split_pulled(records, MessageQueue(topic, "", queue_id))
        return QueuePart(tuple(messages), told.next_begin_offset, told.min_offset, told.max_offset)

    async def broker_config(self, address: str) -> dict[str, str]:
        """One broker's settings by RocketMQ's names."""
        return settings_of(await self._ask(address, Code.GET_BROKER_CONFIG, self._deadline()), address)

    async def set_broker_config(self, address: str, settings: Mapping[str, str]) -> None:
        """Change settings of a running broker; brokers of this project forget them at their next start."""
        body = "".join(f"{name}={value}\n" for name, value in settings.items()).encode()
        await self._ask(address, Code.UPDATE_BROKER_CONFIG, self._deadline(), None, body)

    async def set_write_permission(self, broker: str, *, allowed: bool) -> None:
        """Take the topics of a broker out of producers' routes at every name server, or put them back."""
        code = Code.ADD_WRITE_PERM_OF_BROKER if allowed else Code.WIPE_WRITE_PERM_OF_BROKER
        await self._at_name_servers(code, BrokerNameHeader(broker))

    # -- topics --------------------------------------------------------------------------------------------------------

    async def topics(self, *, system: bool = False) -> list[TopicInfo]:
        """Every topic at every broker, by name; ``system``: those that every broker has, too."""
        deadline = self._deadline()
        tables = await self._read_all("", Code.GET_ALL_TOPIC_CONFIG, TopicConfigTable, deadline)
        hidden: set[str] = set()
        if not system:
            lists = await self._read_all("", Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, TopicList, deadline)
            hidden = {name for one in lists.values() for name in one.topic_list} | {CREATING_TOPIC}
        found = [
            TopicInfo(name, one.read_queue_nums, one.write_queue_nums, one.perm, broker)
            for broker, table in tables.items()
            for name, one in table.topic_config_table.items()
            if name not in hidden
        ]
        return sorted(found, key=lambda one: (one.name, one.broker))

    async def topic(self, name: str) -> list[TopicInfo]:
        """One topic, at every broker that has it, as routes tell. Raises ``NotFoundError``."""
        route = await self._cluster.route(name, self._deadline())
        return [TopicInfo(name, one.read_queues, one.write_queues, one.permission, one.broker) for one in route.parts]

    async def put_topic(self, topic: TopicInfo) -> None:
        """Create a topic, or change its numbers of queues and its permission; at all brokers unless it names one."""
        if problem := check_client_topic(topic.name):
            raise ConfigError([problem])
        header = PutTopicHeader(
            topic.name,
            CREATING_TOPIC,
            topic.read_queues,
            topic.write_queues,
            topic.permission,
            "SINGLE_TAG",
            False,
        )
        await self._change(topic.broker, Code.UPDATE_AND_CREATE_TOPIC, header)
        self._cluster.routes.now_exists(topic.name)

    async def delete_topic(self, name: str, broker: str = "") -> None:
        """Delete a topic and its messages, at all brokers and name servers, or at one. Raises ``NotFoundError``."""
        deadline = self._deadline()
        await self._cluster.route(name, deadline)
        await self._change(broker, Code.DELETE_TOPIC_IN_BROKER, TopicHeader(name), deadline=deadline)
        if self._cluster.by_name_servers and not broker:
            await self._at_name_servers(Code.DELETE_TOPIC_IN_NAMESRV, TopicHeader(name))

    async def queue_ranges(self, topic: str) -> list[QueueRange]:
        """The offsets of all the topic's queues, also of those that may only be read. Raises ``NotFoundError``."""
        return await self._ranges(topic, self._deadline())

    async def topic_ranges(self, topics: Iterable[str]) -> dict[str, list[QueueRange]]:
        """``queue_ranges`` of many topics, without those that do not exist or that this account may not read."""
        return await _those_there({name: self.queue_ranges(name) for name in topics})

    async def offset_at(self, queue: MessageQueue, start: Start) -> int:
        """A queue's first offset, its end, or the offset of the first message stored at a time or later."""
        return await self._offset_at(queue, start, self._deadline())

    # -- groups --------------------------------------------------------------------------------------------------------

    async def groups(self) -> list[GroupInfo]:
        """The settings of every consumer group at every broker, by name."""
        code = Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        tables = await self._read_all("", code, SubscriptionGroupTable, self._deadline())
        found = [
            GroupInfo(name, one.retry_max_times, one.consume_enable, one.consume_broadcast_enable, broker)
            for broker, table in tables.items()
            for name, one in table.subscription_group_table.items()
        ]
        return sorted(found, key=lambda one: (one.name, one.broker))

    async def put_group(self, group: GroupInfo) -> None:
        """Create a consumer group, or change its settings; at all brokers unless it names one."""
        if problem := check_group_name(group.name):
            raise ConfigError([problem])
        config = SubscriptionGroupConfig(
            group.name,
            consume_enable=group.is_enabled,
            consume_broadcast_enable=group.may_broadcast,
            retry_max_times=group.retries_max,
        )
        await self._change(group.broker, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, config.encode())

    async def delete_group(self, name: str, broker: str = "", *, with_offsets: bool = True) -> None:
        """Delete a consumer group at all brokers, or at one; its consumers should be stopped.

        Without ``with_offsets`` a group made anew under this name goes on where this one was.
        """
        header = _DeleteGroup(name, with_offsets, with_offsets)
        await self._change(broker, Code.DELETE_SUBSCRIPTIONGROUP, header)

    async def groups_of_topic(self, topic: str) -> list[str]:
        """The consumer groups that have read a topic. Raises ``NotFoundError``."""
        found = await self._of_topic(topic, Code.QUERY_TOPIC_CONSUME_BY_WHO, GroupList, self._deadline())
        return sorted({name for one in found.values() for name in one.group_list})

    async def members(self, group: str) -> GroupMembers:
        """The consumers of a group that are online, and their subscriptions. Raises ``NotFoundError`` if nobody is."""
        header, code = GroupHeader(group), Code.GET_CONSUMER_CONNECTION_LIST
        found = await self._known_to_some(group, code, header, ConsumerConnectionList)
        clients = {one.client_id: one for each in found for one in each.connection_set}
        topics = {name: one.sub_string for each in found for name, one in each.subscription_table.items()}
        first = found[0]
        return GroupMembers(
            tuple(clients[name] for name in sorted(clients)),
            dict(sorted(topics.items())),
            first.message_model,
            first.consume_from_where,
        )

    async def producers(self, group: str) -> tuple[ClientConnection, ...]:
        """The producers of a group that are online. Raises ``NotFoundError`` if nobody is."""
        header, code = ProducerGroupHeader(group), Code.GET_PRODUCER_CONNECTION_LIST
        found = await self._known_to_some(group, code, header, ProducerConnectionList)
        clients = {one.client_id: one for each in found for one in each.connection_set}
        return tuple(clients[name] for name in sorted(clients))

    async def all_producers(self) -> dict[str, tuple[ProducerInfo, ...]]:
        """The producers that are online, by group."""
        tables = await self._read_all("", Code.GET_ALL_PRODUCER_INFO, ProducersByGroup, self._deadline())
        found: dict[str, dict[str, ProducerInfo]] = {}
        for table in tables.values():
            for group, producers in table.data.items():
                found.setdefault(group, {}).update({one.client_id: one for one in producers})
        return {group: tuple(found[group].values()) for group in sorted(found)}

    # -- offsets -------------------------------------------------------------------------------------------------------

    async def progress(self, group: str, topic: str = "") -> list[QueueProgress]:
        """A group's progress in every queue of its topics (or of one). Raises ``NotFoundError`` if it has none."""
        header = ConsumeStatsHeader(group, topic)
        found = await self._known_to_some(group, Code.GET_CONSUME_STATS, header, ConsumeStats)
        rows = [
            QueueProgress(queue, one.consumer_offset, one.broker_offset, one.last_timestamp)
            for each in found
            for queue, one in each.offset_table.items()
            if topic in ("", queue.topic)
        ]
        if not rows:
            raise NotFoundError(f"group {group} has no offsets" + (f" in topic {topic}" if topic else ""))
        return sorted(rows, key=lambda one: (one.queue.topic, one.queue.broker_name, one.queue.queue_id))

    async def progress_of(self, groups: Iterable[str]) -> dict[str, list[QueueProgress]]:
        """``progress`` of many groups, without those that have none or that this account may not use."""
        return await _those_there({name: self.progress(name) for name in groups})

    async def offsets(self, group: str, topic: str = "") -> dict[MessageQueue, int]:
        """A group's committed offsets. Raises ``NotFoundError`` if it has none."""
        return {one.queue: one.committed for one in await self.progress(group, topic)}

    async def lag(self, group: str, topic: str = "") -> int:
        """How many messages a group has yet to consume. Raises ``NotFoundError`` if it has no offsets."""
        return sum(one.lag for one in await self.progress(group, topic))

    async def set_offsets(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Commit offsets for a group, forwards or backwards; its consumers should be stopped."""
        await self._set_offsets(group, offsets, self._deadline())

    async def commit_position(
        self, group: str, position: int, topics: Sequence[str], broker: str = ""
    ) -> dict[MessageQueue, int]:
        """Record that a group which reads a broker's log itself has consumed everything of these topics before a
        position in it, so that its lag is visible; of our brokers only.

        Returns the offsets that this means; none moves back. Messages that are not in their queues yet are left for the
        next call. Raises ``NotFoundError`` for an unknown topic.
        """
        if not topics:
            return {}
        deadline = self._deadline()
        name = (await self._cluster.broker(broker, deadline)).name
        body = CommitPosition(group, position, topics).encode()
        answer = await self._cluster.ask_master(name, OwnCode.COMMIT_POSITION, body=body, deadline=deadline)
        try:
            reached = decode_reached(answer.body)
        except RequestError as error:
            raise BadAnswerError(f"brokers {name} answered with offsets that cannot be read: {error}") from error
        return {MessageQueue(topic, name, queue_id): offset for topic, queue_id, offset in reached}

    async def reset_offsets(self, group: str, topic: str, start: Start) -> dict[MessageQueue, int]:
        """Move a group's offsets in a topic, forwards or backwards; returns where each queue is then.

        Consumers that are online are told by their brokers, and go there at once.
        """
        deadline = self._deadline()
        queues = (await self._cluster.route(topic, deadline)).readable
        places = await at_once(self._offset_at(one, start, deadline) for one in queues)
        offsets = dict(zip(queues, places, strict=True))
        at = {"first": 0, "last": -1}.get(start, start) if isinstance(start, str) else start
        header = ResetClientOffsetHeader(topic, group, int(at), True)
        for broker in {one.broker_name for one in queues}:
            try:
                code = Code.INVOKE_BROKER_TO_RESET_OFFSET
                await self._cluster.ask_master(broker, code, header, deadline=deadline)
            except (NotFoundError, BrokerFailedError):  # nobody is online, or the group has no offsets there
                pass
        await self._set_offsets(group, offsets, deadline)
        return offsets

    # -- messages ------------------------------------------------------------------------------------------------------

    async def message_by_id(self, offset_id: str, broker: str = "") -> Message:
        """The message with this id (``SendResult.offset_id``). Raises ``NotFoundError``.

        ``broker``: the one to ask; otherwise the one whose address the id names.
        """
        host, offset = parsed_id(offset_id)
        deadline = self._deadline()
        broker = broker or broker_of(host, await self._named("", deadline))
        header = ViewMessageHeader(offset)
        try:
            answer = await self._cluster.ask_reader(broker, Code.VIEW_MESSAGE_BY_ID, header, deadline=deadline)
        except BrokerFailedError as error:  # RocketMQ has no other code for it
            raise NotFoundError(f"no message with id {offset_id}: {error}") from error
        message = next(iter(decoded(answer.body)), None)
        if message is None or message.store_host != host:
            raise NotFoundError(f"no message with id {offset_id}")
        return message

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 32,
        begin_ms: int = 0,
        end_ms: int = FOREVER_MS,
        unique: bool = False,
        broker: str = "",
    ) -> list[Message]:
        """Messages with this key stored between two times, oldest first. Raises ``NotFoundError`` for no such topic.

        ``unique``: with this ``message_id``, which their producer gave them.
        """
        deadline = self._deadline()
        header = QueryMessageHeader(topic, key, min(max_messages, QUERIED_MAX), begin_ms, end_ms)
        request = Frame(Code.QUERY_MESSAGE, 0, write_header(header) | {_UNIQUE_QUERY: str(unique).lower()})
        route = await self._cluster.route(topic, deadline)
        found: list[Message] = []
        for name in [one.broker for one in route.parts if broker in ("", one.broker)]:
            answer = await self._call_reader(name, request, deadline)
            if answer.code == AnswerCode.SUCCESS:
                found += decoded(answer.body)
            elif answer.code != AnswerCode.QUERY_NOT_FOUND:
                raise refusal_of(answer, name)
        found = [one for one in found if (one.unique_key == key if unique else key in one.keys)]  # not only its hash
        return sorted(found, key=lambda one: one.store_timestamp)[:max_messages]

    async def messages(
        self, queue: MessageQueue, offset: int, *, max_messages: int = 32, tags: str = "*"
    ) -> tuple[list[Message], int]:
        """Messages of a queue from ``offset`` on, for no group, and the offset for the next call.

        No messages and the same offset: there is nothing more. ``tags``: only messages with these (``A || B``). Raises
        ``ConfigError`` for an expression without any tag.
        """
        return await self._messages(queue, offset, max_messages, tags, self._deadline())

    async def newest(
        self,
        topic: str,
        ends: Mapping[MessageQueue, int] | None = None,
        *,
        max_messages: int = 32,
        queue: MessageQueue | None = None,
        stored: tuple[int, int] = (0, 0),
        oldest_first: bool = False,
    ) -> Page:
        """A topic's messages from the newest one backwards, or from the oldest one on: a page of at most 100 and 1 MiB.

        Across its queues, or of one, as far as they may be read; of those ``stored`` at the first time or later, and
        before the second one (0: no limit). ``ends`` of a page give the page after it. Raises ``NotFoundError``,
        ``ForbiddenError`` if the topic may not be read, and ``MessageRefusedError`` for a ``max_messages`` over 100.
        """
        if not 0 < max_messages <= PAGE_MAX:
            raise MessageRefusedError(f"max_messages is {max_messages}: a page has 1 to {PAGE_MAX} messages")
        deadline = self._deadline()
        readable = frozenset((await self._cluster.route(topic, deadline)).readable)
        if not readable:
            raise ForbiddenError(f"topic {topic} does not allow reads")
        if queue is not None and queue not in readable:
            raise NotFoundError(f"topic {topic} has no queue {queue.queue_id} that can be read")
        there = await self._ranges(topic, deadline) if queue is None else [await self._range_of(queue, deadline)]
        spans = await at_once(
            self._span(one, ends or {}, stored, deadline, oldest_first=oldest_first)
            for one in there
            if one.queue in readable
        )

        async def pull(one: MessageQueue, offset: int, count: int) -> tuple[list[Message], int]:
            return await self._messages(one, offset, count, "*", deadline)

        return await read_page(spans, pull, max_messages)

    async def delayed(
        self, level: int = 0, offset: int = -1, *, max_messages: int = 32, broker: str = ""
    ) -> tuple[list[DelayLevelStatus], list[Message]]:
        """Every delay level of a broker, and messages that wait at one, from ``offset`` on (-1: the next ones).

        They are as stored: the topic and queue that they are for are properties. Needs an administrator's account.
        Raises ``NotFoundError`` for a level that the broker does not have.
        """
        deadline = self._deadline()
        name = (await self._cluster.broker(broker, deadline)).name
        ask = partial(self._cluster.ask_reader, name, deadline=deadline)

        async def pull(number: int, first: int, count: int) -> list[Message]:
            queue = MessageQueue(SCHEDULE_TOPIC, name, number - 1)
            return (await self._messages(queue, first, count, "*", deadline))[0]

        levels = await read_levels(name, ask, pull)
        if not 0 <= level <= len(levels):
            raise NotFoundError(f"there is no delay level {level}: use 1 to {len(levels)}, or 0 for no messages")
        if not level or (first := max(levels[level - 1].next_offset, offset)) >= levels[level - 1].end_offset:
            return levels, []
        return levels, await pull(level, first, max_messages)

    async def send_back(
        self, group: str, topic: str, position: int, *, delay_level: int, retries_max: int, broker: str = ""
    ) -> None:
        """Have the message of ``topic`` at this ``position`` of a broker's log (``Message.offset``) delivered to a
        group again after a delay.

        One that was delivered ``retries_max`` times goes to the group's dead letters. An answer that got lost may lead
        to a second copy. Raises ``NotFoundError``.
        """
        header = SendBackHeader(position, group, delay_level, origin_topic=topic, max_reconsume_times=retries_max)
        await self._cluster.ask_master(
            broker, Code.CONSUMER_SEND_MSG_BACK, header, deadline=self._deadline(), harmless=False
        )

    async def resume_transaction(self, offset_id: str, broker: str = "") -> None:
        """Begin a transaction again that was given up: its producers are asked again what became of it.

        ``offset_id`` is that of its message in the topic TRANS_CHECK_MAX_TIME_TOPIC. Raises ``NotFoundError`` for any
        other message, and for one that was resumed before.
        """
        host, _ = parsed_id(offset_id)
        deadline = self._deadline()
        broker = broker or broker_of(host, await self._named("", deadline))
        header, code = ResumeCheckHeader(offset_id), Code.RESUME_CHECK_HALF_MESSAGE
        try:
            await self._cluster.ask_master(broker, code, header, deadline=deadline, harmless=False)
        except BrokerFailedError as error:  # RocketMQ has no other code for it
            raise NotFoundError(f"no transaction that was given up has the id {offset_id}: {error}") from error

    # -- inside --------------------------------------------------------------------------------------------------------

    def _deadline(self) -> Deadline:
        self._cluster.check()
        return self._cluster.deadline()

    async def _named(self, name: str, deadline: Deadline) -> tuple[RoutedBroker, ...]:
        """The brokers of a name; all for an empty one."""
        cluster = self._cluster
        if name:
            return (await cluster.broker(name, deadline),)
        return await cluster.repeat(lambda: cluster.brokers(deadline), deadline, harmless=True)

    async def _ask(
        self,
        address: str,
        code: int,
        deadline: Deadline,
        header: DataclassInstance | None = None,
        body: bytes = b"",
    ) -> Frame:
        """The successful answer of the server at this address."""
        timeout_s = min(ATTEMPT_S_MAX, deadline.remaining_s)
        return await self._cluster.connections.ask(address, code, header, body, timeout_s=timeout_s)

    async def _status(self, address: str, deadline: Deadline) -> BrokerStatus:
        answer = await self._ask(address, Code.GET_BROKER_RUNTIME_INFO, deadline)
        try:
            return BrokerStatus(address, RuntimeInfo.decode(answer.body), KVTable.decode(answer.body).table)
        except RequestError as error:
            raise BadAnswerError(f"{address} answered with a status that cannot be read: {error}") from error

    async def _change(
        self,
        broker: str,
        code: int,
        header: DataclassInstance | None,
        body: bytes = b"",
        *,
        deadline: Deadline | None = None,
    ) -> None:
        """At the masters of all brokers, or of one name. If some fail, the others are changed all the same."""
        deadline = deadline or self._deadline()
        names = [one.name for one in await self._named(broker, deadline)]
        asked = (self._cluster.ask_master(one, code, header, body, deadline=deadline) for one in names)
        await _all_of(await asyncio.gather(*asked, return_exceptions=True))

    async def _at_name_servers(self, code: int, header: DataclassInstance) -> None:
        if not self._cluster.by_name_servers:
            raise ConfigError(["this is a request to name servers: give name_servers=…"])
        deadline = self._deadline()
        asked = (self._ask(one, code, deadline, header) for one in self._cluster.given)
        await _all_of(await asyncio.gather(*asked, return_exceptions=True))

    async def _read_all(self, broker: str, code: int, kind: type[_B], deadline: Deadline) -> dict[str, _B]:
        """The body of each broker's answer, by name."""
        names = [one.name for one in await self._named(broker, deadline)]
        answers = await asyncio.gather(*(self._cluster.ask_reader(one, code, deadline=deadline) for one in names))
        return {name: body_of(kind, answer, name) for name, answer in zip(names, answers, strict=True)}

    async def _of_topic(self, topic: str, code: int, kind: type[_B], deadline: Deadline) -> dict[str, _B]:
        """The body of the answer of each broker that has a topic. Raises ``NotFoundError``."""
        names = [one.broker for one in (await self._cluster.route(topic, deadline)).parts]
        header = TopicHeader(topic)
        asked = (self._cluster.ask_reader(one, code, header, deadline=deadline) for one in names)
        answers = await asyncio.gather(*asked)
        return {name: body_of(kind, answer, name) for name, answer in zip(names, answers, strict=True)}

    async def _known_to_some(self, group: str, code: int, header: DataclassInstance, kind: type[_B]) -> list[_B]:
        """The bodies of brokers that know a group. Raises ``NotFoundError`` if none does, and any other error."""
        deadline = self._deadline()
        names = [one.name for one in await self._named("", deadline)]
        asked = (self._cluster.ask_reader(one, code, header, deadline=deadline) for one in names)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found: list[_B] = []
        missing: NotFoundError | None = None
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, NotFoundError | BrokerFailedError):  # RocketMQ's code for an unknown producer group
                missing = NotFoundError(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(body_of(kind, answer, name))
        if not found:
            raise missing or NotFoundError(f"no broker knows group {group}")
        return found

    async def _call_reader(self, broker: str, request: Frame, deadline: Deadline) -> Frame:
        """The answer of a broker's master, or without one of a copy, whatever its code."""
        addresses = (await self._cluster.broker(broker, deadline)).readable
        failure: ClientError | None = None
        for address in addresses:
            timeout_s = min(ATTEMPT_S_MAX, deadline.remaining_s)
            try:
                return await self._cluster.connections.call(address, request, timeout_s)
            except ClientError as error:
                failure = error
        raise failure or NotFoundError(f"brokers {broker} have no address now")

    async def _messages(
        self, queue: MessageQueue, offset: int, count: int, tags: str, deadline: Deadline
    ) -> tuple[list[Message], int]:
        wanted, told = tags_of_expression(tags), sent_expression(tags)
        header = PullHeader(
            _TOOLS_GROUP, queue.topic, queue.queue_id, offset, count, _SUBSCRIPTION_FLAG, 0, 0, 0, told, "TAG"
        )
        request = Frame(Code.PULL_MESSAGE, 0, write_header(header))
        answer = await self._call_reader(queue.broker_name, request, deadline)
        more = answer.code == AnswerCode.SUCCESS
        if not more and answer.code not in _NOTHING_THERE:
            raise refusal_of(answer, queue.broker_name)
        next_offset = header_of(PullAnswer, answer).next_begin_offset
        found = decoded(answer.body) if more else []
        # Brokers compare the tags' hash codes.
        return [one for one in found if wanted is None or one.tags in wanted], next_offset

    async def _span(
        self,
        there: QueueRange,
        ends: Mapping[MessageQueue, int],
        stored: tuple[int, int],
        deadline: Deadline,
        *,
        oldest_first: bool,
    ) -> QueueSpan:
        """The messages of a queue that are still to come."""
        low, high = there.min_offset, there.max_offset
        since_ms, before_ms = stored
        if since_ms and low < high:
            low = max(low, await self._offset_at(there.queue, since_ms, deadline))
        if before_ms and low < high:
            high = min(high, await self._offset_at(there.queue, before_ms, deadline))
        return span_of(there.queue, min(low, high), high, ends, oldest_first=oldest_first)

    async def _offset_at(self, queue: MessageQueue, start: Start, deadline: Deadline) -> int:
        header: DataclassInstance = QueueHeader(queue.topic, queue.queue_id)
        code = Code.GET_MAX_OFFSET if start == "last" else Code.GET_MIN_OFFSET
        if isinstance(start, int):
            header, code = OffsetByTimeHeader(queue.topic, queue.queue_id, start), Code.SEARCH_OFFSET_BY_TIMESTAMP
        answer = await self._cluster.ask_reader(queue.broker_name, code, header, deadline=deadline)
        return max(header_of(OffsetAnswer, answer).offset, 0)

    async def _ranges(self, topic: str, deadline: Deadline) -> list[QueueRange]:
        found = {
            queue: QueueRange(queue, one.min_offset, one.max_offset, one.last_update_timestamp)
            for table in (await self._of_topic(topic, Code.GET_TOPIC_STATS_INFO, TopicStatsTable, deadline)).values()
            for queue, one in table.offset_table.items()
        }
        # Brokers tell of those that may be written.
        others = [one for one in (await self._cluster.route(topic, deadline)).readable if one not in found]
        for one in await at_once(self._range_of(queue, deadline) for queue in others):
            found[one.queue] = one
        return sorted(found.values(), key=lambda one: (one.queue.broker_name, one.queue.queue_id))

    async def _range_of(self, queue: MessageQueue, deadline: Deadline) -> QueueRange:
        first, last = await self._offset_at(queue, "first", deadline), await self._offset_at(queue, "last", deadline)
        return QueueRange(queue, first, max(first, last), 0)

    async def _set_offsets(self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline) -> None:
        await at_once(
            self._cluster.ask_master(
                queue.broker_name,
                Code.UPDATE_CONSUMER_OFFSET,
                UpdateOffsetHeader(group, queue.topic, queue.queue_id, offset),
                deadline=deadline,
            )
            for queue, offset in offsets.items()
        )


@record(frozen=True, slots=True)
class _DeleteGroup:
    """DELETE_SUBSCRIPTIONGROUP with the names of both releases: RocketMQ 5 calls the second field ``cleanOffset``."""

    group_name: str
    remove_offset: bool = False
    clean_offset: bool = False


async def _those_there(asked: Mapping[str, Awaitable[_T]]) -> dict[str, _T]:
    """The results by name, without those that do not exist or are not this account's."""

    async def found(one: Awaitable[_T]) -> _T | None:
        try:
            return await one
        except (NotFoundError, ForbiddenError):
            return None

    results = await at_once(map(found, asked.values()))
    return {name: one for name, one in zip(asked, results, strict=True) if one is not None}


async def _all_of(outcomes: Iterable[object]) -> None:
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
