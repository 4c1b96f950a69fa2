"""How much of what all clients share one of them may make, over remoting."""

from __future__ import annotations

from dledger.config import AccessConfig
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting.pulls import COMMIT_OFFSET, SUBSCRIPTION
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import CommitGroupOffsets
from tests.support.remoting import RemotingSocket, pull_fields, send_fields
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness, captured

HALF = AccessConfig(account_share_percent=50)


def commit(client: RemotingSocket, group: str) -> Frame:
    """As RocketMQ's clients do it."""
    fields = {"consumerGroup": group, "topic": "T", "queueId": 0, "commitOffset": 1}
    return client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields)


def commit_many(client: RemotingSocket, group: str) -> Frame:
    """As ours do it."""
    return client.ask(OwnCode.COMMIT_OFFSETS, {}, CommitGroupOffsets(group, [("T", 0, 1)]).encode())


def commit_with_a_pull(client: RemotingSocket, group: str) -> Frame:
    fields = pull_fields(group, "T", sysFlag=COMMIT_OFFSET | SUBSCRIPTION, subscription="*", commitOffset=1)
    return client.ask(RequestCode.PULL_MESSAGE, fields)


def send(client: RemotingSocket, topic: str) -> Frame:
    return client.ask(RequestCode.SEND_MESSAGE_V2, send_fields(topic, queues=8), b"x")


def test_one_client_makes_a_share_of_all_groups_only() -> None:
    """Those that are gone count no longer, and those that are there may be committed to."""
    with RemotingHarness(BrokerConfig(groups_max=4, access=HALF)) as broker, broker.dial() as client:
        assert [commit(client, group).code for group in ("a", "b")] == [0, 0]
        for refused in (commit(client, "c"), commit_many(client, "c")):
            assert (refused.code, "has made 2 groups since this broker started" in refused.remark) == (1, True)
        assert commit_with_a_pull(client, "c").code == AnswerCode.PULL_NOT_FOUND
        broker.on_loop(broker.broker.offsets.close)  # what was committed with pulls is stored by now
        assert not broker.state.has_group("c")
        assert commit_many(client, "b").code == commit(client, "b").code == 0
        gone = {"groupName": "a", "removeOffset": "true"}
        assert client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, gone).code == 0
        assert commit_many(client, "c").code == 0


def test_one_client_makes_a_share_of_all_queues_by_sending() -> None:
    """RepeatedFieldLimit by queues; who makes topics by name is not held to it."""
    with RemotingHarness(BrokerConfig(queues_max=32, access=HALF)) as broker, broker.dial() as client:
        assert [send(client, topic).code for topic in ("A", "B")] == [0, 0]
        refused = send(client, "C")
        assert refused.code == AnswerCode.TOPIC_NOT_EXIST
        assert "has made 16 queues since this broker started" in refused.remark
        assert captured(client, "F60", topic="C").code == 0
        assert send(client, "C").code == 0
