"""The follower's side: what is executed, what is answered, and when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dledger.config import FlushMode
from dledger.core.messages import (
    CheckedAppend,
    PushAppend,
    PushCommit,
    PushInstall,
    PushKind,
    PushResponse,
    PushTruncate,
    Readmission,
    ReceivedPush,
    Wake,
)
from dledger.errors import CorruptLogError, ResponseCode
from dledger.types import (
    GENESIS,
    ClusterMember,
    Configuration,
    EntryId,
    HardState,
    LogIndex,
    NodeId,
    Position,
    Standing,
    Term,
)
from tests.support.cluster import N1, N2
from tests.support.solo import Solo, Source


def truncate(source: Source, index: int) -> PushTruncate:
    at = LogIndex(index)
    return PushTruncate(source.term, source.epoch, EntryId(source.log.term_at(at), at), source.log.chain_crc_at(at))


def checked(source: Source, push: PushAppend) -> CheckedAppend:
    return CheckedAppend(push.term, push.epoch, push.commit_index, source.log.check_run(push.run))


def test_an_arrival_wakes_the_handler_and_waits_for_its_step() -> None:
    """Pushes are judged when they are executed, one per step, in order."""
    solo = Solo()
    source = Source(1, 1, 1)
    solo.push(N1, source.compare(-1))
    solo.node.receive(N1, source.compare(-1), 0)
    solo.node.receive(N1, checked(source, source.append(0, 0)), 0)
    solo.take()
    assert solo.woken & Wake.HANDLER
    assert solo.log.last.index == -1

    assert solo.node.handler.step(3) == 3
    assert solo.node.handler.step(4) is None
    assert solo.node.handler.step(5) is None

    assert solo.log.last.index == 0


def test_an_append_is_answered_when_it_is_flushed() -> None:
    """Trap 4: the answer leaves with the flush, and the flush is asked for."""
    solo = Solo()
    source = Source(1, 1)
    solo.push(N1, source.compare(-1))

    assert solo.push(N1, source.append(0), flush=False) == []
    assert solo.woken & Wake.FLUSH
    solo.flush()

    (answer,) = (message for _, message in solo.take())
    assert (answer.kind, answer.flushed_index) == (PushKind.APPEND, 0)  # type: ignore[union-attr]  # a PushResponse


def test_an_answer_vouches_for_nothing_that_was_not_compared() -> None:
    """It may be of an older leader, and the present one has others at these places: durable is not replicated."""
    solo = Solo(terms=(1, 1, 1, 1))
    solo.flush()
    source = Source(2, 1, 1, 2)

    (answer,) = solo.push(N1, source.compare(1))

    assert (answer.code, answer.verified_index, answer.flushed_index) == (ResponseCode.SUCCESS, 1, 1)


def test_one_answer_covers_all_appends_of_a_flush() -> None:
    """Acknowledgements are as few as flushes."""
    solo = Solo()
    source = Source(1, 1, 1, 1)
    solo.push(N1, source.compare(-1))
    for index in range(3):
        assert solo.push(N1, source.append(index, index), flush=False) == []

    solo.flush()

    assert len(solo.take()) == 1
    solo.flush()
    assert solo.take() == []


def test_a_flush_behind_the_newest_append_acknowledges_what_it_covers() -> None:
    """Progress is told at once, the rest with the next flush."""
    solo = Solo()
    source = Source(1, 1, 1)
    solo.push(N1, source.compare(-1))
    solo.push(N1, source.append(0, 0), flush=False)
    solo.log.flush()
    solo.push(N1, source.append(1, 1), flush=False)
    solo.node.flushed()
    assert solo.take() == []  # it was told when the second append was executed

    solo.flush()

    assert len(solo.take()) == 1


def test_asynchronous_flush_answers_at_once() -> None:
    """``flush=async`` acknowledges what is written."""
    solo = Solo(flush_mode=FlushMode.ASYNC)
    source = Source(1, 1)
    solo.push(N1, source.compare(-1))

    (answer,) = solo.push(N1, source.append(0), flush=False)

    assert (answer.code, answer.flushed_index) == (ResponseCode.SUCCESS, 0)


def test_a_leader_that_counts_only_what_is_flushed_gets_nothing_else() -> None:
    """Whatever the follower's own mode: the promise is the leader's. Its answer comes when the disk has caught up."""
    solo = Solo(flush_mode=FlushMode.ASYNC)
    source = Source(1, 1)
    solo.push(N1, replace(source.compare(-1), flushed_only=True))

    before = solo.push(N1, source.append(0), flush=False)
    solo.flush()
    after = [message for message in solo.take() if isinstance(message[1], PushResponse)]

    assert all(answer.flushed_index == -1 for answer in before)
    assert [answer.flushed_index for _, answer in after if isinstance(answer, PushResponse)] == [0]


def test_what_an_earlier_leader_counted_says_nothing_of_the_next() -> None:
    """The one took the page cache for good enough; the other may have promised more."""
    solo, source = Solo(flush_mode=FlushMode.ASYNC), Source(1, 1)
    solo.push(N1, replace(source.compare(-1), flushed_only=False))
    (late,) = solo.push(N1, source.append(0, commit=0), flush=False)

    (answer,) = solo.push(N2, PushCommit(Term(2), 1, LogIndex(0)), flush=False)

    assert (late.flushed_index, answer.flushed_index) == (0, -1)


def test_a_leader_that_has_not_said_what_it_counts_gets_what_is_flushed() -> None:
    """Before its first comparison of a term nothing of the page cache is told; an earlier version goes by ours."""
    solo = Solo(terms=(1, 1), flush_mode=FlushMode.ASYNC, committed=1)
    solo.log.append_as_leader(Term(1), [b"in the page cache"])
    solo.state.advance_commit(LogIndex(2))
    source = Source(2, 1, 1)

    (early,) = solo.push(N1, source.append(1), flush=False)
    (late,) = solo.push(N1, source.compare(1), flush=False)

    assert (early.verified_index, early.flushed_index) == (2, 1)
    assert late.flushed_index == 2


@pytest.mark.parametrize("mode", list(FlushMode))
def test_a_truncation_is_answered_when_it_is_durable(mode: FlushMode) -> None:
    """Trap 7: in either flush mode, since a truncation that comes undone would revive entries."""
    solo = Solo(terms=(1, 2, 2), flush_mode=mode)
    source = Source(3, 1, 3)
    solo.push(N1, source.compare(0))

    assert solo.push(N1, truncate(source, 1), flush=False) == []
    solo.flush()

    ((_, answer),) = solo.take()
    assert getattr(answer, "kind", None) is PushKind.TRUNCATE
    assert solo.log.last.index == 0


@pytest.mark.parametrize("own", [(1,), (1, 1)])
def test_a_truncate_of_nothing_is_answered_at_once(own: tuple[int, ...]) -> None:
    """An entry that agrees, or is not there, needs no change."""
    solo = Solo(terms=own)
    source = Source(2, 1, 1, 2)
    solo.push(N1, source.compare(0))

    (answer,) = solo.push(N1, truncate(source, 1), flush=False)

    assert answer.code is ResponseCode.SUCCESS
    assert solo.log.last.index == len(own) - 1


def test_a_truncate_beyond_what_is_verified_is_refused() -> None:
    """Only a proven conflict right after the proven match is cut."""
    solo = Solo(terms=(1, 2, 2))
    source = Source(3, 1, 3, 3)
    solo.push(N1, source.compare(0))

    (answer,) = solo.push(N1, truncate(source, 2))

    assert answer.code is ResponseCode.INCONSISTENT_STATE
    assert solo.log.last.index == 2


def test_an_append_that_leaves_a_gap_is_refused() -> None:
    """The log has no holes; the answer tells where it ends."""
    solo = Solo(terms=(1,))
    source = Source(2, 1, 1, 1, 2)

    (answer,) = solo.push(N1, source.append(2))

    assert (answer.code, answer.end_index) == (ResponseCode.INCONSISTENT_STATE, 0)


def test_an_append_after_another_entry_is_refused() -> None:
    """The entry before the run must agree in its term."""
    solo = Solo(terms=(1, 2))
    source = Source(4, 1, 3, 4)

    (answer,) = solo.push(N1, source.append(2))

    assert answer.code is ResponseCode.INCONSISTENT_STATE


def test_an_append_over_conflicting_entries_is_refused_not_applied() -> None:
    """Cutting is TRUNCATE's business."""
    solo = Solo(terms=(1, 2))
    source = Source(4, 1, 3, 4)

    (answer,) = solo.push(N1, source.append(1))

    assert answer.code is ResponseCode.INCONSISTENT_STATE
    assert solo.log.last == EntryId(Term(2), LogIndex(1))


