"""Statistics of topics and groups over remoting: see ``broker.stats``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import ClientTables
from rocketstore.broker.mastership import host_text
from rocketstore.broker.statistics import GroupPosition, check_queues
from rocketstore.broker.topics import SeenTopic
from rocketstore.broker_remoting.administration import Administration
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
from rocketstore.remoting.headers import (
    BrokerConsumeStatsHeader,
    ConsumeStatsHeader,
    ConsumeTimeSpanHeader,
    TopicHeader,
    read_header,
)


class StatsRequests:
    """On the loop. ``get_tps`` is how many messages a second a group gets of a topic; for any thread."""

    def __init__(
        self, broker: Broker, admin: Administration, clients: ClientTables, get_tps: Callable[[str, str], float]
    ) -> None:
        self._broker = broker
        self._get_tps = get_tps
        self._admin = admin
        self._clients = clients

    async def of_topic(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_TOPIC_STATS_INFO."""
        topic = self._broker.topics.require_seen(read_header(TopicHeader, frame.fields).topic)
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._topic_stats, topic))

    async def of_group(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_CONSUME_STATS: for all topics in which the group has offsets, or for one."""
        header = read_header(ConsumeStatsHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        group = self._clients.consumers(header.consumer_group)
        subscribed = frozenset(group.subscriptions) if group is not None else frozenset[str]()
        return frame.answer(body=await self._admin.read(self._group_stats, header, subscribed))

    async def of_all_groups(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_BROKER_CONSUME_STATS."""
        header = read_header(BrokerConsumeStatsHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        return frame.answer(body=await self._admin.read(self._all_stats, header.is_order))

    async def time_spans(self, _: RemotingConnection, frame: Frame) -> Frame:
        """QUERY_CONSUME_TIME_SPAN."""
        header = read_header(ConsumeTimeSpanHeader, frame.fields)
        self._broker.mastership.require_caught_up()
        topic = self._broker.topics.require_seen(header.topic)
        return frame.answer(body=await self._admin.read(self._spans, topic, header.group))

    # -- on a read thread ----------------------------------------------------------------------------------------------

    def _topic_stats(self, topic: SeenTopic) -> bytes:
        table = {
            self._queue(topic.name, one.queue_id): TopicOffset(one.begin, one.end, one.last_ms)
            for one in self._broker.stats.of_topic(topic)
        }
        return TopicStatsTable(table).encode()

    def _group_stats(self, header: ConsumeStatsHeader, subscribed: Collection[str]) -> bytes:
        group, topics = header.consumer_group, list[SeenTopic]()
        if not header.topic:
            topics = self._broker.stats.topics_of(group)
        elif (named := self._broker.topics.seen(header.topic)) is not None:
            topics = [named]
        return self._stats(group, [one for one in topics if not subscribed or one.name in subscribed]).encode()

    def _all_stats(self, only_ordered: bool) -> bytes:
        stats = self._broker.stats
        wanted = {
            group: [one for one in stats.topics_of(group) if one.order or not only_ordered]
            for group in self._broker.state.groups()
        }
        check_queues(sum(one.read_queues for topics in wanted.values() for one in topics))
        found = {
            group: tuple(self._stats(group, [one]) for one in topics) for group, topics in wanted.items() if topics
        }
        places = [place for several in found.values() for one in several for place in one.offset_table.values()]
        behind = sum(place.broker_offset - place.consumer_offset for place in places)
        listed = tuple({group: several} for group, several in found.items())
        return ConsumeStatsList(listed, host_text(self._broker.store_host), behind).encode()

    def _stats(self, group: str, topics: Collection[SeenTopic]) -> ConsumeStats:
        table = self._table(self._broker.stats.of_group(group, topics))
        return ConsumeStats(table, sum(self._get_tps(group, one.name) for one in topics))

    def _spans(self, topic: SeenTopic, group: str) -> bytes:
        spans = (
            QueueTimeSpan(
                self._queue(topic.name, one.queue_id), one.first_ms, one.last_ms, one.consumed_ms, one.delay_ms
            )
            for one in self._broker.stats.ages(group, topic)
        )
        return ConsumeTimeSpans(tuple(spans)).encode()

    def _table(self, progress: Iterable[GroupPosition]) -> dict[MessageQueue, ConsumeOffset]:
        return {
            self._queue(one.topic, one.queue_id): ConsumeOffset(one.end, one.consumed, one.consumed_ms, one.given_out)
            for one in progress
        }

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self._broker.config.name, queue_id)
