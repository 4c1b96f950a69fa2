"""One follower as its leader sees it: attempts, window, deadlines, watermarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.core.dispatcher import DispatcherState
from dledger.core.messages import LoadRun, PushCommit, PushCompare, PushInstall, PushKind, PushTruncate, Wake
from dledger.errors import CorruptLogError, ResponseCode
from dledger.types import EntryId, LogIndex, Role, Standing, Term
from dledger.values import MIB
from tests.support.cluster import N1
from tests.support.solo import Solo, load_runs


def leading(*terms: int, term_entries: int = 0, push_bytes_max: int = MIB, inflight_pushes_max: int = 16) -> Solo:
    """A leader whose log holds ``terms``, its no-op and ``term_entries`` more, all flushed."""
    solo = Solo(terms=terms, push_bytes_max=push_bytes_max, inflight_pushes_max=inflight_pushes_max)
    solo.lead()
    for _ in range(term_entries):
        solo.log.append_as_leader(solo.state.term, [b"x"])
    solo.flush()
    solo.take()
    return solo


def state_of(solo: Solo) -> DispatcherState:
    return solo.node.dispatchers[N1].state


def test_a_follower_dispatches_nothing() -> None:
    """Only a leader pushes; without leadership nothing is due."""
    solo = Solo()

    assert solo.node.dispatchers[N1].step(0) is None
    assert solo.take() == []
    assert state_of(solo) is DispatcherState.IDLE


def test_the_first_push_of_a_term_compares_at_the_end() -> None:
    """COMPARE asks about the leader's last entry and is awaited for the push timeout."""
    solo = leading(1, 2)

    due = solo.node.dispatchers[N1].step(solo.now_ms)

    ((_, message),) = solo.take()
    chain_crc = solo.log.chain_crc_at(LogIndex(2))
    assert message == PushCompare(Term(3), 2, EntryId(Term(3), LogIndex(2)), chain_crc, flushed_only=True)
    assert due == solo.now_ms + solo.config.replication.push_timeout_ms
    assert solo.dispatch(N1, ms=999) == []
    assert isinstance(solo.dispatch(N1, ms=1)[0], PushCompare)


def test_a_leader_whose_own_entry_is_damaged_sends_nothing_that_depends_on_it() -> None:
    """What leaves a member is proven: a turned bit here must not look like the follower's. It waits for repair."""
    solo = leading(1, 2)
    damage = CorruptLogError(Path("data"), 7, "chainCrc of entry 2 does not continue entry 1", "Repair it", 2)
    solo.log.damage[LogIndex(2)] = damage

    assert solo.dispatch(N1) == []
    assert solo.damage == [damage]
    assert solo.dispatch(N1, ms=solo.config.replication.retry_interval_ms - 1) == []
    assert solo.damage == [damage]
    solo.log.damage.clear()

    (message,) = solo.dispatch(N1, ms=1)
    assert isinstance(message, PushCompare)
    assert solo.role is Role.LEADER


def test_damage_where_a_follower_is_known_to_have_been_does_not_stop_the_leader() -> None:
    """What the follower lacks is told by the leader's own log; where that is damaged, nothing is told of it."""
    solo = leading(1, 1)
    solo.state.remembered[N1] = EntryId(Term(1), LogIndex(1))
    damage = CorruptLogError(Path("data"), 7, "chainCrc of entry 1 does not continue entry 0", "Repair it", 1)
    solo.dispatch(N1)
    solo.log.damage[LogIndex(1)] = damage

    solo.respond(N1, PushKind.COMPARE, ResponseCode.INCONSISTENT_STATE, end=0)
    solo.take()
    assert damage in solo.damage
    assert not solo.leader_role.doubted
    solo.log.damage.clear()
    solo.dispatch(N1)
    solo.respond(N1, PushKind.COMPARE, verified=0)

    assert solo.leader_role.doubted == {N1: 7}


