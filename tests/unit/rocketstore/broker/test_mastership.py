"""When a member that was started again may answer reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.broker.mastership import CatchUp
from rocketstore.broker_remoting.pulls import SUBSCRIPTION
from rocketstore.remoting.codes import RequestCode
from rocketstore.types import BrokerRole
from tests.support.remoting import pull_fields
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


class Member:
    """A node and its store as far as catching up needs them."""

    def __init__(self, *, recovered_index: int = 10) -> None:
        self.node = SimpleNamespace(leader=None, end_index=recovered_index, committed_index=4, voter=True)
        self.store = SimpleNamespace(role=BrokerRole.SLAVE, dispatch_behind_bytes=0)
        self.committed_position = 400
        self.is_applied = True
        self.has_caught_up = CatchUp(
            lambda: self.node,  # type: ignore[arg-type,return-value]
            self.store,  # type: ignore[arg-type]
            lambda: self.committed_position,
            lambda: self.is_applied,
        )


def test_nothing_is_known_before_a_leader_tells_what_is_committed() -> None:
    """Not even if all of the log seemed to be committed when it stopped; then everything has to reach the queues."""
    member = Member()
    told = [member.has_caught_up()]
    member.node.committed_index = 10
    told.append(member.has_caught_up())
    member.node.leader, member.node.committed_index = "n1", 9
    told.append(member.has_caught_up())
    member.node.committed_index, member.committed_position, member.store.dispatch_behind_bytes = 10, 1000, 600
    told.append(member.has_caught_up())
    member.committed_position, member.store.dispatch_behind_bytes, member.is_applied = 5000, 4000, False
    told.append(member.has_caught_up())
    member.is_applied = True
    told.append(member.has_caught_up())
    member.node.leader, member.is_applied = None, False
    told.append(member.has_caught_up())

    assert told == [False, False, False, False, False, True, True]


def test_a_tail_that_was_never_committed_is_not_waited_for() -> None:
    """The leader replaced it by less."""
    member = Member(recovered_index=100)
    member.node.leader, member.node.end_index, member.node.committed_index = "n1", 7, 7

    assert member.has_caught_up()


def test_a_new_disk_has_not_caught_up_as_long_as_it_has_no_vote() -> None:
    """It recovers nothing, so nothing tells it what is missing: it would say that no topic exists."""
    member = Member(recovered_index=-1)
    member.node.leader, member.node.voter, member.node.committed_index = "n1", False, -1
    before = member.has_caught_up()
    member.node.voter, member.committed_position, member.store.dispatch_behind_bytes = True, 900, 1
    fetched = member.has_caught_up()
    member.store.dispatch_behind_bytes = 0

    assert (before, fetched, member.has_caught_up()) == (False, False, True)


def test_a_master_has_caught_up() -> None:
    """It was made master only then."""
    member = Member()
    member.store.role = BrokerRole.SYNC_MASTER

    assert member.has_caught_up()


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (RequestCode.PULL_MESSAGE, pull_fields("g", "T", sysFlag=SUBSCRIPTION, subscription="*")),
        (RequestCode.GET_MAX_OFFSET, {"topic": "T", "queueId": 0}),
        (RequestCode.GET_MIN_OFFSET, {"topic": "T", "queueId": 0}),
        (RequestCode.QUERY_CONSUMER_OFFSET, {"consumerGroup": "g", "topic": "T", "queueId": 0}),
        (RequestCode.GET_ALL_TOPIC_CONFIG, {}),
        (RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}),
        (RequestCode.GET_ALL_CONSUMER_OFFSET, {}),
        (RequestCode.GET_ALL_DELAY_OFFSET, {}),
    ],
)
def test_reads_are_refused_until_then(code: RequestCode, fields: dict[str, object]) -> None:
    """What it is, it tells all the same."""
    caught_up = False
    with RemotingHarness(has_caught_up=lambda: caught_up) as broker, broker.dial() as client:
        refused = client.ask(code, fields)
        assert refused.code == AnswerCode.SERVICE_NOT_AVAILABLE
        assert "does not know yet" in refused.remark
        assert client.ask(RequestCode.GET_BROKER_RUNTIME_INFO).code == AnswerCode.SUCCESS
        caught_up = True
        assert client.ask(code, fields).code in (
            AnswerCode.SUCCESS,
            AnswerCode.PULL_NOT_FOUND,
            AnswerCode.QUERY_NOT_FOUND,
        )
