"""Bugs of DLedger and of other Raft systems that this core must not have, each under its number."""

from __future__ import annotations

import itertools

import pytest

from dledger.config import FlushMode
from dledger.core.messages import (
    PushAppend,
    PushCommit,
    PushCompare,
    PushKind,
    PushResponse,
    PushTruncate,
    ReceivedPush,
)
from dledger.errors import PendingFullError, QuorumAckTimeoutError, ResponseCode
from dledger.types import EntryId, HardState, LogIndex, NodeId, Role, Standing, Term
from tests.support.cluster import N0, N1, N2, Cluster, Sent, made_log
from tests.support.solo import Solo, Source


def test_316_commit_never_exceeds_the_end() -> None:
    """#316: a follower told of a commit index beyond its log commits what it holds, and survives a truncation."""
    solo = Solo(terms=(1, 1))
    source = Source(2, 1, 2)
    solo.push(N1, source.compare(0))

    solo.push(N1, PushCommit(Term(2), source.epoch, LogIndex(99)))

    assert solo.state.commit_index == 0
    assert solo.log.last.index == 1


def test_52_a_truncated_member_votes_by_the_log_it_has() -> None:
    """#52, trap 22: the end that votes are compared with follows a truncation."""
    solo = Solo(terms=(1, 3, 3))
    source = Source(4, 1, 2)
    solo.push(N1, source.compare(0))
    solo.push(N1, _truncate(source, 1))
    solo.push(N1, source.append(1))

    assert solo.log.last == EntryId(Term(2), LogIndex(1))
    solo.now_ms += solo.state.election.election_timeout_ms_max
    assert solo.ask_vote(N2, 9, EntryId(Term(2), LogIndex(1))).granted


def test_61_a_wiped_follower_is_refilled_without_a_new_write() -> None:
    """#61: an idle leader refills a follower whose disk was lost."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, b"a", b"b")
    cluster.advance(50)
    cluster.wipe(N2)

    cluster.start(N2)
    cluster.advance(2000)

    assert cluster.same_logs()


@pytest.mark.parametrize("lost", [PushCompare, PushTruncate, PushAppend, PushCommit, PushResponse])
def test_142_251_331_replication_resumes_after_any_lost_message(lost: type) -> None:
    """#142, #251, #331, trap 32: whichever push or answer is lost, without any notice, the follower gets everything."""
    logs = {N0: made_log(1, 1, 3), N1: made_log(1, 1, 3), N2: made_log(1, 2, 2, 2)}
    cluster = Cluster(3, logs=logs)
    cluster.drop(lost, target=N2)
    cluster.drop(lost, sender=N2)
    cluster.elect()
    cluster.append(N0, b"a")
    cluster.advance(3000)

    cluster.heal()
    cluster.advance(3000)

    assert cluster.same_logs()


@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_331_every_nth_push_unanswered_still_converges(every: int) -> None:
    """DLedger AppendAndPushTest: pushes that go unanswered now and then delay replication, but never stop it."""
    cluster = Cluster(3, push_bytes_max=100)
    cluster.elect()
    counter = itertools.count(1)
    cluster.drops.append(lambda sent: isinstance(sent.message, PushResponse) and next(counter) % every == 0)

    outcomes = [cluster.append(N0, b"%d" % number) for number in range(50)]
    cluster.advance(20_000)
    cluster.heal()
    cluster.advance(3000)

    assert cluster.same_logs()
    assert not any(outcome.pending for outcome in outcomes)


def test_331_a_repeated_push_is_acknowledged() -> None:
    """#331: an append that the follower holds already gets its answer again (DLedger said REPEATED_PUSH for hours)."""
    solo = Solo()
    source = Source(1, 1, 1)
    solo.push(N1, source.compare(-1))

    first = solo.push(N1, source.append(0))
    again = solo.push(N1, source.append(0))

    for answers in (first, again):
        assert [(one.code, one.flushed_index) for one in answers] == [(ResponseCode.SUCCESS, 1)]
    assert solo.log.last.index == 1


def test_85_a_preferred_member_that_is_behind_does_not_stay_candidate() -> None:
    """#85: a preferred leader with a short log first catches up, then leads."""
    cluster = Cluster(3, preferred_leaders=(N0,))
    cluster.crash(N0)
    cluster.advance_until(lambda: cluster.leader() is not None)
    leader = cluster.leader()
    assert leader is not None
    cluster.append(leader, *[b"x"] * 50)

    cluster.start(N0)
    cluster.advance(5000)

    assert cluster.leader() == N0
    assert cluster.same_logs()


