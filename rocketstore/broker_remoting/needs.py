"""The permissions that each request over remoting requires under access control: one table, by request code. Pure.

RocketMQ 4.9 checks a dozen codes and leaves the others open to everybody who has a key. Here a code without a rule is
denied: what changes a broker, or shows more than single topics and groups, requires an administrator, and everything
else requires permissions on all topics and groups it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from dledger.access.guard import ResourceKind
from dledger.access.permissions import DEAD_PREFIX, RETRY_PREFIX, Permission
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.message.record import TOPIC_BYTES_MAX
from rocketstore.remoting.bodies.clients import CheckClientBody, HeartbeatData, LockQueuesBody
from rocketstore.remoting.bodies.groups import SubscriptionGroupConfig, SubscriptionGroupList
from rocketstore.remoting.bodies.topics import TopicConfigList
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.group_offsets import CommitOffsets, FetchOffsets
from rocketstore.remoting.headers import EndTransactionHeader, SendBackHeader, read_header

SUB, PUB = Permission.SUB, Permission.PUB
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
"""Clients write here what they did with their messages: every key may."""
NAME_CHARS_MAX: Final = 255
"""Names are quoted in the audit log, and no topic or group has a longer one."""
_GROUP_TOPICS: Final = (RETRY_PREFIX, DEAD_PREFIX)


class Need(NamedTuple):
    """A permission that a request requires."""

    kind: ResourceKind
    name: str
    permission: Permission


class Rule(NamedTuple):
    """What a request requires besides a valid key."""

    needs: Callable[[Frame], tuple[Need, ...]]
    admin: bool = False
    changes: bool = False
    """Whether it changes the broker: what an administrator may do is recorded then."""


def topic_need(name: str, permission: Permission) -> Need:
    """A group's own topics belong to its members, who also write to them."""
    return Need(ResourceKind.TOPIC, _checked(name), SUB if name.startswith(_GROUP_TOPICS) else permission)


def group_need(name: str) -> Need:
    """To be a member of the group."""
    return Need(ResourceKind.GROUP, _checked(name), SUB)


def _checked(name: str) -> str:
    if len(name) > NAME_CHARS_MAX:
        raise RequestError(f"a name of {len(name)} characters: topics have at most {TOPIC_BYTES_MAX}")
    return name


def _field(frame: Frame, name: str) -> str:
    found = frame.fields.get(name)
    if found is None:
        raise RequestError(f"the custom field <{name}> is null")
    return found


# -- kinds of rules ----------------------------------------------------------------------------------------------------


def _nothing(_frame: Frame) -> tuple[Need, ...]:
    return ()


def _sends(field: str) -> Rule:
    def needs(frame: Frame) -> tuple[Need, ...]:
        topic = _field(frame, field)
        return () if topic == TRACE_TOPIC else (topic_need(topic, PUB),)

    return Rule(needs)


def _reads(*, topic: str = "", group: str = "") -> Rule:
    """The names of the fields with the topic and the group."""

    def needs(frame: Frame) -> tuple[Need, ...]:
        on_topic = (topic_need(_field(frame, topic), SUB),) if topic else ()
        return (group_need(_field(frame, group)), *on_topic) if group else on_topic

    return Rule(needs)


def _group_and_perhaps_topic(frame: Frame) -> tuple[Need, ...]:
    topic = frame.fields.get("topic")
    on_group = group_need(_field(frame, "consumerGroup"))
    return (on_group, topic_need(topic, SUB)) if topic else (on_group,)


def _topic_and_perhaps_group(frame: Frame) -> tuple[Need, ...]:
    group = frame.fields.get("consumerGroup")
    on_topic = topic_need(_field(frame, "topic"), SUB)
    return (on_topic, group_need(group)) if group else (on_topic,)


def _group_left(frame: Frame) -> tuple[Need, ...]:
    group = frame.fields.get("consumerGroup")  # C++ leaves out what it is not in by an empty name
    return (group_need(group),) if group else ()


def _heartbeat(frame: Frame) -> tuple[Need, ...]:
    """Every group that the client consumes in, and every topic that it subscribes to."""
    needs: dict[Need, None] = {}
    for data in HeartbeatData.decode(frame.body).consumer_data_set:
        needs[group_need(data.group_name)] = None
        for one in data.subscription_data_set:
            needs[topic_need(one.topic, SUB)] = None
    return tuple(needs)


def _locks(frame: Frame) -> tuple[Need, ...]:
    wanted = LockQueuesBody.decode(frame.body)
    return _in_topics(wanted.consumer_group, [one.topic for one in wanted.mq_set])


def _fetches_offsets(frame: Frame) -> tuple[Need, ...]:
    wanted = FetchOffsets.decode(frame.body)
    return _in_topics(wanted.group, [topic for topic, _ in wanted.queues])


