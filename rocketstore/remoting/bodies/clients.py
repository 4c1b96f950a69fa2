"""Bodies sent by clients about themselves, and lists of clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Final

from dledger.records import record
from dledger.remoting.codes import Language
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.body import AtMost, Body
from rocketstore.remoting.headers import Int32, Int64, Named
from rocketstore.types import ConsumeFromWhere, ConsumeType, MessageModel

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
