"""Which of RocketMQ's requests are supported, and what differs: ``docs/rocketmq.md`` has the table made from this."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from rocketstore.remoting.codes import RequestCode as Code


class AnsweredBy(StrEnum):
    """Whose request it is to answer."""

    BROKER = "broker"
    NAME_SERVER = "name server"
    BOTH = "name server and broker"
    """Brokers tell of their own group, to clients that have no name server; Apache's brokers do not."""
    CLIENT = "client"


class Support(StrEnum):
    """Whether it is carried out."""

    YES = "yes"
    ANSWERED = "answered"
    """With success, but nothing is done."""
    NO = "no"


class Supported(NamedTuple):
    """The support of a request; ``note``: a difference from RocketMQ, or why it is not supported."""

    receiver: AnsweredBy
    support: Support
    note: str = ""


def _by_broker(note: str = "") -> Supported:
    return Supported(AnsweredBy.BROKER, Support.YES, note)


def _by_name_server(note: str = "") -> Supported:
    return Supported(AnsweredBy.NAME_SERVER, Support.YES, note)


def _by_both(note: str = "") -> Supported:
    return Supported(AnsweredBy.BOTH, Support.YES, note)


def _to_client(note: str = "") -> Supported:
    return Supported(AnsweredBy.CLIENT, Support.YES, note)


def _answered(note: str) -> Supported:
    return Supported(AnsweredBy.BROKER, Support.ANSWERED, note)


def _not(note: str, receiver: AnsweredBy = AnsweredBy.BROKER) -> Supported:
    return Supported(receiver, Support.NO, note)


_AT_MASTER: Final = "a slave passes it on to the master"
_ACL: Final = "code 3: access rules are a file on each broker ([security.md](security.md#access-keys-and-limits))"
_OWN_GROUP: Final = "a broker tells of its own group only, which RocketMQ's brokers do not"
_QUEUES: Final = "about 20,000 queues at most"