def _commits_offsets(frame: Frame) -> tuple[Need, ...]:
    wanted = CommitOffsets.decode(frame.body)
    return _in_topics(wanted.group, [topic for topic, *_ in wanted.offsets])


def _in_topics(group: str, topics: Sequence[str]) -> tuple[Need, ...]:
    return (group_need(group), *(topic_need(one, SUB) for one in dict.fromkeys(topics)))


def _subscription(frame: Frame) -> tuple[Need, ...]:
    wanted = CheckClientBody.decode(frame.body)
    return group_need(wanted.group), topic_need(wanted.subscription_data.topic, SUB)


_ANY_ACCOUNT: Final = Rule(_nothing)
_ADMIN_READS: Final = Rule(_nothing, admin=True)
_ADMIN_CHANGES: Final = Rule(_nothing, admin=True, changes=True)
_TOPIC: Final = _reads(topic="topic")
_CODE: Final = RequestCode

RULES: Final[Mapping[int, Rule]] = {
    # producers
    _CODE.SEND_MESSAGE: _sends("topic"),
    _CODE.SEND_MESSAGE_V2: _sends("b"),
    _CODE.SEND_BATCH_MESSAGE: _sends("b"),
    _CODE.SEND_REPLY_MESSAGE: _sends("topic"),
    _CODE.SEND_REPLY_MESSAGE_V2: _sends("b"),
    OwnCode.SEND_NUMBERED: _ANY_ACCOUNT,  # and PUB on the topics of its messages
    OwnCode.NEXT_NUMBER: _ANY_ACCOUNT,  # producers' names are separate per account
    _CODE.END_TRANSACTION: _ANY_ACCOUNT,  # and PUB on the topic of the message: see ``RECORDS``
    # consumers
    _CODE.PULL_MESSAGE: _reads(topic="topic", group="consumerGroup"),
    _CODE.LITE_PULL_MESSAGE: _reads(topic="topic", group="consumerGroup"),
    _CODE.QUERY_CONSUMER_OFFSET: _reads(topic="topic", group="consumerGroup"),
    _CODE.UPDATE_CONSUMER_OFFSET: _reads(topic="topic", group="consumerGroup"),
    OwnCode.FETCH_OFFSETS: Rule(_fetches_offsets),
    OwnCode.COMMIT_OFFSETS: Rule(_commits_offsets),
    _CODE.SEARCH_OFFSET_BY_TIMESTAMP: _TOPIC,
    _CODE.GET_MAX_OFFSET: _TOPIC,
    _CODE.GET_MIN_OFFSET: _TOPIC,
    _CODE.GET_EARLIEST_MSG_STORETIME: _TOPIC,
    _CODE.CONSUMER_SEND_MSG_BACK: _reads(group="group"),  # and SUB on the topic of the message: see ``RECORDS``
    _CODE.HEART_BEAT: Rule(_heartbeat),
    _CODE.UNREGISTER_CLIENT: Rule(_group_left),
    _CODE.GET_CONSUMER_LIST_BY_GROUP: _reads(group="consumerGroup"),
    _CODE.LOCK_BATCH_MQ: Rule(_locks),
    _CODE.UNLOCK_BATCH_MQ: Rule(_locks),
    _CODE.CHECK_CLIENT_CONFIG: Rule(_subscription),
    # messages
    _CODE.QUERY_MESSAGE: _TOPIC,
    _CODE.VIEW_MESSAGE_BY_ID: _ANY_ACCOUNT,  # and SUB on the topic of the message that is found
    # questions; what lists topics or groups shows those that the account may use
    _CODE.GET_ALL_TOPIC_CONFIG: _ANY_ACCOUNT,
    _CODE.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _ANY_ACCOUNT,
    _CODE.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _ANY_ACCOUNT,
    _CODE.GET_ALL_PRODUCER_INFO: _ANY_ACCOUNT,
    _CODE.GET_BROKER_RUNTIME_INFO: _ANY_ACCOUNT,
    _CODE.GET_BROKER_HA_STATUS: _ANY_ACCOUNT,
    _CODE.GET_ROUTEINFO_BY_TOPIC: _ANY_ACCOUNT,  # as of a name server, which has no accounts
    _CODE.GET_BROKER_CLUSTER_INFO: _ANY_ACCOUNT,
    _CODE.GET_TOPIC_CONFIG: _TOPIC,
    _CODE.GET_SUBSCRIPTIONGROUP_CONFIG: _reads(group="group"),
    _CODE.GET_TOPIC_STATS_INFO: _TOPIC,
    _CODE.QUERY_TOPIC_CONSUME_BY_WHO: _TOPIC,
    _CODE.GET_CONSUMER_CONNECTION_LIST: _reads(group="consumerGroup"),
    _CODE.GET_PRODUCER_CONNECTION_LIST: _reads(group="producerGroup"),
    _CODE.GET_CONSUME_STATS: Rule(_group_and_perhaps_topic),
    _CODE.QUERY_CONSUME_TIME_SPAN: _reads(topic="topic", group="group"),
    _CODE.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _reads(topic="topic", group="group"),
    _CODE.GET_CONSUMER_RUNNING_INFO: _reads(group="consumerGroup"),
    _CODE.QUERY_CONSUME_QUEUE: Rule(_topic_and_perhaps_group),
    # of all topics or all groups at once; the offsets of all, which slaves fetch
    _CODE.GET_BROKER_CONFIG: _ADMIN_READS,
    _CODE.GET_ALL_CONSUMER_OFFSET: _ADMIN_READS,
    _CODE.GET_ALL_DELAY_OFFSET: _ADMIN_READS,
    _CODE.GET_BROKER_CONSUME_STATS: _ADMIN_READS,
    _CODE.QUERY_CORRECTION_OFFSET: _ADMIN_READS,
    _CODE.VIEW_BROKER_STATS_DATA: _ADMIN_READS,
    _CODE.GET_BROKER_CLUSTER_ACL_INFO: _ADMIN_READS,
    # never carried out: the rules are a file
    _CODE.UPDATE_AND_CREATE_ACL_CONFIG: _ADMIN_READS,
    _CODE.DELETE_ACL_CONFIG: _ADMIN_READS,
    _CODE.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: _ADMIN_READS,
    # changes
    _CODE.UPDATE_AND_CREATE_TOPIC: _ADMIN_CHANGES,
    _CODE.UPDATE_AND_CREATE_TOPIC_LIST: _ADMIN_CHANGES,
    _CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _ADMIN_CHANGES,
    _CODE.DELETE_TOPIC_IN_BROKER: _ADMIN_CHANGES,
    _CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _ADMIN_CHANGES,
    _CODE.DELETE_SUBSCRIPTIONGROUP: _ADMIN_CHANGES,
    _CODE.UPDATE_BROKER_CONFIG: _ADMIN_CHANGES,
    _CODE.INVOKE_BROKER_TO_RESET_OFFSET: _ADMIN_CHANGES,
    _CODE.CLONE_GROUP_OFFSET: _ADMIN_CHANGES,
    _CODE.CONSUME_MESSAGE_DIRECTLY: _ADMIN_CHANGES,
    _CODE.RESUME_CHECK_HALF_MESSAGE: _ADMIN_CHANGES,
    _CODE.CLEAN_EXPIRED_CONSUMEQUEUE: _ADMIN_CHANGES,
    _CODE.CLEAN_UNUSED_TOPIC: _ADMIN_CHANGES,
    _CODE.DELETE_EXPIRED_COMMITLOG: _ADMIN_CHANGES,
}
"""By request code. A broker never gets the codes that only name servers or clients serve."""

