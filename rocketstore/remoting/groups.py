"""Subscription groups: their settings and members, heartbeats and locks of clients, offsets, times and statistics by
queue. JSON bodies; their fields' names are RocketMQ's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Final

from dledger.records import record
from dledger.remoting.codes import Language
from rocketstore.remoting.body import EMPTY_IS_NULL, AtMost, Body, NullableText
from rocketstore.remoting.headers import Int32, Int64, Named
from rocketstore.remoting.topics import PUT_AT_ONCE_MAX, DataVersion, MessageQueue
from rocketstore.types import ConsumeFromWhere, ConsumeType, MessageModel

GROUP_BYTES_MAX: Final = 64 * 1024
"""Of one group's settings: RocketMQ's take 300."""
RETRY_DELAYS_MAX: Final = 1024
"""That can be read; a group may have fewer."""
GROUPS_BYTES_MAX: Final = 1024 * 1024
"""Of a list of them."""


@record(frozen=True, slots=True)
class CustomizedRetryPolicy(Body):
    """Delays in milliseconds."""

    next: Annotated[tuple[Int64, ...], AtMost(RETRY_DELAYS_MAX)]


@record(frozen=True, slots=True)
class ExponentialRetryPolicy(Body):
    """The first and the longest delay in milliseconds; each is so many times the one before."""

    initial: Int64
    max: Int64
    multiplier: Int64


@record(frozen=True, slots=True)
class GroupRetryPolicy(Body):
    """Of RocketMQ 5: the one that ``type`` names (CUSTOMIZED, EXPONENTIAL) counts."""

    type: str = "CUSTOMIZED"
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    customized_retry_policy: CustomizedRetryPolicy | None = None


@record(frozen=True, slots=True)
class SubscriptionGroupConfig(Body):
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP."""

    bytes_max: ClassVar[int] = GROUP_BYTES_MAX
    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_queue_nums: Int32 = 1
    retry_max_times: Int32 = 16
    broker_id: Int64 = 0
    which_broker_when_consume_slowly: Int64 = 1
    notify_consumer_ids_changed_enable: bool = True
    consume_message_orderly: Annotated[bool, EMPTY_IS_NULL] = False
    group_retry_policy: GroupRetryPolicy | None = None
    """RocketMQ 5's, as the next and the one before."""


@record(frozen=True, slots=True)
class SubscriptionGroupList(Body):
    """UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST."""

    bytes_max: ClassVar[int] = GROUPS_BYTES_MAX
    group_config_list: Annotated[tuple[SubscriptionGroupConfig, ...], AtMost(PUT_AT_ONCE_MAX)] = ()


