"""A leader whose process is gone is suspected at once, and nothing else changes (docs/protocol.md, "Suspicion")."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.core.failure_detection import ANSWER_MS_MAX, RANK_MS, REPEAT_MS_MAX, REPEAT_MS_MIN, REPEATS_MAX
from dledger.core.member_state import Candidate, Follower
from dledger.core.messages import PushCommit, VoteRequest, VoteResult, Wake
from dledger.types import Configuration, EntryId, HardState, LogIndex, MemberRole, NodeId, Role, Standing, Term
from tests.support.cluster import N1, N2, FixedTimeouts
from tests.support.solo import Solo

LEADER = N2
N3, N4 = NodeId("n3"), NodeId("n4")


def follower(size: int = 3, **more: object) -> Solo:
    """Member n0 at 400 ms, which has just heard n2 as the leader of term 5."""
    solo = Solo(size, hard_state=HardState(Term(5), standing=Standing.FULL), **more)  # type: ignore[arg-type]  # by name
    solo.now_ms = 400
    solo.hear(LEADER, 5)
    solo.take()
    return solo


def lose(solo: Solo, leader: NodeId = LEADER, term: int = 5, *, gone: bool = True) -> None:
    """The leader's connection broke; its address refuses connections, or something answers there."""
    solo.node.leader_lost(leader, Term(term), solo.now_ms, gone=gone)


def knows(solo: Solo, *held: int) -> None:
    """The leader's heartbeat states how far each member's log is durable, in the members' order."""
    marks = tuple((NodeId(f"n{number}"), EntryId(Term(5), LogIndex(index))) for number, index in enumerate(held))
    solo.hear(LEADER, 5, watermarks=marks)
    solo.take()


def rounds(solo: Solo, ms: int) -> int:
    """The number of pre-votes asked within that time, an elector's step per millisecond."""
    sent = [message for _ in range(ms) for _, message in solo.tick(1) if isinstance(message, VoteRequest)]
    assert all(request.pre_vote and request.term == 6 for request in sent)
    return len(sent) // len(solo.state.peers)


def test_a_gone_leaders_follower_asks_for_votes_at_once_in_the_next_term() -> None:
    """The first in rank does not wait; the elector is woken, because it sleeps until the election timeout."""
    solo = follower(terms=(5,) * 8)
    knows(solo, 7, 6, 9)

    lose(solo)

    assert solo.state.outbox.wake & Wake.ELECTOR
    solo.take()
    assert rounds(solo, 1) == 1


def test_members_of_the_same_rank_are_kept_apart() -> None:
    """They may have heard different heartbeats last, and each take itself for the first."""
    solo = follower(terms=(5,) * 8, random=FixedTimeouts(9))
    knows(solo, 7, 6, 9)

    lose(solo)

    assert isinstance(solo.state.role, Follower)
    assert solo.state.role.election_due_ms == 409


@pytest.mark.parametrize(("held", "place"), [((7, 6, 9), 0), ((6, 7, 9), 1), ((6, 6, 9), 1), ((0, 0, 0), 1)])
def test_the_follower_with_the_longest_known_log_is_first(held: tuple[int, ...], place: int) -> None:
    """Ids decide between equals; the dead leader, however long its log, holds up nobody."""
    solo = follower(terms=(5,) * 8)
    knows(solo, *held)

    lose(solo)

    assert isinstance(solo.state.role, Follower)
    assert solo.state.role.election_due_ms == 400 + place * RANK_MS


def learns(solo: Solo, *learners: NodeId) -> None:
    """These members, of those configured, are learners."""
    current = solo.state.membership.current
    members = [replace(one, role=MemberRole.LEARNER) if one.node_id in learners else one for one in current.members]
    solo.state.adopt(Configuration(tuple(members), LogIndex(7)))


def test_a_learner_has_no_place() -> None:
    """It never asks for votes, however much it holds: nobody waits for it."""
    solo = follower(5, terms=(5,) * 8)
    knows(solo, 6, 7, 9, 7, 5)
    learns(solo, N1, N3)

    lose(solo)

    assert isinstance(solo.state.role, Follower)
    assert solo.state.role.election_due_ms == 400


def test_a_member_without_standing_is_last() -> None:
    """It could only be elected by all members, and one of them is gone."""
    solo = Solo(5, hard_state=HardState(Term(5), standing=Standing.DOUBTFUL))
    solo.hear(LEADER, 5)

    lose(solo)

    assert isinstance(solo.state.role, Follower)
    assert solo.state.role.election_due_ms == 3 * RANK_MS


