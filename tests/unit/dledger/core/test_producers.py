"""Exactly-once append on the leader: what is new, what was there, and that a later leader knows it, too."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from dledger.core import producers
from dledger.core.messages import RoleReason, TakeLeadership, Wake
from dledger.core.noop_payload import ProducerSnapshot, Registration, decode_payload
from dledger.core.ports import ProducersAt
from dledger.core.producers import RUNS_KEPT, KnownProducer, needed_from, rebuild
from dledger.errors import (
    CorruptLogError,
    DiskFullError,
    DLedgerError,
    EntryTooLargeError,
    InvalidRequestError,
    NotLeaderError,
    OutOfOrderSequenceError,
    PendingFullError,
    ShutdownError,
    TermChangedError,
    UnknownProducerError,
)
from dledger.types import (
    NOOP_CHANNEL,
    AppendedBatch,
    Boundary,
    HardState,
    LogIndex,
    Magic,
    ProducerBatch,
    Role,
    Standing,
    StoredRun,
    Term,
)
from tests.support.cluster import N1, Outcome
from tests.support.disk_log import DiskLog
from tests.support.producers import append, bodies_of, commit, known, leading, newer_payload, settled, successor, told
from tests.support.solo import Solo


def test_a_repeated_append_is_answered_with_the_place_of_the_first() -> None:
    """Nothing is stored twice, and the answer is as good as the first one."""
    solo = leading()
    first = append(solo, "p", 0, b"a", b"b")
    commit(solo)

    again = append(solo, "p", 0, b"a", b"b")
    commit(solo)

    assert first.value.first_index == 2  # after the NOOP and the registration
    assert again.value == AppendedBatch(
        solo.state.term,
        LogIndex(0),
        LogIndex(-1),
        (),
        (StoredRun(LogIndex(2), 2, Term(1), first.value.positions),),
    )
    assert bodies_of(solo) == [b"a", b"b"]


def test_of_a_batch_that_is_there_in_part_the_rest_is_appended() -> None:
    """A client may cut what it repeats in another way."""
    solo = leading()
    append(solo, "p", 0, b"a", b"b")

    outcome = append(solo, "p", 1, b"b", b"c")
    commit(solo)

    assert outcome.value.duplicates[0].first_index == 3
    assert (outcome.value.first_index, outcome.value.last_index) == (4, 4)
    assert bodies_of(solo) == [b"a", b"b", b"c"]


def test_a_gap_and_an_unknown_producer_are_refused() -> None:
    """What comes before must be stored before, and the log must know of it."""
    solo = leading()
    append(solo, "p", 0, b"a")

    gap = append(solo, "p", 2, b"c")
    unknown = append(solo, "q", 1, b"x")
    waiting = solo.node.quorum_ack.pending_entries
    settled(solo, unknown)

    assert isinstance(gap.error, OutOfOrderSequenceError)
    assert isinstance(unknown.error, UnknownProducerError)
    assert gap.error.outcome == unknown.error.outcome == "not_applied"
    assert bodies_of(solo) == [b"a"]
    assert waiting == 1


def test_what_is_missing_is_told_once_a_quorum_confirms_the_leader() -> None:
    """One that was frozen and replaced knows nothing of what came since; who believes it stores things twice."""
    solo = Solo(3)
    solo.lead()
    append(solo, "p", 0, b"a")
    solo.flush()
    solo.streaming(N1)
    solo.settle_quorum()
    gap = append(solo, "p", 2, b"c")
    solo.tick()

    before = gap.pending
    solo.beat(N1, solo.node.reads.round)
    solo.tick()

    assert before
    assert isinstance(gap.error, OutOfOrderSequenceError)


def test_a_refusal_that_no_quorum_confirms_has_written_nothing() -> None:
    """So a client numbers it anew instead of telling its user that nobody knows."""
    solo = Solo(3)
    solo.lead()
    late, stopped = append(solo, "q", 1, b"x"), Outcome[AppendedBatch]()
    solo.now_ms += 60_000
    solo.tick()
    solo.node.quorum_ack.append([b"x"], solo.now_ms, stopped, ProducerBatch("q", 1))
    solo.node.abandon(ShutdownError("this node stops"))
    solo.take()

    for outcome in (late, stopped):
        assert isinstance(outcome.error, NotLeaderError)
        assert outcome.error.outcome == "not_applied"


def test_a_replaced_leader_says_that_it_does_not_lead_not_that_something_is_missing() -> None:
    """So the client repeats the same with the next one."""
    solo = Solo(3)
    solo.lead()
    unknown = append(solo, "q", 1, b"x")

    solo.hear(N1, solo.state.term + 1)
    solo.tick()

    assert isinstance(unknown.error, NotLeaderError)


@pytest.mark.parametrize("name", ["", "a b", "ü", "x" * 129, "a\n"])
def test_names_are_of_few_characters(name: str) -> None:
    """They are stored, logged and shown."""
    error = append(leading(), name, 0, b"a").error

    assert isinstance(error, InvalidRequestError)
    assert "A-Z" in str(error)


def test_sequences_are_not_negative_and_batches_not_empty() -> None:
    """Both would count backwards."""
    solo = leading()
    append(solo, "p", 0, b"a")

    for name, sequence, bodies in (("p", -1, [b"x"]), ("new", -1, [b"x"]), ("p", 0, []), ("p", 1, [])):
        assert isinstance(append(solo, name, sequence, *bodies).error, InvalidRequestError)
    assert known(solo)["p"] == 1


def test_a_batch_that_is_too_large_leaves_the_sequence_where_it_was() -> None:
    """The next good one has the same number."""
    solo = leading(max_entry_bytes=200)
    append(solo, "p", 0, b"a")

    refused = append(solo, "p", 1, bytes(2 << 20)).error
    batch = append(solo, "p", 1, *[b""] * 65_537).error

    assert isinstance(refused, EntryTooLargeError)
    assert isinstance(batch, InvalidRequestError)
    assert known(solo) == {"p": 1}


def test_a_refused_append_of_a_new_producer_leaves_nothing_behind() -> None:
    """Neither an entry nor a place in the table, which others may need: nothing was applied."""
    solo = leading(max_entry_bytes=200)
    end = solo.log.last

    too_large = append(solo, "p", 0, bytes(2 << 20)).error
    empty = append(solo, "q", 0).error
    solo.log.disk_full = True
    no_room = append(solo, "r", 0, b"a").error

    assert [type(error) for error in (too_large, empty, no_room)] == [
        EntryTooLargeError,
        InvalidRequestError,
        DiskFullError,
    ]
    assert solo.log.last == end
    assert known(solo) == {}


def test_what_is_repeated_counts_as_stored_only_once_it_is_committed() -> None:
    """The original may still be lost with this leader; an answer must not come before that is out of the question."""
    solo = Solo(3)
    solo.lead()
    append(solo, "p", 0, b"a")

    again = append(solo, "p", 0, b"a")
    solo.flush()
    solo.settle_quorum()
    waiting = again.pending
    solo.streaming(N1)
    solo.settle_quorum()

    assert waiting
    assert again.value.duplicates[0].first_index == 2


def test_a_leader_that_loses_its_place_does_not_answer_for_the_next_one() -> None:
    """The outcome of both is unknown."""
    solo = Solo(3)
    solo.lead()
    first = append(solo, "p", 0, b"a")
    again = append(solo, "p", 0, b"a")

    solo.hear(N1, solo.state.term + 1)
    solo.settle_quorum()

    for outcome in (first, again):
        assert isinstance(outcome.error, TermChangedError)
    assert isinstance(append(solo, "p", 0, b"a").error, NotLeaderError)


def test_repetitions_count_towards_what_may_wait() -> None:
    """Else they could fill the memory of a leader without a quorum."""
    solo = Solo(3, pending_entries_max=3)
    solo.lead()
    append(solo, "p", 0, b"a")

    outcomes = [append(solo, "p", 0, b"a") for _ in range(3)]

    assert [outcome.pending for outcome in outcomes] == [True, True, False]
    assert isinstance(outcomes[2].error, PendingFullError)


def test_a_new_leader_knows_what_its_log_holds() -> None:
    """Also entries after the newest snapshot, and of producers that it has registered itself."""
    solo = leading()
    append(solo, "p", 0, b"a", b"b")
    append(solo, "q", 0, b"x")
    second = successor(solo)
    append(second, "p", 2, b"c")
    append(second, "r", 0, b"r")
    third = successor(second)

    again = append(third, "p", 1, b"b", b"c", b"d")
    commit(third)

    assert known(third) == {"q": 1, "p": 4, "r": 1}
    assert [(run.first_index, run.count) for run in again.value.duplicates] == [(3, 1), (7, 1)]
    assert bodies_of(third) == [b"a", b"b", b"x", b"c", b"r", b"d"]


def test_entries_that_a_new_leader_does_not_hold_are_appended_again() -> None:
    """They were never committed, so nobody may have been told that they are stored."""
    solo = leading()
    append(solo, "p", 0, b"a")
    append(solo, "p", 1, b"lost")
    solo.log.truncate(LogIndex(3))

    other = successor(solo)
    again = append(other, "p", 1, b"lost")
    commit(other)

    assert again.value.duplicates == ()
    assert bodies_of(other) == [b"a", b"lost"]


def test_a_lost_registration_is_written_anew() -> None:
    """With the first entry the producer's name was lost, too."""
    solo = leading()
    append(solo, "p", 0, b"a")
    solo.log.truncate(LogIndex(1))

    other = successor(solo)
    append(other, "p", 0, b"a")

    assert known(other) == {"p": 1}
    assert bodies_of(other) == [b"a"]


