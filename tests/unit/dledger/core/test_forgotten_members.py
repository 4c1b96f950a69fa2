"""Members that have lost their memory, in a group whose members change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dledger.core.membership import Membership
from dledger.core.messages import CommittedEntry, HeartbeatResponse, PushCompare, VoteResponse
from dledger.core.standing import Ballot, Electorate, Victory, victory
from dledger.errors import CorruptLogError
from dledger.types import NO_INDEX, NO_TERM, EntryId, HardState, LogIndex, Role, Standing, Term
from tests.support.cluster import N0, N1, N2, made_log
from tests.support.members import NONE, configuration, put
from tests.support.solo import Solo, Source


def test_a_compare_carries_the_newest_committed_configuration() -> None:
    """M10: an explicit one; not one that may still be undone."""
    solo = Solo(3, log=made_log(1, 1, 1, 1, committed=3))
    solo.state.install(configuration("012", index=1))
    solo.state.adopt(configuration("0123", index=3))
    solo.lead()

    (told,) = solo.dispatch(N1)

    assert isinstance(told, PushCompare)
    assert told.configuration == configuration("012", index=1)


def test_one_that_catches_up_does_not_stand_for_election_as_of_an_old_configuration() -> None:
    """M10: it was alone once, and would elect itself, without what others have committed since."""
    source = Source(1, 1)
    put(source.log, 1, "0")
    newest = configuration("01", index=9)
    solo = Solo(3, hard_state=HardState())
    solo.push(N1, PushCompare(source.term, 1, EntryId(NO_TERM, NO_INDEX), 0, configuration=newest))

    solo.push(N1, source.append(0, epoch=1))
    for _ in range(5):
        solo.time_out()

    assert solo.state.membership.current == solo.state.membership.committed == newest
    assert solo.role is not Role.LEADER


def test_attempts_towards_one_that_was_removed_and_added_again_are_numbered_on() -> None:
    """In the same term it takes lower numbers for attempts that were given up (world 400,147)."""
    solo = Solo(3, log=made_log(1, committed=0))
    solo.lead()
    solo.dispatch(N2)
    epoch = solo.node.dispatchers[N2].epoch

    solo.state.install(configuration("01", index=1))
    assert N2 not in solo.node.dispatchers
    solo.state.install(configuration("01", "2", index=2))
    (compare,) = solo.dispatch(N2)

    assert isinstance(compare, PushCompare)
    assert compare.epoch > epoch > 0


def test_a_group_that_has_changed_its_members_is_not_founded() -> None:
    """M6: the only voter of an old configuration may be one that has lost everything."""
    ballots = {N0: Ballot(Standing.BLANK, 1, used=True)}

    assert victory(ballots, Electorate(frozenset({N0})), N0) is Victory.FOUNDING
    assert victory(ballots, Electorate(frozenset({N0}), may_found=False), N0) is None


def test_nobody_founds_a_group_with_the_vote_of_one_that_waits_to_be_added() -> None:
    """M12: who waits knows that there is a group."""
    solo = Solo(3, hard_state=HardState())
    assert not solo.ask_vote(N1, 1).used

    solo.state.membership = Membership(N0, NONE)

    assert solo.ask_vote(N1, 2).used


def _leader() -> Solo:
    """It leads n1, whose uid in the configuration is 5, and n2."""
    solo = Solo(3, log=made_log(1, 1, committed=1))
    solo.state.install(configuration("012", index=1, n1=5))
    solo.lead()
    solo.take()
    return solo


def _answer(solo: Solo, uid: int, *, standing: Standing = Standing.FULL) -> None:
    answer = HeartbeatResponse(solo.state.term, read_sequence=1, standing=standing, boot_id=7, uid=uid)
    solo.node.receive(N1, answer, solo.now_ms)


def test_another_memory_counts_for_nothing() -> None:
    """M11: neither for check-quorum nor for reads, and it is told to give up its standing."""
    solo = _leader()

    _answer(solo, 6)

    assert not solo.leader_role.supports[N1]
    assert N1 not in solo.leader_role.stand
    assert solo.leader_role.doubted == {N1: 7}
    assert solo.node.reads.confirmed_round == 0


def test_another_memory_counts_once_this_leader_has_readmitted_it() -> None:
    """M11: of two voters, the configuration with its new uid cannot be committed without it."""
    solo = _leader()

    _answer(solo, 6, standing=Standing.BLANK)
    assert not solo.leader_role.stand
    _answer(solo, 6)

    assert solo.leader_role.stand == {N1}
    assert solo.leader_role.doubted == {}
    assert solo.node.reads.confirmed_round == 1


def test_a_vote_tells_that_the_configuration_is_committed() -> None:
    """M6: then the voters before it are not needed."""
    log = made_log(1, 1)
    index = put(log, 1, "01")
    log.flush()
    solo = Solo(3, log=log)
    solo.state.adopt(replace(configuration("01"), index=index))
    solo.time_out()
    held = CommittedEntry(LogIndex(index), log.chain_crc_at(index))
    assert solo.state.membership.previous_voters == (N0, N1, N2)

    vote = VoteResponse(Term(solo.state.term + 1), granted=True, pre_vote=True, committed=(held,))
    solo.node.receive(N1, vote, solo.now_ms)

    assert solo.state.membership.is_committed


def test_what_is_damaged_here_is_not_taken_for_what_others_have_committed() -> None:
    """M6: another entry may be in its place; then this configuration is none, and would count for good."""
    log = made_log(1, 1)
    index = put(log, 1, "01")
    log.flush()
    solo = Solo(3, log=log)
    solo.state.adopt(replace(configuration("01"), index=index))
    solo.time_out()
    log.damage[index] = CorruptLogError(Path("data"), 7, "a bad sector", "Repair it", index)

    vote = VoteResponse(
        Term(solo.state.term + 1), granted=True, pre_vote=True, committed=(CommittedEntry(LogIndex(index), 4711),)
    )
    solo.node.receive(N1, vote, solo.now_ms)

    assert not solo.state.membership.is_committed
