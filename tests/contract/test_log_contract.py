"""What every ``Log`` promises, whether it lives in files or in memory (``dledger.core.ports.Log``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from dledger.core.ports import BatchHook, Log
from dledger.errors import (
    EntryTooLargeError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    InvariantError,
    MisplacedRunError,
    ShutdownError,
)
from dledger.types import (
    GENESIS,
    NO_ENTRY,
    NOOP_CHANNEL,
    Body,
    Boundary,
    CheckedRun,
    EntryId,
    LogIndex,
    Magic,
    Position,
    Term,
)
from tests.support.memory_store import MemoryStore
from tests.support.sweeps import thinned
from tests.unit.dledger.store.support import SEGMENT_BYTES, bodies_of, copy_log, fill, open_store, runs_of, small_config


class HookedLog(Log, Protocol):
    """A log that takes append hooks."""

    def add_batch_hook(self, hook: BatchHook) -> None: ...


MakeLog = Callable[[], HookedLog]


@pytest.fixture(params=["file", "memory"])
def make_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeLog]:
    made: list[HookedLog] = []

    def make() -> HookedLog:
        log: HookedLog
        if request.param == "memory":
            log = MemoryStore(segment_bytes=SEGMENT_BYTES)
        else:
            log = open_store(small_config(tmp_path / str(len(made))))
        made.append(log)
        return log

    yield make
    for log in made:
        log.close()


@pytest.fixture
def log(make_log: MakeLog) -> HookedLog:
    return make_log()


def test_an_empty_log_starts_after_genesis(log: Log) -> None:
    """A new log holds nothing and says so in every way."""
    assert (log.begin, log.last, log.last_chain_crc, log.end_position) == (GENESIS, NO_ENTRY, 0, 0)
    assert (log.flushed.index, log.write_sequence, log.committed_index) == (-1, 0, -1)
    assert log.term_at(LogIndex(-1)) == -1
    assert log.chain_crc_at(LogIndex(-1)) == 0
    assert log.first_index_of_term(Term(0)) == 0
    with pytest.raises(IndexOutOfRangeError):
        log.read(LogIndex(0))
    with pytest.raises(IndexOutOfRangeError):
        log.read_at(Position(0))


def test_a_batch_gets_contiguous_indexes_and_positions(log: Log) -> None:
    """One record follows the other at a distance of its size (48 + body)."""
    batch = log.append_as_leader(Term(3), [b"a", b"", b"ccc"])

    assert (batch.term, batch.first_index, batch.last_index) == (3, 0, 2)
    assert batch.positions == (0, 49, 97)
    assert log.last == EntryId(Term(3), LogIndex(2))
    assert log.end_position == 148
    assert bodies_of(log) == [b"a", b"", b"ccc"]


def test_entries_read_back_with_all_their_fields(log: Log) -> None:
    """read, read_at, term_at and chain_crc_at agree about an entry."""
    log.append_as_leader(Term(1), [b"first"])
    batch = log.append_as_leader(Term(2), [b""], Magic.NOOP)

    entry = log.read(LogIndex(1))

    assert (entry.index, entry.term, entry.magic, entry.body) == (1, 2, Magic.NOOP, b"")
    assert entry.position == batch.positions[0]
    assert log.read_at(entry.position) == entry
    assert log.term_at(LogIndex(1)) == 2
    assert log.chain_crc_at(LogIndex(1)) == entry.chain_crc == log.last_chain_crc


def test_a_batch_may_cross_segments(log: Log) -> None:
    """An entry that does not fit with 8 bytes to spare starts the next segment; the batch stays one append."""
    batch = log.append_as_leader(Term(1), [b"x" * 1000] * 10)

    assert batch.positions == (0, 1048, 2096, 4096, 5144, 6192, 8192, 9240, 10288, 12288)
    assert log.write_sequence == 1
    assert bodies_of(log) == [b"x" * 1000] * 10


@pytest.mark.sweep
@pytest.mark.parametrize("rest", thinned(range(-64, 65)))
def test_rollover_is_exact_to_the_byte(make_log: MakeLog, rest: int) -> None:
    """The second record stays in the segment exactly if its size + 8 fits what the first left."""
    log = make_log()
    log.append_as_leader(Term(1), [b"x" * 952])
    size = SEGMENT_BYTES - 1000 + rest

    batch = log.append_as_leader(Term(1), [b"y" * (size - 48), b"z"])

    assert batch.positions[0] == (1000 if rest <= -8 else SEGMENT_BYTES)
    assert bodies_of(log) == [b"x" * 952, b"y" * (size - 48), b"z"]


@pytest.mark.sweep
@pytest.mark.parametrize("surplus", thinned(range(-64, 65)))
def test_an_entry_as_large_as_a_segment(make_log: MakeLog, surplus: int) -> None:
    """Up to segment - 8 bytes are stored; more is refused before anything rolls, wherever it is in the batch."""
    log = make_log()
    body = b"x" * (SEGMENT_BYTES + surplus - 48)

    if surplus <= -8:
        assert log.append_as_leader(Term(1), [b"a" * 64, body]).positions == (0, SEGMENT_BYTES)
        assert log.read(LogIndex(1)).body == body
    else:
        with pytest.raises(EntryTooLargeError):
            log.append_as_leader(Term(1), [b"a", body])
        assert (log.last, log.end_position) == (NO_ENTRY, 0)


def test_an_empty_batch_is_refused(log: Log) -> None:
    """Appending nothing is a mistake of the caller."""
    with pytest.raises(InvalidRequestError):
        log.append_as_leader(Term(1), [])


def test_a_term_below_the_last_is_a_bug(log: Log) -> None:
    """Terms never decrease along the log (Raft §5.3)."""
    log.append_as_leader(Term(2), [b"a"])
    with pytest.raises(InvariantError):
        log.append_as_leader(Term(1), [b"b"])


def test_batch_hooks_see_each_segments_part_of_a_batch_at_once(log: HookedLog) -> None:
    """Bodies that are ``bytearray`` are patched in place; what is stored, and its CRC, is what the hook gives back."""
    seen: list[list[int]] = []

    def hook(positions: Sequence[int], bodies: Sequence[Body]) -> Sequence[Body]:
        seen.append(list(positions))
        return [_stamp(body, position) for position, body in zip(positions, bodies, strict=True)]

    log.add_batch_hook(hook)
    batch = log.append_as_leader(Term(1), [bytearray(b"..a"), b"..b", b"x" * 4000])
    log.append_as_leader(Term(1), [b"..n"], Magic.NOOP)

    assert seen == [[0, 51], [4096]]
    assert batch.positions == (0, 51, 4096)
    assert [body[:4] for body in bodies_of(log)] == [b"00a", b"51b", b"96xx", b"..n"]


def _stamp(body: Body, position: int) -> Body:
    patched = body if isinstance(body, bytearray) else bytearray(body)
    patched[:2] = b"%02d" % (position % 100 if position else 0)
    return patched


def test_a_batch_hook_must_keep_lengths(log: HookedLog) -> None:
    """Positions were fixed before it ran."""
    log.add_batch_hook(lambda _positions, bodies: [*bodies, b""])
    with pytest.raises(InvariantError, match="must not change the length"):
        log.append_as_leader(Term(1), [b"a"])


def test_a_no_op_in_ordinary_form_passes_the_hooks_and_is_copied_as_it_is(make_log: MakeLog) -> None:
    """It must look like any other record to a Java reader, on every member; the chain covers the channel."""
    leader, follower = make_log(), make_log()
    leader.add_batch_hook(
        lambda positions, bodies: [_stamp(one, at) for at, one in zip(positions, bodies, strict=True)]
    )
    leader.append_as_leader(Term(1), [b"..a"])
    leader.append_as_leader(Term(2), [b"..n"], Magic.NORMAL, channel=NOOP_CHANNEL)
    leader.append_as_leader(Term(2), [b"..b"])

    copy_log(leader, follower, 1 << 20)

    for log in (leader, follower):
        assert [(one.magic, one.channel) for one in log.read_range(LogIndex(0), LogIndex(2), 1 << 20)] == [
            (Magic.NORMAL, 0),
            (Magic.NOOP, NOOP_CHANNEL),
            (Magic.NORMAL, 0),
        ]
        assert bodies_of(log) == [b"00a", b"51n", b"02b"]


def test_runs_copy_a_log_byte_for_byte(make_log: MakeLog) -> None:
    """A follower fed by runs has the same positions, chain and bytes, whatever the size of the runs."""
    leader = make_log()
    fill(leader, 60, size=200)

    for max_bytes in (1, 700, 1 << 20):
        follower = make_log()
        copy_log(leader, follower, max_bytes)
        assert (follower.last, follower.end_position) == (leader.last, leader.end_position)
        assert follower.last_chain_crc == leader.last_chain_crc
        assert [r.data for r in runs_of(follower)] == [r.data for r in runs_of(leader)]


def test_slice_run_takes_at_least_one_entry_and_stays_in_a_segment(log: Log) -> None:
    """A run ends at the last entry within the limit or at the segment's end."""
    fill(log, 60, size=200)

    assert log.slice_run(LogIndex(0), 0) == 0
    assert log.slice_run(LogIndex(0), 248) == 0
    assert log.slice_run(LogIndex(0), 495) == 0
    assert log.slice_run(LogIndex(0), 496) == 1
    assert log.slice_run(LogIndex(0), 1 << 20) == 15
    assert log.slice_run(LogIndex(16), 1 << 20) == 31
    assert log.slice_run(LogIndex(59), 1 << 20) == 59
    with pytest.raises(IndexOutOfRangeError):
        log.slice_run(LogIndex(60), 1)
    with pytest.raises(InvalidRequestError):
        log.read_run(LogIndex(15), LogIndex(16))