def test_a_run_that_overlaps_the_log_adds_only_its_rest() -> None:
    """Trap 20: what is there already stays untouched."""
    solo = Solo(terms=(1, 1))
    source = Source(2, 1, 1, 2, 2)
    before = solo.log.record_bytes(LogIndex(1))

    *_, answer = solo.push(N1, source.append(0))

    assert (answer.verified_index, answer.flushed_index) == (3, 3)
    assert solo.log.record_bytes(LogIndex(1)) == before
    assert solo.log.last_chain_crc == source.log.last_chain_crc


def test_a_run_newer_than_its_leader_is_refused() -> None:
    """No entry can be of a later term than the leader that sends it."""
    solo = Solo()

    (answer,) = solo.push(N1, PushAppend(Term(1), 1, LogIndex(-1), Source(2, 2).append(0).run))

    assert answer.code is ResponseCode.INCONSISTENT_STATE


def test_a_run_at_a_wrong_position_is_refused() -> None:
    """Its CRCs may be right all the same: what a leader sends must not stop a follower as if its disk had failed."""
    solo = Solo()
    source = Source(1)
    source.log.reset(replace(GENESIS, position=Position(96)))
    source.log.append_as_leader(Term(1), [b"x"])

    (answer,) = solo.push(N1, source.append(0))

    assert (answer.code, answer.verified_index, answer.end_index) == (ResponseCode.INCONSISTENT_STATE, -1, -1)


