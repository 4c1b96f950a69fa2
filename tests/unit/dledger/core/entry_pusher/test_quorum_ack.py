"""Pending appends: refused, committed, overtaken or overdue, each exactly once."""

from __future__ import annotations

import pytest

from dledger.core.messages import Wake
from dledger.errors import (
    DiskFullError,
    DLedgerError,
    InvalidRequestError,
    LeaderNotReadyError,
    LeaderTransferringError,
    NotLeaderError,
    PendingFullError,
    QuorumAckTimeoutError,
    TermChangedError,
)
from dledger.types import AppendedBatch, LogIndex, Term
from tests.support.cluster import N1, N2, N3, N4, Outcome
from tests.support.solo import Solo


def leading(size: int = 3, *, pending_entries_max: int = 100, pending_bytes_max: int = 1000) -> Solo:
    solo = Solo(size, pending_entries_max=pending_entries_max, pending_bytes_max=pending_bytes_max)
    solo.lead()
    return solo


def append(solo: Solo, *bodies: bytes) -> Outcome[AppendedBatch]:
    outcome: Outcome[AppendedBatch] = Outcome()
    solo.node.quorum_ack.append(bodies, solo.now_ms, outcome)
    solo.take()
    return outcome


def test_only_a_leader_appends_and_others_give_a_hint() -> None:
    """The hint names the leader that is known."""
    solo = Solo()
    solo.hear(N2, 1)

    error = append(solo, b"x").error

    assert isinstance(error, NotLeaderError)
    assert error.leader is not None
    assert error.leader.node_id == N2


def test_appends_are_refused_while_leadership_is_handed_over() -> None:
    """Trap 27: the pause is named, and nothing is written."""
    solo = leading()
    solo.leader_role.transferring = True

    assert isinstance(append(solo, b"x").error, LeaderTransferringError)
    assert solo.log.last.index == 0


def test_what_the_store_refuses_is_answered() -> None:
    """An empty batch, a full disk: nothing applied, nothing pending."""
    solo = leading()
    assert isinstance(append(solo).error, InvalidRequestError)
    solo.log.disk_full = True
    solo.leader_role.disk_full.update(dict.fromkeys(solo.leader_role.disk_full, True))
    assert isinstance(append(solo, b"x").error, DiskFullError)

    assert solo.node.quorum_ack.pending_entries == 0


def test_a_leader_whose_disk_alone_is_full_asks_for_another_try() -> None:
    """The group goes on without it, and so shall its clients: the others have room, and one of them will lead."""
    solo = leading()
    solo.log.disk_full = True

    error = append(solo, b"x").error

    assert isinstance(error, LeaderTransferringError)
    assert error.outcome == "not_applied"
    assert solo.log.last.index == 0


def test_pending_entries_and_bytes_are_bounded_but_one_batch_always_fits() -> None:
    """A batch larger than the limit is taken when nothing else waits."""
    solo = leading(pending_entries_max=2, pending_bytes_max=10)
    big = append(solo, b"0123456789", b"0123456789", b"x")

    refused = append(solo, b"x")

    assert big.pending
    assert isinstance(refused.error, PendingFullError)
    bytes_only = leading(pending_bytes_max=10)
    append(bytes_only, b"012345678")
    assert isinstance(append(bytes_only, b"0123").error, PendingFullError)


def test_an_append_wakes_flush_and_dispatchers_and_the_first_one_the_checker() -> None:
    """The checker must learn the first deadline; later ones are behind it."""
    solo = leading()
    append(solo, b"x")
    assert solo.woken == Wake.FLUSH | Wake.DISPATCHERS | Wake.QUORUM_ACK
    append(solo, b"y")

    assert solo.woken & (Wake.FLUSH | Wake.DISPATCHERS) == Wake.FLUSH | Wake.DISPATCHERS
    assert not solo.woken & Wake.QUORUM_ACK


def test_the_commit_index_is_the_highest_that_a_quorum_holds() -> None:
    """The quorum-th highest watermark of five, own flush included; it wakes those whom a new commit index concerns.

    The elector is one of them only while reads wait for it.
    """
    solo = leading(5)
    append(solo, b"1")
    append(solo, b"2")
    append(solo, b"3")
    solo.flush()
    for peer, match in ((N1, 2), (N2, 1), (N3, 0), (N4, -1)):
        solo.matches(peer, match)

    solo.settle_quorum()

    assert solo.state.commit_index == 1
    assert solo.woken & Wake.DISPATCHERS
    assert not solo.woken & Wake.ELECTOR

    solo.leader_role.reads_waiting = True
    solo.matches(N2, 2)
    solo.settle_quorum()

    assert solo.state.commit_index == 2
    assert solo.woken & Wake.ELECTOR


