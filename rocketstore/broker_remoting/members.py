"""Requests of clients about themselves and each other: heartbeats, members of a group, locks on queues, retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

from dledger.remoting.codes import RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.clients import ConsumerGroup, ConsumingClient, Heartbeat, Subscription
from rocketstore.broker.groups import LOCKED_AT_ONCE, Groups
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker_remoting.access import QuotaOf
from rocketstore.broker_remoting.decoding import BodyDecoder
from rocketstore.broker_remoting.links import RemotingLink
from rocketstore.remoting.bodies.clients import (
    ConsumerData,
    ConsumerIdList,
    HeartbeatData,
    LockedQueuesBody,
    LockQueuesBody,
    SubscriptionData,
)
from rocketstore.remoting.codes import VERSION_SEND_BACK_MAX
from rocketstore.remoting.headers import GroupHeader, SendBackHeader, UnregisterClientHeader, read_header

HEARTBEAT_BYTES_MAX: Final = 1024 * 1024
"""A thousand subscriptions take a fifth of it, a thousand with five tags each a third."""


class MemberRequests:
    """On the loop."""

    def __init__(
        self,
        groups: Groups,
        quota_of: QuotaOf,
        link_of: Callable[[RemotingConnection], RemotingLink],
        decoder: BodyDecoder,
        readers: ReadThreads,
    ) -> None:
        self._groups = groups
        self._quota_of = quota_of
        self._link_of = link_of
        self._decoder = decoder
        self._readers = readers
        self._encoded: WeakKeyDictionary[ConsumerGroup, tuple[tuple[str, ...], bytes]] = WeakKeyDictionary()

    async def heartbeat(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """HEART_BEAT."""
        if len(frame.body) > HEARTBEAT_BYTES_MAX:
            raise RequestError(f"a heartbeat of {len(frame.body)} bytes: at most {HEARTBEAT_BYTES_MAX} are allowed")
        beat = await self._decoder.run(connection, frame, _heartbeat, frame)
        if connection.is_closed:  # it would never be removed, and no other consumer would get its queues
            return frame.answer()
        await self._groups.join(self._link_of(connection), self._quota_of(connection, frame).owner, beat)
        return frame.answer()

    async def unregister(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """UNREGISTER_CLIENT."""
        header = read_header(UnregisterClientHeader, frame.fields)
        self._groups.clients.unregister(self._link_of(connection), header.producer_group, header.consumer_group)
        return frame.answer()

    async def consumer_ids(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_CONSUMER_LIST_BY_GROUP: clients use it to divide the queues among themselves."""
        name = read_header(GroupHeader, frame.fields).consumer_group
        group = self._groups.clients.consumers(name)
        if group is None:
            raise RequestError(f"no consumer for this group, {name}")
        known = self._encoded.get(group)
        if known is None or known[0] is not group.ids:
            self._encoded[group] = known = group.ids, ConsumerIdList(group.ids).encode()
        return frame.answer(body=known[1])

    async def lock(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """LOCK_BATCH_MQ: a queue is the same by whatever name of a broker."""
        wanted = await self._decoder.run(connection, frame, LockQueuesBody.decode, frame.body)
        owner = self._quota_of(connection, frame).owner
        queues = [(one.topic, one.queue_id) for one in wanted.mq_set]
        got = frozenset(await self._groups.lock(wanted.consumer_group, wanted.client_id, queues, owner))
        answer = LockedQueuesBody(tuple(one for one in wanted.mq_set if (one.topic, one.queue_id) in got))
        body = answer.encode() if len(got) <= LOCKED_AT_ONCE else await self._readers.run(answer.encode)
        return frame.answer(body=body)

    async def unlock(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """UNLOCK_BATCH_MQ."""
        unwanted = await self._decoder.run(connection, frame, LockQueuesBody.decode, frame.body)
        queues = [(one.topic, one.queue_id) for one in unwanted.mq_set]
        await self._groups.unlock(unwanted.consumer_group, unwanted.client_id, queues)
        return frame.answer()

    async def send_back(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """CONSUMER_SEND_MSG_BACK."""
        header = read_header(SendBackHeader, frame.fields)
        limited = frame.version >= VERSION_SEND_BACK_MAX and header.max_reconsume_times >= 0
        await self._groups.retries.put_back(
            header.group,
            header.offset,
            delay_level=header.delay_level,
            retries_max=header.max_reconsume_times if limited else None,
            quota=self._quota_of(connection, frame),
        )
        return frame.answer()


def data_of(one: Subscription) -> SubscriptionData:
    """A subscription as it is shown to RocketMQ's tools."""
    return SubscriptionData(one.topic, one.expression, one.tags, one.codes, one.version, one.kind, one.class_filter)


def _heartbeat(frame: Frame) -> Heartbeat:
    data = HeartbeatData.decode(frame.body)
    producers = tuple(one.group_name for one in data.producer_data_set)
    consumers = tuple(_consumer(one) for one in data.consumer_data_set)
    return Heartbeat(data.client_id, producers, consumers, frame.language, frame.version)


def _consumer(data: ConsumerData) -> ConsumingClient:
    subscriptions = tuple(
        Subscription(
            one.topic,
            one.sub_string,
            one.tags_set,
            one.code_set,
            one.sub_version,
            one.expression_type,
            one.class_filter_mode,
        )
        for one in data.subscription_data_set
    )
    return ConsumingClient(
        data.group_name, data.consume_type, data.message_model, data.consume_from_where, subscriptions
    )