def test_a_matching_follower_goes_straight_to_append() -> None:
    """Nothing is truncated where nothing conflicts, and the answer's watermark counts at once."""
    solo = leading(1)

    solo.streaming(N1)

    assert state_of(solo) is DispatcherState.APPEND
    assert solo.leader_role.match[N1] == 1
    assert solo.dispatch(N1) == []


def test_a_longer_follower_is_truncated_at_the_first_entry_after_the_match() -> None:
    """TRUNCATE names the leader's entry there; the follower decides whether its own conflicts."""
    solo = leading(1)
    solo.dispatch(N1)
    solo.respond(N1, PushKind.COMPARE, ResponseCode.INCONSISTENT_STATE, end=5, conflict=EntryId(Term(1), LogIndex(1)))
    solo.dispatch(N1)

    solo.respond(N1, PushKind.COMPARE, verified=0, end=5)
    ((_, message),) = solo.take()

    assert state_of(solo) is DispatcherState.TRUNCATE
    assert message == PushTruncate(
        Term(2), solo.epochs[N1], EntryId(Term(2), LogIndex(1)), solo.log.chain_crc_at(LogIndex(1))
    )
    solo.respond(N1, PushKind.TRUNCATE, verified=0, end=0)
    assert state_of(solo) is DispatcherState.APPEND
    assert load_runs(solo.dispatch(N1)) == [(1, 1)]


def test_an_unanswered_truncate_is_given_up() -> None:
    """It shares the deadline of the COMPARE before it; then everything starts anew."""
    solo = leading(1)
    solo.streaming(N1, match=0)
    solo.dispatch(N1)
    solo.respond(N1, PushKind.APPEND, ResponseCode.INCONSISTENT_STATE, verified=0, end=0)
    solo.dispatch(N1)
    solo.respond(N1, PushKind.COMPARE, verified=0, end=5)
    assert state_of(solo) is DispatcherState.TRUNCATE
    solo.take()

    assert solo.dispatch(N1, ms=999) == []
    assert isinstance(solo.dispatch(N1, ms=1)[0], PushCompare)


def test_a_refused_truncate_compares_at_the_followers_end() -> None:
    """The follower's log has moved meanwhile."""
    solo = leading(1, term_entries=3)
    solo.streaming(N1, match=0)
    solo.dispatch(N1)
    solo.respond(N1, PushKind.APPEND, ResponseCode.INCONSISTENT_STATE, verified=0, end=0)
    solo.dispatch(N1)
    solo.respond(N1, PushKind.COMPARE, verified=0, end=2)
    solo.take()

    solo.respond(N1, PushKind.TRUNCATE, ResponseCode.INCONSISTENT_STATE, verified=0, end=2)

    (message,) = solo.dispatch(N1)
    assert isinstance(message, PushCompare)
    assert message.previous.index == 2


def test_the_window_is_bounded() -> None:
    """No more than the configured pushes are on their way; each answer makes room."""
    solo = leading(term_entries=10, push_bytes_max=1, inflight_pushes_max=3)
    solo.streaming(N1, match=0)

    assert load_runs(solo.dispatch(N1)) == [(1, 1), (2, 2), (3, 3)]
    assert solo.node.dispatchers[N1].in_flight == 3
    assert solo.dispatch(N1) == []
    solo.respond(N1, PushKind.APPEND, verified=2)

    assert load_runs(solo.dispatch(N1)) == [(4, 4), (5, 5)]


def test_runs_are_cut_by_bytes() -> None:
    """A push carries as many entries as fit, and at least one."""
    solo = leading(term_entries=5, push_bytes_max=2 * 49)
    solo.streaming(N1, match=0)

    assert load_runs(solo.dispatch(N1)) == [(1, 2), (3, 4), (5, 5)]