def test_part_of_a_run_can_be_appended(make_log: MakeLog) -> None:
    """A run that overlaps what is there is appended from the first missing entry on."""
    leader, follower = make_log(), make_log()
    bodies = fill(leader, 10)
    run = leader.read_run(LogIndex(0), LogIndex(9))
    first = leader.read_run(LogIndex(0), LogIndex(3))
    follower.append_run(follower.check_run(first), LogIndex(0))

    last = follower.append_run(follower.check_run(run), LogIndex(4))

    assert last == leader.last
    assert bodies_of(follower) == bodies


def test_a_run_read_again_after_a_truncation_is_the_new_one(make_log: MakeLog) -> None:
    """Whoever keeps what was read last must not give a follower what is no longer in the log."""
    log = make_log()
    fill(log, 4)
    old = log.read_run(LogIndex(2), LogIndex(3))
    assert log.read_run(LogIndex(2), LogIndex(3)) == old

    log.truncate(LogIndex(3))
    with pytest.raises(IndexOutOfRangeError):
        log.read_run(LogIndex(2), LogIndex(3))
    log.append_as_leader(Term(9), [b"another"])

    new = log.read_run(LogIndex(2), LogIndex(3))
    assert log.check_run(new).last == log.last
    assert new.data != old.data


def test_a_checked_run_names_its_noops(make_log: MakeLog) -> None:
    """Both forms, and nothing else: followers look there for configurations (M2)."""
    log = make_log()
    log.append_as_leader(Term(1), [b""], Magic.NOOP)
    log.append_as_leader(Term(1), [b"x"] * 3, channel=7)
    log.append_as_leader(Term(1), [b"noop"] * 2, channel=NOOP_CHANNEL)
    log.append_as_leader(Term(1), [b"y"], channel=1 << 30)

    assert _checked(log, 0, 6).noops == (0, 4, 5)
    assert _checked(log, 1, 3).noops == ()


