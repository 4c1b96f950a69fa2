"""How a broker does, what it is set to, what was counted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dledger.monitoring import ConditionKind
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.broker.statistics import Sample, Statistics, Total
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import BrokerStatsData, CheckClientBody, SubscriptionData
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import KVTable
from rocketstore.state.changes import GroupConfig
from tests.support.remoting import RemotingSocket, pull_fields, send_fields
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness, captured
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN

EXPORTED = frozenset(
    [
        "clientCallbackExecutorThreads",
        "brokerClusterName",
        "brokerId",
        "brokerName",
        "brokerRole",
        "fileReservedTime",
        "filterServerNums",
        "flushDiskType",
        "maxMessageSize",
        "messageDelayLevel",
        "msgTraceTopicName",
        "slaveReadEnable",
        "traceOn",
        "traceTopicEnable",
        "useTLS",
        "autoCreateTopicEnable",
        "autoCreateSubscriptionGroup",
    ]
)
"""Settings that mqadmin's exportConfigs and exportMetrics cannot do without."""
NOT_HERE = {
    "commitLogDirCapacity",
    "commitLogDiskRatio_/tmp/w/remoting/run/store/commitlog",
    "putLatency99",
    "putLatency999",
    "remainTransientStoreBufferNumbs",
}
"""RocketMQ 4.9.7 tells them, and none of its tools asks for them."""


def test_all_that_mqadmin_asks_of_a_running_broker(client: RemotingSocket, broker: RemotingHarness) -> None:
    """A missing value breaks its tables (F9, F10)."""
    client.send()
    table = KVTable.decode(captured(client, "F9").body).table
    of_the_store = {"commitLogDiskRatio"}  # the fake tells no more
    theirs = KVTable.decode(GOLDEN["F10"].frame.body).table.keys() - NOT_HERE
    stored = {key for key in theirs if key not in table}
    assert not {key for key in stored if key.startswith(("msg", "send", "pull", "query", "broker", "EndTr", "start"))}
    assert of_the_store <= table.keys()
    assert table["brokerVersionDesc"].startswith("V4_9")
    assert [table[f"scheduleMessageOffset_{level}"] for level in (1, 18)] == ["0,0", "0,0"]
    numbers = [key for key in table if key.startswith(("msg", "send", "pull", "query"))]
    assert len(numbers) == 16
    assert all(table[key].isdigit() for key in numbers)


def test_a_broker_tells_its_place_in_its_group(client: RemotingSocket, broker: RemotingHarness) -> None:
    """What RocketMQ's brokers do not tell, beside what they do: for ``cluster list`` and the console."""
    broker.view = replace(broker.view, role="LEADER", term=7, members={"n0": "h:1", "n1": ""})
    broker.conditions.set(ConditionKind.DISK_FULL, "no space")

    found = RuntimeInfo.decode(captured(client, "F9").body)

    assert (found.role, found.term, found.members) == ("LEADER", 7, (("n0", "h:1"), ("n1", "")))
    assert found.conditions == ("disk_full",)
    assert found.node
    assert found.release


def test_the_settings_are_told_by_their_names(client: RemotingSocket, broker: RemotingHarness) -> None:
    answer = client.ask(RequestCode.GET_BROKER_CONFIG)
    settings = dict(line.split("=", 1) for line in answer.body.decode().splitlines())
    assert settings["brokerClusterName"] == "DefaultCluster"
    assert (settings["brokerRole"], settings["brokerId"]) == ("SYNC_MASTER", "0")
    assert settings.keys() >= EXPORTED
    assert settings["autoCreateTopicEnable"] == "true"
    assert settings["brokerIP1"] == "127.0.0.1"
    assert settings["mappedFileSizeCommitLog"] == str(1 << 30)
    assert json.loads(answer.fields["version"]).keys() == {"counter", "timestamp"}


def test_cleaning(client: RemotingSocket, broker: RemotingHarness) -> None:
    assert client.ask(RequestCode.DELETE_EXPIRED_COMMITLOG).code == 0
    assert broker.store.cleanings == 1
    for code in (RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, RequestCode.CLEAN_UNUSED_TOPIC):
        answer = client.ask(code)
        assert (answer.code, bool(answer.remark)) == (0, True)
    assert broker.store.cleanings == 1


def test_access_rules_are_not_changed_from_afar(client: RemotingSocket) -> None:
    for code in (50, 51, 53):
        answer = client.ask(code, {"accessKey": "k", "secretKey": "s"})
        assert (answer.code, "file" in answer.remark) == (AnswerCode.REQUEST_CODE_NOT_SUPPORTED, True)
    answer = client.ask(RequestCode.GET_BROKER_CLUSTER_ACL_INFO)
    assert answer.fields["brokerAddr"] == "127.0.0.1:10911"
    assert json.loads(answer.fields["version"]).keys() == {"counter", "timestamp"}
    assert json.loads(answer.fields["allAclFileVersion"]) == {}