def test_an_overdue_append_compares_again_behind_it() -> None:
    """Trap 32: a lost push or answer costs one timeout and never stops replication."""
    solo = leading(term_entries=1)
    solo.streaming(N1, match=0)
    solo.dispatch(N1)

    assert solo.dispatch(N1, ms=999) == []
    (message,) = solo.dispatch(N1, ms=1)

    assert isinstance(message, PushCompare)
    assert message.previous.index == 1
    assert solo.node.dispatchers[N1].in_flight == 0


def test_answers_to_earlier_attempts_move_no_state_but_the_watermark() -> None:
    """ABA: what was durable stays durable, but the attempt it answered is over."""
    solo = leading(term_entries=2)
    solo.streaming(N1, match=0)
    solo.dispatch(N1)
    old = solo.epochs[N1]
    solo.dispatch(N1, ms=1000)
    assert state_of(solo) is DispatcherState.COMPARE

    solo.respond(N1, PushKind.APPEND, verified=1, epoch=old)

    assert state_of(solo) is DispatcherState.COMPARE
    assert solo.leader_role.match[N1] == 1


def test_late_success_answers_of_another_kind_change_nothing() -> None:
    """Only the awaited kind of answer ends a state."""
    solo = leading()
    solo.dispatch(N1)

    for kind in (PushKind.APPEND, PushKind.TRUNCATE, PushKind.INSTALL, PushKind.COMMIT):
        solo.respond(N1, kind)

    assert state_of(solo) is DispatcherState.COMPARE


def test_answers_outside_the_term_are_ignored() -> None:
    """Neither an answer of an older term nor one before the first step of a new leadership counts."""
    solo = leading()
    solo.respond(N1, PushKind.APPEND, verified=0, epoch=9)
    assert solo.leader_role.match[N1] == -1
    solo.dispatch(N1)
    solo.respond(N1, PushKind.APPEND, verified=0, term=0)

    assert solo.leader_role.match[N1] == -1


def test_a_later_term_ends_the_leadership() -> None:
    """§5.1 for answers to pushes."""
    solo = leading()
    solo.dispatch(N1)

    solo.respond(N1, PushKind.APPEND, ResponseCode.EXPIRED_TERM, term=5)

    assert solo.role is Role.FOLLOWER
    assert solo.node.dispatchers[N1].step(0) is None
    assert state_of(solo) is DispatcherState.IDLE


def test_a_watermark_wakes_quorum_ack_and_during_a_transfer_the_elector() -> None:
    """Whoever reacts to a watermark is woken when it rises, not when it repeats."""
    solo = leading(term_entries=1)
    solo.streaming(N1, match=0)
    solo.dispatch(N1)
    solo.leader_role.transferring = True

    solo.respond(N1, PushKind.APPEND, verified=1)
    solo.take()
    assert solo.woken & (Wake.QUORUM_ACK | Wake.ELECTOR) == Wake.QUORUM_ACK | Wake.ELECTOR
    solo.respond(N1, PushKind.APPEND, verified=1)
    solo.take()

    assert not solo.woken & (Wake.QUORUM_ACK | Wake.ELECTOR)


def test_a_watermark_beyond_the_leaders_log_is_ignored() -> None:
    """A follower with another history (async flush, power cut) must not stop its leader; it is asked again later."""
    solo = leading()
    solo.dispatch(N1)

    solo.respond(N1, PushKind.COMPARE, verified=99)

    assert solo.leader_role.match[N1] == -1
    assert state_of(solo) is DispatcherState.COMPARE
    assert solo.dispatch(N1, ms=99) == []
    (again,) = solo.dispatch(N1, ms=1)
    assert isinstance(again, PushCompare)
    assert again.previous == solo.log.last


def test_a_late_watermark_beyond_the_leaders_log_does_not_start_over() -> None:
    """An answer to an earlier attempt moves no state, whatever it claims."""
    solo = leading()
    solo.dispatch(N1)

    solo.respond(N1, PushKind.COMPARE, verified=99, epoch=0)

    assert solo.leader_role.match[N1] == -1
    assert solo.dispatch(N1, ms=100) == []