def test_each_append_completes_with_its_own_batch_in_order() -> None:
    """A batch is acknowledged whole, once its last entry is committed (trap 35)."""
    solo = leading()
    first, second = append(solo, b"a", b"b"), append(solo, b"c")
    solo.flush()
    solo.matches(N1, 1)
    solo.settle_quorum()
    assert first.pending

    solo.matches(N1, 2)
    solo.settle_quorum()

    assert first.value.last_index == 2
    assert second.pending
    assert solo.node.quorum_ack.pending_entries == 1


def test_overdue_appends_end_as_unknown_and_give_the_next_deadline() -> None:
    """The step tells when the oldest pending append is due."""
    solo = leading()
    timeout = solo.config.replication.ack_timeout_ms
    start = solo.now_ms
    first = append(solo, b"a")
    solo.now_ms += 10
    second = append(solo, b"b")

    assert solo.node.quorum_ack.step(start) == start + timeout
    assert solo.node.quorum_ack.step(start + timeout) == start + 10 + timeout
    solo.take()

    assert isinstance(first.error, QuorumAckTimeoutError)
    assert second.pending


@pytest.mark.parametrize("again", [False, True])
def test_losing_the_term_fails_what_is_pending(again: bool) -> None:
    """Trap 21: also when this member leads again, in another term, before the checker steps."""
    solo = leading()
    outcome = append(solo, b"x")
    solo.state.become_follower(Term(5), None, solo.now_ms)
    if again:
        solo.lead()

    solo.settle_quorum()

    assert isinstance(outcome.error, TermChangedError)
    assert solo.node.quorum_ack.pending_entries == 0
    assert solo.node.quorum_ack.step(solo.now_ms) is None


def test_entries_of_earlier_terms_are_not_counted() -> None:
    """§5.4.2."""
    solo = Solo(terms=(1, 1))
    solo.lead()
    solo.flush()
    solo.matches(N1, 1)

    solo.settle_quorum()

    assert solo.state.commit_index == -1


def test_a_commit_wakes_the_elector_only_for_reads_that_wait_for_it() -> None:
    """A read of a new leader waits for the no-op; without one the elector sleeps on."""
    for reading in (False, True):
        solo = leading()
        solo.flush()
        solo.matches(N1, 0)
        if reading:
            solo.node.reads.submit(solo.now_ms, Outcome[object]())
        solo.take()

        solo.settle_quorum()

        assert bool(solo.woken & Wake.ELECTOR) is reading


class _Numbered:
    """Gives its entries the log's own numbers, which only the moment of the append can tell."""

    def __init__(self, solo: Solo, refusal: DLedgerError | None = None) -> None:
        self._solo = solo
        self._refusal = refusal
        self.calls: list[object] = []

    def bodies(self, term: Term, stored: int = 0) -> list[bytes] | DLedgerError:
        self.calls.append(term)
        return self._refusal or [b"%d" % (self._solo.log.last.index + 1)]

    def placed(self, batch: AppendedBatch | None) -> None:
        self.calls.append(None if batch is None else batch.first_index)


def append_prepared(solo: Solo, prepared: _Numbered) -> Outcome[AppendedBatch]:
    outcome: Outcome[AppendedBatch] = Outcome()
    solo.node.quorum_ack.append_prepared(prepared, solo.now_ms, outcome)
    solo.take()
    return outcome


def test_a_prepared_append_is_made_at_the_moment_it_is_written() -> None:
    """It hears the term first, then where it is; it is committed like any other."""
    solo = leading()
    prepared = _Numbered(solo)

    outcome = append_prepared(solo, prepared)

    assert outcome.pending
    assert prepared.calls == [1, 1]
    assert solo.log.read(LogIndex(1)).body == b"1"


def test_a_prepared_append_hears_of_a_refusal_by_the_log_before_anything_else_is_appended() -> None:
    """Whatever it gave out for the batch it can take back."""
    solo = leading()
    solo.leader_role.transferring = True
    prepared = _Numbered(solo)

    assert isinstance(append_prepared(solo, prepared).error, LeaderTransferringError)
    assert prepared.calls == [1, None]


def test_a_prepared_append_may_refuse_itself() -> None:
    """Nothing is written, and its own error is the answer."""
    solo = leading()
    prepared = _Numbered(solo, LeaderNotReadyError("not in this term"))

    assert isinstance(append_prepared(solo, prepared).error, LeaderNotReadyError)
    assert prepared.calls == [1]
    assert solo.log.last.index == 0


def test_nobody_but_a_leader_prepares_an_append() -> None:
    """The hint names the leader that is known."""
    solo = Solo()
    solo.hear(N2, 1)
    prepared = _Numbered(solo)

    error = append_prepared(solo, prepared).error

    assert isinstance(error, NotLeaderError)
    assert error.leader is not None
    assert prepared.calls == []
