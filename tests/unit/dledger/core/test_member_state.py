"""The member's record: every change of role, term and vote goes through it and is checked there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.config import FlushMode
from dledger.core.member_state import Candidate, Follower, Leader
from dledger.core.messages import Readmission, RoleChange, Wake
from dledger.core.standing import Ballot
from dledger.errors import InvariantError
from dledger.types import NO_INDEX, EntryId, HardState, LogIndex, Role, Standing, Term
from tests.support.cluster import N0, N1, N2, N3, N4
from tests.support.solo import Solo


def test_roles_have_names_and_leaders() -> None:
    """Role and known leader as people see them."""
    solo = Solo()
    assert (solo.state.role_name, solo.state.leader_id) == (Role.FOLLOWER, None)
    solo.campaign()
    assert (solo.state.role_name, solo.state.leader_id) == (Role.CANDIDATE, None)
    solo.vote(N1)
    assert (solo.state.role_name, solo.state.leader_id) == (Role.LEADER, N0)


@pytest.mark.parametrize(("size", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_quorum_is_a_majority(size: int, quorum: int) -> None:
    """More than half of all members."""
    assert Solo(size).state.quorum == quorum


def test_a_restart_starts_from_the_checkpoint_or_the_begin() -> None:
    """The commit index is what was recorded, and never below the log's begin."""
    log = Solo(terms=(1, 1, 1), committed=1).log
    assert Solo(log=log).state.commit_index == 1
    log.expire(LogIndex(1))
    assert Solo(log=log).state.commit_index == 2


def test_the_term_of_the_log_is_adopted_at_the_start() -> None:
    """A crash may leave entries of a term that the hard state does not know yet."""
    state = Solo(terms=(1, 4), hard_state=HardState(Term(3), N1, standing=Standing.FULL)).state

    assert state.hard_state == HardState(Term(4), None, standing=Standing.FULL)
    assert state.hard_state_version == 1


def test_durable_index_depends_on_the_flush_mode() -> None:
    """Synchronous: what is flushed; asynchronous: what is written."""
    for mode, durable in ((FlushMode.SYNC, NO_INDEX), (FlushMode.ASYNC, 0)):
        solo = Solo(flush_mode=mode)
        solo.log.append_as_leader(Term(1), [b""])
        assert solo.state.durable_index == durable


def test_hears_leader_until_the_shortest_timeout_has_passed() -> None:
    """A follower protects its leader as long as no honest member can have timed out."""
    solo = Solo()
    assert not solo.state.hears_leader(0)
    solo.hear(N1, 1)

    assert solo.state.hears_leader(499)
    assert not solo.state.hears_leader(500)


def test_leaders_hear_themselves_and_candidates_nobody() -> None:
    """A leader is deposed by check-quorum or a later term's answer, not by a vote request."""
    solo = Solo()
    solo.campaign()
    assert not solo.state.hears_leader(solo.now_ms)
    solo.vote(N1)
    assert solo.state.hears_leader(solo.now_ms + 10_000)


def test_a_term_never_goes_back() -> None:
    """§5.1: terms only grow."""
    state = Solo(hard_state=HardState(Term(3), standing=Standing.FULL)).state

    with pytest.raises(InvariantError, match="term never goes back"):
        state.become_follower(Term(2), None, 0)
    with pytest.raises(InvariantError, match="term never goes back"):
        state.save_hard_state(HardState(Term(2), standing=Standing.FULL))


def test_a_vote_is_given_once_per_term() -> None:
    """§5.2: the vote of a term never changes; a new term has a new one."""
    state = Solo(hard_state=HardState(Term(3), N1, standing=Standing.FULL)).state

    with pytest.raises(InvariantError, match="one vote per term"):
        state.save_hard_state(HardState(Term(3), N2, standing=Standing.FULL))
    state.save_hard_state(HardState(Term(3), N1, standing=Standing.FULL))
    state.save_hard_state(HardState(Term(4), N2, standing=Standing.FULL))

    assert state.hard_state_version == 2


def test_a_new_term_forgets_vote_and_leader() -> None:
    """What belongs to a term ends with it."""
    solo = Solo(hard_state=HardState(Term(3), N1, standing=Standing.FULL))

    solo.state.become_follower(Term(4), None, 0)

    assert solo.state.hard_state == HardState(Term(4), None, standing=Standing.FULL)
    assert solo.state.role == Follower(None, 500, None)


