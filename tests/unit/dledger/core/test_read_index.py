"""The queue of linearizable reads by itself."""

from __future__ import annotations

from dledger.core.messages import Wake
from tests.support.cluster import N1, N2, Outcome
from tests.support.solo import Solo


def leading(size: int = 3) -> Solo:
    solo = Solo(size)
    solo.lead()
    solo.state.advance_commit(solo.log.last.index)
    solo.take()
    return solo


def test_an_empty_queue_has_nothing_due() -> None:
    """No read, no timer."""
    solo = leading()

    assert solo.node.reads.step(0) is None
    assert len(solo.node.reads) == 0


def test_a_read_asks_for_a_round_and_wakes_the_elector() -> None:
    """The round begins when the elector steps, not at the next heartbeat."""
    solo = leading()
    solo.node.reads.submit(5, Outcome[object]())
    solo.take()

    assert solo.woken & Wake.ELECTOR
    assert solo.node.reads.wants_round
    assert len(solo.node.reads) == 1
    assert solo.node.reads.step(5) == 5 + solo.config.replication.ack_timeout_ms


def test_a_round_needs_a_quorum_of_answers() -> None:
    """Five members: the leader and two answers."""
    solo = leading(5)
    outcome: Outcome[object] = Outcome()
    solo.node.reads.submit(solo.now_ms, outcome)
    solo.tick()
    number = solo.node.reads.round

    solo.beat(N1, number)
    solo.tick()
    assert outcome.pending
    solo.beat(N2, number)
    solo.tick()

    assert outcome.value == 0


def test_late_answers_do_not_lower_what_was_confirmed() -> None:
    """Answers arrive in any order; the highest round counts."""
    solo = leading()
    for _ in range(3):
        solo.tick(100)
    outcome: Outcome[object] = Outcome()
    solo.node.reads.submit(solo.now_ms, outcome)
    solo.tick()

    solo.beat(N1, solo.node.reads.round)
    solo.beat(N1, 1)
    solo.tick()

    assert outcome.value == 0


def test_answers_wake_the_elector_only_while_reads_wait() -> None:
    """Ordinary heartbeats cost no wake-up."""
    solo = leading()
    solo.beat(N1, 1)
    solo.take()
    assert not solo.woken & Wake.ELECTOR

    solo.node.reads.submit(0, Outcome[object]())
    solo.take()
    solo.beat(N1, 1)
    solo.take()

    assert solo.woken & Wake.ELECTOR


def test_reads_finish_in_order_and_time_out_one_by_one() -> None:
    """The due time of the oldest unfinished read is the queue's."""
    solo = leading()
    first, second = Outcome[object](), Outcome[object]()
    timeout = solo.config.replication.ack_timeout_ms
    solo.node.reads.submit(0, first)
    solo.node.reads.submit(10, second)

    assert solo.node.reads.step(timeout) == 10 + timeout
    solo.take()

    assert first.error.code.name == "WAIT_QUORUM_ACK_TIMEOUT"
    assert second.pending
