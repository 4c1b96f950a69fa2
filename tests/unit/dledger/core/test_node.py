"""The node routes each message to its part, and only messages of members."""

from __future__ import annotations

import pytest

from dledger.core.member_state import Leader
from dledger.core.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    LoadRun,
    Message,
    PushCommit,
    PushKind,
    VoteRequest,
    VoteResponse,
    Wake,
)
from dledger.errors import InvalidRequestError, UnknownMemberError
from dledger.types import NO_ENTRY, LogIndex, NodeId, Role, Term
from tests.support.cluster import N0, N1, N2, Outcome
from tests.support.solo import Solo, Source

STRANGER = NodeId("n9")


def test_nobody_speaks_in_the_members_own_name() -> None:
    """Trap 31: nothing changes."""
    solo = Solo()
    with pytest.raises(UnknownMemberError):
        solo.node.answer(N0, HeartbeatRequest(Term(5)), 0)
    with pytest.raises(UnknownMemberError):
        solo.node.receive(N0, PushCommit(Term(5), 1, LogIndex(0)), 0)

    assert solo.state.term == 0


def test_a_member_that_is_not_known_here_is_answered() -> None:
    """M7: this member may be behind, so it votes for a candidate and follows a leader that it has never heard of."""
    solo = Solo()

    assert solo.ask_vote(STRANGER, 5).granted
    assert solo.hear(STRANGER, 5).term == 5
    assert solo.state.leader_id == STRANGER


def test_votes_of_members_that_are_not_known_here_do_not_count() -> None:
    """M7: answered is whoever asks, counted is who is a voter."""
    solo = Solo()
    solo.campaign()
    for stranger in (STRANGER, NodeId("n8")):
        solo.vote(stranger)

    strangers_elected = isinstance(solo.state.role, Leader)
    solo.vote(N1)

    assert not strangers_elected
    assert solo.role is Role.LEADER


def test_a_term_far_ahead_is_approached() -> None:
    """Reliability §4: one forged message must not use up the terms of a group; a million elections are believed.

    But each brings the member nearer, so that members whose terms have come apart meet again.
    """
    step, far = 10**6, Term(10**9)
    solo = Solo()

    vote = solo.ask_vote(N1, far)
    beat = solo.hear(N1, far)
    for message in (PushCommit(far, 1, LogIndex(0)), VoteResponse(far, granted=False), HeartbeatResponse(far)):
        solo.node.receive(N1, message, 0)

    assert (vote.term, vote.granted, beat.term) == (step, False, 2 * step)
    assert solo.state.term == 5 * step
    assert solo.hear(N1, 6 * step).term == 6 * step
    assert solo.state.leader_id == N1


def test_while_a_leader_is_heard_a_member_far_ahead_moves_nobody() -> None:
    """Neither its votes nor its answers: a group with a leader needs nobody in another term."""
    far = Term(10**9)
    follower, leader = Solo(), Solo()
    follower.hear(N1, 1)
    leader.lead()

    for solo in (follower, leader):
        solo.ask_vote(N2, far)
        solo.ask_vote(N2, far, transfer=True)
        solo.ask_vote(N2, far, pre_vote=True)
        solo.beat(N2, term=far)
        solo.vote(N2, granted=False, term=far)
        solo.respond(N2, PushKind.COMMIT, term=far)

    assert follower.state.term == leader.state.term == 1
    assert leader.role is Role.LEADER


@pytest.mark.parametrize(
    "message",
    [
        VoteRequest(Term(1), NO_ENTRY),
        HeartbeatRequest(Term(1)),
        Source(1, 1).append(0),
        LoadRun(Term(1), 1, LogIndex(0), LogIndex(0), LogIndex(0)),
    ],
)
def test_messages_that_need_another_way_are_refused(message: Message) -> None:
    """Requests are answered, appends are verified first, and LoadRun never travels."""
    with pytest.raises(InvalidRequestError):
        Solo().node.receive(N1, message, 0)


def test_a_flush_wakes_the_quorum_ack_checker() -> None:
    """The leader's own watermark moves with its flush."""
    solo = Solo()
    solo.node.flushed()
    solo.take()

    assert solo.woken & Wake.QUORUM_ACK


def test_users_requests_reach_their_parts() -> None:
    """Appends, reads and transfers on a follower are all refused, each by its part."""
    solo = Solo()
    append, read, transfer = Outcome[object](), Outcome[object](), Outcome[object]()

    solo.node.quorum_ack.append([b""], 0, append)
    solo.node.reads.submit(0, read)
    solo.node.elector.transfer(N1, 0, transfer)
    solo.node.elector.transfer(N1, 0)
    solo.take()

    assert [one.error.code.name for one in (append, read, transfer)] == ["NOT_LEADER"] * 3
    assert solo.role is Role.FOLLOWER
