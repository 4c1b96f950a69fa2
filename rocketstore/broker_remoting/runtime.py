"""Requests of RocketMQ's tools to a running broker: for its figures and statistics, for its settings, to clean up."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from ipaddress import ip_address
from typing import Final

from dledger import __version__, properties
from dledger.errors import ConfigError
from dledger.remoting.codes import VERSION, AnswerCode, RequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.fastjson import dumps
from dledger.remoting.frame import Frame
from rocketstore.broker.broker import Broker
from rocketstore.broker.clients import ClientTables
from rocketstore.broker.mastership import broker_id, host_text
from rocketstore.broker.statistics import GroupPosition, Statistics, check_queues
from rocketstore.broker.topics import SeenTopic
from rocketstore.broker_remoting.administration import READS_WAITING_MAX, Administration
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.ha.protocol import PROOF, PROVE, answer_challenge
from rocketstore.remoting.groups import (
    BrokerStatsData,
    BrokerStatsItem,
    ConsumeOffset,
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpans,
    QueueTimeSpan,
    TopicOffset,
    TopicStatsTable,
)
from rocketstore.remoting.headers import (
    AclVersionAnswer,
    BrokerConsumeStatsHeader,
    ConsumeStatsHeader,
    ConsumeTimeSpanHeader,
    StatsDataHeader,
    TopicHeader,
    VersionAnswer,
    read_header,
    write_header,
)
from rocketstore.remoting.runtime import HA_PORT, LOG_END, HaFacts, own_table, status_of
from rocketstore.remoting.topics import DataVersion, KVTable, MessageQueue
from rocketstore.settings import FixedSettingError, properties_of

_LOG: Final = logging.getLogger("rocketstore")
CONFIG_BYTES_MAX: Final = 64 * 1024
_OF_TOPICS: Final = frozenset({"auto_create_topic_enable", "broker_permission", "default_topic_queue_nums"})
"""Settings that name servers see in the topics."""
_FIXED: Final[Mapping[str, str]] = {
    "clientCallbackExecutorThreads": str(os.cpu_count()),  # exportMetrics takes it for the number of processors
    "filterServerNums": "0",
    "msgTraceTopicName": "RMQ_SYS_TRACE_TOPIC",
    "traceOn": "true",
    "traceTopicEnable": "false",
}
"""RocketMQ's settings that are none here; its tools fail without them."""
VERSION_TEXT: Final = "V4_9_8"


