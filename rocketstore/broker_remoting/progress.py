"""Offsets of whole groups: copied from one to another, compared, and the units of a queue as they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from dledger.remoting.codes import RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import ClientTables, Subscription
from rocketstore.broker.reading import SQL92
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
        wanted = None if subscription is None else await self._may_match(subscription)
        return frame.answer(body=await self._admin.read(self._units, header, subscription, wanted))

    async def _may_match(self, subscription: Subscription) -> Callable[[int], bool]:
        """Whether a unit's tags code may be one of a wanted message: all that a queue tells."""
        found = await self._broker.filters.of(subscription.kind, subscription.expression)
        return (lambda _code: True) if found is None or found.codes is None else found.codes.__contains__

    def _units(
        self, header: ConsumeQueueHeader, subscription: Subscription | None, wanted: Callable[[int], bool] | None
    ) -> bytes:
        found = self._broker.stats.units(header.topic, header.queue_id, header.index, header.count)
        if found is None:
            raise RequestError(f"{header.queue_id}@{header.topic} is not exist!")
        units = tuple(
            ConsumeQueueData(one.offset, one.size, one.tags_code, eval=wanted is not None and wanted(one.tags_code))
            for one in found.units
        )
        shown = None if subscription is None else data_of(subscription)
        filter_data = _filter_data(header, subscription)
        return ConsumeQueueBody(units, found.end, found.begin, shown, filter_data).encode()


def _filter_data(header: ConsumeQueueHeader, subscription: Subscription | None) -> str:
    """A group's condition as RocketMQ reports it, as JSON."""
    if not header.consumer_group:
        return ""
    if subscription is None:
        return f"{header.consumer_group}@{header.topic} is not online!"
    if subscription.kind != SQL92:
        return "null"
    data = {
        "clientVersion": subscription.version,
        "consumerGroup": header.consumer_group,
        "expression": subscription.expression,
        "expressionType": subscription.kind,
        "topic": header.topic,
    }
    return json.dumps(data, indent="\t")