@pytest.mark.parametrize(("term", "index", "position"), [(3, 5, 480), (-1, 5, 480), (1, -1, 0), (1, 5, -1)])
def test_an_install_that_no_leader_can_mean_is_refused(term: int, index: int, position: int) -> None:
    """An empty log after an entry of a later term would never vote for, nor follow, this leader again."""
    solo = Solo(terms=(1,))
    install = PushInstall(Term(2), 1, EntryId(Term(term), LogIndex(index)), 0, Position(position))

    (answer,) = solo.push(N1, install)

    assert (answer.kind, answer.code) == (PushKind.INSTALL, ResponseCode.INCONSISTENT_STATE)
    assert solo.log.last.index == 0


def test_a_push_that_contradicts_a_sound_record_is_refused_and_changes_nothing() -> None:
    """Trap 36: equal index and term with another chain CRC. This record is proven, so the fault is the other's."""
    solo = Solo(terms=(1, 2))
    other = Source(2, 2)
    other.log.append_as_leader(Term(2), [b"another history"])

    answers = [*solo.push(N1, other.compare(1)), *solo.push(N1, other.append(0))]

    assert [answer.code for answer in answers] == [ResponseCode.OTHER_HISTORY] * 2
    assert solo.log.last == EntryId(Term(2), LogIndex(1))


def test_the_members_of_another_history_are_not_taken_over() -> None:
    """M10: two groups may have one name; whoever shows that its log is another one has no word here."""
    solo = Solo(terms=(1, 2))
    other = Source(2, 2)
    other.log.append_as_leader(Term(2), [b"another history"])
    theirs = Configuration((ClusterMember(NodeId("x"), "h", 1),), LogIndex(1 << 40), Term(2))
    before = solo.node.state.membership.current

    solo.push(N1, replace(other.compare(1), configuration=theirs))

    assert solo.node.state.membership.current == before


@pytest.mark.parametrize("kind", [PushKind.COMPARE, PushKind.TRUNCATE, PushKind.APPEND])
def test_damage_of_the_own_record_is_told_and_no_push_is_judged_by_it(kind: PushKind) -> None:
    """Whoever meets a difference proves its own record first: if that is damaged, neither side's log is at stake."""
    solo = Solo(terms=(1, 1, 2))
    source = Source(2, 1, 1, 2)
    push: ReceivedPush
    match kind:
        case PushKind.COMPARE:
            push = source.compare(1)
        case PushKind.TRUNCATE:
            solo.push(N1, source.compare(0))
            push = PushTruncate(Term(2), source.epoch, EntryId(Term(2), LogIndex(1)), 0)
        case _:
            push = checked(source, source.append(1, 1))
    damage = CorruptLogError(Path("data"), 7, "chainCrc of entry 1 does not continue entry 0", "Repair it", 1)
    solo.log.damage[LogIndex(1)] = damage

    (answer,) = solo.push(N1, push)

    assert (answer.kind, answer.code) == (kind, ResponseCode.DISK_ERROR)
    assert solo.damage == [damage]
    assert solo.log.last.index == 2