@pytest.mark.parametrize(
    ("kind", "text", "code"),
    [
        ("TAG", "A || B", AnswerCode.SUCCESS),
        ("TAG", "A || || B", AnswerCode.SUCCESS),
        ("TAG", "||", AnswerCode.SUBSCRIPTION_PARSE_FAILED),
        ("SQL92", "a > 1", AnswerCode.SUCCESS),
        ("SQL92", "a >", AnswerCode.SUBSCRIPTION_PARSE_FAILED),
        ("XML", "a > 1", AnswerCode.SYSTEM_ERROR),
    ],
)
def test_whether_a_subscription_can_be_served(client: RemotingSocket, kind: str, text: str, code: AnswerCode) -> None:
    body = CheckClientBody("one", "g", SubscriptionData("T", text, expression_type=kind)).encode()
    assert client.ask(RequestCode.CHECK_CLIENT_CONFIG, None, body).code == code


def test_where_a_condition_is_wrong_is_told(client: RemotingSocket) -> None:
    """At a client's start, in RocketMQ's way; off, the broker names the setting."""
    body = CheckClientBody("one", "g", SubscriptionData("T", "a = 1 OR", expression_type="SQL92")).encode()
    assert "wrong at character 9: found the end" in client.ask(RequestCode.CHECK_CLIENT_CONFIG, None, body).remark
    assert client.ask(RequestCode.UPDATE_BROKER_CONFIG, None, b"enablePropertyFilter=false").code == 0
    answer = client.ask(RequestCode.CHECK_CLIENT_CONFIG, None, body)
    assert answer.code == AnswerCode.SYSTEM_ERROR
    assert answer.remark.startswith("The broker does not support consumer to filter message by SQL92")
    assert "enablePropertyFilter" in answer.remark


def test_what_was_counted(client: RemotingSocket, broker: RemotingHarness) -> None:
    """Per minute, hour and day: sums, rates, and how much each message was on average."""
    service = broker.remoting
    statistics = service._statistics  # its clock is the test's here
    first = statistics._kept[0][-1].at_ms
    key = ("TOPIC_PUT_SIZE", "T")
    for minute in range(1, 121):
        sample = Sample(first + minute * 60_000, {key: Total(minute * 6000, minute * 60)})
        broker.bridge.run(_take(statistics, sample))
    fields = {"statsName": key[0], "statsKey": key[1]}
    answer = client.ask(RequestCode.VIEW_BROKER_STATS_DATA, fields)
    found = BrokerStatsData.decode(answer.body)
    assert (found.stats_minute.tps, found.stats_hour.tps, found.stats_day.tps) == (100.0, 100.0, 100.0)
    assert (found.stats_hour.sum, found.stats_day.sum) == (6000 * 60, 6000 * 120)
    assert found.stats_day.avgpt == 100.0
    none = client.ask(RequestCode.VIEW_BROKER_STATS_DATA, fields | {"statsKey": "Unknown"})
    assert none.code == AnswerCode.SYSTEM_ERROR


async def _take(statistics: Statistics, sample: Sample) -> None:
    statistics.take(sample)


def test_a_reply_goes_to_who_asked(client: RemotingSocket, broker: RemotingHarness) -> None:
    """By the id of its client, with all that a message has; it is not stored."""
    with broker.dial() as asker:
        asker.subscribe("askers", "T", client_id="asker")
        fields = send_fields("DefaultCluster_REPLY_TOPIC", properties="REPLY_TO_CLIENT\x01asker\x02CORRELATION_ID\x01c")
        asked = client.begin(RequestCode.SEND_REPLY_MESSAGE_V2, fields, b"here you are")
        pushed = asker.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
        assert (pushed.body, pushed.fields["topic"]) == (b"here you are", "DefaultCluster_REPLY_TOPIC")
        assert pushed.fields["bornHost"] == "{}:{}".format(*client.socket.getsockname())
        assert pushed.fields["properties"].startswith(str(fields["i"]) + "\x02PUSH_REPLY_TIME\x01")
        asker.reply(pushed)
        answer = client.answer_to(asked)
        assert (answer.code, answer.fields["msgId"]) == (0, "0")
        asked = client.begin(RequestCode.SEND_REPLY_MESSAGE_V2, fields, b"here you are")
        asker.reply(asker.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT), 1, "no")
        assert client.answer_to(asked).code == AnswerCode.SYSTEM_ERROR
    assert not broker.store.log.records