def test_a_pre_vote_keeps_the_term() -> None:
    """Asking whether one would win changes nothing durable."""
    state = Solo().state

    state.become_candidate(7, pre_vote=True)

    assert state.role == Candidate(
        pre_vote=True, election_due_ms=507, ballots={N0: Ballot(Standing.FULL, 1, used=False)}
    )
    assert state.hard_state_version == 0


def test_only_a_member_with_standing_leads() -> None:
    """One without it must take it first: with what it counts itself, it would commit."""
    state = Solo(hard_state=HardState()).state
    state.become_candidate(0, pre_vote=False)

    with pytest.raises(InvariantError, match="a leader has standing"):
        state.become_leader(LogIndex(0), 0)


def test_only_a_candidate_that_voted_for_itself_leads() -> None:
    """§5.2: nobody leads without a campaign of this term."""
    solo = Solo()
    with pytest.raises(InvariantError, match="only a candidate"):
        solo.state.become_leader(LogIndex(0), 0)
    solo.state.become_candidate(0, pre_vote=True)
    with pytest.raises(InvariantError, match="only a candidate"):
        solo.state.become_leader(LogIndex(0), 0)
    solo.state.role = Candidate(pre_vote=False, election_due_ms=0)
    with pytest.raises(InvariantError, match="voted for itself"):
        solo.state.become_leader(LogIndex(0), 0)


def test_a_leaders_record_starts_empty() -> None:
    """Nothing of an earlier leadership survives in a later one."""
    solo = Solo()
    solo.lead()

    assert solo.state.role == Leader(
        since_ms=1000,
        noop_index=LogIndex(0),
        match={N1: NO_INDEX, N2: NO_INDEX},
        contact_ms={N1: 1000, N2: 1000},
        disk_full={N1: False, N2: False},
        producers=solo.leader_role.producers,
        counts={N1: False, N2: False},
        supports={N1: True, N2: True},
        boot_ids={},
    )


def test_follow_refuses_an_older_term_and_refreshes_in_the_present_one() -> None:
    """A message of the present leader postpones the election."""
    solo = Solo(hard_state=HardState(Term(2), standing=Standing.FULL))

    assert not solo.state.follow(N1, Term(1), 0)
    assert solo.state.follow(N1, Term(2), 10)
    assert solo.state.follow(N1, Term(2), 20)

    assert solo.state.role == Follower(N1, election_due_ms=520, last_heard_ms=20)


def test_a_second_leader_of_a_term_is_not_followed() -> None:
    """Election safety: what another member claims is refused, what this one does itself is checked."""
    solo = Solo()
    solo.state.follow(N1, Term(1), 0)
    before = replace(solo.state.role)

    assert not solo.state.follow(N2, Term(1), 10)

    assert solo.state.role == before
    with pytest.raises(InvariantError, match="one leader per term"):
        solo.state.become_follower(Term(1), N2, 0)


def test_role_changes_are_announced_once_and_wake_whoever_reacts() -> None:
    """Only a change of role, term or leader is one; elector, dispatchers and quorum-ack look at it."""
    solo = Solo()
    solo.state.follow(N1, Term(1), 0)
    solo.state.become_follower(Term(1), N1, 0)
    solo.take()

    assert solo.role_changes == [RoleChange(Role.FOLLOWER, Term(1), N1)]
    assert solo.woken == Wake.ELECTOR | Wake.QUORUM_ACK | Wake.DISPATCHERS


def test_commit_moves_forward_within_the_log() -> None:
    """Trap 23: never back, never beyond the end; the log is told."""
    solo = Solo(terms=(1, 1))
    solo.state.advance_commit(LogIndex(1))
    solo.state.advance_commit(LogIndex(0))

    assert solo.state.outbox.committed == 1
    assert solo.log.committed_index == 1
    with pytest.raises(InvariantError, match="commit <= end"):
        solo.state.advance_commit(LogIndex(2))


def test_standing_is_saved_once() -> None:
    """Who has it keeps it; the vote of the present term goes to its leader, if one is known."""
    state = Solo(hard_state=HardState(Term(1))).state
    state.follow(N1, Term(1), 0)

    state.take_standing(Standing.FULL)
    state.take_standing(Standing.FULL)

    assert state.hard_state == HardState(Term(1), N1, standing=Standing.FULL)
    assert state.hard_state_version == 1


def test_a_member_whose_log_is_not_whole_counts_for_nothing_until_it_is() -> None:
    """Not durably: it forgets nothing."""
    state = Solo(hard_state=HardState(Term(1), standing=Standing.FULL)).state
    seen = []
    for whole in (True, False, True):
        state.whole = whole
        seen.append((state.standing, state.own_ballot.standing, state.has_standing))

    counts = (Standing.FULL, Standing.FULL, True)
    assert seen == [counts, (Standing.DOUBTFUL, Standing.DOUBTFUL, False), counts]
    assert state.hard_state_version == 0


