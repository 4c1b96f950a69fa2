"""What each request requires: the table itself, without a broker."""

from __future__ import annotations

import pytest

from dledger.access.guard import ResourceKind
from dledger.remoting.codes import RequestError
from dledger.remoting.frame import Frame
from rocketstore.broker.permissions import PUB, SUB, Need
from rocketstore.broker.refusal import Refusal
from rocketstore.broker_remoting.requests import REQUESTS, action_of, resource_of
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import CommitGroupOffsets, CommitPosition, FetchOffsets
from rocketstore.remoting.groups import (
    ConsumerData,
    HeartbeatData,
    ProducerData,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
)
from rocketstore.remoting.topics import TopicConfigData, TopicConfigList
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN

TOPIC, GROUP = ResourceKind.TOPIC, ResourceKind.GROUP
ELSEWHERE = {
    *range(RequestCode.PUT_KV_CONFIG, RequestCode.UNREGISTER_BROKER + 1),
    RequestCode.CHECK_TRANSACTION_STATE,
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    RequestCode.DELETE_TOPIC_IN_NAMESRV,
    RequestCode.GET_KVLIST_BY_NAMESPACE,
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
    RequestCode.GET_TOPICS_BY_CLUSTER,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
    RequestCode.GET_UNIT_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
    RequestCode.UPDATE_NAMESRV_CONFIG,
    RequestCode.GET_NAMESRV_CONFIG,
    RequestCode.QUERY_DATA_VERSION,
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
    RequestCode.ADD_WRITE_PERM_OF_BROKER,
}
"""What name servers and clients are asked."""
OPEN = {
    RequestCode.END_TRANSACTION,
    RequestCode.VIEW_MESSAGE_BY_ID,
    RequestCode.GET_ALL_TOPIC_CONFIG,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE,
    RequestCode.GET_ALL_PRODUCER_INFO,
    RequestCode.GET_BROKER_RUNTIME_INFO,
    RequestCode.GET_BROKER_HA_STATUS,
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.GET_BROKER_CLUSTER_INFO,
    OwnCode.SEND_NUMBERED,
    OwnCode.NEXT_NUMBER,
}
"""Every account may ask these; what they show or do is checked by the message, or by the answer."""


def needs(code: int, fields: dict[str, str] | None = None, body: bytes = b"") -> set[Need]:
    return set(REQUESTS[code].needs(Frame(code, 1, fields or {}, body)))


def test_every_code_that_a_broker_serves_has_a_rule(broker: RemotingHarness) -> None:
    """Whoever adds one says what it requires; without a rule it is denied."""
    assert broker.remoting.server.codes <= REQUESTS.keys()
    assert set(REQUESTS) == set(RequestCode) - ELSEWHERE | set(OwnCode)


@pytest.mark.parametrize(
    ("code", "field"),
    [
        (RequestCode.SEND_MESSAGE, "topic"),
        (RequestCode.SEND_MESSAGE_V2, "b"),
        (RequestCode.SEND_BATCH_MESSAGE, "b"),
        (RequestCode.SEND_REPLY_MESSAGE, "topic"),
        (RequestCode.SEND_REPLY_MESSAGE_V2, "b"),
    ],
)
def test_a_send_requires_pub_on_the_topic_that_its_handler_reads(code: int, field: str) -> None:
    """A field of the other form is no topic."""
    other = "b" if field == "topic" else "topic"
    assert needs(code, {field: "T", other: "other"}) == {Need(TOPIC, "T", PUB)}
    assert needs(code, {field: "RMQ_SYS_TRACE_TOPIC"}) == set()
    for own in ("%RETRY%g", "%DLQ%g"):  # members of the group write to these
        assert needs(code, {field: own}) == {Need(TOPIC, own, SUB)}
    with pytest.raises(RequestError, match=f"the custom field <{field}> is null"):
        needs(code, {other: "T"})


def test_a_heartbeat_requires_every_group_and_every_topic() -> None:
    """But no producer group: these are names only."""
    data = [
        ConsumerData("g", subscription_data_set=(SubscriptionData("T"), SubscriptionData("%RETRY%g"))),
        ConsumerData("h", subscription_data_set=(SubscriptionData("U"),)),
    ]
    body = HeartbeatData("c", (ProducerData("p"),), tuple(data)).encode()
    topics = {Need(TOPIC, name, SUB) for name in ("T", "%RETRY%g", "U")}
    assert needs(RequestCode.HEART_BEAT, body=body) == topics | {Need(GROUP, "g", SUB), Need(GROUP, "h", SUB)}


def test_captured_heartbeats_require_what_they_name() -> None:
    """C++ has other bodies (F78)."""
    frame = GOLDEN["F78"].frame
    assert {(one.kind, one.permission) for one in needs(frame.code, {}, frame.body)} == {(TOPIC, SUB), (GROUP, SUB)}