def test_suspicion_never_postpones_an_election() -> None:
    """Where the election timeout ends first, it holds."""
    solo = follower(5, terms=(5,) * 3)
    knows(solo, 0, 2, 2, 2, 2)
    solo.now_ms = 895

    lose(solo)

    assert isinstance(solo.state.role, Follower)
    assert solo.state.role.election_due_ms == 900


def test_a_suspecting_member_grants_pre_votes_and_votes_of_a_later_term() -> None:
    """It no longer hears a leader, although the last heartbeat was just now (§4.2.3)."""
    solo = follower()
    before = solo.ask_vote(N1, 6, pre_vote=True)
    lose(solo)

    asked, voted = solo.ask_vote(N1, 6, pre_vote=True), solo.ask_vote(N1, 6)

    assert (before.granted, asked.granted, voted.granted) == (False, True, True)
    assert solo.state.hard_state.vote == N1


def test_a_suspecting_member_votes_once_in_a_term() -> None:
    """Its term has its leader, and the vote of it has been given (Raft §5.2)."""
    solo = Solo(5, hard_state=HardState(Term(5), vote=LEADER, standing=Standing.FULL))
    solo.hear(LEADER, 5)
    lose(solo)

    same = solo.ask_vote(N1, 5)

    assert (same.granted, same.result) == (False, VoteResult.REJECT_ALREADY_HAS_LEADER)
    assert solo.ask_vote(N1, 6).granted
    assert solo.ask_vote(NodeId("n3"), 6).result is VoteResult.REJECT_ALREADY_VOTED
    assert solo.state.hard_state == HardState(Term(6), N1, standing=Standing.FULL)


def test_any_message_of_the_leader_ends_the_suspicion() -> None:
    """It lives: others' pre-votes are refused again, and the whole election timeout holds."""
    solo = follower()
    lose(solo)

    solo.hear(LEADER, 5)

    assert solo.state.role == Follower(LEADER, 900, 400)
    assert not solo.ask_vote(N1, 6, pre_vote=True).granted
    solo.take()
    assert rounds(solo, 499) == 0


def test_a_push_that_came_before_the_end_is_no_sign_of_life() -> None:
    """It is executed first, if it still waits on the queue."""
    solo = follower(terms=(5,) * 3)
    solo.push(LEADER, PushCommit(Term(5), 1, LogIndex(0)))
    solo.node.receive(LEADER, PushCommit(Term(5), 1, LogIndex(1)), solo.now_ms)

    lose(solo)
    solo.node.handler.step(solo.now_ms)

    assert not solo.state.hears_leader(solo.now_ms)


def test_a_leader_of_a_later_term_ends_the_suspicion() -> None:
    """The group has found another one."""
    solo = follower()
    lose(solo)

    solo.hear(N1, 6)

    assert solo.state.role == Follower(N1, 900, 400)


@pytest.mark.parametrize(("leader", "term"), [(N1, 5), (LEADER, 4), (LEADER, 6)])
def test_the_loss_of_another_member_is_no_suspicion(leader: NodeId, term: int) -> None:
    """What was found out about an earlier term, or a member that does not lead, concerns nobody."""
    solo = follower()

    lose(solo, leader, term)

    assert solo.state.role == Follower(LEADER, 900, 400)
    assert not solo.ask_vote(N1, 6, pre_vote=True).granted


def test_refused_pre_votes_are_repeated_soon_but_not_for_ever() -> None:
    """Others may find out a little later. After that the election timeout holds again."""
    solo = follower()
    lose(solo)

    assert rounds(solo, RANK_MS + REPEAT_MS_MIN) == 2
    assert rounds(solo, REPEATS_MAX * REPEAT_MS_MAX) == REPEATS_MAX - 1
    assert isinstance(solo.state.role, Candidate)
    assert rounds(solo, solo.state.role.election_due_ms - solo.now_ms) == 1
    assert rounds(solo, solo.state.election.election_timeout_ms_min - 1) == 0


def test_a_suspecting_member_that_is_granted_its_pre_vote_campaigns() -> None:
    """And wins the next term by ordinary votes."""
    solo = follower()
    lose(solo)
    solo.tick(RANK_MS)

    solo.vote(N1, pre_vote=True)
    assert (solo.role, solo.state.term) == (Role.CANDIDATE, 6)
    solo.vote(N1)

    assert solo.role is Role.LEADER