def test_f1_a_late_truncate_of_a_deposed_leader_removes_nothing() -> None:
    """F1 (since #298), trap 19: TRUNCATE of an earlier term is refused, whatever it asks for."""
    solo = Solo(hard_state=HardState(Term(2), standing=Standing.FULL), terms=(1, 2, 2))
    solo.hear(N2, 2)
    old = Source(1, 1, 1, 1)

    for index in range(3):
        (answer,) = solo.push(N1, _truncate(old, index))
        assert answer.code is ResponseCode.EXPIRED_TERM

    assert solo.log.last == EntryId(Term(2), LogIndex(2))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_f1_no_order_of_late_pushes_removes_what_the_present_leader_wrote(order: tuple[int, ...]) -> None:
    """F1 as a property: the pushes of a deposed leader come in any order between and after those of its successor."""
    solo = Solo(terms=(1, 1, 1))
    old = Source(2, 1, 2, 2)
    new = Source(3, 1, 1, 1, 3)
    solo.push(N2, new.compare(2))
    solo.push(N2, new.append(3, commit=2))
    late: list[ReceivedPush | PushAppend] = [
        old.compare(0),
        _truncate(old, 1),
        old.append(1),
        PushCommit(Term(2), old.epoch, LogIndex(2)),
    ]

    for number in order:
        (answer,) = solo.push(N1, late[number])
        assert answer.code is ResponseCode.EXPIRED_TERM

    assert solo.log.last == new.log.last
    assert solo.log.last_chain_crc == new.log.last_chain_crc
    assert solo.state.commit_index == 2


def test_f1_a_late_truncate_of_an_earlier_attempt_removes_nothing() -> None:
    """Trap 20: a duplicate of the leader's own TRUNCATE arrives after the appends that followed it."""
    solo = Solo(terms=(1, 2, 2))
    source = Source(3, 1, 3, 3)
    solo.push(N1, source.compare(0))
    truncate = _truncate(source, 1)
    solo.push(N1, truncate)
    source.epoch += 1
    solo.push(N1, source.append(1))

    assert solo.push(N1, truncate) == []
    assert solo.push(N1, PushTruncate(Term(3), source.epoch, truncate.conflict, truncate.chain_crc))

    assert solo.log.last == EntryId(Term(3), LogIndex(2))


def test_f1_nothing_at_or_below_the_commit_index_goes_whatever_a_push_says() -> None:
    """Trap 19: two histories of committed entries cannot be repaired; a sound member keeps its own, and stays up."""
    solo = Solo(terms=(1, 1), committed=1)
    other = Source(3, 2, 2)

    answers = [
        *solo.push(N1, other.compare(1)),
        *solo.push(N1, _truncate(other, 1)),
        *solo.push(N1, other.append(0)),
    ]

    assert [answer.code for answer in answers] == [ResponseCode.OTHER_HISTORY] * 3
    assert solo.log.last == EntryId(Term(1), LogIndex(1))


def test_f1_matching_entries_survive_a_failover() -> None:
    """§4.2 of the DLedger notes: a leader's first COMPARE never makes a follower drop what agrees with it."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.append(N0, *[b"%d" % number for number in range(20)])
    cluster.advance(50)
    wrote = [cluster[one].log.write_sequence for one in (N1, N2)]

    cluster.crash(N0)
    cluster.advance(2000)

    assert [cluster[one].log.write_sequence for one in (N1, N2)] == [sequence + 1 for sequence in wrote]


def test_f4_nothing_is_acknowledged_before_its_flush() -> None:
    """F4, trap 4: with the disks of both followers standing still, an append is not acknowledged."""
    cluster = Cluster(3)
    cluster.elect()
    for one in (N1, N2):
        cluster[one].flush_paused = True
    outcome = cluster.append(N0, b"a")
    cluster.advance(500)
    assert outcome.pending

    cluster[N1].flush_paused = False
    cluster.settle()

    assert outcome.value


def test_f4_the_leader_counts_itself_only_after_its_own_flush() -> None:
    """Trap 4, etcd #14370: the leader's unflushed entry is no vote for its commit."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N2)
    cluster[N0].flush_paused = True
    outcome = cluster.append(N0, b"a")
    cluster.advance(500)
    assert outcome.pending

    cluster[N0].flush_paused = False
    cluster.settle()

    assert outcome.value


