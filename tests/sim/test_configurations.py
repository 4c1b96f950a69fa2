"""Changes of members that no group may show: the checker must refuse each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dledger.types import ClusterMember, Configuration, EntryId, LogIndex, MemberRole, NodeId, Term
from tests.sim.configurations import ConfigurationChecks, relevant, require_step
from tests.sim.violations import Violation

if TYPE_CHECKING:
    from tests.sim.driver import SimNode


def group(voters: str, learners: str = "", *, index: int = -1, term: int = 1) -> Configuration:
    """A configuration of one-letter members."""
    members = tuple(
        ClusterMember(NodeId(name), "h", 1, MemberRole.VOTER if name in voters else MemberRole.LEARNER, ord(name) - 97)
        for name in sorted(voters + learners)
    )
    return Configuration(members, LogIndex(index), Term(term), next_number=3)


def member(name: str, in_force: Configuration, *others: Configuration) -> SimNode:
    """A running member with these configurations in its log."""
    log = SimpleNamespace(configurations=list(others), begin=SimpleNamespace(index=-1))
    membership = SimpleNamespace(current=in_force, is_committed=in_force not in others)
    state = SimpleNamespace(membership=membership, learners=in_force.learners, commit_index=-1)
    return cast("SimNode", SimpleNamespace(name=name, log=log, is_unread=False, core=SimpleNamespace(state=state)))


def checks(founders: Configuration) -> ConfigurationChecks:
    """The checker's part, of a group that begins so."""
    return ConfigurationChecks(founders, lambda _node: None)


@pytest.mark.parametrize("after", ["cd", "abcde", "ade", "a"])
def test_m1_more_than_one_voter_at_a_time_is_refused(after: str) -> None:
    """Two majorities may then have no member in common."""
    with pytest.raises(Violation, match="more than one voter"):
        require_step(group("abc"), group(after))


@pytest.mark.parametrize(("after", "learners"), [("abcd", ""), ("ab", ""), ("ab", "c"), ("abc", "d")])
def test_m1_one_voter_at_a_time_is_taken(after: str, learners: str) -> None:
    """And any number of learners."""
    require_step(group("abc"), group(after, learners))


def test_a_number_that_was_given_before_is_refused() -> None:
    """A broker's id would come again."""
    with pytest.raises(Violation, match="given twice"):
        require_step(group("ac"), group("abc"))


def test_m2_a_configuration_that_is_appended_and_not_in_force_is_refused() -> None:
    """It counts from its append."""
    appended = group("ab", index=5)
    found = checks(group("abc"))
    found._appended[EntryId(Term(1), LogIndex(5))] = appended

    with pytest.raises(Violation, match="another configuration is in force"):
        found.observe(member("a", group("abc"), appended), [])


def test_m2_a_configuration_that_was_cut_off_and_is_in_force_is_refused() -> None:
    """Truncation undoes it."""
    with pytest.raises(Violation, match="another configuration is in force"):
        checks(group("abc")).observe(member("a", group("ab", index=5)), [])


def test_m10_a_committed_configuration_ahead_of_the_log_is_taken() -> None:
    """INSTALL brings it before the entries up to it."""
    found = checks(group("abc"))
    found.observe_commit(group("ab", index=5))

    found.observe(member("a", group("ab", index=5)), [])


def test_m6_elected_by_all_of_the_new_configuration_alone_is_refused() -> None:
    """B, which is being removed, has not voted for A."""
    found = checks(group("abx"))
    found.observe_vote(NodeId("x"), NodeId("a"), Term(8), counts=False)
    candidate = member("a", group("ax", index=5))

    with pytest.raises(Violation, match="nor by all"):
        found.observe_leader(candidate, Term(8), committed_end=4)
    found.observe_vote(NodeId("b"), NodeId("a"), Term(8), counts=False)
    found.observe_leader(candidate, Term(8), committed_end=4)


def test_m7_votes_of_learners_do_not_count() -> None:
    """They are given all the same: the learner may be a voter by now."""
    found = checks(group("abc"))
    found.observe_vote(NodeId("d"), NodeId("a"), Term(8), counts=True)

    with pytest.raises(Violation, match="without a majority"):
        found.observe_leader(member("a", group("abc", "d", index=5)), Term(8), committed_end=5)


def test_one_that_is_no_voter_does_not_lead() -> None:
    """Removed, or a learner."""
    with pytest.raises(Violation, match="no voter leads"):
        checks(group("abc")).observe_leader(member("a", group("bc", "a", index=5)), Term(8), committed_end=5)


def test_m9_a_removal_that_reaches_its_subject_before_it_is_committed_is_refused() -> None:
    """It could be the only one that holds it, and may not campaign."""
    found = checks(group("abc"))
    leader = member("a", group("ab", index=5), group("ab", index=5))

    found.observe_push(leader, NodeId("c"), LogIndex(4))
    found.observe_push(leader, NodeId("b"), LogIndex(5))
    with pytest.raises(Violation, match="reaches its subject first"):
        found.observe_push(leader, NodeId("c"), LogIndex(5))


def test_m9_what_is_not_committed_reaches_no_learner() -> None:
    """A voter that holds the learner's promotion may need its vote, and must not hold less."""
    newest = group("ab", "c", index=5)
    leader = member("a", newest, group("abd", index=4))
    found = checks(group("ab"))

    found.observe_push(leader, NodeId("b"), LogIndex(6))
    found.observe_push(leader, NodeId("c"), LogIndex(-1))
    with pytest.raises(Violation, match="a learner gets what may be undone"):
        found.observe_push(leader, NodeId("c"), LogIndex(6))


def test_a_configuration_that_may_yet_be_committed_counts_for_majorities() -> None:
    """One that an older leader left behind does not."""
    newest = group("abc", index=5)
    left, open_ = group("bc", index=7), group("abcd", index=9, term=2)

    found = relevant(newest, [member("a", newest, newest, left), member("b", newest, newest, open_)], 8)

    assert found == (newest, open_)
