"""Configurations in the log: when they count, when they are undone, and to whom they are sent."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from dledger.config import FlushMode
from dledger.core import log_matching, membership
from dledger.core.member_state import NEVER_MS, Candidate, MemberState
from dledger.core.membership import encode_configuration, recover_membership
from dledger.core.messages import LoadRun, PushAppend, PushCommit, PushCompare, PushInstall, PushKind, PushTruncate
from dledger.core.noop_payload import UnreadablePayloadError
from dledger.errors import DiskFullError, ResponseCode
from dledger.types import NO_INDEX, NO_TERM, Configuration, EntryId, LogIndex, Magic, NodeId, Position, Standing, Term
from dledger.values import MIB
from tests.support.cluster import N0, N1, N2, N3, N4, made_log
from tests.support.disk_log import DiskLog
from tests.support.members import NONE, configuration, put
from tests.support.memory_store import MemoryStore
from tests.support.solo import Solo, Source


def _follower(source: Source, **changes: object) -> Solo:
    """n0, which has compared its empty log with that of n1 as leader."""
    solo = Solo(**changes)  # type: ignore[arg-type]  # settings by name
    solo.push(N1, PushCompare(source.term, 1, EntryId(NO_TERM, NO_INDEX), 0))
    return solo


def _with_fourth() -> tuple[Source, LogIndex]:
    """A leader's log whose second entry makes n3 a voter."""
    source = Source(1, 1)
    return source, put(source.log, 1, "0123")


def test_a_follower_counts_with_a_configuration_from_its_append_on() -> None:
    """M2: appended is in force, committed or not; and it is spoken to from then on."""
    source, index = _with_fourth()
    solo = _follower(source)

    solo.push(N1, source.append(0, epoch=1))

    assert (solo.state.quorum, solo.state.peers) == (3, (N1, N2, N3))
    assert solo.state.membership.current.index == index
    assert not solo.state.membership.is_committed
    assert N3 in solo.node.dispatchers


def test_a_configuration_that_is_here_already_counts_once() -> None:
    """A run may repeat entries, and a member may hold a newer configuration."""
    source, index = _with_fourth()
    solo = _follower(source)
    solo.push(N1, source.append(0, epoch=1))
    put(source.log, 1, "012")
    solo.push(N1, source.append(0, epoch=1))
    solo.push(N1, source.append(0, epoch=1))

    assert solo.state.membership.current.index == index + 1
    assert solo.state.quorum == 2


def test_a_truncated_configuration_is_undone() -> None:
    """M2: what another leader's log lacks was never in force."""
    source, _ = _with_fourth()
    solo = _follower(source)
    solo.push(N1, source.append(0, epoch=1))

    other = Source(2, 1, 2)
    solo.push(N2, other.compare(0))
    solo.push(N2, PushTruncate(Term(2), 2, EntryId(Term(2), LogIndex(1)), other.log.chain_crc_at(LogIndex(1))))

    assert solo.log.last.index == 0
    assert solo.state.peers == (N1, N2)
    assert N3 not in solo.node.dispatchers


def test_the_driver_is_told_what_is_committed() -> None:
    """M3: it makes that durable, from a copy that does not change."""
    source, index = _with_fourth()
    solo = _follower(source)
    solo.push(N1, source.append(0, epoch=1))
    solo.node.receive(N1, PushCommit(source.term, 1, index), 0)
    solo.node.handler.step(0)

    told = solo.state.outbox.membership
    assert told is not None
    solo.state.adopt(configuration("01", index=9))

    assert told.is_committed
    assert (told.committed.index, told.current.index) == (index, index)


def test_the_driver_is_told_of_each_configuration_that_is_committed() -> None:
    """M3: also while a newer one is not."""
    solo = Solo(3, terms=[1] * 5)
    solo.state.adopt(configuration("0123", index=2))
    solo.state.adopt(configuration("013", index=4))
    solo.take()

    solo.state.advance_commit(LogIndex(3))

    told = solo.state.outbox.membership
    assert told is not None
    assert (told.committed.index, told.current.index) == (2, 4)