CODES: Final[Mapping[Code, Supported]] = {
    Code.SEND_MESSAGE: _by_broker(_AT_MASTER),
    Code.PULL_MESSAGE: _by_broker(
        "filters by tags and [SQL92](#sql92-filters); an offset committed with it is replicated within 0.2 s; "
        "suggests a slave with `slaveReadEnable`, and slaves answer without it, too"
    ),
    Code.QUERY_MESSAGE: _by_broker("`pull_bytes_max` per answer; messages of a deleted topic are never found"),
    Code.QUERY_CONSUMER_OFFSET: _by_broker(),
    Code.UPDATE_CONSUMER_OFFSET: _by_broker(f"{_AT_MASTER}; an offset beyond the queue's end is refused with code 1"),
    Code.UPDATE_AND_CREATE_TOPIC: _by_broker(
        f"{_AT_MASTER}; answered once the name servers know, or after a second; 1 to 1024 queues"
    ),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: _by_broker(
        f"RocketMQ 5's; {_AT_MASTER}; as for one topic, at most 1024, none of them if one is refused"
    ),
    Code.GET_ALL_TOPIC_CONFIG: _by_broker(),
    Code.UPDATE_BROKER_CONFIG: _by_broker("[a few settings](#settings-of-a-running-broker); code 16 for all others"),
    Code.GET_BROKER_CONFIG: _by_broker(),
    Code.GET_BROKER_RUNTIME_INFO: _by_broker("the times that requests wait for threads are always 0"),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _by_broker(
        "the first message at that time or later, as in RocketMQ 5; RocketMQ 4 answers the nearest one, also an older"
    ),
    Code.GET_MAX_OFFSET: _by_broker(),
    Code.GET_MIN_OFFSET: _by_broker("0 for an unknown queue, not -1"),
    Code.GET_EARLIEST_MSG_STORETIME: _by_broker(),
    Code.VIEW_MESSAGE_BY_ID: _by_broker("messages of a deleted topic are never found"),
    Code.HEART_BEAT: _by_broker(),
    Code.UNREGISTER_CLIENT: _by_broker(),
    Code.CONSUMER_SEND_MSG_BACK: _by_broker(_AT_MASTER),
    Code.END_TRANSACTION: _by_broker(
        f"{_AT_MASTER}; ends a transaction once ([messages.md](messages.md#transactions))"
    ),
    Code.GET_CONSUMER_LIST_BY_GROUP: _by_broker(),
    Code.CHECK_TRANSACTION_STATE: _to_client(
        "to who prepared the message, else one producer of the group, in turn ([messages.md](messages.md#checks))"
    ),
    Code.NOTIFY_CONSUMER_IDS_CHANGED: _to_client(),
    Code.LOCK_BATCH_MQ: _by_broker(_AT_MASTER),
    Code.UNLOCK_BATCH_MQ: _by_broker(_AT_MASTER),
    Code.GET_ALL_CONSUMER_OFFSET: _by_broker("code 1 if the answer would exceed 16 MiB"),
    Code.GET_ALL_DELAY_OFFSET: _by_broker(),
    Code.CHECK_CLIENT_CONFIG: _by_broker(
        "code 23 says where an expression is wrong; code 1 for SQL92 if `enablePropertyFilter` is false"
    ),
    Code.UPDATE_AND_CREATE_ACL_CONFIG: _not(_ACL),
    Code.DELETE_ACL_CONFIG: _not(_ACL),
    Code.GET_BROKER_CLUSTER_ACL_INFO: _by_broker("the version is the time of the broker's start"),
    Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: _not(_ACL),
    Code.PUT_KV_CONFIG: _by_name_server(),
    Code.GET_KV_CONFIG: _by_name_server(),
    Code.DELETE_KV_CONFIG: _by_name_server(),
    Code.REGISTER_BROKER: _by_name_server(),
    Code.UNREGISTER_BROKER: _by_name_server(),
    Code.GET_ROUTEINFO_BY_TOPIC: _by_both(_OWN_GROUP),
    Code.GET_BROKER_CLUSTER_INFO: _by_both(_OWN_GROUP),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _by_broker(_AT_MASTER),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _by_broker("without the groups that RocketMQ always has"),
    Code.GET_TOPIC_STATS_INFO: _by_broker(),
    Code.GET_CONSUMER_CONNECTION_LIST: _by_broker(),
    Code.GET_PRODUCER_CONNECTION_LIST: _by_broker(),
    Code.WIPE_WRITE_PERM_OF_BROKER: _by_name_server(),
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _by_name_server(),
    Code.DELETE_SUBSCRIPTIONGROUP: _by_broker(
        f"{_AT_MASTER}; a group with offsets stays with the default settings, unless `removeOffset` is set: then its "
        "retry and dead-letter topics go with it"
    ),
    Code.GET_CONSUME_STATS: _by_broker(_QUEUES),
    Code.DELETE_TOPIC_IN_BROKER: _by_broker(f"{_AT_MASTER}; deletes the groups' offsets in the topic, too"),
    Code.DELETE_TOPIC_IN_NAMESRV: _by_name_server(),
    Code.GET_KVLIST_BY_NAMESPACE: _by_name_server(),
    Code.RESET_CONSUMER_CLIENT_OFFSET: _to_client(),
    Code.GET_CONSUMER_STATUS_FROM_CLIENT: _to_client(),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: _by_broker("groups of at most 1024 clients"),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _by_broker(
        "groups of at most 1024 clients; those that do not answer within 5 s are named in the remark"
    ),
    Code.GET_TOPICS_BY_CLUSTER: _by_name_server(),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _by_broker(
        f"RocketMQ 5's; {_AT_MASTER}; at most 1024, none of them if one is refused"
    ),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: _by_broker(),
    Code.QUERY_CONSUME_TIME_SPAN: _by_broker(),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: _by_name_server(),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _by_broker(),
    Code.CLEAN_EXPIRED_CONSUMEQUEUE: _answered("queue files are always removed along with the log's"),
    Code.GET_CONSUMER_RUNNING_INFO: _by_broker("passed on to the client without the request's signature"),
    Code.QUERY_CORRECTION_OFFSET: _by_broker("never deletes the offsets of `filterGroups`"),
    Code.CONSUME_MESSAGE_DIRECTLY: _by_broker("passed on to the client without the request's signature"),
    Code.SEND_MESSAGE_V2: _by_broker(_AT_MASTER),
    Code.GET_UNIT_TOPIC_LIST: _by_name_server(),
    Code.GET_HAS_UNIT_SUB_TOPIC_LIST: _by_name_server(),
    Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: _by_name_server(),
    Code.CLONE_GROUP_OFFSET: _by_broker(f"{_AT_MASTER}; without a topic, the offsets in all topics"),
    Code.VIEW_BROKER_STATS_DATA: _by_broker(
        "TOPIC_PUT_NUMS, TOPIC_PUT_SIZE, GROUP_GET_NUMS, GROUP_GET_SIZE, SNDBCK_PUT_NUMS, BROKER_PUT_NUMS and "
        "BROKER_GET_NUMS, of the first `metrics_topics_max` topics; `avgpt` is per message"
    ),
    Code.CLEAN_UNUSED_TOPIC: _answered("files of deleted topics are removed along with the log's"),
    Code.GET_BROKER_CONSUME_STATS: _by_broker(_QUEUES),
    Code.UPDATE_NAMESRV_CONFIG: _by_name_server("changes `orderMessageEnable` only"),
    Code.GET_NAMESRV_CONFIG: _by_name_server(),
    Code.SEND_BATCH_MESSAGE: _by_broker(_AT_MASTER),
    Code.QUERY_CONSUME_QUEUE: _by_broker("at most 4096 units"),
    Code.QUERY_DATA_VERSION: _by_name_server(),
    Code.RESUME_CHECK_HALF_MESSAGE: _by_broker(
        f"{_AT_MASTER}; messages of `TRANS_CHECK_MAX_TIME_TOPIC`, any other is refused with code 1"
    ),
    Code.SEND_REPLY_MESSAGE: _by_broker("replies are delivered, but not stored"),
    Code.SEND_REPLY_MESSAGE_V2: _by_broker("replies are delivered, but not stored"),
    Code.PUSH_REPLY_MESSAGE_TO_CLIENT: _to_client(),
    Code.ADD_WRITE_PERM_OF_BROKER: _by_name_server(),
    Code.GET_ALL_PRODUCER_INFO: _by_broker(),
    Code.DELETE_EXPIRED_COMMITLOG: _by_broker(),
    Code.GET_TOPIC_CONFIG: _by_broker("RocketMQ 5's"),
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: _by_broker("RocketMQ 5's; without the settings that 4.9 does not have"),
    Code.LITE_PULL_MESSAGE: _by_broker("RocketMQ 5's `PULL_MESSAGE` of consumers that poll; the same"),
    Code.RECALL_MESSAGE: _by_broker(f"RocketMQ 5's; {_AT_MASTER}; of a timed message that is not on its way"),
    Code.QUERY_ASSIGNMENT: _by_broker(
        "RocketMQ 5's; as `setConsumeMode` says; clients of other groups that ask pop, from all queues"
    ),
    Code.SET_MESSAGE_REQUEST_MODE: _by_broker(f"RocketMQ 5's; {_AT_MASTER}; replicated"),
    Code.GET_ALL_MESSAGE_REQUEST_MODE: _by_broker("RocketMQ 5's"),
    Code.POP_MESSAGE: _by_broker("RocketMQ 5's; up to 32 messages, for 1 s to 12 h"),
    Code.ACK_MESSAGE: _by_broker("RocketMQ 5's"),
    Code.BATCH_ACK_MESSAGE: _by_broker("RocketMQ 5's"),
    Code.CHANGE_MESSAGE_INVISIBLETIME: _by_broker("RocketMQ 5's"),
    Code.PEEK_MESSAGE: _by_broker("RocketMQ 5's"),
    Code.NOTIFICATION: _by_broker("RocketMQ 5's"),
    Code.POLLING_INFO: _by_broker("RocketMQ 5's"),
    Code.GET_BROKER_HA_STATUS: _by_broker("RocketMQ 5's; transfer speeds are 0; code 1 in a group, which has no HA"),
}