def test_a_restarted_follower_loses_its_watermark() -> None:
    """Another boot id: what the earlier process had in its memory only is gone."""
    solo = leading()
    solo.streaming(N1)
    assert solo.leader_role.match[N1] == 0

    solo.respond(N1, PushKind.APPEND, verified=-1, boot_id=8)

    assert solo.leader_role.match[N1] == -1
    assert isinstance(solo.dispatch(N1)[0], PushCompare)


def test_a_follower_that_holds_less_than_it_said_counts_for_nothing_until_it_knows() -> None:
    """It still calls itself sound, in heartbeats too; what it acknowledges meanwhile commits nothing."""
    solo = leading(1, 1)
    solo.streaming(N1)
    solo.settle_quorum()
    solo.respond(N1, PushKind.APPEND, verified=0, boot_id=8)  # its disk was set back
    solo.log.append_as_leader(solo.state.term, [b"x"])
    solo.flush()

    for _ in range(2):
        solo.dispatch(N1)
        solo.respond(N1, PushKind.COMPARE, verified=3, boot_id=8)
        solo.beat(N1, boot_id=8)
        solo.settle_quorum()
        assert not solo.leader_role.counts[N1]
        assert solo.state.commit_index == 2

    solo.respond(N1, PushKind.APPEND, verified=3, boot_id=9, standing=Standing.DOUBTFUL)  # it has heard of it
    solo.dispatch(N1)
    solo.respond(N1, PushKind.COMPARE, verified=3, boot_id=9)
    solo.settle_quorum()
    assert solo.state.commit_index == 3


@pytest.mark.parametrize(
    ("own", "conflict", "end", "asked"),
    [
        # the follower's log is shorter: ask about its end
        ((1, 1, 1), None, 0, 0),
        # the leader has the follower's term: ask about the leader's last entry of it
        ((1, 1, 2, 2, 4), EntryId(Term(2), LogIndex(2)), 5, 3),
        # the leader lacks the follower's term: ask before its first entry
        ((1, 1, 3, 3), EntryId(Term(2), LogIndex(1)), 4, 0),
        # the follower's term is later than the leader's there: ask before its first entry
        ((1, 1, 1), EntryId(Term(9), LogIndex(2)), 3, 1),
        # nothing agrees: ask about the start
        ((3,), EntryId(Term(2), LogIndex(0)), 3, -1),
    ],
)
def test_a_refused_compare_skips_a_whole_term(
    own: tuple[int, ...], conflict: EntryId | None, end: int, asked: int
) -> None:
    """§5.3: one question per conflicting term instead of one per entry."""
    solo = leading(*own)
    solo.dispatch(N1)

    refusal = ResponseCode.INCONSISTENT_STATE
    if conflict is None:
        solo.respond(N1, PushKind.COMPARE, refusal, end=end)
    else:
        solo.respond(N1, PushKind.COMPARE, refusal, end=end, conflict=conflict)

    (message,) = solo.dispatch(N1)
    assert isinstance(message, PushCompare)
    assert message.previous.index == asked


def test_a_follower_below_the_leaders_begin_is_installed() -> None:
    """The dispatcher sends the begin, waits for the answer, and compares there."""
    solo = leading(1, 1, 1)
    solo.log.expire(LogIndex(1))
    solo.dispatch(N1)
    solo.respond(N1, PushKind.COMPARE, ResponseCode.INCONSISTENT_STATE, end=-1)

    (message,) = solo.dispatch(N1)
    assert isinstance(message, PushInstall)
    assert message.before_begin == EntryId(Term(1), LogIndex(1))
    assert state_of(solo) is DispatcherState.INSTALL
    assert isinstance(solo.dispatch(N1, ms=1000)[0], PushInstall)
    solo.respond(N1, PushKind.INSTALL, verified=1)

    (message,) = solo.dispatch(N1)
    assert isinstance(message, PushCompare)
    assert message.previous.index == 1