class RunningBroker:
    """On the loop."""

    def __init__(
        self,
        broker: Broker,
        admin: Administration,
        statistics: Statistics,
        announce: Callable[[], Awaitable[None]],
        replication: Callable[[], dict[str, str]],
    ) -> None:
        """``replication``: what is told of classic replication, empty in a group; for any thread."""
        self._broker = broker
        self._replication = replication
        self._announce = announce
        self._admin = admin
        self._statistics = statistics
        self._release = __version__

    async def info(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_BROKER_RUNTIME_INFO."""
        broker, counted = self._broker, self._statistics
        sending, now = broker.sending, counted.now()
        here = {
            "brokerVersion": str(VERSION),
            "brokerVersionDesc": VERSION_TEXT,
            "brokerActive": "true",
            "startAcceptSendRequestTimeStamp": "0",
            "msgPutTotalYesterdayMorning": str(counted.yesterday_morning.puts),
            "msgPutTotalTodayMorning": str(counted.this_morning.puts),
            "msgPutTotalTodayNow": str(now.puts),
            "msgGetTotalYesterdayMorning": str(counted.yesterday_morning.gets),
            "msgGetTotalTodayMorning": str(counted.this_morning.gets),
            "msgGetTotalTodayNow": str(now.gets),
            "sendThreadPoolQueueSize": str(sending.messages_pending),
            "sendThreadPoolQueueCapacity": str(broker.config.send_pending_messages_max),
            "pullThreadPoolQueueSize": str(broker.loop.readers.waiting),
            "pullThreadPoolQueueCapacity": str(broker.config.pulls_waiting_max),
            "pullsWaiting": str(len(broker.pulling.waiting)),
            "queryThreadPoolQueueSize": str(self._admin.waiting),
            "queryThreadPoolQueueCapacity": str(READS_WAITING_MAX),
            "EndTransactionQueueSize": "0",
            "EndTransactionThreadPoolQueueCapacity": "0",
        }
        # Nothing waits in a queue of its own for a thread: waiting requests are counted above, but not their time.
        here |= dict.fromkeys([f"{kind}ThreadPoolQueueHeadWaitTimeMills" for kind in ("send", "pull", "query")], "0")
        return frame.answer(body=await self._admin.read(self._info, here, frame.fields.get(PROVE, "")))

    def _info(self, here: dict[str, str], prove: str) -> bytes:
        """Waits for the file system and for the node's lock: on a read thread."""
        broker = self._broker
        log = broker.store.log
        if prove and isinstance(log, PlainCommitLog) and not broker.config.access.acl_enable:
            here[PROOF] = answer_challenge(log, prove)
        store, state, transactions, schedule, _ = broker.storage
        told = store.runtime_info() | state.runtime_info() | transactions.runtime_info() | schedule.runtime_info()
        view, conditions = broker.mastership.view(), broker.loop.conditions.now()
        node = broker.config.node_id
        own = own_table(self._release, node, view.role, view.term, view.members, conditions, leader=view.leader)
        own[LOG_END] = str(log.end_offset)
        return KVTable(told | here | own | self._replication()).encode()

    async def ha_status(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_BROKER_HA_STATUS."""
        facts = HaFacts.of(await self._admin.read(self._replication))
        if facts is None:
            raise RequestError("this broker's log is replicated within its group, not by a master to slaves")
        return frame.answer(body=status_of(facts, self._broker.loop.clock.wall_ms()).encode())

    async def config(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_BROKER_CONFIG."""
        broker = self._broker
        config, role = broker.config, broker.store.role
        now = {
            "brokerRole": str(role),
            "brokerId": str(broker_id(config, role, broker.mastership.view())),
            "brokerIP1": str(ip_address(broker.store_host.ip)),
            "useTLS": str(config.effective_security.has_tls).lower(),
        }
        if (ha_port := self._replication().get(HA_PORT)) is not None:
            now[HA_PORT] = ha_port
        settings = {**_FIXED, **properties_of(config), **now}
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        version = DataVersion(self._broker.live.changes, self._broker.store.stats.boot_ms).encode().decode()
        return frame.answer(fields=write_header(VersionAnswer(version)), body=text.encode())

    async def change_config(self, connection: RemotingConnection, frame: Frame) -> Frame:
        """UPDATE_BROKER_CONFIG: all settings, or none; this broker's only, and until its next start."""
        if len(frame.body) > CONFIG_BYTES_MAX:
            raise RequestError(f"{len(frame.body)} bytes of settings: at most {CONFIG_BYTES_MAX} are allowed")
        try:
            given = {one.key: one.value for one in properties.parse(properties.decode(frame.body))}
        except ConfigError as error:
            raise RequestError(f"malformed settings: {error}") from error
        try:
            changed = self._broker.live.change(given)
        except FixedSettingError as error:
            raise RequestError(str(error), AnswerCode.NO_PERMISSION) from error
        for name, value in changed.items():
            _LOG.info("setting %s=%s until the next start, by %s", name, value, connection.place)
        if changed.keys() & _OF_TOPICS:
            await self._announce()
        return frame.answer(remark="in effect until this broker's next start" if changed else "")

    async def stats_data(self, _: RemotingConnection, frame: Frame) -> Frame:
        """VIEW_BROKER_STATS_DATA."""
        header = read_header(StatsDataHeader, frame.fields)
        found = self._statistics.of(header.stats_name, header.stats_key)
        if found is None:
            limit = self._broker.config.metrics_topics_max
            what = f"The stats <{header.stats_name}> <{header.stats_key}> not exist"
            raise RequestError(f"{what}: nothing was counted, or not among the first {limit} (metricsTopicsMax)")
        return frame.answer(body=BrokerStatsData(*(BrokerStatsItem(*one) for one in found)).encode())

    async def clean_log(self, _: RemotingConnection, frame: Frame) -> Frame:
        """DELETE_EXPIRED_COMMITLOG: files whose time has come, whatever the hour."""
        self._broker.store.request_clean()
        return frame.answer()

    async def clean_queues(self, _: RemotingConnection, frame: Frame) -> Frame:
        """CLEAN_EXPIRED_CONSUMEQUEUE and CLEAN_UNUSED_TOPIC: done all the time, so nothing is left to do."""
        return frame.answer(remark="files of queues go with the log's, without being asked; their numbering stays")

    async def acl_version(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GET_BROKER_CLUSTER_ACL_INFO."""
        config, version = self._broker.config, DataVersion(0, self._broker.store.stats.boot_ms).encode().decode()
        file = config.access.acl_file if config.access.acl_enable else None
        by_file = "{}" if file is None else f"{{{dumps(str(file)).decode()}:{version}}}"
        address = host_text(self._broker.store_host)
        header = AclVersionAnswer(version, by_file, config.name, address, config.cluster_name)
        return frame.answer(fields=write_header(header))

    async def no_acl_changes(self, _: RemotingConnection, __: Frame) -> Frame:
        """UPDATE_AND_CREATE_ACL_CONFIG, DELETE_ACL_CONFIG, UPDATE_GLOBAL_WHITE_ADDRS_CONFIG."""
        reason = "access rules are a file on each broker, which is read again when it changes: edit that"
        raise RequestError(reason, AnswerCode.REQUEST_CODE_NOT_SUPPORTED)


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