def test_a_split_vote_is_followed_by_new_questions_soon() -> None:
    """Two that take themselves for the first each get half of the votes: neither waits for an election timeout."""
    solo = follower(5)
    lose(solo)
    solo.tick(4 * RANK_MS)
    for voter in (N1, NodeId("n3")):
        solo.vote(voter, pre_vote=True)
    assert solo.state.term == 6
    solo.take()

    solo.vote(N1, granted=False)
    assert rounds(solo, REPEAT_MS_MAX) == 0, "the others' votes would do"
    solo.vote(NodeId("n3"), granted=False)
    assert solo.state.outbox.wake & Wake.ELECTOR, "it sleeps until the election timeout"
    sent = [message for _ in range(REPEAT_MS_MAX) for _, message in solo.tick(1) if isinstance(message, VoteRequest)]

    assert {(request.pre_vote, request.term) for request in sent} == {(True, 7)}


def test_a_split_vote_is_known_by_the_voters() -> None:
    """Three of five members vote, one of which is gone: if one refuses, no majority is left."""
    solo = follower(5)
    learns(solo, N3, N4)
    lose(solo)
    solo.tick(4 * RANK_MS)
    solo.vote(N1, pre_vote=True)
    assert solo.state.term == 6
    solo.take()

    solo.vote(N1, granted=False)
    sent = [message for _ in range(REPEAT_MS_MAX) for _, message in solo.tick(1) if isinstance(message, VoteRequest)]

    assert {(request.pre_vote, request.term) for request in sent} == {(True, 7)}


def test_a_lost_campaign_after_a_silence_waits_for_the_election_timeout() -> None:
    """As ever: only where the leader is known to be gone is there a hurry."""
    solo = Solo(5, hard_state=HardState(Term(5), standing=Standing.FULL))
    solo.campaign()
    solo.take()

    for voter in solo.state.peers:
        solo.vote(voter, granted=False)

    assert rounds(solo, 499) == 0


def test_a_suspecting_member_with_a_full_disk_does_not_campaign() -> None:
    """It could not write its first entry; but it grants others' pre-votes."""
    solo = follower()
    solo.log.disk_full = True
    lose(solo)

    assert rounds(solo, 200) == 0
    assert solo.ask_vote(N1, 6, pre_vote=True).granted


def test_a_leader_whose_address_answers_is_asked() -> None:
    """The process may have been started again; until it says that it does not lead, nothing changes."""
    solo = follower()

    lose(solo, gone=False)

    ((target, question),) = solo.take()
    assert target == LEADER
    assert isinstance(question, VoteRequest)
    assert question.pre_vote
    assert solo.state.hears_leader(solo.now_ms)
    solo.vote(LEADER, granted=False, pre_vote=True, leads=False)
    assert not solo.state.hears_leader(solo.now_ms)


@pytest.mark.parametrize(("granted", "term"), [(False, 4), (True, 5)])
def test_an_answer_from_before_the_leaders_term_is_no_answer_to_the_question(*, granted: bool, term: int) -> None:
    """It had not been elected yet, and the answer was long on its way. What is granted is the term asked for."""
    solo = follower()
    lose(solo, gone=False)

    solo.vote(LEADER, term=term, granted=granted, pre_vote=True)
    solo.vote(LEADER, granted=False)
    assert solo.state.role == Follower(LEADER, 900, 400)
    solo.vote(LEADER, granted=False, pre_vote=True)

    assert not solo.state.hears_leader(solo.now_ms)


@pytest.mark.parametrize("granted", [True, False])
def test_a_process_that_was_started_again_may_grant_the_question(granted: bool) -> None:
    """The question is a pre-vote: its answer says whether it leads in either case."""
    solo = follower()
    lose(solo, gone=False)

    solo.vote(LEADER, granted=granted, pre_vote=True)

    assert isinstance(solo.state.role, Follower)
    assert solo.state.role.suspects


def test_a_leader_that_confirms_that_it_leads_is_not_suspected() -> None:
    """Only the connection broke."""
    solo = follower()
    lose(solo, gone=False)

    solo.vote(LEADER, granted=False, pre_vote=True, leads=True)
    solo.vote(LEADER, granted=False, pre_vote=True)

    assert solo.state.role == Follower(LEADER, 900, 400)


def test_an_answer_that_nobody_waits_for_makes_no_suspicion() -> None:
    """Given before it led, or so late that it says nothing about now."""
    solo = follower()
    solo.vote(LEADER, granted=False, pre_vote=True)
    lose(solo, gone=False)
    solo.now_ms += ANSWER_MS_MAX + 1

    solo.vote(LEADER, granted=False, pre_vote=True)

    assert solo.state.role == Follower(LEADER, 900, 400)
