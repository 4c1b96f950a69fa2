"""Administration of topics: create, change, delete, list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from dledger.remoting.connection import RemotingConnection
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.system_topics import system_topics
from rocketstore.broker_remoting.administration import Administration
from rocketstore.broker_remoting.topic_table import TopicTable, known_topic
from rocketstore.message.checks import check_client_topic
from rocketstore.remoting.bodies.routes import TopicList
from rocketstore.remoting.bodies.topics import TopicConfigData, TopicConfigList
from rocketstore.remoting.headers import PutTopicHeader, TopicHeader, read_header
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
        topic = self._checked(
            TopicConfigData(
                header.topic,
                header.read_queue_nums,
                header.write_queue_nums,
                header.perm,
                header.topic_filter_type,
                header.topic_sys_flag,
                header.order,
            )
        )
        await self._broker.changes.make(lambda done: self._broker.state.put_topic(topic, done))
        await self._announce()
        return frame.answer()

    async def put_all(self, _: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_AND_CREATE_TOPIC_LIST."""
        self._broker.mastership.require()
        wanted = await self._admin.read(TopicConfigList.decode, frame.body)
        topics = [self._checked(one) for one in wanted.topic_config_list]
        await self._broker.changes.make(*[partial(self._broker.state.put_topic, one) for one in topics])
        await self._announce()
        return frame.answer()

    async def one(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_TOPIC_CONFIG."""
        name = read_header(TopicHeader, frame.fields).topic
        return frame.answer(body=known_topic(self._broker, name).encode())

    async def delete(self, _: RemotingConnection, frame: Frame) -> Frame:
        """DELETE_TOPIC_IN_BROKER: an unknown topic counts as deleted."""
        name = read_header(TopicHeader, frame.fields).topic
        self._broker.mastership.require()
        self._check_name(name)
        if self._broker.state.topic(name) is not None:
            await self._broker.changes.make(lambda done: self._broker.state.delete_topic(name, done))
            await self._announce()
        return frame.answer()

    async def all(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_TOPIC_CONFIG."""
        return frame.answer(body=await self._admin.read(lambda: self._table.now().encode()))

    async def of_the_system(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_SYSTEM_TOPIC_LIST_FROM_BROKER."""
        return frame.answer(body=TopicList(tuple(sorted(system_topics(self._broker.config)))).encode())

    def _checked(self, wanted: TopicConfigData) -> TopicConfig:
        """The topic, if there may be one. Raises ``RequestError``, ``InvalidRequestError``."""
        self._check_name(wanted.topic_name)
        if wanted.topic_filter_type != SINGLE_TAG:
            raise RequestError(f"topicFilterType {wanted.topic_filter_type[:64]!r} is not supported: use {SINGLE_TAG}")
        return TopicConfig(
            wanted.topic_name,
            wanted.read_queue_nums,
            wanted.write_queue_nums,
            wanted.perm,
            wanted.order,
            wanted.topic_sys_flag,
        )

    def _check_name(self, topic: str) -> None:
        problem = check_client_topic(topic)
        if not problem and topic in system_topics(self._broker.config):
            problem = f"the topic {topic} is one of the system's: it can be neither changed nor deleted"
        if problem:
            raise RequestError(problem)