def test_asynchronous_flush_acknowledges_from_the_page_cache() -> None:
    """``flush=async`` is RocketMQ's behaviour, chosen explicitly: no disk is waited for."""
    cluster = Cluster(3, flush_mode=FlushMode.ASYNC)
    for host in cluster.hosts.values():
        host.flush_paused = True
    cluster.advance_until(lambda: cluster.leader() is not None)

    assert cluster.append(N0, b"a").value.last_index == 1


def test_a_single_asynchronous_member_acknowledges_at_once() -> None:
    """A group of one with ``flush=async`` waits for nothing."""
    cluster = Cluster(1, flush_mode=FlushMode.ASYNC)
    cluster[N0].flush_paused = True
    cluster.settle()

    assert cluster.append(N0, b"a").value.last_index == 1


def test_power_cut_of_all_members_loses_nothing_acknowledged() -> None:
    """Issue 2: acknowledged means flushed on a majority, so all may crash at once."""
    cluster = Cluster(3)
    cluster.elect()
    cluster[N2].flush_paused = True
    assert cluster.append(N0, b"a", b"b").value

    for one in cluster.ids:
        cluster.crash(one)
        cluster[one].flush_paused = False
    for one in (N1, N2):
        cluster.start(one)
    cluster.advance(5000)

    assert cluster.leader() == N1
    assert cluster.bodies(N2) == [b"a", b"b"]


def test_a_dead_quorum_times_out_appends_as_unknown() -> None:
    """DLedger AppendAndPushTest: offline peers → 502; the entry may still be committed, and here it is."""
    cluster = Cluster(3, ack_timeout_ms=300)
    cluster.elect()
    cluster.drop(PushAppend)
    outcome = cluster.append(N0, b"a")
    cluster.advance(301)
    assert isinstance(outcome.error, QuorumAckTimeoutError)
    assert outcome.error.outcome == "unknown"

    cluster.heal()
    cluster.advance(2000)

    assert cluster.bodies(N1) == [b"a"]


def test_too_many_pending_appends_are_refused() -> None:
    """DLedger AppendAndPushTest: offline peers → 503, and appends are taken again once the pending ones are done."""
    cluster = Cluster(3, pending_entries_max=2)
    cluster.elect()
    cluster.drop(PushAppend)
    first = cluster.append(N0, b"a", b"b")

    assert isinstance(cluster.append(N0, b"c").error, PendingFullError)
    cluster.heal()
    cluster.advance(2000)

    assert first.value
    assert cluster.append(N0, b"d").value


def test_follower_stop_and_start_completes_pending_appends() -> None:
    """DLedger AppendAndPushTest: appends that wait for a stopped follower complete when it is back."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N1)
    cluster.crash(N2)
    outcome = cluster.append(N0, b"a")
    assert outcome.pending

    cluster.start(N1)
    cluster.advance(800)

    assert outcome.value


def test_an_ex_leaders_extra_entries_are_cut() -> None:
    """DLedger AppendAndPushTest: what a cut-off leader wrote and nobody holds gives way to its successor's entries."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.isolate(N0)
    cluster.append(N0, b"lost 1", b"lost 2", b"lost 3")
    cluster.advance_until(lambda: cluster.leader() == N1)
    cluster.append(N1, b"kept")

    cluster.heal()
    cluster.advance(3000)

    assert cluster.same_logs()
    assert cluster.bodies(N0) == [b"kept"]


def test_a_disk_full_leader_refuses_appends_and_takes_them_again() -> None:
    """Trap 10: DISK_FULL is a refusal, and it ends without a restart."""
    cluster = Cluster(1)
    cluster.elect()
    cluster[N0].log.disk_full = True
    assert cluster.append(N0, b"a").error.code is ResponseCode.DISK_FULL

    cluster[N0].log.disk_full = False

    assert cluster.append(N0, b"a").value