def test_a_log_without_producers_has_plain_no_ops() -> None:
    """Nothing is told where there is nothing to tell: such logs stay what they were, byte for byte."""
    solo = leading()
    outcome: Outcome[AppendedBatch] = Outcome()
    solo.node.quorum_ack.append([b"x"], 0, outcome)
    other = successor(solo)

    assert told(other) == []
    assert other.log.read(other.log.last.index).body == b""


def test_an_append_without_a_producer_has_channel_0_and_others_the_slot() -> None:
    """The header's field is what a later leader counts."""
    solo = leading()
    append(solo, "p", 0, b"a")
    append(solo, "q", 0, b"b")
    solo.node.quorum_ack.append([b"c"], 0, Outcome[AppendedBatch]())

    channels = [run[0] for run in solo.log.channel_runs(LogIndex(0), solo.log.last.index)]

    assert channels == [NOOP_CHANNEL, 1, NOOP_CHANNEL, 2, 0]
    assert told(solo) == [Registration("p", 1), Registration("q", 2)]


def test_a_snapshot_is_written_after_so_many_entries_while_there_are_producers() -> None:
    """So that no later leader has to look far back."""
    solo = leading(producer_snapshot_entries=40)
    for _ in range(100):
        solo.node.quorum_ack.append([b"x"], 0, Outcome[AppendedBatch]())
    append(solo, "p", 0, b"a")
    for _ in range(100):
        solo.node.quorum_ack.append([b"x"], 0, Outcome[AppendedBatch]())

    kinds = [type(payload).__name__ for payload in told(solo)]

    assert kinds == ["Registration", "ProducerSnapshot", "ProducerSnapshot"]


