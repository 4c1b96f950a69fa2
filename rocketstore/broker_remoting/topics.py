"""Administration of topics: create, change, delete, list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.system_topics import system_topics
from rocketstore.broker_remoting.administration import Administration
from rocketstore.broker_remoting.topic_table import TopicTable, topic_data
from rocketstore.remoting.bodies.routes import TopicList
from rocketstore.remoting.bodies.topics import TopicConfigData, TopicConfigList
from rocketstore.remoting.headers import PutTopicHeader, TopicHeader, read_header
from rocketstore.state.attributes import TopicAttributes, parse_changes
from rocketstore.state.changes import TopicConfig

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