def test_a_configuration_of_a_later_version_stops_a_follower() -> None:
    """Who cannot know the members must not take part."""
    source = Source(1)
    payload = bytearray(encode_configuration(configuration("0123")))
    payload[8] = 2
    log = MemoryStore(MIB)
    log.append_as_leader(Term(1), [bytes(payload)], Magic.NOOP)
    solo = _follower(source)

    with pytest.raises(UnreadablePayloadError):
        solo.push(N1, PushAppend(Term(1), 1, NO_INDEX, log.read_run(LogIndex(0), LogIndex(0))))


# -- M3: acknowledged once flushed --------------------------------------------------------------------------------


def test_in_async_mode_a_configuration_is_acknowledged_only_once_it_is_flushed() -> None:
    """M3: and what follows it, too; entries before it are not held up."""
    source, index = _with_fourth()
    source.log.append_as_leader(Term(1), [b"after it"])
    solo = Solo(flush_mode=FlushMode.ASYNC)
    solo.push(N1, PushCompare(source.term, 1, EntryId(NO_TERM, NO_INDEX), 0, flushed_only=False))

    (answer,) = solo.push(N1, source.append(0, epoch=1), flush=False)
    assert answer.flushed_index == index - 1
    *_, answer = solo.push(N1, PushCommit(source.term, 1, LogIndex(0)))

    assert answer.flushed_index == index + 1


def test_in_async_mode_a_leader_counts_its_own_configuration_only_once_it_is_flushed() -> None:
    """M3: as its followers do."""
    solo = Solo(1, flush_mode=FlushMode.ASYNC)
    solo.lead()
    solo.settle_quorum()
    last = solo.log.last.index
    index = put(solo.log, int(solo.state.term), "0", "1")
    solo.state.adopt(configuration("0", "1", index=index, term=int(solo.state.term)))
    solo.log.append_as_leader(solo.state.term, [b"x"])

    assert solo.state.durable_index == last
    solo.flush()
    assert solo.state.durable_index == index + 1
    assert solo.state.unflushed is None


def test_the_first_of_several_unflushed_configurations_holds_up_what_follows() -> None:
    """M3: a power cut takes both."""
    source, index = _with_fourth()
    put(source.log, 1, "012")
    solo = Solo(flush_mode=FlushMode.ASYNC)
    solo.push(N1, PushCompare(source.term, 1, EntryId(NO_TERM, NO_INDEX), 0, flushed_only=False))

    (answer,) = solo.push(N1, source.append(0, epoch=1), flush=False)

    assert answer.flushed_index == index - 1


def test_a_flush_between_two_configurations_frees_the_first_alone() -> None:
    """M3: the second one may still be taken back."""
    solo = Solo(flush_mode=FlushMode.ASYNC)
    solo.state.adopt(configuration("0123", index=put(solo.log, 1, "0123")))
    solo.log.flush()
    flushed = solo.log.last.index
    second = put(solo.log, 1, "012")
    solo.state.adopt(configuration("012", index=second))

    assert solo.state.durable_index == flushed
    solo.log.flush()
    assert solo.state.durable_index == second


# -- M3: recovery -------------------------------------------------------------------------------------------------


def _log(committed: int = -1) -> DiskLog:
    """Entries 0 to 4, of which 1 and 3 are configurations."""
    log = made_log(1)
    put(log, 1, "0123")
    log.append_as_leader(Term(1), [b"x"])
    put(log, 1, "01")
    log.append_as_leader(Term(1), [b"y"])
    if committed >= 0:
        log.set_committed(LogIndex(committed))
    log.flush()
    return log


@pytest.mark.parametrize(("committed", "known"), [(-1, -1), (0, -1), (1, 1), (2, 1), (3, 3), (4, 3)])
def test_a_restart_finds_what_the_log_holds(committed: int, known: int) -> None:
    """M3: the newest is in force, and those up to the commit index are known to be committed."""
    found = recover_membership(N0, _log(committed), None, NO_INDEX, configuration("012"))

    assert found.current.index == 3
    assert found.current.voters == (N0, N1)
    assert found.committed.index == known
    assert found.leaving == () or not found.is_committed