def test_a_snapshot_is_written_after_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of large entries lie far apart, and reading them must stay quick."""
    monkeypatch.setattr(producers, "SNAPSHOT_BYTES", 10_000)
    solo = leading()
    for sequence in range(25):
        append(solo, "p", sequence, bytes(1000))

    assert [type(payload).__name__ for payload in told(solo)] == [
        "Registration",
        "ProducerSnapshot",
        "ProducerSnapshot",
    ]


def test_a_snapshot_is_written_with_the_first_batch_in_a_new_segment() -> None:
    """Else the newest one could lie in the only segment that retention may remove, while a full disk takes no other."""
    solo = leading(segment_bytes=1 << 20)
    for sequence in range(7):
        append(solo, "p", sequence, bytes(300_000))
    commit(solo)
    needed = needed_from(solo.log, solo.config)

    assert needed is not None
    assert solo.log.positions(needed, needed)[0] >= 2 << 20
    assert solo.log.end_position < 3 << 20
    assert known(successor(solo)) == {"p": 7}


def test_a_snapshot_is_written_after_many_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a new leader the reading of a body."""
    monkeypatch.setattr(producers, "SNAPSHOT_REGISTRATIONS", 10)
    solo = leading()
    for number in range(10):
        append(solo, f"p{number}", 0, b"")

    assert isinstance(told(solo)[-1], ProducerSnapshot)


