"""The node routes each message to its part, and only messages of members."""

from __future__ import annotations

import pytest

from dledger.core.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    LoadRun,
    Message,
    PushCommit,
    VoteRequest,
    VoteResponse,
)
from dledger.core.outbox import Wake
from dledger.errors import InvalidRequestError, UnknownMemberError
from dledger.types import NO_ENTRY, LogIndex, NodeId, Role, Term
from tests.support.cluster import N0, N1, Outcome
from tests.support.solo import Solo, Source

STRANGER = NodeId("n9")


def test_strangers_are_refused() -> None:
    """Trap 31: neither a stranger nor the member itself may send, and nothing changes."""
    solo = Solo()
    for sender in (STRANGER, N0):
        with pytest.raises(UnknownMemberError):
            solo.node.answer(sender, HeartbeatRequest(Term(5)), 0)
        with pytest.raises(UnknownMemberError):
            solo.node.receive(sender, PushCommit(Term(5), 1, LogIndex(0)), 0)
        with pytest.raises(UnknownMemberError):
            solo.node.connection_lost(sender)

    assert solo.state.term == 0


def test_a_term_far_ahead_is_refused() -> None:
    """Reliability §4: one forged message must not use up the terms of a group; a million elections are believed."""
    solo = Solo()
    limit, beyond = Term(10**6), Term(10**6 + 1)
    push = PushCommit(beyond, 1, LogIndex(0))

    for request in (VoteRequest(beyond, NO_ENTRY), HeartbeatRequest(beyond)):
        with pytest.raises(InvalidRequestError, match="term 1000001"):
            solo.node.answer(N1, request, 0)
    for message in (push, VoteResponse(beyond, granted=False), HeartbeatResponse(beyond)):
        with pytest.raises(InvalidRequestError, match="term 1000001"):
            solo.node.receive(N1, message, 0)

    assert solo.state.term == 0
    assert solo.hear(N1, limit).term == limit


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

    solo.node.append([b""], 0, append)
    solo.node.read_index(0, read)
    solo.node.transfer(N1, 0, transfer)
    solo.node.transfer(N1, 0)
    solo.take()

    assert [one.error.code.name for one in (append, read, transfer)] == ["NOT_LEADER"] * 3
    assert solo.role is Role.FOLLOWER