@pytest.mark.parametrize(
    ("code", "on_topic", "on_group"),
    [
        (RequestCode.PULL_MESSAGE, "topic", "consumerGroup"),
        (RequestCode.LITE_PULL_MESSAGE, "topic", "consumerGroup"),
        (RequestCode.QUERY_CONSUMER_OFFSET, "topic", "consumerGroup"),
        (RequestCode.UPDATE_CONSUMER_OFFSET, "topic", "consumerGroup"),
        (RequestCode.GET_CONSUME_STATS, "topic", "consumerGroup"),
        (RequestCode.QUERY_CONSUME_QUEUE, "topic", "consumerGroup"),
        (RequestCode.QUERY_CONSUME_TIME_SPAN, "topic", "group"),
        (RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, "topic", "group"),
        (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, "topic", ""),
        (RequestCode.GET_MAX_OFFSET, "topic", ""),
        (RequestCode.GET_MIN_OFFSET, "topic", ""),
        (RequestCode.GET_EARLIEST_MSG_STORETIME, "topic", ""),
        (RequestCode.QUERY_MESSAGE, "topic", ""),
        (RequestCode.GET_TOPIC_STATS_INFO, "topic", ""),
        (RequestCode.GET_TOPIC_CONFIG, "topic", ""),
        (RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, "", "group"),
        (RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, "topic", ""),
        (RequestCode.CONSUMER_SEND_MSG_BACK, "", "group"),
        (RequestCode.UNREGISTER_CLIENT, "", "consumerGroup"),
        (RequestCode.GET_CONSUMER_LIST_BY_GROUP, "", "consumerGroup"),
        (RequestCode.GET_CONSUMER_CONNECTION_LIST, "", "consumerGroup"),
        (RequestCode.GET_PRODUCER_CONNECTION_LIST, "", "producerGroup"),
        (RequestCode.GET_CONSUMER_RUNNING_INFO, "", "consumerGroup"),
    ],
)
def test_a_read_requires_sub_on_its_topic_and_on_its_group(code: int, on_topic: str, on_group: str) -> None:
    """By the fields that its handler reads."""
    fields = {name: name.upper() for name in ("topic", "group", "consumerGroup", "producerGroup")}
    expected = {Need(TOPIC, on_topic.upper(), SUB)} if on_topic else set()
    if on_group:
        expected |= {Need(GROUP, on_group.upper(), SUB)}
    assert needs(code, fields) == expected


def test_locks_require_the_group_and_the_topics() -> None:
    """Also to unlock."""
    queues = b",".join(b'{"brokerName":"b","queueId":0,"topic":"%s"}' % one for one in (b"T", b"U", b"T"))
    body = b'{"clientId":"c","consumerGroup":"g","mqSet":[%s]}' % queues
    for code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ):
        assert needs(code, {}, body) == {Need(GROUP, "g", SUB), Need(TOPIC, "T", SUB), Need(TOPIC, "U", SUB)}


def test_offsets_of_many_queues_require_the_group_and_the_topics() -> None:
    """Whether they are read or stored."""
    wanted = {Need(GROUP, "g", SUB), Need(TOPIC, "T", SUB), Need(TOPIC, "U", SUB)}
    assert needs(OwnCode.FETCH_OFFSETS, {}, FetchOffsets("g", [("T", 0), ("U", 0), ("T", 1)]).encode()) == wanted
    assert needs(OwnCode.COMMIT_OFFSETS, {}, CommitGroupOffsets("g", [("T", 0, 5), ("U", 1, 0)]).encode()) == wanted
    assert needs(OwnCode.COMMIT_POSITION, {}, CommitPosition("g", 5, ["U", "T"]).encode()) == wanted


def test_a_filter_to_be_checked_requires_what_it_is_for() -> None:
    body = b'{"clientId":"c","group":"g","subscriptionData":{"topic":"T","subString":"*"}}'
    assert needs(RequestCode.CHECK_CLIENT_CONFIG, {}, body) == {Need(GROUP, "g", SUB), Need(TOPIC, "T", SUB)}


def test_all_others_are_for_administrators() -> None:
    """Only these are open to every account."""
    free = {code for code, rule in REQUESTS.items() if not rule.rule.admin and _requires_nothing(code)}
    assert free == OPEN | {RequestCode.UNREGISTER_CLIENT}  # of no group


def _requires_nothing(code: int) -> bool:
    try:
        return REQUESTS[code].needs(Frame(code, 1)) == ()
    except RequestError:
        return False


def test_what_is_too_long_for_a_name_gets_into_no_log() -> None:
    with pytest.raises(Refusal, match="a name of 256 characters"):
        needs(RequestCode.GET_MAX_OFFSET, {"topic": "x" * 256})
    assert resource_of(Frame(RequestCode.DELETE_TOPIC_IN_BROKER, 1, {"topic": "x" * 256})) == ""


def test_the_audit_log_gets_names() -> None:
    """Of the request, and of what it is about."""
    group = SubscriptionGroupConfig("g").encode()
    assert resource_of(Frame(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, 1, {}, group)) == "group:g"
    groups = SubscriptionGroupList((SubscriptionGroupConfig("g"), SubscriptionGroupConfig("h"))).encode()
    found = resource_of(Frame(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, 1, {}, groups))
    assert found == "group:g and 1 more"
    topics = TopicConfigList((TopicConfigData("T"),)).encode()
    assert resource_of(Frame(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, 1, {}, topics)) == "topic:T"
    assert resource_of(Frame(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, 1, {}, b"{}")) == ""
    assert resource_of(Frame(RequestCode.DELETE_SUBSCRIPTIONGROUP, 1, {"groupName": "g"})) == "group:g"
    assert resource_of(Frame(RequestCode.DELETE_TOPIC_IN_BROKER, 1, {"topic": "T"})) == "topic:T"
    assert resource_of(Frame(RequestCode.GET_BROKER_CONFIG, 1)) == ""
    assert action_of(Frame(10, 1)) == "SEND_MESSAGE"
    assert action_of(Frame(9999, 1)) == "request 9999"