def test_a_new_leader_writes_no_snapshot_before_one_is_due() -> None:
    """The group waits for its first entry, which all of them have to store."""
    solo = leading(producer_snapshot_entries=40)
    append(solo, "p", 0, b"a")
    commit(solo)

    second = successor(solo, producer_snapshot_entries=40)

    assert told(second) == [Registration("p", 1)]
    assert known(second) == {"p": 1}


def test_leaders_in_a_row_leave_no_more_between_two_snapshots_than_one_does() -> None:
    """Each counts on from the snapshot before its own term, and writes the one that its predecessor left out."""
    solo = leading(producer_snapshot_entries=40)
    append(solo, "p", 0, b"a")
    for _ in range(12):
        for _ in range(15):
            solo.node.quorum_ack.append([b"x"], 0, Outcome[AppendedBatch]())
        commit(solo)
        solo = successor(solo, producer_snapshot_entries=40)
    snapshots = [
        index
        for index in map(LogIndex, range(solo.log.last.index + 1))
        if isinstance(decode_payload(solo.log.read(index).body), ProducerSnapshot)
    ]
    gaps = [after - before for before, after in zip([1, *snapshots], [*snapshots, solo.log.last.index], strict=True)]

    assert max(gaps) <= 41
    assert len(snapshots) == (solo.log.last.index - 1) // 41


class Machine:
    """What a core sees of a state machine whose newest snapshot is of one entry."""

    def __init__(self, solo: Solo) -> None:
        self.applied_index = self.snapshot_index = solo.log.last.index
        self.producers = ProducersAt(self.snapshot_index, solo.leader_role.producers.copy(solo.now_ms))
        self.time_ms = 1_000_000

    def wall_ms(self) -> int:
        return self.time_ms


def test_a_log_that_was_reset_to_a_snapshot_knows_its_producers_from_there() -> None:
    """S8: the entries that tell of them are gone; a repeated append must be recognised nevertheless.

    The new leader writes the table at once: no other member may have it, and the search back is bounded.
    """
    solo = leading()
    append(solo, "p", 0, b"a", b"b")
    append(solo, "q", 0, b"c")
    commit(solo)
    machine = Machine(solo)
    log = DiskLog()
    last = solo.log.last
    log.reset(Boundary(last.index, last.term, solo.log.end_position, solo.log.last_chain_crc))
    second = Solo(1, log=log, hard_state=HardState(last.term, standing=Standing.FULL), machine=machine)
    second.lead()

    again = append(second, "p", 0, b"a", b"b", b"d")
    commit(second)

    assert known(second) == {"p": 3, "q": 1}
    assert sum(run.count for run in again.value.duplicates) == 2
    assert bodies_of(second) == [b"d"]
    assert isinstance(told(second)[0], ProducerSnapshot)
    assert known(successor(second)) == {"p": 3, "q": 1}


def test_a_snapshots_producers_do_not_hide_later_ones() -> None:
    """The log goes on after it, and tells of newer entries; an older table is not needed where the log has one."""
    solo = leading()
    append(solo, "p", 0, b"a")
    commit(solo)
    machine = Machine(solo)
    append(solo, "p", 1, b"b")
    append(solo, "q", 0, b"c")
    commit(solo)
    second = Solo(1, log=solo.log, hard_state=HardState(solo.state.term, standing=Standing.FULL), machine=machine)
    second.lead()

    assert known(second) == {"p": 2, "q": 1}


def test_a_leader_that_ended_before_the_snapshot_it_owed_has_it_written_by_the_next_one() -> None:
    """With the entry that all other members wait for: there may be no further one."""
    solo = leading(producer_snapshot_entries=40)
    append(solo, "p", 0, b"a")
    solo.log.append_as_leader(solo.state.term, [b"x"] * 40)
    commit(solo)

    second = successor(solo, producer_snapshot_entries=40)

    assert isinstance(decode_payload(second.log.read(second.log.last.index).body), ProducerSnapshot)
    assert known(second) == {"p": 1}


