"""``Admin``: topics, groups, their members and offsets, brokers and single messages, for tools and operators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from dledger.errors import ConfigError
from dledger.remoting.codes import RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.admin_messages import MessageAdmin
from rocketstore.client.aio.admin_requests import (
    AdminRequests,
    BrokerStatus,
    ConsumeMode,
    GroupInfo,
    GroupMembers,
    QueueProgress,
    QueueRange,
    Start,
    TopicInfo,
    all_of,
    body_of,
    settings_of,
    those_there,
)
from rocketstore.client.aio.cluster import Cluster, at_once
from rocketstore.client.aio.connections import Deadline
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerFailedError,
    ClientError,
    NotFoundError,
    RequestNotKnownError,
)
from rocketstore.client.aio.outgoing import CREATING_TOPIC
from rocketstore.client.aio.routes import RoutedBroker
from rocketstore.message.checks import check_client_topic, check_group_name
from rocketstore.remoting.body import Body
from rocketstore.remoting.codes import OwnCode
from rocketstore.remoting.codes import RequestCode as Code
from rocketstore.remoting.extensions import CommitPosition, decode_reached
from rocketstore.remoting.groups import (
    ClientConnection,
    ConsumerConnectionList,
    ConsumeStats,
    ConsumeTimeSpans,
    GroupList,
    ProducerConnectionList,
    ProducerInfo,
    ProducersByGroup,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
)
from rocketstore.remoting.headers import (
    BrokerNameHeader,
    ConsumeStatsHeader,
    ConsumeTimeSpanHeader,
    DeleteGroupHeader,
    GroupHeader,
    ProducerGroupHeader,
    PutTopicHeader,
    ResetClientOffsetHeader,
    TopicHeader,
    UpdateOffsetHeader,
)
from rocketstore.remoting.pop import RequestModesBody, SetRequestModeBody
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import KVTable, MessageQueue, TopicConfigData, TopicConfigTable, TopicList
from rocketstore.state.attributes import MESSAGE_TYPE, RETENTION, body_of_policy, policy_of_body

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dledger.client.shared import ClientSecurity

_B = TypeVar("_B", bound=Body)


class GroupAdmin(AdminRequests):
    """The part of ``Admin`` that is about groups."""

    async def groups(self) -> list[GroupInfo]:
        """The settings of every consumer group at every broker, by name."""
        code = Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        tables = await self._read_all("", code, SubscriptionGroupTable, self._deadline())
        found = [
            GroupInfo(
                name,
                one.retry_max_times,
                one.consume_enable,
                one.consume_broadcast_enable,
                broker,
                one.consume_message_orderly,
                policy_of_body(one.group_retry_policy) or "levels",
            )
            for broker, table in tables.items()
            for name, one in table.subscription_group_table.items()
        ]
        return sorted(found, key=lambda one: (one.name, one.broker))

    async def put_group(self, group: GroupInfo) -> None:
        """Create a consumer group, or change the settings that are given; at all brokers unless it names one.

        If somebody else changes other settings of it at the same time, those may be lost.
        """
        if problem := check_group_name(group.name):
            raise ConfigError([problem])
        deadline = self._deadline()
        names = [one.name for one in await self._named(group.broker, deadline)]
        outcomes = await asyncio.gather(*(self._put_at(one, group, deadline) for one in names), return_exceptions=True)
        await all_of(outcomes)

    async def _put_at(self, broker: str, group: GroupInfo, deadline: Deadline) -> None:
        ask, code = self._cluster.ask_master, Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG  # the one that RocketMQ 4 knows
        table = body_of(SubscriptionGroupTable, await ask(broker, code, None, deadline=deadline), broker)
        before = table.subscription_group_table.get(group.name) or SubscriptionGroupConfig(group.name)
        delays = before.group_retry_policy
        if group.retry_delays is not None:
            delays = None if group.retry_delays == "levels" else body_of_policy(group.retry_delays)
        config = replace(
            before,
            consume_enable=before.consume_enable if group.is_enabled is None else group.is_enabled,
            consume_broadcast_enable=(
                before.consume_broadcast_enable if group.may_broadcast is None else group.may_broadcast
            ),
            retry_max_times=before.retry_max_times if group.retries_max is None else group.retries_max,
            consume_message_orderly=before.consume_message_orderly if group.is_ordered is None else group.is_ordered,
            group_retry_policy=delays,
        )
        put = Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await ask(broker, put, None, config.encode(), deadline=deadline)

    async def consume_modes(self) -> list[ConsumeMode]:
        """Those that were set, of every broker, by topic and group; brokers of RocketMQ 4 have none."""
        deadline = self._deadline()
        tables: dict[str, RequestModesBody] = {}
        for name in [one.name for one in await self._named("", deadline)]:
            with suppress(RequestNotKnownError):
                code = Code.GET_ALL_MESSAGE_REQUEST_MODE
                tables[name] = body_of(
                    RequestModesBody, await self._cluster.ask_reader(name, code, deadline=deadline), name
                )
        found = [
            ConsumeMode(topic, group, one.mode, max(one.pop_share_queue_num, 0), broker)
            for broker, table in tables.items()
            for topic, groups in table.message_request_mode_map.items()
            for group, one in groups.items()
        ]
        return sorted(found, key=lambda one: (one.topic, one.group, one.broker))

    async def set_consume_mode(self, mode: ConsumeMode) -> None:
        """Have a group's consumers pull a topic or pop it, as ``mqadmin setConsumeMode``."""
        body = SetRequestModeBody(mode.topic, mode.group, mode.mode, mode.share_queues).encode()
        await self._change(mode.broker, Code.SET_MESSAGE_REQUEST_MODE, None, body)

    async def delete_group(self, name: str, broker: str = "", *, with_offsets: bool = True) -> None:
        """Delete a consumer group at all brokers, or at one; its consumers should be stopped.

        Without ``with_offsets`` a group made anew under this name goes on where this one was.
        """
        header = DeleteGroupHeader(name, with_offsets, with_offsets)
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

    async def ages(self, group: str, topic: str) -> dict[MessageQueue, int]:
        """By queue of a topic, how long (ms) the next message that the group consumes has been stored; 0: it has
        consumed all. Raises ``NotFoundError``.
        """
        header = ConsumeTimeSpanHeader(topic, group)
        found = await self._known_to_some(group, Code.QUERY_CONSUME_TIME_SPAN, header, ConsumeTimeSpans)
        return {one.message_queue: max(one.delay_time, 0) for each in found for one in each.consume_time_span_set}

    async def progress_of(self, groups: Iterable[str]) -> dict[str, list[QueueProgress]]:
        """``progress`` of many groups, without those that have none or that this account may not use."""
        return await those_there(groups, self.progress)

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

    # -- inside --------------------------------------------------------------------------------------------------------

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