@record(frozen=True, slots=True)
class SubscriptionGroupTable(Body):
    """Answer to GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""

    data_version: DataVersion = DataVersion()
    subscription_group_table: Mapping[str, SubscriptionGroupConfig] = field(default_factory=dict)


@record(frozen=True, slots=True)
class GroupList(Body):
    """Answer to QUERY_TOPIC_CONSUME_BY_WHO."""

    group_list: tuple[str, ...] = ()


@record(frozen=True, slots=True)
class ConsumerOffsetTable(Body):
    """Answer to GET_ALL_CONSUMER_OFFSET: offsets by queue, by ``topic@group``."""

    offset_table: Mapping[str, Mapping[Int32, Int64]] = field(default_factory=dict)


@record(frozen=True, slots=True)
class DelayOffsetTable(Body):
    """Answer to GET_ALL_DELAY_OFFSET: offsets by delay level."""

    offset_table: Mapping[Int32, Int64] = field(default_factory=dict)


@record(frozen=True, slots=True)
class CorrectionOffsets(Body):
    """Answer to QUERY_CORRECTION_OFFSET: offsets by queue."""

    correction_offsets: Mapping[Int32, Int64] = field(default_factory=dict)


CLIENT_BYTES_MAX: Final = 2 * 1024 * 1024
"""For a body that any client may send: enough for a heartbeat with ten thousand subscriptions."""
GROUPS_MAX: Final = 1024
"""For one client: a program rarely has ten, and every heartbeat contains all of them."""
SUBSCRIPTIONS_MAX: Final = 16_384
"""For one group: the topics of one consumer."""
LOCK_QUEUES_MAX: Final = 8192
"""In one request to lock queues: those of one group at one broker."""
TAGS_MAX: Final = 16_384
"""For one subscription: the tags of an expression of 64 KiB."""


@record(frozen=True, slots=True)
class SubscriptionData(Body):
    """One topic of a consumer group. ``code_set`` contains the hashes of the tags; both are empty for all messages."""

    topic: str
    sub_string: str = "*"
    tags_set: Annotated[tuple[str, ...], AtMost(TAGS_MAX)] = ()
    code_set: Annotated[tuple[Int32, ...], AtMost(TAGS_MAX)] = ()
    sub_version: Int64 = 0
    expression_type: str = "TAG"
    class_filter_mode: bool = False


@record(frozen=True, slots=True)
class ProducerData(Body):
    """A producer group that a client belongs to."""

    group_name: str


@record(frozen=True, slots=True)
class ConsumerData(Body):
    """A consumer group that a client belongs to."""

    group_name: str
    consume_type: ConsumeType = ConsumeType.CONSUME_PASSIVELY
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    subscription_data_set: Annotated[tuple[SubscriptionData, ...], AtMost(SUBSCRIPTIONS_MAX)] = ()
    unit_mode: bool = False


@record(frozen=True, slots=True)
class HeartbeatData(Body):
    """HEART_BEAT."""

    bytes_max: ClassVar[int] = CLIENT_BYTES_MAX
    client_id: Annotated[str, Named("clientID")]
    producer_data_set: Annotated[tuple[ProducerData, ...], AtMost(GROUPS_MAX)] = ()
    consumer_data_set: Annotated[tuple[ConsumerData, ...], AtMost(GROUPS_MAX)] = ()


@record(frozen=True, slots=True)
class CheckClientBody(Body):
    """CHECK_CLIENT_CONFIG."""

    bytes_max: ClassVar[int] = CLIENT_BYTES_MAX
    client_id: str
    group: str
    subscription_data: SubscriptionData


@record(frozen=True, slots=True)
class ConsumerIdList(Body):
    """Answer to GET_CONSUMER_LIST_BY_GROUP."""

    consumer_id_list: tuple[str, ...] = ()


@record(frozen=True, slots=True)
class LockQueuesBody(Body):
    """LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""

    bytes_max: ClassVar[int] = CLIENT_BYTES_MAX
    client_id: str
    consumer_group: str
    mq_set: Annotated[tuple[MessageQueue, ...], AtMost(LOCK_QUEUES_MAX)] = ()


@record(frozen=True, slots=True)
class LockedQueuesBody(Body):
    """Answer to LOCK_BATCH_MQ: the queues that the client now has locked."""

    locked: Annotated[tuple[MessageQueue, ...], Named("lockOKMQSet")] = ()


@record(frozen=True, slots=True)
class ClientConnection(Body):
    """A client in the lists below."""

    client_id: str
    client_addr: str
    language: Language
    version: Int32


@record(frozen=True, slots=True)
class ConsumerConnectionList(Body):
    """Answer to GET_CONSUMER_CONNECTION_LIST."""

    connection_set: tuple[ClientConnection, ...] = ()
    subscription_table: Mapping[str, SubscriptionData] = field(default_factory=dict)
    consume_type: ConsumeType = ConsumeType.CONSUME_PASSIVELY
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET


@record(frozen=True, slots=True)
class ProducerConnectionList(Body):
    """Answer to GET_PRODUCER_CONNECTION_LIST."""

    connection_set: tuple[ClientConnection, ...] = ()


@record(frozen=True, slots=True)
class ProducerInfo(Body):
    """A producer in the table below; ``remote_ip`` is Java's ``/ip:port``."""

    client_id: str
    remote_ip: Annotated[str, Named("remoteIP")]
    language: Language
    version: Int32
    last_update_timestamp: Int64


@record(frozen=True, slots=True)
class ProducersByGroup(Body):
    """Answer to GET_ALL_PRODUCER_INFO, by group."""

    data: Mapping[str, tuple[ProducerInfo, ...]] = field(default_factory=dict)


@record(frozen=True, slots=True)
class ProcessQueueInfo(Body):
    """One queue of a consumer in the body below."""

    commit_offset: Int64 = 0
    cached_msg_count: Int32 = 0
    cached_msg_size_in_mi_b: Annotated[Int32, Named("cachedMsgSizeInMiB")] = 0
    locked: bool = False
    droped: bool = False


@record(frozen=True, slots=True)
class ConsumerRunningInfo(Body):
    """Answer to GET_CONSUMER_RUNNING_INFO, of a client."""

    properties: Mapping[str, str] = field(default_factory=dict)
    subscription_set: tuple[SubscriptionData, ...] = ()
    mq_table: Mapping[MessageQueue, ProcessQueueInfo] = field(default_factory=dict)


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