@pytest.mark.parametrize("properties", ["", "REPLY_TO_CLIENT\x01nobody"])
def test_a_reply_to_nobody_is_refused(client: RemotingSocket, properties: str) -> None:
    fields = send_fields("DefaultCluster_REPLY_TOPIC", properties=properties)
    answer = client.ask(RequestCode.SEND_REPLY_MESSAGE_V2, fields, b"x")
    assert (answer.code, bool(answer.remark)) == (AnswerCode.SYSTEM_ERROR, True)


def _change(client: RemotingSocket, text: str) -> Frame:
    return client.ask(RequestCode.UPDATE_BROKER_CONFIG, None, text.encode())


def test_topics_are_no_longer_created(client: RemotingSocket, broker: RemotingHarness) -> None:
    """Name servers are told, since they know such a broker by its topic TBW102."""
    assert client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("New"), b"x").code == 0
    assert _change(client, "autoCreateTopicEnable=false\ndefaultTopicQueueNums=2\n").code == 0
    assert len(broker.announced) == 1
    refused = client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("Newer"), b"x")
    assert refused.code == AnswerCode.TOPIC_NOT_EXIST
    answer = client.ask(RequestCode.GET_BROKER_CONFIG)
    settings = dict(line.split("=", 1) for line in answer.body.decode().splitlines())
    assert (settings["autoCreateTopicEnable"], settings["defaultTopicQueueNums"]) == ("false", "2")
    assert json.loads(answer.fields["version"])["counter"] == 1
    assert _change(client, "auto_create_topic_enable=true").code == 0
    assert client.ask(RequestCode.SEND_MESSAGE_V2, send_fields("Newer", queues=8), b"x").code == 0
    assert broker.state.table["Newer"].write_queues == 2


def test_a_broker_may_be_closed_for_writes_or_reads(client: RemotingSocket) -> None:
    """As before a broker is taken out of service."""
    client.subscribe("g", "T")
    assert _change(client, "brokerPermission=4").code == 0
    assert client.send().code == AnswerCode.NO_PERMISSION
    assert client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T")).code != AnswerCode.NO_PERMISSION
    assert _change(client, "brokerPermission=2").code == 0
    assert client.send().code == 0
    assert client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T")).code == AnswerCode.NO_PERMISSION


def test_other_settings_that_change(client: RemotingSocket, broker: RemotingHarness) -> None:
    text = "autoCreateSubscriptionGroup=false\npullBytesMax=5m\n"
    assert _change(client, text).code == 0
    assert broker.announced == []
    fields = pull_fields("g", "T", sysFlag=6, suspendTimeoutMillis=1)
    unknown = client.ask(RequestCode.PULL_MESSAGE, fields)
    assert unknown.code == AnswerCode.SUBSCRIPTION_GROUP_NOT_EXIST
    broker.state.configs["g"] = GroupConfig("g")
    assert client.ask(RequestCode.PULL_MESSAGE, fields).code == AnswerCode.PULL_NOT_FOUND
    assert broker.broker.config.pull_bytes_max == 5 << 20


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("fileReservedTime=1", AnswerCode.NO_PERMISSION, "fileReservedTime"),
        ("brokerName=x", AnswerCode.NO_PERMISSION, "brokerName"),
        ("noSuchSetting=1", AnswerCode.SYSTEM_ERROR, "noSuchSetting"),
        ("brokerPermission=9", AnswerCode.SYSTEM_ERROR, "broker_permission"),
        ("brokerPermission=x", AnswerCode.SYSTEM_ERROR, "brokerPermission"),
        ("enablePropertyFilter=perhaps", AnswerCode.SYSTEM_ERROR, "enablePropertyFilter"),
        ("autoCreateTopicEnable=\\u00", AnswerCode.SYSTEM_ERROR, "malformed"),
        pytest.param("x" * 65_536, AnswerCode.SYSTEM_ERROR, "bytes of settings", id="long"),
    ],
)
def test_settings_that_cannot_change_are_refused_with_all_others_of_the_request(
    client: RemotingSocket, broker: RemotingHarness, text: str, code: AnswerCode, reason: str
) -> None:
    before = broker.broker.config
    answer = _change(client, f"autoCreateTopicEnable=false\n{text}")
    assert (answer.code, reason in answer.remark) == (code, True)
    assert broker.broker.config is before


def test_no_change_is_one(client: RemotingSocket, broker: RemotingHarness) -> None:
    before = broker.broker.config
    for text in ("", "brokerPermission=6"):
        assert _change(client, text).code == 0
    assert broker.broker.config is before
