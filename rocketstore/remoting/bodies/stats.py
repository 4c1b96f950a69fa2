"""Bodies for administrators: offsets and times by queue, statistics, resets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from dledger.records import record
from rocketstore.remoting.bodies.clients import CLIENT_BYTES_MAX, SubscriptionData
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.body import Body, NullableText
from rocketstore.remoting.headers import Int32, Int64


@record(frozen=True, slots=True)
class TopicOffset(Body):
    """The ends of one queue."""

    min_offset: Int64 = 0
    max_offset: Int64 = 0
    last_update_timestamp: Int64 = 0


@record(frozen=True, slots=True)
class TopicStatsTable(Body):
    """Answer to GET_TOPIC_STATS_INFO."""

    offset_table: Mapping[MessageQueue, TopicOffset] = field(default_factory=dict)


@record(frozen=True, slots=True)
class ConsumeOffset(Body):
    """A group's progress in one queue. ``pull_offset``, of RocketMQ 5: before it all was given out; None: not told."""

    broker_offset: Int64 = 0
    consumer_offset: Int64 = 0
    last_timestamp: Int64 = 0
    pull_offset: Int64 | None = None


@record(frozen=True, slots=True)
class ConsumeStats(Body):
    """Answer to GET_CONSUME_STATS."""

    offset_table: Mapping[MessageQueue, ConsumeOffset] = field(default_factory=dict)
    consume_tps: float = 0.0


@record(frozen=True, slots=True)
class ConsumeStatsList(Body):
    """Answer to GET_BROKER_CONSUME_STATS: one map per group."""

    consume_stats_list: tuple[Mapping[str, tuple[ConsumeStats, ...]], ...] = ()
    broker_addr: NullableText = ""
    total_diff: Int64 = 0


@record(frozen=True, slots=True)
class ResetOffsetBody(Body):
    """RESET_CONSUMER_CLIENT_OFFSET, and the answer to INVOKE_BROKER_TO_RESET_OFFSET."""

    offset_table: Mapping[MessageQueue, Int64] = field(default_factory=dict)


@record(frozen=True, slots=True)
class QueueOffsetForC(Body):
    """An offset to reset to, in the form below."""

    topic: str
    broker_name: str
    queue_id: Int32
    offset: Int64


@record(frozen=True, slots=True)
class ResetOffsetBodyForC(Body):
    """The same for the C++ client, which does not support objects as keys."""

    offset_table: tuple[QueueOffsetForC, ...] = ()


@record(frozen=True, slots=True)
class ConsumerStatusBody(Body):
    """Answer to GET_CONSUMER_STATUS_FROM_CLIENT (one table), INVOKE_BROKER_TO_GET_CONSUMER_STATUS (one per client)."""

    bytes_max: ClassVar[int] = CLIENT_BYTES_MAX
    message_queue_table: Mapping[MessageQueue, Int64] = field(default_factory=dict)
    consumer_table: Mapping[str, Mapping[MessageQueue, Int64]] = field(default_factory=dict)


@record(frozen=True, slots=True)
class QueueTimeSpan(Body):
    """The times of the first, the last and the consumed message of one queue."""

    message_queue: MessageQueue
    min_time_stamp: Int64 = 0
    max_time_stamp: Int64 = 0
    consume_time_stamp: Int64 = 0
    delay_time: Int64 = 0


@record(frozen=True, slots=True)
class ConsumeTimeSpans(Body):
    """Answer to QUERY_CONSUME_TIME_SPAN."""

    consume_time_span_set: tuple[QueueTimeSpan, ...] = ()


@record(frozen=True, slots=True)
class BrokerStatsItem(Body):
    """Counts of one period: total, per second, per call."""

    sum: Int64 = 0
    tps: float = 0.0
    avgpt: float = 0.0


@record(frozen=True, slots=True)
class BrokerStatsData(Body):
    """Answer to VIEW_BROKER_STATS_DATA."""

    stats_minute: BrokerStatsItem = BrokerStatsItem()
    stats_hour: BrokerStatsItem = BrokerStatsItem()
    stats_day: BrokerStatsItem = BrokerStatsItem()


@record(frozen=True, slots=True)
class ConsumeQueueData(Body):
    """One unit of a consume queue; ``eval`` says whether it passes the filter of the requested group."""

    physic_offset: Int64 = 0
    physic_size: Int32 = 0
    tags_code: Int64 = 0
    extend_data_json: NullableText = ""
    bit_map: NullableText = ""
    eval: bool = False
    msg: NullableText = ""


@record(frozen=True, slots=True)
class ConsumeQueueBody(Body):
    """Answer to QUERY_CONSUME_QUEUE."""

    queue_data: tuple[ConsumeQueueData, ...] = ()
    max_queue_index: Int64 = 0
    min_queue_index: Int64 = 0
    subscription_data: SubscriptionData | None = None
    filter_data: NullableText = ""
