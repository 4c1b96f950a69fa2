"""``check`` notices every contradiction that one member can show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dledger.errors import InvariantError
from dledger.types import FlushMark, HardState, LogIndex, Standing, Term
from tests.support.cluster import N1
from tests.support.invariants import LastCheck, check
from tests.support.solo import Solo


def follower() -> Solo:
    return Solo(terms=(1, 1), committed=1)


def leader() -> Solo:
    solo = Solo(terms=(1, 1), committed=1)
    solo.lead()
    return solo


def test_sound_members_pass() -> None:
    """Followers, candidates and leaders in order give what the next check compares with."""
    candidate = follower()
    candidate.campaign()

    assert check(follower().node) == LastCheck(Term(1), LogIndex(1))
    assert check(candidate.node, LastCheck(Term(1), LogIndex(0))) == LastCheck(Term(2), LogIndex(1))
    assert check(leader().node) == LastCheck(Term(2), LogIndex(1))


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (LastCheck(Term(2), LogIndex(0)), "term never goes back"),
        (LastCheck(Term(1), LogIndex(2)), "commit index never goes back"),
    ],
)
def test_going_back_is_noticed(before: LastCheck, message: str) -> None:
    """Terms and commit indexes only grow while a process runs."""
    with pytest.raises(InvariantError, match=message):
        check(follower().node, before)


def _commit_beyond_end(solo: Solo) -> None:
    solo.state.commit_index = LogIndex(9)


def _expire_uncommitted(solo: Solo) -> None:
    solo.log.expire(LogIndex(0))
    solo.state.commit_index = LogIndex(-1)


def _flush_beyond_end(solo: Solo) -> None:
    solo.log._flushed = FlushMark(LogIndex(9), 0)


def _entry_of_later_term(solo: Solo) -> None:
    solo.log.append_as_leader(Term(9), [b""])


def _verified_beyond_end(solo: Solo) -> None:
    solo.node.handler.verified_index = LogIndex(9)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_commit_beyond_end, "commit <= end"),
        (_expire_uncommitted, "only committed entries expire"),
        (_flush_beyond_end, "flushed <= end"),
        (_entry_of_later_term, "no entry is newer"),
        (_verified_beyond_end, "verified <= end"),
    ],
)
def test_a_contradicting_follower_is_noticed(damage: Callable[[Solo], None], message: str) -> None:
    """Each bound on a member's indexes is checked."""
    solo = follower()
    damage(solo)

    with pytest.raises(InvariantError, match=message):
        check(solo.node)


def _wrong_noop(solo: Solo) -> None:
    solo.leader_role.noop_index = LogIndex(0)


def _match_beyond_end(solo: Solo) -> None:
    solo.leader_role.match[N1] = LogIndex(9)


def _not_a_voter(solo: Solo) -> None:
    solo.state.hard_state = replace(solo.state.hard_state, standing=Standing.BLANK)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_wrong_noop, "no-op is of its term"),
        (_match_beyond_end, "match <= end"),
        (_not_a_voter, "a leader has standing"),
    ],
)
def test_a_contradicting_leader_is_noticed(damage: Callable[[Solo], None], message: str) -> None:
    """What a leader claims is checked against its log and its right to lead."""
    solo = leader()
    damage(solo)

    with pytest.raises(InvariantError, match=message):
        check(solo.node)


def test_a_non_voting_follower_is_sound() -> None:
    """Only leaders must have standing."""
    assert check(Solo(hard_state=HardState()).node) == LastCheck(Term(0), LogIndex(-1))
