"""Groups, who is in them, and their offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dledger.errors import ConfigError
from dledger.remoting.codes import RequestError
from rocketstore.client.aio.admin_answers import body_of
from rocketstore.client.aio.admin_records import ConsumeMode, GroupInfo, GroupMembers, QueueProgress
from rocketstore.client.aio.admin_requests import AdminRequests, Start, all_of, those_there
from rocketstore.client.aio.cluster import at_once
from rocketstore.client.aio.connections import Deadline
from rocketstore.client.aio.errors import BadAnswerError, BrokerFailedError, NotFoundError, RequestNotKnownError
from rocketstore.message.checks import check_group_name
from rocketstore.remoting.bodies.clients import (
    ClientConnection,
    ConsumerConnectionList,
    ProducerConnectionList,
    ProducerInfo,
    ProducersByGroup,
)
from rocketstore.remoting.bodies.groups import GroupList, SubscriptionGroupConfig, SubscriptionGroupTable
from rocketstore.remoting.bodies.pop import RequestModesBody, SetRequestModeBody
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.bodies.stats import ConsumeStats, ConsumeTimeSpans
from rocketstore.remoting.body import Body
from rocketstore.remoting.codes import OwnCode
from rocketstore.remoting.codes import RequestCode as Code
from rocketstore.remoting.group_offsets import CommitPosition, decode_reached
from rocketstore.remoting.headers import (
    ConsumeStatsHeader,
    ConsumeTimeSpanHeader,
    DeleteGroupHeader,
    GroupHeader,
    ProducerGroupHeader,
    ResetClientOffsetHeader,
    UpdateOffsetHeader,
)
from rocketstore.state.attributes import body_of_policy, policy_of_body

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
