"""The configurations in force."""

from __future__ import annotations

import pytest

from dledger.core.membership import Membership
from dledger.types import ClusterMember, Configuration, LogIndex, MemberRole, NodeId, Term
from tests.support import members


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


def test_the_configuration_before_is_the_one_right_before() -> None:
    """M6: a member that has yet to hear what is committed may hold several."""
    membership = _membership()
    membership.adopt(_configuration(5, "abd"))
    membership.adopt(_configuration(6, "ab"))
    assert membership.previous_voters == ("a", "b", "d")


def test_configurations_that_are_committed_at_once_leave_nobody_untold() -> None:
    """M9: neither those that were members at first, nor those that came and went meanwhile."""
    membership = _membership()
    membership.adopt(_configuration(5, "abd"))
    membership.adopt(_configuration(6, "ab"))
    membership.commit(LogIndex(6))
    assert membership.left == ("c", "d")
    assert [one.node_id for one in membership.leaving] == ["c", "d"]


def test_a_copy_stays_as_the_original_was() -> None:
    """The driver acts on it outside the lock."""
    membership = _membership()
    membership.adopt(_configuration(5, "ab"))
    membership.commit(LogIndex(5))
    membership.adopt(_configuration(6, "abd"))
    copy = membership.copy()
    membership.release(NodeId("c"))
    membership.commit(LogIndex(6))
    assert (copy.left, copy.contact_ids) == (("c",), ("b", "d", "c"))
    assert (copy.committed.index, copy.current.index, copy.is_committed) == (5, 6, False)


@pytest.mark.parametrize(("known", "told", "forgot"), [(7, 7, False), (7, 8, True), (7, 0, False), (0, 8, False)])
def test_only_two_known_uids_that_differ_are_two_memories(known: int, told: int, forgot: bool) -> None:
    """M11: 0 says nothing, on either side; and a stranger has nothing to forget."""
    membership = Membership(NodeId("n0"), members.configuration("012", n2=known))
    assert membership.is_forgetful(NodeId("n2"), told) is forgot
    assert not membership.is_forgetful(NodeId("n3"), told)


def _unsure() -> Membership:
    """Of a member that lost its file, and whose log holds two."""
    membership = _membership()
    membership.adopt(_configuration(5, "abcd"))
    membership.adopt(_configuration(9, "abcde"))
    membership.distrust()
    return membership


def test_what_a_log_says_waits_where_it_may_be_old() -> None:
    """M10: nobody is a voter until a leader's word; and it goes with the log's end."""
    membership = _unsure()
    assert (membership.voters, membership.previous_voters) == (frozenset(), ())
    assert membership.is_unsure
    assert not membership.is_committed
    assert membership.copy().is_unsure

    membership.truncated(LogIndex(5))

    assert (membership.is_unsure, membership.is_committed) == (False, True)


@pytest.mark.parametrize(("told", "voters"), [(5, "abcde"), (7, "abcde"), (20, "abf")])
def test_what_is_newer_than_a_leaders_word_is_in_force_again(told: int, voters: str) -> None:
    """M2: an entry of the log counts, whether or not it did when the word came; else it would never count here."""
    membership = _unsure()

    membership.install(_configuration(told, "abf"))

    assert membership.voters == frozenset(voters)
    assert (membership.is_committed, membership.is_unsure) == (told == 20, False)


def test_one_that_is_committed_without_a_leaders_word_is_in_force_again() -> None:
    """The leader knew of none that was committed before: so none is newer but those in the log."""
    membership = _unsure()
    assert not membership.commit(LogIndex(4))

    assert membership.commit(LogIndex(5))

    assert (membership.committed.index, membership.current.index) == (5, 9)
    assert membership.previous_voters == ("a", "b", "c", "d")


def test_all_that_damage_hid_waits_for_a_leaders_word() -> None:
    """M6: the one before the last has a say in elections."""
    found = _membership()
    found.adopt(_configuration(5, "abcd"))
    found.adopt(_configuration(9, "abcde"))
    membership = _membership()

    membership.hold_until_told(found)
    assert (membership.voters, membership.is_unsure) == (frozenset(), True)
    membership.commit(LogIndex(5))

    assert membership.previous_voters == ("a", "b", "c", "d")
