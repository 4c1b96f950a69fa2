"""What waits for a peer: never more than the limits, and the newest of it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from dledger.core.messages import (
    Envelope,
    HeartbeatRequest,
    HeartbeatResponse,
    Message,
    PushCommit,
    PushKind,
    PushResponse,
    Readmission,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
)
from dledger.errors import InvalidRequestError, InvariantError, ResponseCode
from dledger.rpc.peers import codec
from dledger.rpc.peers.frames import FrameKind
from dledger.rpc.peers.link import ANSWER_TIMEOUT_S, HEARTBEATS_MAX, OTHERS_MAX, ControlQueue, Outgoing, PushQueue
from dledger.types import NO_ENTRY, EntryId, LogIndex, NodeId, Term


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
    monkeypatch.setattr("dledger.rpc.peers.link.time.monotonic", lambda: now[0])
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


# --- heartbeats that may be sent with those of other groups -----------------------------------------------------------


def answered(queue: ControlQueue, number: int) -> None:
    """Send a heartbeat alone, and take its answer."""
    queue.add(heartbeat(number))
    assert sent(queue) == [(FrameKind.HEARTBEAT, HeartbeatRequest(Term(1), number))]
    queue.take_answer(FrameKind.HEARTBEAT_ANSWER, from_peer(HeartbeatResponse(Term(1), number)))


def test_a_heartbeat_that_repeats_the_answered_one_is_set_apart() -> None:
    """With the one that it repeats; in a process of one group it goes as any other."""
    queue, alone = ControlQueue(sets_apart=True), ControlQueue()
    for one in (queue, alone):
        answered(one, 1)
        one.add(heartbeat(2))

    assert (queue.next(), queue.has_repetition) == (None, True)
    assert queue.next_repetition() == (heartbeat(2), HeartbeatRequest(Term(1), 1))
    assert sent(alone) == [(FrameKind.HEARTBEAT, HeartbeatRequest(Term(1), 2))]
    queue.repetition_answered(heard=True)
    queue.add(heartbeat(3))
    assert queue.next_repetition() == (heartbeat(3), HeartbeatRequest(Term(1), 1))  # as its addressee remembers it


CHANGES: dict[str, HeartbeatRequest] = {
    "term": HeartbeatRequest(Term(2)),
    "client_address": HeartbeatRequest(Term(1), client_address="h:2"),
    "transfer_target": HeartbeatRequest(Term(1), transfer_target="n1"),
    "readmission": HeartbeatRequest(Term(1), readmission=Readmission(4, LogIndex(7))),
    "founded": HeartbeatRequest(Term(1), founded=True),
    "watermarks": HeartbeatRequest(Term(1), watermarks=((NodeId("n1"), EntryId(Term(1), LogIndex(7))),)),
    "doubted_boot_id": HeartbeatRequest(Term(1), doubted_boot_id=4),
    "countersign": HeartbeatRequest(Term(1), countersign=5),
}


@pytest.mark.parametrize("said", CHANGES.values(), ids=CHANGES)
def test_a_heartbeat_that_says_something_new_goes_alone(said: HeartbeatRequest) -> None:
    """It may make its addressee wait for the disk, or be refused."""
    queue = ControlQueue(sets_apart=True)
    answered(queue, 1)
    queue.add(to_peer(said))

    assert not queue.has_repetition
    assert sent(queue) == [(FrameKind.HEARTBEAT, said)]


def test_every_field_of_a_heartbeat_but_its_number_may_say_something_new() -> None:
    """A new field needs its line above."""
    assert {one.name for one in fields(HeartbeatRequest)} == {*CHANGES, "read_sequence"}


def test_a_heartbeat_goes_alone_while_an_earlier_one_is_unanswered() -> None:
    """Its addressee may be stuck, which the others must not have to wait for."""
    queue = ControlQueue(sets_apart=True)
    answered(queue, 1)
    queue.add(heartbeat(2))
    assert queue.next_repetition() == (heartbeat(2), HeartbeatRequest(Term(1), 1))
    queue.add(heartbeat(3))

    assert queue.next_repetition() is None
    assert sent(queue) == [(FrameKind.HEARTBEAT, HeartbeatRequest(Term(1), 3))]


def test_a_repetition_without_an_answer_makes_the_next_one_go_alone_and_counts_no_longer() -> None:
    """Its group may have gone, or forgotten what is repeated; the limit of unanswered ones is for its connection."""
    queue = ControlQueue(sets_apart=True)
    for number in range(1, 2 * HEARTBEATS_MAX, 2):
        answered(queue, number)
        queue.add(heartbeat(number + 1))
        assert queue.next_repetition() is not None
        queue.repetition_answered(heard=False)

    queue.add(heartbeat(100))
    assert not queue.has_repetition
    assert sent(queue) == [(FrameKind.HEARTBEAT, HeartbeatRequest(Term(1), 100))]


def test_a_new_connection_repeats_nothing() -> None:
    """Its other end has heard nothing on it."""
    queue = ControlQueue(sets_apart=True)
    answered(queue, 1)
    queue.clear()
    queue.add(heartbeat(2))

    assert sent(queue) == [(FrameKind.HEARTBEAT, HeartbeatRequest(Term(1), 2))]
