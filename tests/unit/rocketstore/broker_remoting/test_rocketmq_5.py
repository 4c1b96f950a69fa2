"""What clients and tools of RocketMQ 5 ask of any broker."""

from __future__ import annotations

import json

import pytest

from dledger.remoting.codes import OUTCOME_FIELD, AnswerCode
from rocketstore.broker.mastership import GroupView
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import SubscriptionGroupConfig
from rocketstore.remoting.topics import TopicConfigData
from rocketstore.state.attributes import ExponentialRetryDelays, FixedRetryDelays, RetryPolicy
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.types import BrokerRole, MessageType
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

COMMIT, SUSPEND, INLINE, LITE = 1, 2, 4, 16


def lite_pull(offset: int = 0, **others: object) -> dict[str, object]:
    """As DefaultLitePullConsumer asks: with its subscription, and without a heartbeat before it."""
    fields = {"subscription": "*", "expressionType": "TAG", "maxMsgBytes": 2**31 - 1, "brokerName": "b"}
    return pull_fields("g", "T", offset, **{"sysFlag": INLINE | LITE, **fields, **others})


def test_a_lite_pull_is_answered_like_any_other(broker: RemotingHarness, client: RemotingSocket) -> None:
    """A consumer that polls would otherwise get nothing, and no error."""
    client.send(body=b"one")
    for code in (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE):
        answer = client.ask(code, lite_pull(commitOffset=1, sysFlag=COMMIT | INLINE | LITE))
        assert (answer.code, answer.remark, answer.fields["nextBeginOffset"]) == (0, "FOUND", "1")
        assert decode_record(answer.body).body == b"one"
    wait_until(lambda: broker.state.offset("g", "T", 0) == 1, "the offset that it commits is stored")
    beyond = client.ask(RequestCode.LITE_PULL_MESSAGE, lite_pull(9))
    assert beyond.code == AnswerCode.PULL_OFFSET_MOVED


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"topic": "unknown"}, AnswerCode.TOPIC_NOT_EXIST),
        ({"queueId": 99}, AnswerCode.SYSTEM_ERROR),
        ({"expressionType": "XML"}, AnswerCode.SYSTEM_ERROR),
        ({"expressionType": "SQL92"}, AnswerCode.SUBSCRIPTION_PARSE_FAILED),
        ({"sysFlag": LITE}, AnswerCode.SUBSCRIPTION_NOT_EXIST),
        ({"consumerGroup": "off"}, AnswerCode.NO_PERMISSION),
    ],
)
def test_a_lite_pull_is_refused_like_any_other(
    broker: RemotingHarness, client: RemotingSocket, changed: dict[str, object], code: AnswerCode
) -> None:
    broker.state.configs["off"] = GroupConfig("off", consume_enable=False)
    asked = lite_pull() | changed
    assert client.ask(RequestCode.LITE_PULL_MESSAGE, asked).code == code
    assert client.ask(RequestCode.PULL_MESSAGE, asked).code == code


def test_a_lite_pull_waits_for_a_message(client: RemotingSocket) -> None:
    waits = lite_pull(sysFlag=SUSPEND | INLINE | LITE, suspendTimeoutMillis=20_000)
    waiting = client.begin(RequestCode.LITE_PULL_MESSAGE, waits)
    client.send(body=b"at last")
    assert decode_record(client.answer_to(waiting).body).body == b"at last"


def test_a_topic_is_told_by_itself(broker: RemotingHarness, client: RemotingSocket) -> None:
    """As in the list of all; also one that every broker has, and none that nobody may see."""
    broker.state.table["Orders"] = TopicConfig("Orders", 3, 5, 4, order=True, sys_flag=1)
    told = client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "Orders", "lo": "true"})
    assert TopicConfigData.decode(told.body) == TopicConfigData("Orders", 3, 5, 4, "SINGLE_TAG", 1, order=True)
    assert client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "TBW102"}).code == 0
    for name in ("unknown", "RMQ_SYS_BROKER_STATE"):
        assert client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": name}).code == AnswerCode.TOPIC_NOT_EXIST


def test_a_group_is_told_by_itself(broker: RemotingHarness, client: RemotingSocket) -> None:
    """One that consumers may make by coming has the default settings."""
    wanted = SubscriptionGroupConfig("g", retry_max_times=3).encode()
    assert client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, wanted).code == 0
    told = client.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "g"})
    assert SubscriptionGroupConfig.decode(told.body) == SubscriptionGroupConfig("g", retry_max_times=3)
    new = client.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "new"})
    assert SubscriptionGroupConfig.decode(new.body) == SubscriptionGroupConfig("new")
    assert "new" not in broker.state.groups()
    client.ask(RequestCode.UPDATE_BROKER_CONFIG, None, b"autoCreateSubscriptionGroup=false")
    unknown = client.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "new"})
    assert unknown.code == AnswerCode.SUBSCRIPTION_GROUP_NOT_EXIST


def test_a_topics_type_is_set_kept_and_removed_as_mqadmin_does_it(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """A change that does not name it leaves it; a send of another type is refused with the code of illegal messages."""
    put = {"topic": "T5", "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    put |= {"topicFilterType": "SINGLE_TAG", "order": "false"}

    def attributes_after(attributes: str) -> dict[str, str]:
        assert client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, {**put, "attributes": attributes}).code == 0
        told = client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "T5"})
        return dict(TopicConfigData.decode(told.body).attributes)

    assert attributes_after("+message.type=FIFO,+queue.type=SimpleCQ") == {"message.type": "FIFO"}
    assert attributes_after("") == {"message.type": "FIFO"}
    refused = client.answer_to(client.begin_send("T5", b"no group"))
    assert (refused.code, "the expected type is FIFO, but actual type is NORMAL" in refused.remark) == (
        AnswerCode.MESSAGE_ILLEGAL,
        True,
    )
    assert attributes_after("-message.type") == {}
    assert client.answer_to(client.begin_send("T5", b"any")).code == AnswerCode.SUCCESS
    assert broker.state.table["T5"].message_type is MessageType.UNSPECIFIED