@pytest.mark.parametrize("seed", range(6))
def test_a_later_leader_knows_the_same_runs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in the log together, they are what the leader noted one by one; producers come and go, and so do slots."""
    monkeypatch.setattr(producers, "SLOT_MAX", 5)
    dice = Random(seed)
    solo = leading(max_producers=4, producer_snapshot_entries=2000)
    for step in range(525):
        name = f"p{dice.randrange(3) + (step // 75)}"
        solo.now_ms += 2 * producers.EVICTION_IDLE_MS * (step % 75 == 0)
        count = dice.randrange(1, 4)
        if dice.random() < 0.1:
            solo.node.quorum_ack.append([b"x"], solo.now_ms, Outcome[AppendedBatch]())
        append(solo, name, solo.leader_role.producers.next_sequence(name), *[b"x"] * count)
        commit(solo)

    later = successor(solo, producer_snapshot_entries=2000)

    assert [one.runs for one in tables(later)] == [one.runs for one in tables(solo)]
    assert known(later) == known(solo)
    assert len(known(solo)) == 4
    assert max(len(one.runs) for one in tables(solo)) == RUNS_KEPT


def tables(solo: Solo) -> list[KnownProducer]:
    """The producers that a leader knows, by name."""
    found = solo.leader_role.producers._by_name
    return [found[name] for name in sorted(found)]


def test_more_runs_than_are_remembered_are_still_known_to_be_there() -> None:
    """Only their places are forgotten; the answer says so, and nothing is appended."""
    solo = leading()
    for number in range(40):
        append(solo, "p", number, b"p")
        append(solo, "q", number, b"q")

    outcome = append(solo, "p", 0, *[b"p"] * 40)
    commit(solo)

    duplicates = outcome.value.duplicates
    assert duplicates[0] == StoredRun(LogIndex(0), 8)
    assert sum(run.count for run in duplicates) == 40
    assert all(solo.log.read(run.first_index).body == b"p" for run in duplicates[1:])


def test_old_runs_are_waited_for_as_well() -> None:
    """Where something is that is not remembered: before all that is."""
    solo = Solo(3)
    solo.lead()
    for number in range(40):
        append(solo, "p", number, b"p")
        append(solo, "q", number, b"q")

    again = append(solo, "p", 0, b"p")
    solo.flush()
    solo.streaming(N1, match=4)
    solo.settle_quorum()

    assert again.pending


def test_retention_must_keep_what_the_table_is_made_from() -> None:
    """The newest snapshot, or the registrations if there is none yet."""
    solo = leading()
    none = needed_from(solo.log, solo.config)
    append(solo, "p", 0, b"a")
    commit(solo)
    registered = needed_from(solo.log, solo.config)
    second = successor(solo)
    append(second, "p", 1, b"b")
    second.node.quorum_ack.write_snapshot(0)
    commit(second)
    from_snapshot = needed_from(solo.log, solo.config)
    solo.log.drop_before(LogIndex(5))

    assert (none, registered, from_snapshot) == (None, 1, 5)
    assert known(successor(second)) == {"p": 2}


def test_retention_keeps_what_it_cannot_read() -> None:
    """A later version wrote it, and will need it."""
    solo = leading()
    append(solo, "p", 0, b"a")
    solo.node.noops.append(solo.log, solo.state.term, newer_payload())
    commit(solo)

    assert needed_from(solo.log, solo.config) == 3


def test_who_cannot_prove_what_its_log_tells_of_producers_does_not_lead() -> None:
    """A turned bit could make a new append a repetition: acknowledged, never stored. Once repaired it leads again."""
    solo = leading()
    append(solo, "p", 0, b"a")
    other = Solo(3, log=solo.log, hard_state=HardState(solo.state.term, standing=Standing.FULL))
    damage = CorruptLogError(Path("data"), 7, "chainCrc of entry 1 does not continue entry 0", "Repair it", 1)
    solo.log.damage[LogIndex(1)] = damage
    other.campaign()

    other.vote(N1)
    other.take()
    term = other.state.term
    other.time_out()

    assert (other.role, other.state.term) == (Role.FOLLOWER, term)
    assert other.role_changes[-1].reason is RoleReason.DAMAGED_LOG
    assert other.damage == [damage, damage]
    solo.log.damage.clear()
    other.lead()
    assert other.leader_role.producers.next_sequence("p") == 1


def test_a_member_that_has_been_repaired_takes_leadership_when_it_is_offered() -> None:
    """Under a good leader its own election timeout, which looks again, never comes."""
    solo = leading()
    append(solo, "p", 0, b"a")
    other = Solo(3, log=solo.log, hard_state=HardState(solo.state.term, standing=Standing.FULL))
    solo.log.damage[LogIndex(1)] = CorruptLogError(Path("data"), 7, "chainCrc is wrong", "Repair it", 1)
    other.campaign()
    other.vote(N1)
    term = other.state.term
    other.hear(N1, term)

    other.node.receive(N1, TakeLeadership(term), other.now_ms)
    assert (other.role, other.state.term) == (Role.FOLLOWER, term)
    other.hear(N1, term)
    solo.log.damage.clear()
    other.node.receive(N1, TakeLeadership(term), other.now_ms)
    assert (other.role, other.state.term) == (Role.CANDIDATE, term + 1)


def test_who_does_not_understand_the_table_does_not_lead() -> None:
    """It would store again what the table says is there. It says why, and does not disturb the others."""
    solo = leading()
    solo.node.noops.append(solo.log, solo.state.term, newer_payload())
    other = Solo(3, log=solo.log, hard_state=HardState(solo.state.term, standing=Standing.FULL))
    other.campaign()

    other.vote(N1)
    other.take()
    term = other.state.term
    for _ in range(5):
        other.time_out()

    assert other.role is Role.FOLLOWER
    assert other.role_changes[-1].reason is RoleReason.UNREADABLE_PRODUCERS
    assert other.state.term == term
    assert "version 2" in str(other.node.elector.unreadable_producers)


@pytest.mark.parametrize("seed", range(12))
def test_the_table_is_a_function_of_the_log(seed: int) -> None:
    """Whatever happened, and wherever the log is cut: a rebuilt table counts what a full count counts (a model)."""
    random = Random(seed)
    solo = leading(producer_snapshot_entries=random.choice((1, 5, 30)), max_producers=3)
    for _ in range(120):
        solo.now_ms += random.choice((0, 0, 0, 700_000))
        name = random.choice("abcd")
        step(solo, random, name, solo.leader_role.producers.next_sequence(name))
        commit(solo)
        if random.random() < 0.05:
            solo = successor(solo, producer_snapshot_entries=random.choice((1, 5, 30)), max_producers=3)
        if random.random() < 0.05:
            retire(solo)
    for _ in range(20):
        low = max(needed_from(solo.log, solo.config) or 0, solo.log.begin.index + 1)
        end = LogIndex(random.randint(low, solo.log.last.index))
        table = rebuild(solo.log, solo.config, end, 0).table
        assert {name: table.next_sequence(name) for name in table._by_name} == counted(solo, end)


def step(solo: Solo, random: Random, name: str, expected: int) -> None:
    """One append, new, repeated or wrong; without a producer now and then."""
    bodies = [b""] * random.randint(1, 3)
    if random.random() < 0.2:
        solo.node.quorum_ack.append(bodies, solo.now_ms, Outcome[AppendedBatch]())
    else:
        append(solo, name, max(0, expected - random.choice((0, 0, 1, 2))), *bodies)


def retire(solo: Solo) -> None:
    """Drop a part of the log, as retention may."""
    limit = needed_from(solo.log, solo.config) or solo.log.committed_index
    if limit > solo.log.begin.index + 1:
        solo.log.drop_before(LogIndex(limit))


def counted(solo: Solo, end: LogIndex) -> dict[str, int]:
    """The model: a plain pass over all that is kept, entry by entry."""
    counts: dict[str, int] = {}
    names: dict[int, str] = {}
    for index in range(solo.log.begin.index + 1, end + 1):
        entry = solo.log.read(LogIndex(index))
        if entry.magic is Magic.NORMAL:
            if entry.channel in names:
                counts[names[entry.channel]] += 1
            continue
        payload = decode_payload(entry.body)
        if isinstance(payload, ProducerSnapshot):
            names = {one.slot: one.name for one in payload.producers}
            counts = {one.name: one.next_sequence for one in payload.producers}
        elif payload is not None:
            if payload.dropped in names:
                del counts[names.pop(payload.dropped)]
            names[payload.slot] = payload.name
            counts[payload.name] = 0
    return counts


def test_how_far_a_producer_is_is_told_once_it_is_certain() -> None:
    """All that is counted is committed, and a quorum says that this is still the leader."""
    solo = Solo(3)
    solo.lead()
    append(solo, "p", 0, b"a", b"b")
    outcome: Outcome[int] = Outcome()
    solo.node.producer_sequence("p", solo.now_ms, outcome)
    solo.tick()
    solo.beat(N1, solo.node.reads.round)
    solo.tick()
    before = outcome.pending
    solo.flush()
    solo.streaming(N1)
    solo.settle_quorum()
    solo.tick()

    assert before
    assert outcome.value == 2


def test_a_registration_is_flushed_though_its_entries_found_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever asks how far a producer is would wait for a flush that nobody was woken for."""
    solo = leading()
    commit(solo)
    write = solo.log.append_as_leader

    def append_noops_only(term: Term, bodies: Any, magic: Magic = Magic.NORMAL, *, channel: int = 0) -> AppendedBatch:  # noqa: ANN401
        if magic is Magic.NORMAL:
            raise DiskFullError("full")
        return write(term, bodies, magic, channel=channel)

    monkeypatch.setattr(solo.log, "append_as_leader", append_noops_only)
    outcome: Outcome[AppendedBatch] = Outcome()
    solo.node.quorum_ack.append([b"1"], solo.now_ms, outcome, ProducerBatch("p", 0))

    assert solo.state.outbox.wake & Wake.FLUSH
    assert solo.state.outbox.wake & Wake.DISPATCHERS