def test_a_refusing_follower_is_retried_after_a_pause() -> None:
    """DISK_FULL and a full queue cost one push per retry interval."""
    solo = leading(term_entries=1)
    solo.streaming(N1, match=0)
    solo.dispatch(N1)
    solo.respond(N1, PushKind.APPEND, ResponseCode.DISK_FULL, verified=0)

    assert solo.dispatch(N1, ms=99) == []
    (message,) = solo.dispatch(N1, ms=1)

    assert isinstance(message, PushCompare)
    assert message.previous.index == 0


def test_an_expired_follower_is_compared_at_its_begin_after_a_pause() -> None:
    """INDEX_LESS_THAN_LOCAL_BEGIN tells where the follower's log begins."""
    solo = leading(1, 1, 1)
    solo.dispatch(N1)
    refusal = ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN
    solo.respond(N1, PushKind.COMPARE, refusal, end=2, conflict=EntryId(Term(1), LogIndex(1)))

    (message,) = solo.dispatch(N1, ms=100)

    assert isinstance(message, PushCompare)
    assert message.previous.index == 1


def test_an_append_carries_the_commit_index_so_that_none_is_sent_alone() -> None:
    """COMMIT is for an idle follower only, after the delay that gives an append its chance."""
    solo = leading(term_entries=1)
    solo.streaming(N1, match=0)
    solo.dispatch(N1)
    solo.respond(N1, PushKind.APPEND, verified=1)
    solo.state.advance_commit(LogIndex(1))
    assert solo.dispatch(N1) == []

    solo.log.append_as_leader(solo.state.term, [b"y"])
    (message,) = solo.dispatch(N1, ms=4)

    assert message == LoadRun(Term(1), solo.epochs[N1], LogIndex(1), LogIndex(2), LogIndex(2))
    solo.respond(N1, PushKind.APPEND, verified=2)
    assert solo.dispatch(N1, ms=100) == []


def test_an_idle_follower_gets_the_commit_index_alone() -> None:
    """The dispatcher tells when it is due, sends it once, and again if it stays unanswered."""
    solo = leading()
    solo.streaming(N1)
    solo.state.advance_commit(LogIndex(0))
    dispatcher = solo.node.dispatchers[N1]
    assert dispatcher.step(solo.now_ms) == solo.now_ms + 5

    (message,) = solo.dispatch(N1, ms=5)
    assert isinstance(message, PushCommit)
    assert solo.dispatch(N1, ms=999) == []
    assert solo.dispatch(N1, ms=1) == []
    (again,) = solo.dispatch(N1, ms=5)
    assert isinstance(again, PushCommit)
    solo.respond(N1, PushKind.COMMIT, verified=0)

    assert solo.dispatch(N1, ms=5000) == []


def test_a_commit_that_moved_while_another_was_on_its_way_goes_out_once_that_is_answered() -> None:
    """An idle follower must not learn of committed entries only when the push timeout has passed."""
    solo = leading(term_entries=1)
    solo.streaming(N1)
    solo.state.advance_commit(LogIndex(0))
    solo.dispatch(N1)
    solo.dispatch(N1, ms=5)
    solo.state.advance_commit(LogIndex(1))
    assert solo.dispatch(N1) == []

    solo.respond(N1, PushKind.COMMIT, verified=1)
    solo.take()

    assert solo.woken & Wake.DISPATCHERS
    solo.dispatch(N1)
    (message,) = solo.dispatch(N1, ms=5)
    assert message == PushCommit(Term(1), solo.epochs[N1], LogIndex(1))


def test_an_answer_wakes_nobody_when_the_commit_index_is_planned_already() -> None:
    """With one append at a time the second follower's answer comes after the commit: there is nothing to send."""
    solo = leading(term_entries=1)
    solo.streaming(N1, match=0)
    solo.dispatch(N1)
    solo.state.advance_commit(LogIndex(1))
    assert solo.node.dispatchers[N1].step(solo.now_ms) == solo.now_ms + 5

    solo.respond(N1, PushKind.APPEND, verified=1)
    solo.take()

    assert not solo.woken & Wake.DISPATCHERS
    (message,) = solo.dispatch(N1, ms=5)
    assert message == PushCommit(Term(1), solo.epochs[N1], LogIndex(1))


