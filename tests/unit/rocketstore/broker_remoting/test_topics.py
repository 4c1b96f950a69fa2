"""Clients without a name server learn from any broker of a group where its topics are, and who is the master."""

from __future__ import annotations

from dledger.remoting.codes import AnswerCode
from rocketstore.broker.mastership import GroupView
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import BrokerData, ClusterInfo, QueueData, TopicRouteData
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

MEMBERS = {"n0": "192.0.2.1:1", "n1": "192.0.2.2:2", "n2": "192.0.2.3:3", "n3": ""}


def _route(client: RemotingSocket, topic: str) -> TopicRouteData:
    answer = client.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
    assert answer.code == 0
    return TopicRouteData.decode(answer.body)


def test_a_broker_tells_where_a_topic_is_in_its_group(broker: RemotingHarness, client: RemotingSocket) -> None:
    """As a name server would: broker id 0 is the master, and members without a known address are left out."""
    broker.view = GroupView("FOLLOWER", 3, "n1", MEMBERS["n1"], MEMBERS)
    config = broker.broker.config
    group = BrokerData(config.cluster_name, config.name, {0: "192.0.2.2:2", 1: "192.0.2.1:1", 2: "192.0.2.3:3"})
    route = _route(client, "T")
    assert route.broker_datas == (group,)
    topic = broker.state.topic("T")
    assert topic is not None
    assert route.queue_datas == (QueueData(config.name, topic.read_queues, topic.write_queues, topic.permission),)
    answer = client.ask(RequestCode.GET_BROKER_CLUSTER_INFO)
    assert ClusterInfo.decode(answer.body) == ClusterInfo({config.name: group}, {config.cluster_name: (config.name,)})


def test_while_there_is_no_leader_a_route_has_no_master(broker: RemotingHarness, client: RemotingSocket) -> None:
    broker.view = GroupView("CANDIDATE", 4, "", "", MEMBERS)
    (group,) = _route(client, "T").broker_datas
    assert group.broker_addrs == {1: "192.0.2.1:1", 2: "192.0.2.2:2", 3: "192.0.2.3:3"}


def test_a_topic_that_does_not_exist_has_no_route(client: RemotingSocket) -> None:
    answer = client.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "nowhere"})
    assert answer.code == AnswerCode.TOPIC_NOT_EXIST


def test_producers_find_out_whether_a_broker_creates_topics(broker: RemotingHarness, client: RemotingSocket) -> None:
    """By the route of RocketMQ's default topic, as from a name server."""
    config = broker.broker.config
    assert config.auto_create_topic_enable
    assert _route(client, "TBW102").queue_datas[0].write_queue_nums == config.default_topic_queue_nums


def test_a_learner_is_in_no_route(broker: RemotingHarness, client: RemotingSocket) -> None:
    """It may have nothing yet."""
    broker.view = GroupView("FOLLOWER", 3, "n1", MEMBERS["n1"], MEMBERS, learners=frozenset({"n2"}))
    (group,) = _route(client, "T").broker_datas
    assert group.broker_addrs == {0: "192.0.2.2:2", 1: "192.0.2.1:1"}
