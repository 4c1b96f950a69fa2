"""Linearizable reads: a leader answers only what a quorum confirms after the read arrived (dissertation §6.4)."""

from __future__ import annotations

import pytest

from dledger.core.member_state import Leader
from dledger.core.messages import HeartbeatRequest, HeartbeatResponse, PushResponse
from dledger.errors import NotLeaderError, PendingFullError, QuorumAckTimeoutError
from dledger.types import Term
from tests.support.cluster import N0, N1, N2, Cluster, Outcome
from tests.support.solo import Solo


@pytest.mark.parametrize("size", [1, 3, 5])
def test_read_sees_every_finished_append(size: int) -> None:
    """A read that begins after an append was acknowledged covers it."""
    cluster = Cluster(size)
    cluster.elect()
    batch = cluster.append(N0, b"a", b"b").value

    assert cluster.read(N0).value == batch.last_index


def test_a_follower_refuses_and_names_the_leader() -> None:
    """A read on a follower is refused with the leader as hint."""
    cluster = Cluster(3)
    cluster.elect()

    error = cluster.read(N1).error

    assert isinstance(error, NotLeaderError)
    assert error.leader is not None
    assert error.leader.node_id == N0


def test_a_stale_leader_cannot_serve() -> None:
    """A leader that was replaced without noticing confirms no read (reliability trap 25, etcd #20418)."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.isolate(N0)
    cluster.advance(400)
    cluster.deliver_election(N1, [N2])
    assert cluster.append(N1, b"new").value

    read = cluster.read(N0)
    cluster.advance(20)
    assert read.pending
    cluster.advance(2000)

    assert isinstance(read.error, NotLeaderError)


def test_reads_that_wait_together_share_one_round() -> None:
    """Any number of reads before the next heartbeat round is confirmed by that one round."""
    solo = Solo()
    solo.lead()
    _commit_noop(solo)
    outcomes: list[Outcome[object]] = [Outcome() for _ in range(100)]
    for outcome in outcomes:
        solo.node.reads.submit(solo.now_ms, outcome)

    rounds = [message for _, message in solo.tick() if isinstance(message, HeartbeatRequest)]
    solo.beat(N1, rounds[0].read_sequence)
    solo.tick()

    assert len(rounds) == 2  # one per peer
    assert all(outcome.value == 0 for outcome in outcomes)


def test_an_answer_to_an_earlier_round_confirms_nothing() -> None:
    """Only a round that began after the read counts."""
    solo = Solo()
    solo.lead()
    _commit_noop(solo)
    earlier = solo.node.reads.round
    outcome: Outcome[object] = Outcome()
    solo.node.reads.submit(solo.now_ms, outcome)
    solo.tick()

    solo.beat(N1, earlier)
    solo.beat(N2, earlier)
    solo.tick()

    assert outcome.pending


def test_a_new_leader_first_waits_for_its_no_op() -> None:
    """Before an entry of its term is committed a leader does not know what is (§8)."""
    cluster = Cluster(3)
    cluster.hold(PushResponse)
    cluster.advance_until(lambda: cluster.leader() is not None)

    read = cluster.read(N0)
    assert read.pending
    cluster.release()

    assert read.value == 0


def test_reads_fail_when_the_leader_steps_down() -> None:
    """Reads that wait are refused at once when leadership is lost, with the new leader if it is known."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.hold(HeartbeatResponse)
    read = cluster.read(N0)
    assert read.pending

    cluster.take_leadership(N1)

    assert isinstance(read.error, NotLeaderError)
    assert read.error.outcome == "not_applied"


def test_a_read_times_out_when_no_quorum_confirms() -> None:
    """A read ends within the ack timeout even while its leader believes to lead."""
    cluster = Cluster(3, ack_timeout_ms=300)
    cluster.elect()
    cluster.drop(HeartbeatResponse)
    read = cluster.read(N0)

    cluster.advance(301)

    assert isinstance(read.error, QuorumAckTimeoutError)


def test_too_many_waiting_reads_are_refused() -> None:
    """The queue of reads is bounded."""
    solo = Solo(pending_entries_max=1)
    solo.lead()
    first, second = Outcome[object](), Outcome[object]()

    solo.node.reads.submit(0, first)
    solo.node.reads.submit(0, second)
    solo.take()

    assert first.pending
    assert isinstance(second.error, PendingFullError)


def _commit_noop(solo: Solo) -> None:
    solo.flush()
    solo.streaming(N1)
    solo.settle_quorum()
    assert solo.state.commit_index == 0


def test_an_answer_to_another_terms_heartbeat_confirms_no_read() -> None:
    """A follower of term 2 does not repeat the round number of a heartbeat that was sent in term 1.

    The member that sent it may lead term 2 again, in a new process whose rounds count from 0.
    """
    solo = Solo()
    solo.hear(N1, 2)

    assert solo.hear(N1, 2, read_sequence=3).read_sequence == 3
    assert solo.hear(N1, 1, read_sequence=50).read_sequence == 0


def test_a_read_of_a_new_term_survives_the_failure_of_older_ones() -> None:
    """Losing leadership and winning it again fails the reads of the lost term only."""
    solo = Solo()
    solo.lead()
    old, new = Outcome[object](), Outcome[object]()
    solo.node.reads.submit(solo.now_ms, old)
    solo.node.receive(N1, HeartbeatResponse(Term(2)), solo.now_ms)
    state = solo.state
    state.become_candidate(solo.now_ms, pre_vote=False)
    solo.vote(N1)
    assert isinstance(state.role, Leader)
    solo.node.reads.submit(solo.now_ms, new)

    solo.tick()

    assert isinstance(old.error, NotLeaderError)
    assert new.pending