def _checked(log: Log, first: int, last: int) -> CheckedRun:
    return log.check_run(log.read_run(LogIndex(first), LogIndex(last)))


def test_a_run_that_does_not_continue_the_log_is_refused(make_log: MakeLog) -> None:
    """Wrong index, term, chain or position: nothing written, nothing poisoned."""
    leader, other, follower = make_log(), make_log(), make_log()
    fill(leader, 10)
    fill(other, 10, size=101)
    copy_log(leader, follower)
    fill(leader, 3)
    fill(other, 3, size=100)
    follower.truncate(LogIndex(8))
    before = (follower.last, follower.end_position, follower.last_chain_crc)

    for checked, at in [
        (_checked(leader, 9, 10), 9),
        (_checked(leader, 9, 10), 8),
        (_checked(leader, 8, 10), 9),
        (_checked(leader, 0, 7), 8),
        (_checked(other, 8, 10), 8),
    ]:
        with pytest.raises(MisplacedRunError):
            follower.append_run(checked, LogIndex(at))
        assert (follower.last, follower.end_position, follower.last_chain_crc) == before
    run = _checked(leader, 8, 10)
    wrong_term = replace(run, run=replace(run.run, previous=EntryId(Term(0), LogIndex(7))))
    with pytest.raises(MisplacedRunError):
        follower.append_run(wrong_term, LogIndex(8))
    follower.append_run(run, LogIndex(8))
    assert follower.read(LogIndex(8)).body == leader.read(LogIndex(8)).body


def test_any_flipped_bit_in_a_run_is_found(make_log: MakeLog) -> None:
    """Every byte of a run is vouched for by a field check or a CRC."""
    leader = make_log()
    leader.append_as_leader(Term(1), [b"zero"])
    leader.append_as_leader(Term(2), [b"one", b"two"])
    run = leader.read_run(LogIndex(1), LogIndex(2))

    for at in range(len(run.data)):
        data = bytearray(run.data)
        data[at] ^= 0x10
        with pytest.raises(InvalidRequestError, match=r"entry \d of the run"):
            leader.check_run(replace(run, data=bytes(data)))