def test_what_a_member_lost_before_its_log_was_whole_takes_its_standing_all_the_same() -> None:
    """Durably: to be whole again says nothing about what it acknowledged."""
    state = Solo(hard_state=HardState(Term(1), standing=Standing.FULL)).state
    state.whole = False
    state.lose_standing("it lacks what it held", 0)
    state.whole = True

    assert state.standing is Standing.DOUBTFUL
    assert state.hard_state.doubt == "it lacks what it held"


def test_what_was_granted_before_a_loss_was_known_gives_no_standing_back() -> None:
    """It was for a member that remembered: after the loss it counts as another process, as after a restart."""
    solo = Solo(hard_state=HardState(Term(1), standing=Standing.FULL))
    granted = Readmission(solo.state.boot_id, NO_INDEX)
    solo.hear(N1, 1)
    solo.state.lose_standing("it lacks what it held", 0)

    solo.hear(N1, 1, readmission=granted)

    assert not solo.state.has_standing


@pytest.mark.parametrize("held", [EntryId(Term(2), LogIndex(0)), EntryId(Term(1), LogIndex(1))], ids=str)
def test_what_is_missed_is_told_by_terms_before_indexes(held: EntryId) -> None:
    """A longer log of an earlier term lacks the entry; a shorter one of a later term had it replaced."""
    solo = Solo(terms=(1, 1) if held.term > 1 else (2,))

    solo.state.heed(held, N1, 0)

    assert solo.state.has_standing is (held.term == 1)


def test_a_leader_forgets_what_its_log_lacks_and_nothing_else() -> None:
    """It was never committed: a member that does not hold it either has lost nothing."""
    solo = Solo(5, terms=(1, 1, 2))
    solo.log.expire(LogIndex(0))
    expired, held = EntryId(Term(1), LogIndex(0)), EntryId(Term(1), LogIndex(1))
    beyond, another = EntryId(Term(1), LogIndex(9)), EntryId(Term(1), LogIndex(2))
    solo.state.remembered = {N1: expired, N2: held, N3: beyond, N4: another}

    solo.lead()

    assert {one: solo.state.remembered.get(one) for one in (N1, N2, N3, N4)} == {
        N1: expired,
        N2: held,
        N3: None,
        N4: None,
    }


def test_a_heartbeat_never_sets_an_earlier_deadline() -> None:
    """The elector sleeps until the one it knows, and a heartbeat does not wake it: it would find out too late."""

    class Falling:
        def __init__(self) -> None:
            self.left = 500

        def randrange(self, start: int, stop: int, /) -> int:
            self.left -= 60
            return min(start + self.left, stop - 1)

    solo = Solo(random=Falling())
    solo.hear(N1, 1)
    dues = []
    for _ in range(5):
        assert isinstance(solo.state.role, Follower)
        dues.append(solo.state.role.election_due_ms)
        solo.now_ms += 10
        solo.hear(N1, 1)

    assert dues == sorted(dues)


def test_a_vote_never_sets_an_earlier_deadline() -> None:
    """As above: who grants a vote waits for the winner, from a moment on that the elector will see."""
    values = iter([900, 500, 500, 500])

    class Given:
        def randrange(self, start: int, stop: int, /) -> int:
            return next(values)

    solo = Solo(random=Given())
    solo.state.become_follower(Term(3), None, 0)
    assert isinstance(solo.state.role, Follower)
    solo.state.role.election_due_ms = 900

    assert solo.ask_vote(N1, 3, EntryId(Term(2), LogIndex(9))).granted

    assert solo.state.role.election_due_ms == 900


def test_what_is_known_of_others_only_grows() -> None:
    """A leader of a later term may know less: right after its election, or because it lost its memory (seed 479)."""
    solo = Solo(hard_state=HardState(Term(4), standing=Standing.FULL))
    solo.hear(N1, 4, watermarks=((N2, EntryId(Term(4), LogIndex(34))),))
    solo.hear(N1, 5, watermarks=((N2, EntryId(Term(4), LogIndex(32))),))
    assert solo.state.remembered == {N2: EntryId(Term(4), LogIndex(34))}

    solo.hear(N1, 5, watermarks=((N2, EntryId(Term(5), LogIndex(20))),))

    assert solo.state.remembered == {N2: EntryId(Term(5), LogIndex(20))}
