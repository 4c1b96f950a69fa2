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
from rocketstore.broker_remoting.topic_table import find_topic, known_topic
from rocketstore.remoting.bodies.groups import CorrectionOffsets
from rocketstore.remoting.bodies.stats import ConsumeQueueBody, ConsumeQueueData
from rocketstore.remoting.headers import CloneOffsetHeader, ConsumeQueueHeader, CorrectionOffsetHeader, read_header
from rocketstore.state.changes import OFFSETS_MAX, QueueOffset

UNITS_MAX: Final = 4096
"""Units of a queue in one answer."""
NEVER: Final = (1 << 63) - 1
"""RocketMQ's offset for a queue that needs no correction."""


class Progress:
    """On the loop."""

    def __init__(self, broker: Broker, admin: Administration, clients: ClientTables) -> None:
        self._broker = broker
        self._admin = admin
        self._clients = clients

    async def clone(self, _: RemotingConnection, frame: Frame) -> Frame:
        """CLONE_GROUP_OFFSET: one topic's, or all; unless ``offline``, only of topics that the group subscribes to."""
        header = read_header(CloneOffsetHeader, frame.fields)
        self._broker.mastership.require()
        state = self._broker.state
        group = self._clients.consumers(header.dest_group)
        subscribed = group.subscriptions.keys() if group is not None and not header.offline else ()
        wanted = [
            one
            for one in state.offsets(header.src_group, header.topic)
            if find_topic(self._broker, one.topic) is not None and (not subscribed or one.topic in subscribed)
        ]
        for start in range(0, len(wanted), OFFSETS_MAX):
            await self._commit(header.dest_group, wanted[start : start + OFFSETS_MAX])
        return frame.answer()

    async def _commit(self, group: str, offsets: list[QueueOffset]) -> None:
        await self._broker.changes.make(lambda done: self._broker.state.commit_offsets(group, offsets, True, done))

    async def correction(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CORRECTION_OFFSET: the lowest offsets of all groups but some. RocketMQ deletes the offsets of these."""
        header = read_header(CorrectionOffsetHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        known_topic(self._broker, header.topic)
        return frame.answer(body=await self._admin.read(self._lowest, header))

    def _lowest(self, header: CorrectionOffsetHeader) -> bytes:
        state, left_out = self._broker.state, frozenset(header.filter_groups.split(","))
        lowest: dict[int, int] = {}
        begins: dict[int, int] = {}
        for group in state.groups():
            for one in () if group in left_out else state.offsets(group, header.topic):
                if one.queue_id not in begins:
                    begins[one.queue_id] = self._broker.offsets.bounds_of(header.topic, one.queue_id)[0]
                if one.offset >= begins[one.queue_id]:
                    lowest[one.queue_id] = min(lowest.get(one.queue_id, NEVER), one.offset)
        for one in state.offsets(header.compare_group, header.topic):
            if lowest.get(one.queue_id, -1) > one.offset:
                lowest[one.queue_id] = NEVER
        return CorrectionOffsets(lowest).encode()

    async def units(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CONSUME_QUEUE."""
        header = read_header(ConsumeQueueHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        known_topic(self._broker, header.topic)
        if not 0 < header.count <= UNITS_MAX:
            raise RequestError(f"count is {header.count}: 1 to {UNITS_MAX} units of a queue can be asked for")
        group = self._clients.consumers(header.consumer_group) if header.consumer_group else None
        subscription = None if group is None else group.subscriptions.get(header.topic)
        return frame.answer(body=await self._admin.read(self._units, header, subscription))

    def _units(self, header: ConsumeQueueHeader, subscription: Subscription | None) -> bytes:
        broker = self._broker
        low, high = self._broker.offsets.bounds_of(header.topic, header.queue_id)
        if not high and (header.topic, header.queue_id) not in broker.store.queues():
            raise RequestError(f"{header.queue_id}@{header.topic} is not exist!")
        tags = None if subscription is None else TagFilter.parse(subscription.expression)
        first = max(header.index, low)
        found: list[ConsumeQueueData] = []
        for offset in range(first, min(first + header.count, high)):
            unit = broker.store.unit(header.topic, header.queue_id, offset)
            if unit is not None:
                wanted = tags is not None and tags.matches_code(unit.tags_code)
                found.append(ConsumeQueueData(unit.offset, unit.size, unit.tags_code, eval=wanted))
        shown = None if subscription is None else data_of(subscription)
        no_filter = "" if not header.consumer_group else "null"  # RocketMQ's: that of SQL92
        if header.consumer_group and subscription is None:
            no_filter = f"{header.consumer_group}@{header.topic} is not online!"
        return ConsumeQueueBody(tuple(found), high, low, shown, no_filter).encode()
