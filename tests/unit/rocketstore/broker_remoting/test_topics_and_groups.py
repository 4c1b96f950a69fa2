"""Topics and groups made, changed, deleted and listed by administrators, with requests that mqadmin sent."""

from __future__ import annotations

import json

import pytest

from dledger.remoting.codes import OUTCOME_FIELD, AnswerCode
from rocketstore.broker.mastership import GroupView
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import SubscriptionGroupConfig, SubscriptionGroupTable
from rocketstore.remoting.topics import TopicConfigData, TopicConfigTable, TopicList
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.types import HIDDEN_TOPICS, BrokerRole
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness, captured
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN


def test_a_topic_is_made_and_the_name_servers_know_before_the_answer(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """Clients ask for the route as soon as they have the answer (F60, F61)."""
    assert captured(client, "F60").code == 0
    assert broker.state.table["T2"] == TopicConfig("T2", 4, 4, 6)
    assert broker.announced == [["T", "T2"]]
    assert captured(client, "F60", readQueueNums=8, perm=4, order="true", topicSysFlag=1).code == 0
    assert broker.state.table["T2"] == TopicConfig("T2", 8, 4, 4, order=True, sys_flag=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"topic": "not a topic"},
        {"topic": ""},
        {"topic": "x" * 128},
        {"topic": "SCHEDULE_TOPIC_XXXX"},
        {"topic": "TBW102"},
        {"topic": "DefaultCluster"},
        *({"topic": name} for name in sorted(HIDDEN_TOPICS)),
        {"readQueueNums": 0},
        {"writeQueueNums": 1025},
        {"perm": 8},
        {"topicSysFlag": -1},
        {"topicFilterType": "MULTI_TAG"},
    ],
)
def test_what_is_no_topic_is_refused(
    broker: RemotingHarness, client: RemotingSocket, fields: dict[str, object]
) -> None:
    before = dict(broker.state.table)
    answer = captured(client, "F60", **fields)
    assert (answer.code, bool(answer.remark)) == (AnswerCode.SYSTEM_ERROR, True)
    assert answer.fields[OUTCOME_FIELD] == "not_applied"
    assert (broker.state.table, broker.announced) == (before, [])


def test_a_topic_is_deleted(broker: RemotingHarness, client: RemotingSocket) -> None:
    assert client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    assert broker.state.table == {}
    assert broker.announced == [[]]
    assert client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    for name in (*HIDDEN_TOPICS, "TBW102"):
        assert client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name}).code == AnswerCode.SYSTEM_ERROR


def test_a_slave_changes_nothing(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Where there is no master to pass it on to."""
    broker.become(BrokerRole.SLAVE)
    broker.view = GroupView()
    group = SubscriptionGroupConfig("g").encode()
    for answer in (
        captured(client, "F60"),
        client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}),
        client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, group),
        client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}),
    ):
        assert (answer.code != 0, "slave" in answer.remark) == (True, True)
    assert (list(broker.state.table), broker.state.groups()) == (["T"], [])


def test_all_topics_but_the_hidden_are_listed(broker: RemotingHarness, client: RemotingSocket) -> None:
    """With a version that changes when they do (F43, F44)."""
    for name in HIDDEN_TOPICS:
        broker.state.table[name] = TopicConfig(name)
    broker.state.table["O"] = TopicConfig("O", 2, 3, 7, order=True, sys_flag=2)
    answer = captured(client, "F43")
    listed = TopicConfigTable.decode(answer.body)
    assert not HIDDEN_TOPICS & listed.topic_config_table.keys()
    assert listed.topic_config_table["O"] == TopicConfigData("O", 2, 3, 7, topic_sys_flag=2, order=True)
    theirs = TopicConfigTable.decode(GOLDEN["F44"].frame.body).topic_config_table
    assert {"SCHEDULE_TOPIC_XXXX", "SELF_TEST_TOPIC", "TBW102", "T"} <= listed.topic_config_table.keys()
    assert theirs["SELF_TEST_TOPIC"] == listed.topic_config_table["SELF_TEST_TOPIC"]
    assert TopicConfigTable.decode(captured(client, "F43").body).data_version == listed.data_version
    captured(client, "F60")
    assert TopicConfigTable.decode(captured(client, "F43").body).data_version.counter == listed.data_version.counter + 1


def test_system_topics_are_listed(client: RemotingSocket) -> None:
    listed = TopicList.decode(client.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body).topic_list
    assert {"TBW102", "SELF_TEST_TOPIC", "DefaultCluster"} <= set(listed)
    assert "T" not in listed


def test_a_group_is_made_and_listed(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Every setting comes back as it was given (F49)."""
    wanted = SubscriptionGroupConfig("g", False, False, False, 2, 3, 1, 2, False)
    assert client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, wanted.encode()).code == 0
    assert broker.state.configs["g"] == GroupConfig("g", False, False, False, 2, 3, 1, 2, False)
    first = SubscriptionGroupTable.decode(client.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)
    assert first.subscription_group_table == {"g": wanted}
    client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, SubscriptionGroupConfig("h").encode())
    body = client.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
    assert SubscriptionGroupTable.decode(body).data_version != first.data_version
    ours = json.loads(body)["subscriptionGroupTable"]["h"]
    theirs = json.loads(GOLDEN["F49"].frame.body)["subscriptionGroupTable"]["ProbeOrder"]
    assert ours | {"groupName": "ProbeOrder"} == theirs


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"groupName":"not a group"}',
        b'{"groupName":"g","retryQueueNums":-1}',
        b'{"groupName":"g","retryMaxTimes":-2}',
        b'{"groupName":"g","brokerId":-1}',
        pytest.param(b'{"groupName":"g","unknown":[' + b"1," * 40_000 + b"1]}", id="long"),
    ],
)
def test_what_is_no_group_is_refused(broker: RemotingHarness, client: RemotingSocket, body: bytes) -> None:
    answer = client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body)
    assert (answer.code, bool(answer.remark)) == (AnswerCode.SYSTEM_ERROR, True)
    assert broker.state.configs == {}


@pytest.mark.parametrize("to_go", ["removeOffset", "cleanOffset"])
def test_a_group_that_is_deleted_keeps_its_offsets_unless_they_are_to_go(
    broker: RemotingHarness, client: RemotingSocket, to_go: str
) -> None:
    """The second name is RocketMQ 5's."""

    def delete(**fields: str) -> int:
        return client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"} | fields).code

    assert delete() == 0
    broker.state.configs["g"] = GroupConfig("g", retry_times_max=1)
    assert delete() == 0
    assert broker.state.groups() == []
    broker.state.configs["g"] = GroupConfig("g", retry_times_max=1)
    broker.state.committed["g", "T", 0] = 5
    assert delete(**{to_go: "false"}) == 0
    assert (broker.state.offset("g", "T", 0), broker.state.group("g")) == (5, GroupConfig("g"))
    assert delete(**{to_go: "true"}) == 0
    assert broker.state.groups() == []