NO_RETENTION: Final = "log"
"""A topic's retention that is the log's."""


class TopicAdmin(AdminRequests):
    """The part of ``Admin`` that is about topics."""

    async def topics(self, *, system: bool = False) -> list[TopicInfo]:
        """Every topic at every broker, by name; ``system``: those that every broker has, too."""
        deadline = self._deadline()
        tables = await self._read_all("", Code.GET_ALL_TOPIC_CONFIG, TopicConfigTable, deadline)
        hidden: set[str] = set()
        if not system:
            lists = await self._read_all("", Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, TopicList, deadline)
            hidden = {name for one in lists.values() for name in one.topic_list} | {CREATING_TOPIC}
        found = [
            _info(one, broker)
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
        """Create a topic, or change its numbers of queues, its permission, its type and its retention; at all brokers
        unless it names one. RocketMQ 4 knows neither of the last two.
        """
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
            attributes=",".join(_changes(topic)),
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
        return await those_there(topics, self.queue_ranges)

    async def offset_at(self, queue: MessageQueue, start: Start) -> int:
        """A queue's first offset, its end, or the offset of the first message stored at a time or later."""
        return await self._offset_at(queue, start, self._deadline())


def _info(one: TopicConfigData, broker: str) -> TopicInfo:
    told = one.attributes.get(MESSAGE_TYPE, ""), one.attributes.get(RETENTION, "")
    return TopicInfo(one.topic_name, one.read_queue_nums, one.write_queue_nums, one.perm, broker, *told)


def _changes(topic: TopicInfo) -> Iterator[str]:
    if topic.message_type:
        yield f"+{MESSAGE_TYPE}={topic.message_type}"
    if topic.retention:
        yield f"-{RETENTION}" if topic.retention == NO_RETENTION else f"+{RETENTION}={topic.retention}"


TIMEOUT_S: Final = 5.0


class Admin(TopicAdmin, GroupAdmin, MessageAdmin):
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
        super().__init__(Cluster(addresses, name_servers, timeout_s=timeout_s, security=security))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._cluster.close()

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

    async def _status(self, address: str, deadline: Deadline) -> BrokerStatus:
        # No other broker can tell it: a slow one may take all the time that the call has.
        connections, code = self._cluster.connections, Code.GET_BROKER_RUNTIME_INFO
        answer = await connections.ask(address, code, None, b"", timeout_s=deadline.remaining_s)
        try:
            return BrokerStatus(address, RuntimeInfo.decode(answer.body), KVTable.decode(answer.body).table)
        except RequestError as error:
            raise BadAnswerError(f"{address} answered with a status that cannot be read: {error}") from error
