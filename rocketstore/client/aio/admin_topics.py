"""Topics and their queues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dledger.errors import ConfigError
from rocketstore.client.aio.admin_records import QueueRange, TopicInfo
from rocketstore.client.aio.admin_requests import AdminRequests, Start, those_there
from rocketstore.client.aio.outgoing import CREATING_TOPIC
from rocketstore.message.checks import check_client_topic
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.bodies.routes import TopicList
from rocketstore.remoting.bodies.topics import TopicConfigData, TopicConfigTable
from rocketstore.remoting.codes import RequestCode as Code
from rocketstore.remoting.headers import PutTopicHeader, TopicHeader
from rocketstore.state.attributes import MESSAGE_TYPE, RETENTION

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
