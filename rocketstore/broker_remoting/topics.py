"""Administration of topics: create, change, delete, list."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.topics import SeenTopic, system_topics
from rocketstore.broker_remoting.administration import Administration
from rocketstore.remoting.bodies.routes import MASTER_ID, BrokerData, ClusterInfo, QueueData, TopicList, TopicRouteData
from rocketstore.remoting.bodies.topics import DataVersion, TopicConfigData, TopicConfigList, TopicConfigTable
from rocketstore.remoting.headers import PutTopicHeader, RouteHeader, TopicHeader, read_header
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