def test_a_full_disk_is_answered() -> None:
    """Trap 10: DISK_FULL with the watermarks, so that the leader goes on from there; not before a file is needed."""
    solo = Solo(terms=(1,))
    source = Source(1, 1)
    for _ in range(2):
        source.log.append_as_leader(Term(1), [bytes(600_000)])
    solo.push(N1, source.compare(0))
    solo.log.disk_full = True

    stored = solo.push(N1, source.append(1, 1))
    (refused,) = solo.push(N1, source.append(2, 2))

    assert {answer.code for answer in stored} == {ResponseCode.SUCCESS}
    assert (refused.code, refused.verified_index) == (ResponseCode.DISK_FULL, 1)


def test_an_earlier_attempt_is_ignored() -> None:
    """The leader itself has given it up."""
    solo = Solo()
    source = Source(1, 1)
    first = source.compare(-1)
    solo.push(N1, source.compare(-1))

    assert solo.push(N1, first) == []


def test_a_new_session_forgets_the_old_ones_answers() -> None:
    """Deferred answers and watermarks belong to one leader and term."""
    solo = Solo(terms=(1, 2, 2))
    source = Source(3, 1, 3)
    solo.push(N1, source.compare(0))
    solo.push(N1, truncate(source, 1), flush=False)
    successor = Source(4, 1)

    answers = solo.push(N2, successor.compare(-1))

    assert [(one.kind, one.verified_index) for one in answers] == [(PushKind.COMPARE, -1)]


def test_answers_wait_while_no_leader_is_known() -> None:
    """A member that gave up its leader answers nobody; the next push of that leader resumes."""
    solo = Solo()
    source = Source(1, 1, 1)
    solo.push(N1, source.compare(-1))
    solo.push(N1, source.append(0, 0), flush=False)
    solo.state.become_follower(Term(1), None, 0)
    solo.flush()
    assert solo.take() == []

    first, second = solo.push(N1, source.append(1, 1))

    assert (first.flushed_index, second.flushed_index) == (0, 1)


def test_an_answer_deferred_by_a_truncation_is_dropped_without_a_leader() -> None:
    """The leader's deadline makes it compare again."""
    solo = Solo(terms=(1, 2))
    source = Source(3, 1, 3)
    solo.push(N1, source.compare(0))
    solo.push(N1, truncate(source, 1), flush=False)
    solo.state.become_follower(Term(3), None, 0)

    solo.flush()

    assert solo.take() == []


def test_commit_is_answered_and_bounded_by_what_is_verified() -> None:
    """Trap 18."""
    solo = Solo(terms=(1, 1))
    source = Source(2, 1, 1)
    solo.push(N1, source.compare(0))

    (answer,) = solo.push(N1, PushCommit(Term(2), source.epoch, LogIndex(1)))

    assert (answer.kind, answer.code) == (PushKind.COMMIT, ResponseCode.SUCCESS)
    assert solo.state.commit_index == 0


@pytest.mark.parametrize("kind", list(PushKind))
def test_a_full_queue_refuses_every_kind(kind: PushKind) -> None:
    """The refusal repeats kind and epoch, without watermarks."""
    solo = Solo(handler_queue_pushes_max=1, inflight_pushes_max=1)
    source = Source(1, 1)
    solo.node.receive(N1, source.compare(-1), 0)
    pushes: dict[PushKind, ReceivedPush] = {
        PushKind.COMPARE: source.compare(-1),
        PushKind.TRUNCATE: truncate(source, 0),
        PushKind.APPEND: checked(source, source.append(0)),
        PushKind.COMMIT: PushCommit(Term(1), source.epoch, LogIndex(0)),
        PushKind.INSTALL: PushInstall(Term(1), source.epoch, EntryId(Term(1), LogIndex(0)), 0, Position(0)),
    }
    solo.take()

    solo.node.receive(N1, pushes[kind], 0)

    ((_, answer),) = solo.take()
    assert getattr(answer, "kind", None) is kind
    assert getattr(answer, "code", None) is ResponseCode.PUSH_REQUEST_IS_FULL
    assert getattr(answer, "verified_index", None) == -1


def test_standing_is_taken_only_in_the_session_of_the_leader_that_gave_it() -> None:
    """What is flushed while no leader is known, or verified by another one, proves nothing."""
    solo = Solo(hard_state=HardState())
    source = Source(1, 1)
    solo.push(N1, source.compare(-1))
    solo.push(N1, source.append(0, commit=0), flush=False)
    solo.hear(N1, 1, readmission=Readmission(solo.state.boot_id, LogIndex(0)))
    solo.state.become_follower(Term(1), None, 0)
    solo.flush()
    assert not solo.state.has_standing

    solo.push(N1, PushCommit(Term(1), source.epoch, LogIndex(0)))

    assert solo.state.has_standing