def test_a_restart_looks_only_at_what_the_directory_does_not_say() -> None:
    """M3: a configuration in the file counts even above the log's end (M10)."""
    log = _log(committed=4)

    saved = recover_membership(N0, log, configuration("0123", index=1), LogIndex(2), configuration("012"))
    ahead = recover_membership(N0, log, configuration("02", index=9), LogIndex(0), configuration("012"))
    clear = recover_membership(N0, log, None, LogIndex(4), configuration("012"))

    assert saved.current.index == 3
    assert ahead.current.index == 9
    assert ahead.is_committed
    assert clear.current.index == -1


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_a_restart_looks_at_every_entry(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """M3: in whatever pieces it reads a long log."""
    monkeypatch.setattr(membership, "_CHUNK_ENTRIES", chunk)

    found = recover_membership(N0, _log(), None, NO_INDEX, configuration("012"))

    assert (found.committed.index, found.previous_voters, found.current.index) == (-1, (N0, N1, N2, N3), 3)


def test_a_restart_without_any_configuration_waits() -> None:
    """M3, M12: neither a voter nor a member of anything."""
    found = recover_membership(N0, DiskLog(), None, NO_INDEX, NONE)

    assert not found.is_voter
    assert (found.peers, found.voting_peers, found.contact_ids) == ((), (), ())


# -- M9, M10: what dispatchers send -------------------------------------------------------------------------------


def _removing(solo: Solo, voters: str, learners: str = "") -> LogIndex:
    """The leader appends a configuration, and an entry after it."""
    term = int(solo.state.term)
    index = put(solo.log, term, voters, learners)
    solo.state.adopt(configuration(voters, learners, index=index, term=term))
    solo.log.append_as_leader(solo.state.term, [b"after it"])
    solo.take()
    return index


@pytest.mark.parametrize(("voters", "learners"), [("013", ""), ("013", "2")])
def test_the_subject_of_a_removal_or_demotion_gets_it_only_when_it_is_committed(voters: str, learners: str) -> None:
    """M9: nor anything after it."""
    solo = Solo(4, terms=[1], committed=0)
    solo.lead()
    solo.streaming(N2)
    solo.streaming(N1)
    index = _removing(solo, voters, learners)

    sent = [one for one in solo.dispatch(N2) if isinstance(one, LoadRun)]
    others = [one for one in solo.dispatch(N1) if isinstance(one, LoadRun)]
    assert sent == []
    assert others[-1].last_index == index + 1
    solo.matches(N1, index + 1)
    solo.matches(N3, index + 1)
    solo.flush()
    solo.settle_quorum()
    assert solo.state.commit_index == index + 1

    sent = [one for one in solo.dispatch(N2) if isinstance(one, LoadRun)]
    assert sent[-1].last_index == index + 1


def test_a_learner_gets_what_is_committed_and_as_a_voter_everything() -> None:
    """M9: what may still be undone must not make its log longer than a voter's, which it would refuse."""
    solo = Solo(3, terms=[1], committed=0)
    solo.lead()
    term = int(solo.state.term)
    solo.state.adopt(configuration("012", "3", index=put(solo.log, term, "012", "3"), term=term))
    solo.flush()
    solo.matches(N1, solo.log.last.index)
    solo.settle_quorum()
    committed = solo.state.commit_index
    solo.streaming(N3, match=0)
    solo.log.append_as_leader(solo.state.term, [b"x"])

    runs = [one for one in solo.dispatch(N3) if isinstance(one, LoadRun)]
    assert runs[-1].last_index == committed == solo.log.last.index - 1
    promotion = put(solo.log, term, "0123")
    solo.state.adopt(configuration("0123", index=promotion, term=term))

    runs = [one for one in solo.dispatch(N3) if isinstance(one, LoadRun)]
    assert runs[-1].last_index == promotion


def test_a_removed_member_is_spoken_to_until_it_knows_or_ten_seconds_have_passed() -> None:
    """M9: then its dispatcher ends."""
    for tells in (True, False):
        solo = Solo(3, terms=[1], committed=0)
        solo.lead()
        solo.streaming(N2)
        index = _removing(solo, "01")
        dispatcher = solo.node.dispatchers[N2]
        solo.matches(N1, index + 1)
        solo.flush()
        solo.settle_quorum()
        solo.dispatch(N2)
        solo.tick(1)
        assert N2 in solo.node.dispatchers
        if tells:
            solo.respond(N2, PushKind.APPEND, verified=index + 1)
        else:
            solo.leader_role.contact_ms[N1] = solo.now_ms + 10_000
            solo.now_ms += 10_000

        solo.tick(1)

        assert N2 not in solo.node.dispatchers
        assert N2 not in solo.leader_role.match
        assert dispatcher.step(solo.now_ms) is None


def test_a_removed_member_knows_only_what_it_has_answered() -> None:
    """M9: the push with the commit index may be lost behind one that is answered."""
    solo = Solo(3, terms=[1], committed=0, push_bytes_max=1)
    solo.lead()
    solo.streaming(N2)
    index = _removing(solo, "01")
    solo.matches(N1, index + 1)
    solo.flush()
    solo.settle_quorum()
    sent = [one.last_index for one in solo.dispatch(N2) if isinstance(one, LoadRun)]
    assert sent == [index, index + 1]

    solo.respond(N2, PushKind.APPEND, verified=index)
    solo.tick(1)
    assert N2 in solo.node.dispatchers
    solo.respond(N2, PushKind.APPEND, verified=index + 1)
    solo.tick(1)

    assert N2 not in solo.node.dispatchers


def test_who_leads_no_more_speaks_no_more_to_those_that_left() -> None:
    """M9: only a leader has something to tell them; the driver hears of it."""
    solo = Solo(3, terms=[1], committed=0)
    solo.lead()
    index = _removing(solo, "01")
    solo.matches(N1, index + 1)
    solo.flush()
    solo.settle_quorum()
    assert N2 in solo.node.dispatchers

    solo.hear(N1, int(solo.state.term) + 1)

    assert N2 not in solo.node.dispatchers
    told = solo.state.outbox.membership
    assert told is not None
    assert told.contact_ids == (N1,)


def test_an_install_carries_the_newest_committed_configuration() -> None:
    """M10: an explicit one; not one that may still be undone."""
    solo = Solo(3, log=made_log(1, 1, 1, 1, committed=3, begin=1))
    solo.lead()
    solo.dispatch(N1)
    solo.respond(N1, PushKind.COMPARE, ResponseCode.INCONSISTENT_STATE, end=-1)
    (plain,) = solo.dispatch(N1)
    assert isinstance(plain, PushInstall)
    assert plain.configuration is None

    committed = configuration("012", index=1)
    solo.state.install(committed)
    solo.state.adopt(configuration("0123", index=4))
    (told,) = solo.dispatch(N1, solo.config.replication.push_timeout_ms)

    assert isinstance(told, PushInstall)
    assert told.configuration == committed


def test_a_follower_takes_over_the_configuration_of_an_install() -> None:
    """M10: also one above the new begin; what its own log put in force is gone with that log."""
    solo = Solo(3, terms=[1])
    own = put(solo.log, 1, "01")
    solo.state.adopt(configuration("01", index=own))
    source = Source(3, 1, 2, 3, 3)
    solo.push(N1, PushCompare(source.term, 1, EntryId(Term(3), LogIndex(3)), 0))
    boundary = EntryId(Term(2), LogIndex(1))
    told = configuration("0123", index=7, term=3)
    position = Position(solo.log.end_position)

    solo.push(N1, PushInstall(source.term, 2, boundary, source.log.chain_crc_at(LogIndex(1)), position, told))

    assert solo.log.begin.index == 1
    assert solo.state.membership.current == solo.state.membership.committed == told
    assert solo.state.quorum == 3


@pytest.mark.parametrize(("told", "in_force"), [(None, -1), (configuration("0123", index=1), 1)])
def test_an_install_undoes_what_the_old_log_put_in_force(told: Configuration | None, in_force: int) -> None:
    """M2, M10: also a configuration that was newer than the one that comes, and never committed."""
    solo = Solo(3, terms=[1, 1, 1, 1, 1])
    solo.state.adopt(configuration("01", index=put(solo.log, 1, "01")))
    source = Source(3, 1, 2, 3, 3)
    solo.push(N1, PushCompare(source.term, 1, EntryId(Term(3), LogIndex(3)), 0))
    boundary = EntryId(Term(2), LogIndex(1))
    position = Position(solo.log.end_position)

    solo.push(N1, PushInstall(source.term, 2, boundary, source.log.chain_crc_at(LogIndex(1)), position, told))

    assert solo.log.last.index == 1
    assert solo.state.membership.current.index == solo.state.membership.committed.index == in_force


def test_a_configuration_that_finds_no_room_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """M2: it is in force where its entry is."""
    source, _ = _with_fourth()
    solo = _follower(source)
    monkeypatch.setattr(solo.log, "append_run", Mock(side_effect=DiskFullError("full")))

    (answer,) = solo.push(N1, source.append(0, epoch=1))

    assert answer.code is ResponseCode.DISK_FULL
    assert solo.state.peers == (N1, N2)


# -- what a member remembers of others ----------------------------------------------------------------------------


def test_what_is_remembered_of_a_member_ends_with_its_life() -> None:
    """M11: of one that left, and of one with another uid; an unknown uid says nothing."""
    solo = Solo(3)
    held = EntryId(Term(1), LogIndex(5))
    for known, adopted, kept in (
        (configuration("012", index=1, n2=7), configuration("01", index=2), False),
        (configuration("012", index=3, n2=7), configuration("012", index=4, n2=8), False),
        (configuration("012", index=5), configuration("012", index=6, n2=8), True),
        (configuration("012", index=7, n2=8), configuration("012", index=8, n2=8), True),
    ):
        solo.state.adopt(known)
        solo.state.remember([(N2, held)])
        solo.state.adopt(adopted)
        assert (N2 in solo.state.remembered) is kept


def test_nothing_is_kept_of_the_history_of_one_that_left() -> None:
    """Another machine may come back under its id."""
    solo = Solo(3)
    solo.state.agrees[N2] = False
    solo.state.contradicted_by.add(N2)

    solo.state.adopt(configuration("01", index=1))

    assert N2 not in solo.state.agrees
    assert N2 not in solo.state.contradicted_by


def test_a_leader_keeps_nothing_of_a_process_that_left() -> None:
    """M11: a member that is added again under its id in the same term is to be heard anew."""
    solo = Solo(3)
    solo.lead()
    leader = solo.leader_role
    solo.beat(N1)
    solo.beat(N2)
    by_process = (leader.boot_ids, leader.doubted, leader.countersigns, leader.memories, leader.blank_boot_ids)
    for peer in (N1, N2):
        solo.matches(peer, 0)
        leader.boot_ids[peer] = leader.doubted[peer] = leader.countersigns[peer] = leader.blank_boot_ids[peer] = 7
    assert leader.stand == {N1, N2}

    leader.speak_with((N1,))

    assert leader.stand == {N1}
    assert [sorted(known) for known in by_process] == [[N1]] * 5
    leader.speak_with((N1, N2))
    assert (leader.match[N2], leader.contact_ms[N2], leader.counts[N2]) == (NO_INDEX, NEVER_MS, False)
    assert (leader.match[N1], leader.counts[N1]) == (0, True)


@pytest.mark.parametrize(
    ("process", "uid", "remembers"), [(7, 9, True), (7, 0, True), (7, 8, False), (6, 9, False), (6, 0, False)]
)
def test_a_process_counts_unless_it_is_of_another_memory(process: int, uid: int, remembers: bool) -> None:
    """M11: it must have been heard itself, not an earlier one; one without a uid has no other memory."""
    solo = Solo(3)
    solo.lead()
    solo.state.adopt(configuration("012", index=1, n1=9))
    solo.leader_role.memories[N1] = process, uid

    solo.leader_role.blank_boot_ids[N1] = 5  # an earlier one was readmitted

    assert solo.state.remembers(solo.leader_role, N1, 7) is remembers
    assert solo.state.remembers(solo.leader_role, N2, 7)


def test_a_member_whose_directory_is_another_one_is_not_elected_by_a_majority() -> None:
    """M11: its own vote may have been given to somebody else, by the memory that the configuration names."""
    solo = Solo(3)
    solo.state.uid = 8
    solo.state.adopt(configuration("012", index=1, n0=7))
    solo.time_out()

    solo.vote(N1, pre_vote=True)

    role = solo.state.role
    assert isinstance(role, Candidate)
    assert role.pre_vote
    assert role.ballots[N0].standing is Standing.BLANK


def test_strangers_and_learners_fence_nobody() -> None:
    """Anyone may send a vote, and a learner's history is that of those whom it follows."""
    solo = Solo(3)
    solo.state.adopt(configuration("012", "34", index=1))
    for one in (N3, N4):
        solo.vote(one, granted=False, other_history=True)
    assert solo.state.contradicted_by == {N3, N4}
    assert not solo.state.fenced

    log_matching.note(solo.state, NodeId("n9"), True)
    assert NodeId("n9") not in solo.state.agrees
    for one in (N1, N2):
        solo.vote(one, granted=False, other_history=True)
    assert solo.state.fenced


# -- M8: who is told that it was removed --------------------------------------------------------------------------


@pytest.mark.parametrize("take", [MemberState.adopt, MemberState.install])
def test_what_a_member_was_told_of_its_removal_counts_until_a_newer_configuration(
    take: Callable[[MemberState, Configuration], object],
) -> None:
    """M8: neither an older configuration nor older news takes it back."""
    state = Solo(3).state
    state.learn_removed(LogIndex(7))
    state.learn_removed(LogIndex(5))
    assert state.removed_at == 7
    take(state, configuration("012", index=6))
    assert state.removed_at == 7

    take(state, configuration("012", index=8))

    assert state.removed_at == NO_INDEX
    state.learn_removed(LogIndex(8))
    assert state.removed_at == NO_INDEX


def test_nobody_is_told_of_a_removal_before_it_is_committed_nor_once_it_is_undone() -> None:
    """M8: an uncommitted one may be truncated, and one that was added again is a member."""
    state = Solo(3, terms=[1] * 10).state
    state.adopt(configuration("012", index=2))
    state.advance_commit(LogIndex(2))
    state.adopt(configuration("01", index=3))
    assert state.removal_of(N2) == NO_INDEX

    state.advance_commit(LogIndex(3))
    assert state.removal_of(N2) == 3
    assert state.removal_of(N1) == NO_INDEX

    state.adopt(configuration("01", "2", index=5))
    assert state.removal_of(N2) == NO_INDEX


# -- what is committed during a change ----------------------------------------------------------------------------


def _changing(before: str, learners: str, after: str) -> tuple[Solo, LogIndex]:
    """n0 leads ``before`` with a committed log, and has appended an entry, and ``after``."""
    solo = Solo(len(before), terms=[1], committed=0)
    solo.lead()
    term = int(solo.state.term)
    solo.state.adopt(configuration(before, learners, index=put(solo.log, term, before, learners), term=term))
    solo.flush()
    for peer in solo.state.peers:
        solo.matches(peer, solo.log.last.index)
    solo.settle_quorum()
    assert solo.state.membership.is_committed
    solo.log.append_as_leader(solo.state.term, [b"before it"])
    solo.flush()
    index = put(solo.log, term, after)
    solo.state.adopt(configuration(after, index=index, term=term))
    return solo, index


def test_a_smaller_majority_commits_nothing_before_it_is_durable() -> None:
    """M2: the leader may lose the configuration with its page cache, and then one disk is the only one of two."""
    solo, index = _changing("01", "", "0")
    solo.settle_quorum()
    assert solo.state.commit_index == index - 2

    solo.flush()
    solo.settle_quorum()

    assert solo.state.commit_index == index


def test_a_new_voter_commits_nothing_that_no_majority_of_the_others_holds() -> None:
    """M2: n1, which knows nothing of it, would be elected with a blank n0."""
    solo, index = _changing("01", "2", "012")
    solo.flush()
    solo.matches(N2, index)
    solo.settle_quorum()
    assert solo.state.commit_index == index - 2

    solo.matches(N1, index - 1)
    solo.settle_quorum()
    assert solo.state.commit_index == index - 1

    solo.matches(N1, index)
    solo.settle_quorum()
    assert solo.state.commit_index == index


def test_the_subject_of_a_removal_is_not_needed_for_it() -> None:
    """M9: it does not get the entry, so it cannot hold it."""
    solo, index = _changing("012", "", "01")
    solo.flush()
    solo.settle_quorum()
    assert solo.state.commit_index == index - 2

    solo.matches(N1, index)
    solo.settle_quorum()
    assert solo.state.commit_index == index
