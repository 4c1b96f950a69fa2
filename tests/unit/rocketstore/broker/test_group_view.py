"""What a broker knows of its group, and what a broker that was removed from it answers."""

from __future__ import annotations

import pytest

from dledger.config import ServerConfig
from dledger.errors import LeaderHint
from dledger.rpc.ports import MemberStatus
from dledger.types import MemberRole, NodeId
from rocketstore.broker.mastership import GroupView, Mastership, broker_id, group_view
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker_config import BrokerConfig
from rocketstore.types import BrokerRole, PutMessageStatus
from tests.support.fake_node import FakeNode
from tests.unit.rocketstore.broker.harness import Harness

MEMBERS = (
    MemberStatus(NodeId("n1"), "h:1", "h:11", number=4),
    MemberStatus(NodeId("n2"), "h:2", "h:12", MemberRole.LEARNER, number=7),
)


def test_a_view_has_the_members_that_count_and_the_own_number() -> None:
    """Who is not a member, or not yet, has none."""
    node = FakeNode(node_id=NodeId("n2"), leader=LeaderHint(NodeId("n1"), "h:11"), members=MEMBERS)
    view = group_view(node.status())
    assert (view.members, view.learners, view.number) == ({"n1": "h:11", "n2": "h:12"}, frozenset({"n2"}), 7)
    node.node_id = NodeId("n3")
    assert group_view(node.status(), "n3 was removed").number == -1
    assert group_view(node.status(), "n3 was removed").removed == "n3 was removed"


@pytest.mark.parametrize(
    ("role", "leader", "expected"),
    [(BrokerRole.SLAVE, "n1", 8), (BrokerRole.SLAVE, "", -1), (BrokerRole.SYNC_MASTER, "n2", 0)],
)
def test_a_broker_id_is_the_members_number_and_one(role: BrokerRole, leader: str, expected: int) -> None:
    """It never changes and is never given again: 0 for the master, -1 while nobody leads."""
    config = BrokerConfig(dledger=ServerConfig())
    assert broker_id(config, role, GroupView(leader=leader, number=7)) == expected


def test_a_removed_broker_refuses_with_the_reason() -> None:
    """Writes and reads alike; it names no master, of whom it will not hear any more."""
    with Harness() as harness:
        harness.store.role = BrokerRole.SLAVE
        view = GroupView("FOLLOWER", 3, "n1", "h:11", removed="n2 was removed from the group (configuration 9)")
        mastership = Mastership(harness.store, lambda: view, lambda: False)

        refused = mastership.refusal()
        assert (refused.status, refused.leader) == (PutMessageStatus.SERVICE_NOT_AVAILABLE, "")
        assert "removed from the group (configuration 9)" in refused.reason
        with pytest.raises(Refusal, match="removed from the group") as raised:
            mastership.require_caught_up()
        assert raised.value.kind is RefusalKind.UNAVAILABLE
