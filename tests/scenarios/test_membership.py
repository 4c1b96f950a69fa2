"""Members come and go: what a group does when it is asked to change."""

from __future__ import annotations

from dledger.errors import (
    NotLeaderError,
)
from dledger.members import ChangeKind
from dledger.types import NodeId
from tests.support.cluster import N0, N1, N2, Cluster


def _voters(cluster: Cluster, node_id: NodeId = N0) -> tuple[NodeId, ...]:
    return cluster[node_id].membership.current.voters


def _settled(cluster: Cluster, *voters: NodeId) -> bool:
    """Whether these are the voters by the committed configuration of each of them, and they hold the same."""
    states = [cluster[one].node.state for one in voters]
    return all(
        state.membership.is_committed
        and state.membership.current.voters == voters
        and state.log.last == states[0].log.last
        and state.commit_index == state.log.last.index
        for state in states
    )


def test_a_group_grows_from_one_to_three_and_shrinks_again() -> None:
    """M13, M16: the leader is removed last but one, and every append is kept."""
    cluster = Cluster(1)
    cluster.elect()
    for newcomer, voters in ((N1, (N0, N1)), (N2, (N0, N1, N2))):
        cluster.join(newcomer)
        added = cluster.change(N0, ChangeKind.ADD, newcomer)
        cluster.advance_until(lambda voters=voters: _settled(cluster, *voters))  # type: ignore[misc]  # bound now
        assert added.value.learners == (newcomer,)
        assert cluster.append(N0, b"with %s" % newcomer.encode()).value

    refused = cluster.change(N0, ChangeKind.REMOVE, N0)
    cluster.advance(1000)
    assert isinstance(refused.error, NotLeaderError)
    leader = cluster.leader()
    assert leader in (N1, N2)
    assert refused.error.leader is not None
    assert refused.error.leader.node_id == leader
    cluster.change(leader, ChangeKind.REMOVE, N0)
    cluster.advance_until(lambda: _settled(cluster, N1, N2))
    cluster.change(leader, ChangeKind.REMOVE, N1 if leader == N2 else N2)
    cluster.advance_until(lambda: _settled(cluster, leader))

    cluster.advance(5000)
    assert cluster.leader() == leader
    assert cluster.append(leader, b"alone").value
    assert cluster.bodies(leader) == [b"with n1", b"with n2", b"alone"]
