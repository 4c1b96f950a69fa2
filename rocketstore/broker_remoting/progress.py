"""Offsets of whole groups: copied from one to another, compared, and the units of a queue as they are stored."""

from __future__ import annotations

from typing import Final

from dledger.remoting.connection import RemotingConnection
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import ClientTables, Subscription
from rocketstore.broker.tag_filter import TagFilter
from rocketstore.broker_remoting.administration import Administration
from rocketstore.broker_remoting.members import data_of
from rocketstore.remoting.bodies.groups import CorrectionOffsets
from rocketstore.remoting.bodies.stats import ConsumeQueueBody, ConsumeQueueData
from rocketstore.remoting.headers import CloneOffsetHeader, ConsumeQueueHeader, CorrectionOffsetHeader, read_header

UNITS_MAX: Final = 4096
"""Units of a queue in one answer."""


class Progress:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration, clients: ClientTables) -> None:
        self._broker = broker
        self._admin = admin
        self._clients = clients

    async def clone(self, _: RemotingConnection, frame: Frame) -> Frame:
        """CLONE_GROUP_OFFSET: one topic's, or all; unless ``offline``, only of topics that the group subscribes to."""
        header = read_header(CloneOffsetHeader, frame.fields)
        group = self._clients.consumers(header.dest_group)
        subscribed = group.subscriptions.keys() if group is not None and not header.offline else ()
        await self._broker.offsets.clone(header.src_group, header.dest_group, header.topic, subscribed)
        return frame.answer()

    async def correction(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CORRECTION_OFFSET: the lowest offsets of all groups but some. RocketMQ deletes the offsets of these."""
        header = read_header(CorrectionOffsetHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        topic = self._broker.topics.require_seen(header.topic).name
        left_out = frozenset(header.filter_groups.split(","))
        lowest = await self._admin.read(self._broker.stats.lowest_offsets, topic, left_out, header.compare_group)
        return frame.answer(body=CorrectionOffsets(lowest).encode())

    async def units(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CONSUME_QUEUE."""
        header = read_header(ConsumeQueueHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        self._broker.topics.require_seen(header.topic)
        if not 0 < header.count <= UNITS_MAX:
            raise RequestError(f"count is {header.count}: 1 to {UNITS_MAX} units of a queue can be asked for")
        group = self._clients.consumers(header.consumer_group) if header.consumer_group else None
        subscription = None if group is None else group.subscriptions.get(header.topic)
        return frame.answer(body=await self._admin.read(self._units, header, subscription))

    def _units(self, header: ConsumeQueueHeader, subscription: Subscription | None) -> bytes:
        found = self._broker.stats.units(header.topic, header.queue_id, header.index, header.count)
        if found is None:
            raise RequestError(f"{header.queue_id}@{header.topic} is not exist!")
        tags = None if subscription is None else TagFilter.parse(subscription.expression)
        units = tuple(
            ConsumeQueueData(
                one.offset, one.size, one.tags_code, eval=tags is not None and tags.matches_code(one.tags_code)
            )
            for one in found.units
        )
        shown = None if subscription is None else data_of(subscription)
        no_filter = "" if not header.consumer_group else "null"  # RocketMQ's: that of SQL92
        if header.consumer_group and subscription is None:
            no_filter = f"{header.consumer_group}@{header.topic} is not online!"
        return ConsumeQueueBody(units, found.end, found.begin, shown, no_filter).encode()
