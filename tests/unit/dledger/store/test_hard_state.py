"""Term and vote: once saved, no crash takes them back, whatever it does to the next save."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, DiskError
from dledger.store.durable_state import HARD_STATE_FILE, SLOT_BYTES, FileHardState, create_hard_state, read_hard_state
from dledger.types import HardState, NodeId, Standing, Term
from tests.crash.crash_fs import Change, RecordingFs, crash_states
from tests.unit.dledger.store.support import UnsyncedFs

SLOTS = range(4)
VOTED = HardState(Term(3), NodeId("n1"), Standing.FULL)
NEXT = HardState(Term(4), NodeId("n2"), Standing.FULL)


def counts(state: HardState) -> bool:
    return state.standing.counts


def saved(directory: Path, fs: RecordingFs) -> FileHardState:
    """A file that has had several saves, the last of them ``VOTED``."""
    directory.mkdir()
    create_hard_state(fs, directory, HardState(Term(1)))
    file = FileHardState(fs, directory)
    file.save(HardState(Term(2), NodeId("n0"), Standing.FULL))
    file.save(VOTED)
    return file


def spoilt(directory: Path, target: Path, slots: tuple[int, ...]) -> Path:
    """A copy of the file in which these slots are unreadable."""
    target.mkdir(exist_ok=True)
    raw = bytearray((directory / HARD_STATE_FILE).read_bytes())
    for number in slots:
        raw[number * SLOT_BYTES : number * SLOT_BYTES + 64] = b"\x55" * 64
    (target / HARD_STATE_FILE).write_bytes(raw)
    return target


def torn(before: bytes, writes: list[Change]) -> Iterator[tuple[bool, bytes]]:
    """What a power cut leaves of unsynced writes: each one as before, done, or neither; and whether all are neither."""
    for fates in itertools.product(("before", "done", "neither"), repeat=len(writes)):
        raw = bytearray(before)
        for fate, write in zip(fates, writes, strict=True):
            if fate != "before":
                data = write.data if fate == "done" else b"\x55" * len(write.data)
                raw[write.offset : write.offset + len(data)] = data
        yield set(fates) == {"neither"}, bytes(raw)


def test_a_save_syncs_once(tmp_path: Path) -> None:
    """A vote waits for it; the mirror for people is written later."""
    fs = RecordingFs()
    file = saved(tmp_path / "node", fs)
    before = len(fs.changes)

    file.save(NEXT)

    assert [change.kind for change in fs.changes[before:]] == ["write", "write", "sync"]
    file.mirror()
    assert (tmp_path / "node" / "currterm").read_text() == "voteLeader=n2\ncurrTerm=4\n"
    before = len(fs.changes)
    file.mirror()
    file.close()
    assert len(fs.changes) == before, "it is up to date"


class FullFs(RecordingFs):
    """Creates no file, on demand."""

    full = False

    def create(self, path: Path) -> int:
        if self.full:
            raise OSError
        return super().create(path)


def test_a_mirror_that_found_no_room_is_written_later(tmp_path: Path) -> None:
    """It stops nothing, and people and Java's tools see no old term for ever."""
    fs = FullFs()
    file = saved(tmp_path / "node", fs)
    fs.full = True
    file.mirror()
    assert not (tmp_path / "node" / "currterm").exists()
    fs.full = False

    file.mirror()

    assert (tmp_path / "node" / "currterm").read_text() == "voteLeader=n1\ncurrTerm=3\n"
    file.close()


def test_a_torn_save_takes_back_no_saved_vote(tmp_path: Path) -> None:
    """Whatever a power cut leaves of both sectors; that both are spoilt takes the member's vote, but not the state."""
    fs, directory, target = RecordingFs(), tmp_path / "node", tmp_path / "crash"
    file = saved(directory, fs)
    before = (directory / HARD_STATE_FILE).read_bytes()
    start = len(fs.changes)
    file.save(NEXT)
    file.close()
    writes = [change for change in fs.changes[start:] if change.kind == "write" and change.path.name == HARD_STATE_FILE]
    target.mkdir()

    found = []
    for both_spoilt, raw in torn(before, writes):
        (target / HARD_STATE_FILE).write_bytes(raw)
        state = read_hard_state(target)
        assert state in (VOTED, NEXT) if not both_spoilt else (state.term, counts(state)) == (VOTED.term, False)
        found.append(state)
    assert {VOTED, NEXT} < set(found)


@pytest.mark.parametrize("slots", [bad for size in (1, 2, 3) for bad in itertools.combinations(SLOTS, size)])
def test_bad_slots_bring_back_no_older_vote_that_counts(tmp_path: Path, slots: tuple[int, ...]) -> None:
    """One leaves the newest state; several leave it, or a member without a vote; opening makes all copies good."""
    fs, directory, target = RecordingFs(), tmp_path / "node", tmp_path / "bad"
    saved(directory, fs).close()
    spoilt(directory, target, slots)

    state = read_hard_state(target)

    assert state == VOTED if len(slots) == 1 else state == VOTED or not counts(state)
    FileHardState(UnsyncedFs(), target).close()
    for one in SLOTS:
        again = read_hard_state(spoilt(target, tmp_path / "again", (one,)))
        assert again == state


def test_a_file_without_a_readable_slot_is_refused(tmp_path: Path) -> None:
    """Defaults would be a forgotten vote."""
    fs, directory = RecordingFs(), tmp_path / "node"
    saved(directory, fs).close()

    with pytest.raises(CorruptLogError, match="--repair"):
        read_hard_state(spoilt(directory, tmp_path / "bad", tuple(SLOTS)))


class KilledInSyncFs(RecordingFs):
    """Its process is killed before a sync, on demand: what was written is in the page cache, and on no disk."""

    killed = False

    def sync(self, fd: int) -> None:
        if self.killed:
            raise OSError
        super().sync(fd)


@pytest.mark.parametrize("lost", [(), (0,), (1,)])
def test_what_a_start_reads_no_later_power_cut_takes_back(tmp_path: Path, lost: tuple[int, ...]) -> None:
    """A process was killed within a save, with all or a part of it written: the next one speaks in that term, maybe
    without another save.
    """
    fs, directory = KilledInSyncFs(), tmp_path / "node"
    file = saved(directory, fs)
    before = (directory / HARD_STATE_FILE).read_bytes()
    fs.killed = True
    with pytest.raises(DiskError):
        file.save(NEXT)
    fs.killed = False
    writes = [change for change in fs.changes[-2:] if change.kind == "write"]
    for number in lost:
        at = writes[number].offset
        fs.write(fs.open(directory / HARD_STATE_FILE), before[at : at + SLOT_BYTES], at)

    again = FileHardState(fs, directory)

    assert again.load() == NEXT
    for number, crash in enumerate(crash_states(fs.changes, len(fs.changes), subsets=8)):
        crash.write_to(directory, tmp_path / f"crash-{number}")
        for one in SLOTS:
            assert read_hard_state(spoilt(tmp_path / f"crash-{number}", tmp_path / "bad", (one,))) == NEXT
    shutil.rmtree(directory)
