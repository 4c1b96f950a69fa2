"""Every change of role says why: what an operator reads in the log and counts in the metrics."""

from __future__ import annotations

from dledger.core.messages import RoleReason
from dledger.types import NodeId, Role
from tests.support.cluster import N0, N1, N2, Cluster


def told(cluster: Cluster, node_id: NodeId) -> list[tuple[Role, RoleReason | None]]:
    """The role changes of a member and their reasons, since this was asked last."""
    changes = [(change.role, change.reason) for change in cluster[node_id].role_changes]
    cluster[node_id].role_changes.clear()
    return changes


def test_an_election_names_each_of_its_steps() -> None:
    """Silence, a quorum that would vote, a quorum that voted; the others follow whoever speaks."""
    cluster = Cluster(3)
    cluster.elect()

    assert told(cluster, N0) == [
        (Role.CANDIDATE, RoleReason.ELECTION_TIMEOUT),
        (Role.CANDIDATE, RoleReason.PRE_VOTE_WON),
        (Role.LEADER, RoleReason.ELECTED),
    ]
    assert told(cluster, N1) == [
        (Role.FOLLOWER, RoleReason.HIGHER_TERM),
        (Role.FOLLOWER, RoleReason.LEADER_HEARD),
    ]
    assert (cluster[N0].node.elector.pre_votes, cluster[N0].node.elector.elections) == (1, 1)
    assert (cluster[N1].node.elector.pre_votes, cluster[N1].node.elector.elections) == (0, 0)


def test_an_election_in_place_of_a_killed_leader_says_so() -> None:
    """No silence: who looks for a slow network would look in vain."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N0)
    told(cluster, N2)

    cluster[N2].node.leader_lost(N0, cluster.term(N2), cluster.now_ms, gone=True)
    cluster.act(N2)
    cluster.advance(20)

    assert told(cluster, N2)[0] == (Role.CANDIDATE, RoleReason.LEADER_GONE)


def test_a_leader_that_nobody_answers_says_so() -> None:
    """Check-quorum is a reason of its own: the network is at fault, not a rival."""
    cluster = Cluster(3)
    cluster.elect()
    told(cluster, N0)
    cluster.isolate(N0)

    cluster.advance(1500)

    assert told(cluster, N0)[0] == (Role.FOLLOWER, RoleReason.QUORUM_LOST)


def test_a_deposed_leader_says_that_it_met_a_higher_term() -> None:
    """After a partition heals, the old leader follows the new one and says what made it."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.isolate(N0)
    cluster.advance(3000)
    told(cluster, N0)

    cluster.heal()
    cluster.advance(3000)

    assert told(cluster, N0)[-1][1] in (RoleReason.HIGHER_TERM, RoleReason.LEADER_HEARD)
    assert cluster[N0].node.elector.pre_votes > 1


def test_a_hand_over_is_told_from_an_election_after_silence() -> None:
    """Dissertation §3.10: the one that takes over was asked to."""
    cluster = Cluster(3)
    cluster.elect()
    told(cluster, N1)

    cluster[N0].node.elector.transfer(N1, cluster.now_ms)
    cluster.advance(500)

    assert cluster.leader() == N1
    assert told(cluster, N1) == [
        (Role.CANDIDATE, RoleReason.LEADERSHIP_OFFERED),
        (Role.LEADER, RoleReason.ELECTED),
    ]


def test_a_member_alone_in_its_group_leads_for_want_of_others() -> None:
    """No pre-vote is asked where nobody could answer."""
    cluster = Cluster(1)
    cluster.elect()

    assert told(cluster, N0) == [
        (Role.CANDIDATE, RoleReason.ELECTION_TIMEOUT),
        (Role.LEADER, RoleReason.ELECTED),
    ]
    assert (cluster[N0].node.elector.pre_votes, cluster[N0].node.elector.elections) == (0, 1)


def test_a_candidate_whose_disk_fills_up_says_so() -> None:
    """It gives up what it cannot do: write the first entry of its term."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.isolate(N2)
    cluster.advance(1500)
    assert (Role.CANDIDATE, RoleReason.ELECTION_TIMEOUT) in told(cluster, N2)

    cluster[N2].log.disk_full = True
    cluster.advance(1500)

    assert told(cluster, N2) == [(Role.FOLLOWER, RoleReason.DISK_FULL)]