def test_a_run_must_be_what_it_says(log: Log) -> None:
    """Truncated, overlong, misnumbered, misplaced and wrongly chained runs are refused."""
    fill(log, 5)
    run = log.read_run(LogIndex(1), LogIndex(3))

    for wrong in (
        replace(run, data=run.data[:-1]),
        replace(run, data=run.data + bytes(48)),
        replace(run, data=run.data + b"\x01"),
        replace(run, data=b""),
        replace(run, last_index=LogIndex(2)),
        replace(run, last_index=LogIndex(4)),
        replace(run, first_index=LogIndex(2)),
        replace(run, position=Position(run.position + 1)),
        replace(run, previous_chain_crc=1),
        replace(run, previous=EntryId(Term(2), LogIndex(0))),
    ):
        with pytest.raises(InvalidRequestError):
            log.check_run(wrong)


def test_truncation_removes_the_tail_for_good(log: Log) -> None:
    """After a truncation the log ends after the entry before, and goes on from there."""
    bodies = fill(log, 60, size=200)
    end, chain = log.read(LogIndex(20)).position, log.chain_crc_at(LogIndex(19))

    log.truncate(LogIndex(60))
    assert log.last.index == 59
    log.truncate(LogIndex(20))

    assert (log.last.index, log.end_position, log.last_chain_crc) == (19, end, chain)
    with pytest.raises(IndexOutOfRangeError):
        log.read(LogIndex(20))
    with pytest.raises(IndexOutOfRangeError):
        log.read_at(end)
    more = fill(log, 10, term=2)
    assert bodies_of(log) == bodies[:20] + more


def test_truncation_at_a_segments_first_entry_takes_the_blank_along(log: Log) -> None:
    """The log then ends inside the earlier segment, where every replica would go on."""
    log.append_as_leader(Term(1), [b"x" * 1000] * 4)

    log.truncate(LogIndex(3))

    assert log.end_position == 3 * 1048
    assert log.append_as_leader(Term(1), [b"small"]).positions == (3 * 1048,)


def test_truncation_to_nothing(log: Log) -> None:
    """All entries may go as long as none is committed."""
    fill(log, 60)

    log.truncate(LogIndex(0))

    assert (log.last, log.end_position, log.last_chain_crc) == (NO_ENTRY, 0, 0)
    assert fill(log, 3) == bodies_of(log)


def test_committed_entries_cannot_be_truncated(log: Log) -> None:
    """Truncation at or below the commit index is fatal (reliability trap 19)."""
    fill(log, 10)
    log.set_committed(LogIndex(4))

    with pytest.raises(InvariantError):
        log.truncate(LogIndex(4))
    log.truncate(LogIndex(5))

    assert log.last.index == 4


def test_the_commit_index_only_grows_within_the_log(log: Log) -> None:
    """It never decreases and never exceeds the last index (reliability trap 23)."""
    fill(log, 10)
    log.set_committed(LogIndex(4))
    log.set_committed(LogIndex(2))

    assert log.committed_index == 4
    with pytest.raises(InvariantError):
        log.set_committed(LogIndex(10))


@pytest.mark.parametrize("position", [2 * SEGMENT_BYTES, SEGMENT_BYTES + 500])
def test_reset_starts_an_empty_log_after_the_boundary(log: Log, position: int) -> None:
    """Everything before the boundary is gone, the boundary itself is known, and the chain goes on from it."""
    fill(log, 20)
    begin = Boundary(LogIndex(99), Term(7), Position(position), 0xCAFE)

    log.reset(begin)

    assert (log.begin, log.last, log.end_position) == (begin, EntryId(Term(7), LogIndex(99)), position)
    assert (log.term_at(LogIndex(99)), log.chain_crc_at(LogIndex(99))) == (7, 0xCAFE)
    assert log.flushed.index == 99
    assert log.committed_index == 99
    with pytest.raises(IndexBeforeBeginError):
        log.term_at(LogIndex(98))
    with pytest.raises(IndexBeforeBeginError):
        log.read(LogIndex(99))
    with pytest.raises(IndexBeforeBeginError):
        log.read_at(Position(0))
    assert log.append_as_leader(Term(8), [b"new"]).positions == (position,)
    assert log.read(LogIndex(100)).body == b"new"
    assert log.read_run(LogIndex(100), LogIndex(100)).previous == EntryId(Term(7), LogIndex(99))


