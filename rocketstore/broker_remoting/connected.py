"""Lists of connected clients: the consumers and producers of groups, and the groups of a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from dledger.remoting.codes import AnswerCode, Language, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import Client, ClientTables
from rocketstore.broker_remoting.administration import Administration
from rocketstore.broker_remoting.members import data_of
from rocketstore.remoting.bodies.clients import (
    CheckClientBody,
    ClientConnection,
    ConsumerConnectionList,
    ProducerConnectionList,
    ProducerInfo,
    ProducersByGroup,
)
from rocketstore.remoting.bodies.groups import GroupList
from rocketstore.remoting.headers import GroupHeader, ProducerGroupHeader, TopicHeader, read_header


class Connected:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration, clients: ClientTables) -> None:
        self._broker = broker
        self._admin = admin
        self._clients = clients

    async def consumers(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_CONSUMER_CONNECTION_LIST."""
        name = read_header(GroupHeader, frame.fields).consumer_group
        group = self._clients.consumers(name)
        if group is None:
            raise RequestError(f"the consumer group[{name}] not online", AnswerCode.CONSUMER_NOT_ONLINE)
        body = ConsumerConnectionList(
            _connections(group.clients.values()),
            {topic: data_of(one) for topic, one in group.subscriptions.items()},
            group.consume_type,
            group.message_model,
            group.consume_from_where,
        )
        return frame.answer(body=await self._admin.read(body.encode))

    async def producers(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_PRODUCER_CONNECTION_LIST."""
        name = read_header(ProducerGroupHeader, frame.fields).producer_group
        connections = _connections(self._clients.producers(name))
        if not connections:
            raise RequestError(f"the producer group[{name}] not exist")
        return frame.answer(body=await self._admin.read(ProducerConnectionList(connections).encode))

    async def all_producers(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_ALL_PRODUCER_INFO."""
        clock_ms, now = self._broker.loop.clock.wall_ms(), asyncio.get_running_loop().time()
        body = ProducersByGroup(
            {
                group: tuple(
                    ProducerInfo(
                        one.client_id,
                        f"/{one.link.address}",
                        Language(one.language),
                        one.version,
                        clock_ms - int((now - one.heard_at) * 1000),
                    )
                    for one in self._clients.producers(group)
                )
                for group in self._clients.producer_groups()
            }
        )
        return frame.answer(body=await self._admin.read(body.encode))

    async def check_client(self, _: RemotingConnection, frame: Frame) -> Frame:
        """CHECK_CLIENT_CONFIG: whether a subscription can be served."""
        asked = (await self._admin.read(CheckClientBody.decode, frame.body)).subscription_data
        await self._broker.filters.of(asked.expression_type, asked.sub_string)
        return frame.answer()

    async def groups_of_topic(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_TOPIC_CONSUME_BY_WHO: groups that subscribe to a topic now, or have offsets in it."""
        topic = read_header(TopicHeader, frame.fields).topic
        here = [one for one in self._clients.consumer_groups() if self._subscribes(one, topic)]
        return frame.answer(body=await self._admin.read(self._groups, topic, here))

    def _subscribes(self, name: str, topic: str) -> bool:
        group = self._clients.consumers(name)
        return group is not None and topic in group.subscriptions

    def _groups(self, topic: str, here: list[str]) -> bytes:
        state = self._broker.state
        noted = [group for group in state.groups() if state.offsets(group, topic)]
        return GroupList(tuple(sorted({*here, *noted}))).encode()


def _connections(clients: Iterable[Client]) -> tuple[ClientConnection, ...]:
    return tuple(
        ClientConnection(one.client_id, one.link.address, Language(one.language), one.version) for one in clients
    )
