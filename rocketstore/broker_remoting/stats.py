"""Statistics of topics and groups: the bounds of queues, the progress of groups, and the age of their next messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from dledger.errors import CorruptLogError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import ClientTables
from rocketstore.broker.hosts import host_text
from rocketstore.broker_remoting.administration import Administration, check_queues
from rocketstore.broker_remoting.topic_table import find_topic, known_topic
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.bodies.stats import (
    ConsumeOffset,
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpans,
    QueueTimeSpan,
    TopicOffset,
    TopicStatsTable,
)
from rocketstore.remoting.bodies.topics import TopicConfigData
from rocketstore.remoting.headers import (
    BrokerConsumeStatsHeader,
    ConsumeStatsHeader,
    ConsumeTimeSpanHeader,
    TopicHeader,
    read_header,
)

_NONE: Final = -1


class Stats:
    """On the loop. ``get_tps`` is how many messages a second a group gets of a topic; for any thread."""

    def __init__(
        self,
        broker: Broker,
        admin: Administration,
        clients: ClientTables,
        get_tps: Callable[[str, str], float],
    ) -> None:
        self._broker = broker
        self._get_tps = get_tps
        self._admin = admin
        self._clients = clients

    async def of_topic(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_TOPIC_STATS_INFO."""
        topic = known_topic(self._broker, read_header(TopicHeader, frame.fields).topic)
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._topic_stats, topic))

    async def of_group(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_CONSUME_STATS: for all topics in which the group has offsets, or for one."""
        header = read_header(ConsumeStatsHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        group = self._clients.consumers(header.consumer_group)
        subscribed = frozenset(group.subscriptions) if group is not None else frozenset[str]()
        named = (header.topic,) if header.topic else None
        return frame.answer(body=await self._admin.read(self._group_stats, header.consumer_group, named, subscribed))

    async def of_all_groups(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_BROKER_CONSUME_STATS."""
        header = read_header(BrokerConsumeStatsHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._all_stats, header.is_order))

    async def time_spans(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CONSUME_TIME_SPAN."""
        header = read_header(ConsumeTimeSpanHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        topic = known_topic(self._broker, header.topic)
        return frame.answer(body=await self._admin.read(self._spans, topic, header.group))

    # -- on a read thread ----------------------------------------------------------------------------------------------

    def _topic_stats(self, topic: TopicConfigData) -> bytes:
        check_queues(topic.write_queue_nums)
        table: dict[MessageQueue, TopicOffset] = {}
        for queue in self._queues(topic, topic.write_queue_nums):
            low, high = self._broker.offsets.bounds_of(topic.topic_name, queue.queue_id)
            last_ms = self._time(queue, high - 1) if high > low else 0
            table[queue] = TopicOffset(low, high, last_ms)
        return TopicStatsTable(table).encode()

    def _group_stats(self, group: str, named: Iterable[str] | None, subscribed: frozenset[str]) -> bytes:
        topics = self._topics_of(group) if named is None else named
        known = [one for name in topics if (one := find_topic(self._broker, name)) is not None]
        check_queues(sum(one.read_queue_nums for one in known))
        table: dict[MessageQueue, ConsumeOffset] = {}
        tps = 0.0
        for topic in known:
            if not subscribed or topic.topic_name in subscribed:  # otherwise it is no longer subscribed to
                table |= self._progress(topic, group)
                tps += self._get_tps(group, topic.topic_name)
        return ConsumeStats(table, tps).encode()

    def _all_stats(self, only_ordered: bool) -> bytes:
        wanted: dict[str, list[TopicConfigData]] = {}
        for group in self._broker.state.groups():
            topics = [find_topic(self._broker, name) for name in self._topics_of(group)]
            wanted[group] = [one for one in topics if one is not None and (one.order or not only_ordered)]
        check_queues(sum(one.read_queue_nums for topics in wanted.values() for one in topics))
        found: list[dict[str, tuple[ConsumeStats, ...]]] = []
        behind = 0
        for group, configs in wanted.items():
            stats = tuple(
                ConsumeStats(self._progress(topic, group), self._get_tps(group, topic.topic_name)) for topic in configs
            )
            if stats:
                found.append({group: stats})
            places = [place for one in stats for place in one.offset_table.values()]
            behind += sum(place.broker_offset - place.consumer_offset for place in places)
        return ConsumeStatsList(tuple(found), host_text(self._broker.store_host), behind).encode()

    def _spans(self, topic: TopicConfigData, group: str) -> bytes:
        check_queues(topic.write_queue_nums)
        now_ms, spans = self._broker.loop.clock.wall_ms(), list[QueueTimeSpan]()
        for queue in self._queues(topic, topic.write_queue_nums):
            low, high = self._broker.offsets.bounds_of(topic.topic_name, queue.queue_id)
            first_ms = self._time(queue, low)
            consumed = self._broker.state.offset(group, topic.topic_name, queue.queue_id)
            consumed_ms = self._time(queue, consumed - 1) if consumed > 0 else first_ms
            next_ms = self._time(queue, max(consumed, low)) if consumed < high else 0
            delay_ms = max(0, now_ms - next_ms) if next_ms > 0 else 0
            spans.append(QueueTimeSpan(queue, first_ms, self._time(queue, high - 1), consumed_ms, delay_ms))
        return ConsumeTimeSpans(tuple(spans)).encode()

    def _progress(self, topic: TopicConfigData, group: str) -> dict[MessageQueue, ConsumeOffset]:
        table: dict[MessageQueue, ConsumeOffset] = {}
        for queue in self._queues(topic, topic.read_queue_nums):
            _low, high = self._broker.offsets.bounds_of(topic.topic_name, queue.queue_id)
            consumed = max(self._broker.state.offset(group, topic.topic_name, queue.queue_id), 0)
            last_ms = self._time(queue, consumed - 1) if consumed else 0
            table[queue] = ConsumeOffset(high, consumed, last_ms)
        return table

    def _topics_of(self, group: str) -> list[str]:
        return sorted({one.topic for one in self._broker.state.offsets(group)})

    def _queues(self, topic: TopicConfigData, count: int) -> Iterable[MessageQueue]:
        return (MessageQueue(topic.topic_name, self._broker.config.name, queue_id) for queue_id in range(count))

    def _time(self, queue: MessageQueue, offset: int) -> int:
        """When a message was stored; 0 if it does not exist, or is damaged: who reads it is told so."""
        if offset < 0:
            return 0
        try:
            return max(self._broker.store.store_time(queue.topic, queue.queue_id, offset), 0)
        except CorruptLogError:
            return 0