def test_duplicates_and_disorder_do_no_harm() -> None:
    """Trap 20: every push and every answer arrives twice, and every third batch of them backwards."""
    cluster = Cluster(3, push_bytes_max=100)
    cluster.elect()
    for number in range(60):
        cluster.hold(PushAppend, PushCompare, PushCommit, PushResponse)
        cluster.append(N0, b"%d" % number)
        cluster.holds.clear()
        held, cluster.held = cluster.held, []
        for sent in [*held, *(held if number % 3 else held[::-1])]:
            cluster.deliver(sent)
        cluster.advance(30)
    cluster.advance(3000)

    assert cluster.same_logs()
    assert len(cluster.bodies(N2)) == 60


def test_a_full_handler_queue_refuses_and_replication_goes_on() -> None:
    """Flow control: a queue that is full answers so, and the dispatcher compares again later."""
    solo = Solo(handler_queue_pushes_max=16, inflight_pushes_max=16)
    source = Source(1, 1)
    for _ in range(16):
        solo.node.receive(N1, source.compare(-1), 0)
    solo.take()

    solo.node.receive(N1, source.compare(-1), 0)

    (answer,) = solo.sent(PushResponse)
    assert isinstance(answer, PushResponse)
    assert (answer.code, answer.kind) == (ResponseCode.PUSH_REQUEST_IS_FULL, PushKind.COMPARE)


def test_more_than_1000_pending_entries_are_replicated_to_a_late_follower() -> None:
    """§4.2 of the DLedger notes: a follower that was down while 1000 entries came was never fed again."""
    cluster = Cluster(3, push_bytes_max=200)
    cluster.elect()
    cluster.crash(N2)
    for number in range(12):
        assert cluster.append(N0, *[b"%d" % number] * 100).value
    cluster.start(N2)

    cluster.advance(3000)

    assert cluster.same_logs()


def test_an_old_term_entry_is_committed_by_the_no_op_alone() -> None:
    """DLedger CommitIndexTest, trap 17: no client write is needed after an election."""
    cluster = Cluster(3, logs={one: made_log(1, 1) for one in (N0, N1, N2)})

    cluster.elect()

    assert [cluster.commit(one) for one in cluster.ids] == [2, 2, 2]
    assert cluster.terms(N2) == [1, 1, 2]


def test_a_second_leader_of_one_term_is_refused() -> None:
    """Election safety: a second leader of the term is a bug or damage elsewhere; nobody follows it or stops for it."""
    solo = Solo(hard_state=HardState(Term(2), standing=Standing.FULL))
    solo.hear(N1, 2)

    heard = solo.hear(N2, 2, read_sequence=3)
    (pushed,) = solo.push(N2, Source(2).compare(-1))

    assert (heard.term, heard.read_sequence) == (2, 0)
    assert (pushed.code, pushed.term, pushed.verified_index) == (ResponseCode.EXPIRED_TERM, 2, -1)
    assert solo.state.leader_id == N1


def test_a_leader_does_not_follow_another_one_of_its_term() -> None:
    """The same, at the leader itself: it goes on to lead."""
    solo = Solo()
    solo.lead()

    solo.hear(N2, solo.state.term)

    assert solo.role is Role.LEADER


def test_positions_and_indexes_of_batches_are_contiguous() -> None:
    """DLedger AppendAndGetTest and BatchPushTest: contiguous indexes, positions of 48 + n bytes each."""
    cluster = Cluster(3)
    cluster.elect()

    first = cluster.append(N0, b"12345", b"1").value
    second = cluster.append(N0, b"").value

    assert (first.first_index, first.last_index) == (1, 2)
    assert first.positions == (48, 48 + 53)
    assert second.positions == (48 + 53 + 49,)
    assert cluster[N2].log.read(LogIndex(2)).position == first.positions[1]


def test_messages_from_late_processes_reach_nobody_in_error() -> None:
    """A message to a member that is down is lost, not kept for its next life."""
    cluster = Cluster(3)
    cluster.elect()
    cluster.crash(N1)

    cluster.deliver(Sent(N0, N1, PushCommit(Term(1), 1, LogIndex(0))))

    assert cluster.role(N0) is Role.LEADER
    assert not cluster[NodeId("n1")].up


def _truncate(source: Source, index: int) -> PushTruncate:
    at = LogIndex(index)
    return PushTruncate(source.term, source.epoch, EntryId(source.log.term_at(at), at), source.log.chain_crc_at(at))