def test_how_far_an_unknown_producer_is() -> None:
    """Zero: it may begin. A name that cannot be one is refused, and only a leader knows."""
    solo = leading()
    answers: list[int | DLedgerError] = []
    commit(solo)
    solo.node.producer_sequence("p", solo.now_ms, answers.append)
    solo.tick()
    solo.node.producer_sequence("a b", solo.now_ms, answers.append)
    solo.take()
    follower = Solo(3)
    follower.node.producer_sequence("p", 0, answers.append)
    follower.take()

    assert answers[0] == 0
    assert isinstance(answers[1], InvalidRequestError)
    assert isinstance(answers[2], NotLeaderError)


class Prepared:
    """Makes the bodies that are asked for."""

    def __init__(self, *bodies: bytes) -> None:
        self.all = bodies
        self.calls: list[object] = []

    def bodies(self, term: Term, stored: int = 0) -> list[bytes] | DLedgerError:
        self.calls.append((term, stored))
        return list(self.all[stored:])

    def placed(self, batch: AppendedBatch | None) -> None:
        self.calls.append(None if batch is None else batch.first_index)


def append_prepared(solo: Solo, prepared: Prepared, sequence: int) -> Outcome[AppendedBatch]:
    outcome: Outcome[AppendedBatch] = Outcome()
    solo.node.quorum_ack.append_prepared(
        prepared, solo.now_ms, outcome, ProducerBatch("p", sequence, len(prepared.all))
    )
    solo.take()
    return outcome


def test_a_prepared_batch_is_made_for_its_new_entries_only() -> None:
    """And not at all when nothing is new: it must give out nothing for what is there."""
    solo = leading()
    first, rest, none = Prepared(b"a", b"b"), Prepared(b"b", b"c"), Prepared(b"a", b"b", b"c")

    outcomes = [append_prepared(solo, first, 0), append_prepared(solo, rest, 1), append_prepared(solo, none, 0)]
    commit(solo)

    assert first.calls == [(1, 0), 2]
    assert rest.calls == [(1, 1), 4]
    assert none.calls == []
    assert [len(outcome.value.positions) for outcome in outcomes] == [2, 1, 0]
    assert sum(run.count for run in outcomes[2].value.duplicates) == 3
    assert bodies_of(solo) == [b"a", b"b", b"c"]


def test_a_prepared_batch_out_of_order_is_not_made() -> None:
    """Its place would be another one when it comes again."""
    solo = leading()
    prepared = Prepared(b"x")

    assert isinstance(settled(solo, append_prepared(solo, prepared, 3)).error, UnknownProducerError)
    assert prepared.calls == []
