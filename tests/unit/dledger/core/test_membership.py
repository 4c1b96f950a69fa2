"""The configurations in force."""

from __future__ import annotations

from dledger.core.membership import Membership
from dledger.members import ClusterMember, Configuration, MemberRole
from dledger.types import LogIndex, NodeId, Term


def _configuration(index: int, voters: str, learners: str = "") -> Configuration:
    voting = [ClusterMember(NodeId(one), "127.0.0.1", 1) for one in voters]
    learning = [ClusterMember(NodeId(one), "127.0.0.1", 1, MemberRole.LEARNER) for one in learners]
    return Configuration((*voting, *learning), LogIndex(index), Term(1))


def _membership() -> Membership:
    return Membership(NodeId("a"), _configuration(-1, "abc"))


def test_appended_configuration_counts_before_it_is_committed() -> None:
    membership = _membership()
    assert membership.adopt(_configuration(5, "abcd"))
    assert membership.quorum == 3
    assert not membership.is_committed
    assert membership.previous_voters == ("a", "b", "c")


def test_truncation_returns_to_the_configuration_before() -> None:
    membership = _membership()
    membership.adopt(_configuration(5, "abcd"))
    assert not membership.truncated(LogIndex(6))
    assert membership.truncated(LogIndex(5))
    assert membership.quorum == 2
    assert membership.is_committed


def test_committed_configuration_survives_truncation() -> None:
    membership = _membership()
    membership.adopt(_configuration(5, "ab"))
    assert not membership.commit(LogIndex(4))
    assert membership.commit(LogIndex(5))
    assert not membership.truncated(LogIndex(3))
    assert membership.current.voters == ("a", "b")


def test_older_configuration_on_the_way_to_an_installed_one_is_ignored() -> None:
    membership = _membership()
    assert membership.install(_configuration(9, "bc"))
    assert not membership.is_voter
    assert not membership.adopt(_configuration(7, "abc"))
    assert membership.current.index == 9


def test_installed_configuration_keeps_newer_appended_ones() -> None:
    membership = _membership()
    membership.adopt(_configuration(9, "ab"))
    membership.install(_configuration(7, "abd"))
    assert membership.current.voters == ("a", "b")
    assert membership.committed.voters == ("a", "b", "d")


def test_learners_are_peers_that_do_not_vote() -> None:
    membership = _membership()
    membership.adopt(_configuration(5, "abc", "d"))
    assert membership.peers == ("b", "c", "d")
    assert membership.voting_peers == ("b", "c")
    assert membership.quorum == 2