@pytest.mark.parametrize(
    "attributes",
    [
        "message.type=FIFO",
        "+message.type",
        "+message.type=LITE",
        "+queue.type=BatchCQ",
        "+unknown=1",
        "-message.type=1",
    ],
)
def test_attributes_that_no_topic_has_here_are_refused(
    broker: RemotingHarness, client: RemotingSocket, attributes: str
) -> None:
    body = topics_body("T5", attributes=dict([attributes.split("=")]) if "=" in attributes else {attributes: ""})
    put = {"topic": "T5", "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    put |= {"topicFilterType": "SINGLE_TAG", "order": "false", "attributes": attributes}
    answer = client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, put)
    assert (answer.code, answer.fields[OUTCOME_FIELD]) == (AnswerCode.SYSTEM_ERROR, "not_applied")
    if not attributes.startswith("-"):
        assert client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, None, body).code == AnswerCode.SYSTEM_ERROR
    assert "T5" not in broker.state.table


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        ({"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1000, 5000]}}, FixedRetryDelays((1000, 5000))),
        (
            {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 1000, "max": 9000, "multiplier": 2}},
            ExponentialRetryDelays(1000, 9000, 2),
        ),
        ({"type": "CUSTOMIZED"}, None),
    ],
)
def test_a_groups_order_and_retry_policy_are_stored_and_told(
    broker: RemotingHarness, client: RemotingSocket, policy: dict[str, object], stored: RetryPolicy | None
) -> None:
    """In the JSON of RocketMQ 5, where delays are milliseconds."""
    wanted = {"groupName": "g5", "consumeMessageOrderly": True, "groupRetryPolicy": policy}
    body = json.dumps(wanted).encode()
    assert client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body).code == 0
    assert broker.state.configs["g5"] == GroupConfig("g5", ordered=True, retry_policy=stored)
    told = json.loads(client.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "g5"}).body)
    assert told["consumeMessageOrderly"] is True
    assert told.get("groupRetryPolicy") == (policy if stored else None)


def topics_body(*names: str, **others: object) -> bytes:
    """As mqadmin 5 writes it."""
    made = [
        {
            "attributes": {},
            "order": False,
            "perm": 6,
            "readQueueNums": 8,
            "topicFilterType": "SINGLE_TAG",
            "topicName": name,
            "topicSysFlag": 0,
            "writeQueueNums": 8,
            **others,
        }
        for name in names
    ]
    return json.dumps({"topicConfigList": made}).encode()


def test_many_topics_are_made_at_once(broker: RemotingHarness, client: RemotingSocket) -> None:
    """And the name servers know them before the answer."""
    names = [f"T{number}" for number in range(150)]
    assert client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, None, topics_body(*names)).code == 0
    assert {name: broker.state.table[name].queues for name in names} == dict.fromkeys(names, 8)
    assert len(broker.announced) == 1


@pytest.mark.parametrize(
    "body",
    [
        topics_body("new", "not a topic"),
        topics_body("new", "TBW102"),
        topics_body("new", writeQueueNums=0),
        topics_body("new", topicFilterType="MULTI_TAG"),
        topics_body(*[f"T{number}" for number in range(1025)]),
        b"{",
    ],
)
def test_of_topics_that_cannot_be_none_is_made(broker: RemotingHarness, client: RemotingSocket, body: bytes) -> None:
    before = dict(broker.state.table)
    answer = client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, None, body)
    assert (answer.code, bool(answer.remark)) == (AnswerCode.SYSTEM_ERROR, True)
    assert (broker.state.table, broker.announced) == (before, [])


def test_many_groups_are_made_at_once_or_none(broker: RemotingHarness, client: RemotingSocket) -> None:
    def ask(*names: str) -> int:
        made = [{"groupName": name, "retryMaxTimes": 5, "groupSysFlag": 0, "attributes": {}} for name in names]
        body = json.dumps({"groupConfigList": made}).encode()
        return client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, None, body).code

    assert ask("a", "no group") == AnswerCode.SYSTEM_ERROR
    assert broker.state.groups() == []
    assert ask("a", "b") == 0
    assert [broker.state.group(name).retry_times_max for name in ("a", "b")] == [5, 5]


def test_a_slave_makes_none_itself(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Where there is no master to pass it on to."""
    broker.become(BrokerRole.SLAVE)
    broker.view = GroupView()
    for code, body in (
        (RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, topics_body("new")),
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, b'{"groupConfigList":[{"groupName":"g"}]}'),
    ):
        answer = client.ask(code, None, body)
        assert (answer.code != 0, "slave" in answer.remark) == (True, True)
    assert (list(broker.state.table), broker.state.groups()) == (["T"], [])


def test_a_member_of_a_group_has_no_slaves_to_tell_of(client: RemotingSocket) -> None:
    """Its log is replicated otherwise: that is said."""
    answer = client.ask(RequestCode.GET_BROKER_HA_STATUS)
    assert (answer.code, "within its group" in answer.remark) == (AnswerCode.SYSTEM_ERROR, True)