def test_standing_is_not_taken_for_entries_of_another_history() -> None:
    """Entries of an earlier life that reach as far as the leader asks, durable ones, too, are not what it asked for."""
    doubtful = HardState(Term(1), standing=Standing.DOUBTFUL, doubt="its disk was set back")
    solo, source = Solo(terms=(1, 1, 1), hard_state=doubtful), Source(2, 1, 2, 2)
    solo.push(N1, source.compare(0))
    solo.hear(N1, 2, readmission=Readmission(solo.state.boot_id, LogIndex(2)))

    solo.flush()
    with_its_own = solo.state.has_standing
    solo.push(N1, truncate(source, 1))
    solo.push(N1, source.append(1))

    assert (with_its_own, solo.state.has_standing) == (False, True)


def test_an_earlier_flush_lets_no_answer_go() -> None:
    """What was flushed before a truncation says nothing of it: after a crash the entries could be back."""
    solo, source = Solo(terms=(1, 1)), Source(2, 1, 2)
    solo.push(N1, source.compare(0))
    assert solo.push(N1, truncate(source, 1), flush=False) == []

    solo.node.flushed()
    early = solo.sent(PushResponse)
    solo.flush()

    assert early == []
    assert len(solo.sent(PushResponse)) == 1


def test_standing_is_taken_in_no_later_term() -> None:
    """A later leader may hold another entry at the index that the earlier one asked for: only its own word counts."""
    solo, source = Solo(hard_state=HardState()), Source(2, 2)
    solo.hear(N1, 1, readmission=Readmission(solo.state.boot_id, LogIndex(0)))

    solo.push(N2, source.compare(-1))
    solo.push(N2, source.append(0, commit=0))

    assert solo.log.flushed.index == 0
    assert not solo.state.has_standing


def test_standing_is_not_taken_after_a_campaign_of_its_own() -> None:
    """The leader that gave the word is of the term before."""
    solo, source = Solo(hard_state=HardState()), Source(2, 2)
    solo.hear(N1, 1, readmission=Readmission(solo.state.boot_id, LogIndex(0)))
    solo.state.become_candidate(0, pre_vote=False)

    solo.push(N2, source.compare(-1))
    solo.push(N2, source.append(0, commit=0))

    assert (solo.state.term, solo.log.flushed.index) == (2, 0)
    assert not solo.state.has_standing


def test_standing_waits_for_a_comparison_with_the_leader_that_gives_it() -> None:
    """Whatever an earlier leader found: what is committed here need not be of the history of this one."""
    solo, source = Solo(hard_state=HardState()), Source(1, 1)
    solo.push(N1, source.compare(-1))
    solo.push(N1, source.append(0, commit=0))
    later = Source(2, 1)

    solo.push(N2, PushCommit(Term(2), 1, LogIndex(0)))
    solo.hear(N2, 2, readmission=Readmission(solo.state.boot_id, LogIndex(0)))
    before = solo.state.has_standing
    solo.push(N2, later.compare(0))

    assert (before, solo.state.has_standing) == (False, True)


def test_standing_waits_until_nothing_of_the_log_is_missing() -> None:
    """What is still to be fetched is not held, however far the log reaches."""
    solo, source = Solo(hard_state=HardState()), Source(1, 1)
    solo.state.whole = False
    solo.push(N1, source.compare(-1))
    solo.push(N1, source.append(0, commit=0))

    solo.hear(N1, 1, readmission=Readmission(solo.state.boot_id, LogIndex(0)))
    before = solo.state.hard_state.standing
    solo.state.whole = True
    solo.hear(N1, 1)

    assert (before, solo.state.hard_state.standing) == (Standing.BLANK, Standing.FOUNDER)


def test_what_was_said_without_standing_is_said_again_with_it() -> None:
    """An append may wait for nobody but this member: its earlier answer did not count."""
    solo = Solo(hard_state=HardState())
    source = Source(1, 1)
    solo.push(N1, source.compare(-1))
    (before,) = solo.push(N1, source.append(0, commit=-1))

    solo.hear(N1, 1, readmission=Readmission(solo.state.boot_id, LogIndex(0)))

    (again,) = solo.sent(PushResponse)
    assert isinstance(again, PushResponse)
    assert (before.standing, before.flushed_index) == (Standing.BLANK, 0)
    assert (again.standing, again.flushed_index) == (Standing.FOUNDER, 0)
