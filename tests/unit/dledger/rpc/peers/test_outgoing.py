"""What waits for a peer: never more than the limits, and the newest of it."""

from __future__ import annotations

import pytest

from dledger.core.messages import (
    Envelope,
    HeartbeatRequest,
    HeartbeatResponse,
    Message,
    PushCommit,
    PushKind,
    PushResponse,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
)
from dledger.errors import InvalidRequestError, InvariantError, ResponseCode
from dledger.rpc.peers import codec
from dledger.rpc.peers.frames import FrameKind
from dledger.rpc.peers.outgoing import ANSWER_TIMEOUT_S, HEARTBEATS_MAX, OTHERS_MAX, ControlQueue, Outgoing, PushQueue
from dledger.types import NO_ENTRY, LogIndex, NodeId, Term


def to_peer(message: Message) -> Envelope:
    return Envelope("c", "g", NodeId("n0"), NodeId("n1"), message)


def from_peer(message: Message) -> bytes:
    return codec.encode(message)


def heartbeat(number: int) -> Envelope:
    return to_peer(HeartbeatRequest(Term(1), number))


def vote(term: int) -> Envelope:
    return to_peer(VoteRequest(Term(term), NO_ENTRY))


def sent(queue: Outgoing) -> list[tuple[FrameKind, Message]]:
    """All that may be sent now."""
    found = []
    while (one := queue.next()) is not None:
        found.append((one[0], one[1].message))
    return found


def test_at_most_four_heartbeats_are_unanswered_and_the_newest_replaces_the_one_that_waits() -> None:
    """It says all that earlier ones said. A peer that is stopped for an hour finds four of them, then the newest."""
    queue = ControlQueue()

    for number in range(100):
        queue.add(heartbeat(number))

    assert [message for _, message in sent(queue)] == [HeartbeatRequest(Term(1), number) for number in range(4)]
    assert queue.dropped == 100 - HEARTBEATS_MAX - 1
    answer = from_peer(HeartbeatResponse(Term(1), 0))
    assert queue.take_answer(FrameKind.HEARTBEAT_ANSWER, answer) is not None
    assert [message for _, message in sent(queue)] == [HeartbeatRequest(Term(1), 99)]
    assert sent(queue) == []


def test_heartbeats_keep_no_vote_from_being_sent() -> None:
    """Votes have their own limit, and go first."""
    queue = ControlQueue()
    for number in range(10):
        queue.add(heartbeat(number))
    for term in range(10):
        queue.add(vote(term))

    kinds = [kind for kind, _ in sent(queue)]

    assert kinds == [FrameKind.VOTE] * OTHERS_MAX + [FrameKind.HEARTBEAT] * HEARTBEATS_MAX
    queue.take_answer(FrameKind.VOTE_ANSWER, from_peer(VoteResponse(Term(1), True)))
    queue.add(to_peer(TakeLeadership(Term(3))))  # behind a vote that was newer than the one that waited
    assert sent(queue) == [(FrameKind.VOTE, VoteRequest(Term(9), NO_ENTRY))]
    assert queue.take_answer(FrameKind.VOTE_ANSWER, from_peer(VoteResponse(Term(1), True))) is not None
    assert sent(queue) == [(FrameKind.TAKE_LEADERSHIP, TakeLeadership(Term(3)))]
    assert queue.take_answer(FrameKind.TAKE_LEADERSHIP_ANSWER, b"") is None


@pytest.mark.parametrize("kind", [FrameKind.VOTE_ANSWER, FrameKind.HEARTBEAT_ANSWER, FrameKind.PUSH_ANSWER])
def test_an_answer_that_nobody_asked_for_is_refused(kind: FrameKind) -> None:
    """It would make room for more than the limit."""
    with pytest.raises(InvalidRequestError, match=f"expected no {kind.name}"):
        ControlQueue().take_answer(kind, b"")


def test_a_peer_that_owes_an_answer_for_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP does not notice a proxy that keeps the connection of a member that is gone."""
    queue = ControlQueue()
    now = [1000.0]
    monkeypatch.setattr("dledger.rpc.peers.outgoing.time.monotonic", lambda: now[0])
    queue.add(heartbeat(1))
    now[0] += 2 * ANSWER_TIMEOUT_S
    assert not queue.is_stuck  # it was not sent yet
    sent(queue)
    now[0] += ANSWER_TIMEOUT_S
    found = [queue.is_stuck]
    now[0] += 0.1
    found.append(queue.is_stuck)
    queue.clear()
    found.append(queue.is_stuck)

    assert found == [False, True, False]
    assert queue.dropped == 1


def test_all_that_was_lost_with_a_connection_is_counted() -> None:
    """What waited, what was ready, and what was not answered."""
    queue = ControlQueue()
    for number in range(10):
        queue.add(heartbeat(number))
        queue.add(vote(number))
    assert queue.next() is not None

    queue.clear()

    assert queue.dropped == 20
    queue.add(vote(1))
    assert len(sent(queue)) == 1


def test_control_messages_are_no_others() -> None:
    """Misuse is an ``InvariantError``."""
    with pytest.raises(InvariantError, match="PushCommit is not a control message"):
        ControlQueue().add(to_peer(PushCommit(Term(1), 0, LogIndex(0))))


def test_pushes_are_sent_in_order_up_to_a_limit_and_never_with_a_gap() -> None:
    """Beyond it the connection must end: what follows a dropped push must not be sent as if nothing were missing."""
    queue = PushQueue(3)
    for index in range(5):
        queue.add(to_peer(PushCommit(Term(1), 0, LogIndex(index))))

    assert (queue.is_stuck, queue.dropped) == (True, 2)
    queue.clear()
    assert (queue.is_stuck, queue.dropped, queue.next()) == (False, 5, None)
    queue.add(to_peer(PushCommit(Term(1), 0, LogIndex(9))))
    assert sent(queue) == [(FrameKind.PUSH, PushCommit(Term(1), 0, LogIndex(9)))]


def test_answers_to_pushes_are_decoded_and_nothing_else_is() -> None:
    """A follower may answer one push, many, or a flush."""
    at = LogIndex(1)
    response = PushResponse(Term(1), 0, PushKind.APPEND, ResponseCode.SUCCESS, at, at, at, NO_ENTRY, 7)

    answer = PushQueue(1).take_answer(FrameKind.PUSH_ANSWER, from_peer(response))

    assert answer == response
    with pytest.raises(InvalidRequestError, match="expected an answer to a push, got VOTE_ANSWER"):
        PushQueue(1).take_answer(FrameKind.VOTE_ANSWER, from_peer(response))