def test_a_planned_commit_is_planned_anew_after_a_broken_stream() -> None:
    """What was planned for the broken one must not keep the new one from telling the commit index."""
    solo = leading(term_entries=1)
    solo.streaming(N1)
    solo.state.advance_commit(LogIndex(1))
    assert solo.node.dispatchers[N1].step(solo.now_ms) == solo.now_ms + 5
    solo.node.connection_lost(N1)
    solo.dispatch(N1)
    solo.dispatch(N1, ms=solo.config.replication.retry_interval_ms)

    solo.respond(N1, PushKind.COMPARE, verified=1)
    solo.take()

    assert state_of(solo) is DispatcherState.APPEND
    assert solo.woken & Wake.DISPATCHERS
    solo.dispatch(N1)
    (message,) = solo.dispatch(N1, ms=5)
    assert message == PushCommit(Term(1), solo.epochs[N1], LogIndex(1))


def test_a_broken_stream_starts_a_new_attempt() -> None:
    """What was in flight may be lost; an idle dispatcher does not care."""
    solo = leading(term_entries=1)
    idle = Solo()
    idle.node.connection_lost(N1)
    assert state_of(idle) is DispatcherState.IDLE
    solo.streaming(N1, match=0)
    solo.dispatch(N1)

    solo.node.connection_lost(N1)
    solo.take()

    assert solo.woken & Wake.DISPATCHERS
    assert solo.node.dispatchers[N1].in_flight == 0
    assert solo.dispatch(N1) == []
    assert isinstance(solo.dispatch(N1, ms=100)[0], PushCompare)


def test_entries_that_expire_while_a_compare_is_under_way_lead_to_an_install() -> None:
    """The leader no longer has the entry after the match, so it can neither truncate there nor append from there."""
    solo = leading(1, 1, 1)
    solo.dispatch(N1)
    solo.respond(N1, PushKind.COMPARE, ResponseCode.INCONSISTENT_STATE, end=0)
    solo.dispatch(N1)
    solo.log.expire(LogIndex(2))

    solo.respond(N1, PushKind.COMPARE, verified=0, end=9)

    (message,) = solo.dispatch(N1)
    assert isinstance(message, PushInstall)
    assert message.before_begin.index == 2


def test_a_late_refusal_of_an_earlier_term_does_not_start_over() -> None:
    """EXPIRED_TERM answers a push of an earlier leadership, even if its epoch is the present attempt's."""
    solo = leading()
    solo.dispatch(N1)

    solo.respond(N1, PushKind.COMPARE, ResponseCode.EXPIRED_TERM)

    assert solo.dispatch(N1, ms=500) == []
    assert state_of(solo) is DispatcherState.COMPARE


def test_a_follower_of_another_history_counts_for_nothing() -> None:
    """Its commit index is no prefix of this log: until the logs were found equal it is not believed, nor afterwards."""
    solo = Solo()
    solo.lead()
    solo.flush()
    for code, kind in (
        (ResponseCode.INCONSISTENT_STATE, PushKind.COMPARE),
        (ResponseCode.OTHER_HISTORY, PushKind.COMPARE),
        (ResponseCode.SUCCESS, PushKind.INSTALL),
    ):
        solo.dispatch(N1)
        solo.respond(N1, kind, code, verified=0)
        solo.settle_quorum()
        assert solo.leader_role.match[N1] == -1
        assert solo.state.commit_index == -1

    solo.respond(N1, PushKind.COMPARE, verified=0)
    agreed = solo.leader_role.match[N1]
    solo.respond(N1, PushKind.APPEND, ResponseCode.OTHER_HISTORY, verified=0)

    assert (agreed, solo.leader_role.match[N1]) == (0, -1)