def test_first_index_of_term(log: Log) -> None:
    """The first entry of a term, or where it would be."""
    for term, count in ((1, 3), (4, 2), (5, 1)):
        fill(log, count, term=term)

    assert [log.first_index_of_term(Term(term)) for term in range(7)] == [0, 0, 3, 3, 3, 5, 6]


def test_flush_advances_the_mark_to_the_last_entry(log: Log) -> None:
    """A change is durable when the flushed sequence has reached its number."""
    fill(log, 5)
    assert log.flushed.index == -1

    mark = log.flush()

    assert (mark.index, mark.sequence) == (4, log.write_sequence)
    assert log.flushed == mark == log.flush()


def test_truncating_flushed_entries_lowers_the_mark(log: Log) -> None:
    """The mark never exceeds the last index; the truncation itself is durable after the next flush."""
    fill(log, 10)
    log.flush()

    log.truncate(LogIndex(5))

    assert log.flushed.index == 4
    assert log.flushed.sequence < log.write_sequence
    assert log.flush().sequence == log.write_sequence


def test_read_range_respects_its_limits(log: Log) -> None:
    """At least one entry, then as many as fit, across segments."""
    bodies = fill(log, 60, size=200)

    def read(first: int, last: int, max_bytes: int) -> list[bytes]:
        return [entry.body for entry in log.read_range(LogIndex(first), LogIndex(last), max_bytes)]

    assert read(0, 100, 1 << 20) == bodies
    assert read(3, 9, 1 << 20) == bodies[3:10]
    assert read(3, 9, 0) == bodies[3:4]
    assert read(14, 50, 5 * 248) == bodies[14:19]
    assert read(14, 50, 5 * 248 - 1) == bodies[14:18]
    assert read(15, 50, 248) == bodies[15:16]
    with pytest.raises(IndexOutOfRangeError):
        read(60, 61, 100)
    with pytest.raises(IndexOutOfRangeError):
        read(5, 4, 100)


def test_indexes_outside_are_refused(log: Log) -> None:
    """Beyond the end and below -1 there is nothing."""
    fill(log, 3)

    for index in (-2, 3, 1 << 40):
        with pytest.raises(IndexOutOfRangeError):
            log.term_at(LogIndex(index))
        with pytest.raises(IndexOutOfRangeError):
            log.chain_crc_at(LogIndex(index))
    for position in (-1, 1, 149, 444, 1 << 40):
        with pytest.raises(IndexOutOfRangeError):
            log.read_at(Position(position))


def test_close_is_idempotent_and_final(log: Log) -> None:
    """A closed log refuses instead of crashing."""
    fill(log, 3)

    log.close()
    log.close()

    with pytest.raises(ShutdownError):
        log.append_as_leader(Term(1), [b"x"])
    with pytest.raises(ShutdownError):
        log.read(LogIndex(0))
    with pytest.raises(ShutdownError):
        log.flush()


def test_positions_and_channels_of_a_range(log: Log) -> None:
    """Over several segments: runs of equal channels, and a NOOP's mark for both forms of a NOOP."""
    log.append_as_leader(Term(1), [b""], Magic.NOOP)
    first = log.append_as_leader(Term(1), [bytes(50)] * 20)
    second = log.append_as_leader(Term(1), [b"x"] * 3, channel=7)
    log.append_as_leader(Term(1), [b"noop"], channel=NOOP_CHANNEL)
    third = log.append_as_leader(Term(1), [b"y"] * 2, channel=1 << 30)

    assert log.channel_runs(LogIndex(0), log.last.index) == [
        (NOOP_CHANNEL, 0, 1),
        (0, 1, 20),
        (7, 21, 3),
        (NOOP_CHANNEL, 24, 1),
        (1 << 30, 25, 2),
    ]
    assert log.channel_runs(LogIndex(22), LogIndex(24)) == [(7, 22, 2), (NOOP_CHANNEL, 24, 1)]
    positions = log.positions(LogIndex(1), log.last.index)
    assert positions[:23] == first.positions + second.positions
    assert positions[24:] == third.positions


def test_positions_and_channels_are_of_kept_entries_only(log: Log) -> None:
    """The errors of ``term_at``."""
    fill(log, 3)

    for read in (log.positions, log.channel_runs):
        with pytest.raises(IndexOutOfRangeError):
            read(LogIndex(0), LogIndex(3))
        with pytest.raises(IndexBeforeBeginError):
            read(LogIndex(-1), LogIndex(2))