IN_BODY: Final = frozenset(
    {
        _CODE.HEART_BEAT,
        _CODE.LOCK_BATCH_MQ,
        _CODE.UNLOCK_BATCH_MQ,
        _CODE.CHECK_CLIENT_CONFIG,
        OwnCode.FETCH_OFFSETS,
        OwnCode.COMMIT_OFFSETS,
    }
)
"""Requests whose needs are in their bodies, which may be large."""

RECORDS: Final[Mapping[int, tuple[Callable[[Frame], int], Permission]]] = {
    _CODE.CONSUMER_SEND_MSG_BACK: (lambda frame: read_header(SendBackHeader, frame.fields).offset, SUB),
    _CODE.END_TRANSACTION: (lambda frame: read_header(EndTransactionHeader, frame.fields).commit_log_offset, PUB),
}
"""Requests about a message somewhere in the log: where it is, and what they require on its topic.

Otherwise any group could have the messages of other topics sent back to itself, and any account could end the
transactions of others.
"""


def resource_of(frame: Frame) -> str:
    """What an administrator's request is about, for the audit log."""
    if frame.code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
        return f"group:{_checked(SubscriptionGroupConfig.decode(frame.body).group_name)}"
    if frame.code == RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST:
        return _several("group", [one.group_name for one in SubscriptionGroupList.decode(frame.body).group_config_list])
    if frame.code == RequestCode.UPDATE_AND_CREATE_TOPIC_LIST:
        return _several("topic", [one.topic_name for one in TopicConfigList.decode(frame.body).topic_config_list])
    for kind, names in (("topic", ("topic",)), ("group", ("consumerGroup", "groupName", "group", "destGroup"))):
        for name in names:
            found = frame.fields.get(name, "")
            if found and len(found) <= NAME_CHARS_MAX:
                return f"{kind}:{found}"
    return ""


def _several(kind: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{kind}:{_checked(names[0])}{more}" if names else ""


_NAMES: Final[Mapping[int, str]] = {one.value: one.name for one in (*RequestCode, *OwnCode)}


def action_of(frame: Frame) -> str:
    """The request's name, for people."""
    return _NAMES.get(frame.code) or f"request {frame.code}"
