"""Crash enumeration: the store is cut at every write, sync, rename and unlink, with unsynced changes lost in many ways.

For every disk that can result: what was flushed is there, nothing is invented, nothing truncated comes back once the
truncation was flushed, and opening again changes nothing. Disks that hold the same are opened once.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dledger.store.durable_state import BOOT_RECORD_FILE, FileHardState, create_hard_state
from dledger.store.file_store import FileStore
from dledger.types import Boundary, HardState, LogIndex, NodeId, Position, Standing, Term
from tests.crash.crash_fs import Change, RecordingFs, crash_states, sectors_lost
from tests.support.damage import turn
from tests.support.sweeps import fewer, thinned
from tests.unit.dledger.store.support import FakeClock, UnsyncedFs, abandon, bodies_of, fill, open_store, small_config


@dataclass
class Version:
    """The log as the caller knew it from change ``since`` on."""

    since: int
    begin: int
    entries: dict[int, bytes]
    last: int


@dataclass
class Recorder:
    """Drives a store and keeps every version of the log, and where flushes were acknowledged."""

    store: FileStore
    fs: RecordingFs
    versions: list[Version] = field(default_factory=list)
    flushed: list[tuple[int, int]] = field(default_factory=list)
    """(number of changes, number of the version) at each acknowledged flush."""
    _entries: dict[int, bytes] = field(default_factory=dict)

    def note(self) -> None:
        """Keep the present version."""
        log = self.store
        for index in range(log.begin.index + 1, log.last.index + 1):
            self._entries[index] = log.read(LogIndex(index)).body
        entries = {index: body for index, body in self._entries.items() if index <= log.last.index}
        self.versions.append(Version(len(self.fs.changes), log.begin.index, entries, log.last.index))

    def fill(self, count: int, size: int = 60, term: int = 1) -> None:
        fill(self.store, count, size, term)
        self.note()

    def truncate(self, index: int) -> None:
        self.store.truncate(LogIndex(index))
        for gone in [one for one in self._entries if one >= index]:
            del self._entries[gone]
        self.note()

    def reset(self, begin: Boundary) -> None:
        self.store.reset(begin)
        self._entries.clear()
        self.note()

    def flush(self) -> None:
        self.store.flush()
        self.flushed.append((len(self.fs.changes), len(self.versions) - 1))

    def clean(self) -> None:
        self.store.clean(self.store.committed_index)
        self.note()


def _appends(run: Recorder) -> None:
    run.fill(3)
    run.flush()
    run.fill(4)
    run.store.sync_checkpoint()
    run.fill(4, size=100)
    run.flush()
    run.fill(2)


def _truncations(run: Recorder) -> None:
    run.fill(9)
    run.flush()
    run.store.sync_checkpoint()
    run.truncate(4)
    run.fill(1, term=1)
    run.flush()
    run.fill(6, term=2)
    run.truncate(6)
    run.fill(3, term=3)
    run.flush()


def _same_again_after_truncation(run: Recorder) -> None:
    # The entry that is appended again is the very one that was dropped, so the stale record behind it would fit.
    run.fill(8)
    run.flush()
    run.truncate(5)
    run.flush()
    run.fill(1)
    run.flush()


def _truncation_then_roll(run: Recorder) -> None:
    run.fill(14)
    run.flush()
    run.truncate(2)
    run.flush()
    run.fill(8, term=2)
    run.flush()


def _truncation_back_to_a_recorded_mark(run: Recorder) -> None:
    run.fill(3)
    run.store.sync_checkpoint()
    run.fill(2)
    run.flush()
    run.truncate(3)
    run.flush()
    run.fill(1, term=2)
    run.flush()


def _reset(run: Recorder) -> None:
    run.fill(9)
    run.flush()
    run.store.sync_checkpoint()
    run.reset(Boundary(LogIndex(19), Term(5), Position(512), 77))
    run.fill(2, term=6)
    run.flush()


def _clean(run: Recorder) -> None:
    run.fill(16)
    run.flush()
    run.store.set_committed(LogIndex(12))
    run.clean()
    run.fill(3)
    run.flush()


def _warm(run: Recorder) -> None:
    run.fill(3)
    while run.store.warm():
        pass
    run.flush()
    run.fill(4)
    while run.store.warm():
        pass
    run.fill(3, size=200)
    run.flush()


def _stop(run: Recorder) -> None:
    run.fill(9)
    run.store.close()
    run.flushed.append((len(run.fs.changes), len(run.versions) - 1))


@dataclass(frozen=True, slots=True)
class Found:
    """What a disk held when it was opened."""

    begin: int
    last: int
    entries: dict[int, bytes]


def _found(disk: Path, sizes: dict[str, Any]) -> Found:
    """Open it, and once more, which must change nothing."""
    config = small_config(disk, **sizes)
    found = open_store(config)
    begin, last = found.begin.index, found.last.index
    entries = {index: found.read(LogIndex(index)).body for index in range(begin + 1, last + 1)}
    first = (found.begin, found.last, found.last_chain_crc, found.end_position)
    abandon(found)
    again = open_store(config)
    assert (again.begin, again.last, again.last_chain_crc, again.end_position) == first
    assert again.recovery_report.cut_at is None
    assert again.recovery_report.index_rewritten_from is None
    abandon(again)
    return Found(begin, last, entries)


def _check(found: Found, run: Recorder, at: int) -> str:
    """Why the recovered log is wrong; empty if it is one that the caller must expect."""
    acknowledged = [version for when, version in run.flushed if when <= at]
    start = acknowledged[-1] if acknowledged else 0
    versions = run.versions
    # A version is possible as soon as its operation began, which is when the one before was complete.
    window = [versions[start]] + [
        version for before, version in zip(versions[start:], versions[start + 1 :], strict=False) if before.since <= at
    ]
    begins = {version.begin for version in window}
    if found.begin not in begins:
        return f"begin {found.begin} not in {begins}"
    same_begin = [version for version in window if version.begin >= found.begin or version is window[0]]
    needed = min(version.last for version in same_begin) if acknowledged else found.begin
    if found.last < needed:
        return f"ends at {found.last}, flushed up to {needed}"
    entries = found.entries
    if not any(all(version.entries.get(i) == body for i, body in entries.items()) for version in window):
        return f"entries {entries} are of no version"
    return ""


_SCENARIOS = [
    _appends,
    _truncations,
    _same_again_after_truncation,
    _truncation_then_roll,
    _truncation_back_to_a_recorded_mark,
    _reset,
    _clean,
    _warm,
    _stop,
]


@pytest.mark.sweep
@pytest.mark.parametrize("scenario", _SCENARIOS, ids=lambda one: one.__name__.strip("_"))
def test_every_crash_leaves_a_log_that_keeps_its_promises(scenario: Callable[[Recorder], None], tmp_path: Path) -> None:
    """Flushed entries survive, nothing is invented, truncated ones stay gone, recovery is idempotent (traps 6, 7)."""
    base, retention = tmp_path / "run", {"disk_check_ratio": 1e-9, "retention_hours": 0} if scenario is _clean else {}
    sizes = {"segment_bytes": 512, "index_segment_bytes": 128, "warm_bytes": 128, **retention}
    fs = RecordingFs()
    store = open_store(small_config(base, **sizes), fs, FakeClock(4_000_000_000_000))
    run = Recorder(store, fs)
    start = len(fs.changes)
    run.note()
    scenario(run)

    found: dict[bytes, Found] = {}
    for at in thinned(range(start, len(fs.changes) + 1)):
        for state in crash_states(fs.changes, at):
            content = state.content
            if content not in found:
                disk = tmp_path / "disk"
                state.write_to(base, disk)
                found[content] = _found(disk, sizes)
                shutil.rmtree(disk)
            problem = _check(found[content], run, at)
            assert not problem, f"crash before change {at} ({fs.changes[at - 1]}), lost {state.lost}: {problem}"
    assert len(found) > fewer(20)
    abandon(store)


@pytest.mark.sweep
@pytest.mark.parametrize("number", [0, 1, 3], ids=["first", "middle", "last"])
def test_every_crash_of_a_repair_leaves_a_log_that_can_be_repaired(number: int, tmp_path: Path) -> None:
    """A segment that came from a peer takes the place of the damaged one, which is moved aside."""
    sizes, entries, committed = {"segment_bytes": 512, "index_segment_bytes": 128}, 16, 14
    base, fs = tmp_path / "run", RecordingFs()
    store, peer = open_store(small_config(base, **sizes), fs), open_store(small_config(tmp_path / "peer", **sizes))
    for one in (store, peer):
        bodies = fill(one, entries, 60)
        one.flush()
        one.set_committed(LogIndex(committed))
        one.sync_checkpoint()
    path = store.data_directories[0] / f"{number * 512:020d}"
    turn(path, 70)
    inode = fs.inode(path)
    fs.changes += [Change("write", path, inode, 70, path.read_bytes()[70:71]), Change("sync", path, inode)]
    start = len(fs.changes)
    assert store.segment_repair().repair(number * 512, peer.copy_committed).bases == (number * 512,)
    store.sync_checkpoint()

    seen: set[bytes] = set()
    for at in thinned(range(start, len(fs.changes) + 1), 4):
        for state in crash_states(fs.changes, at):
            if state.content in seen:
                continue
            seen.add(state.content)
            disk = tmp_path / "disk"
            state.write_to(base, disk)
            found = open_store(small_config(disk, **sizes), mend=True)
            for damage in found.damage_at_start:
                found.segment_repair().repair(int(damage.path.name), peer.copy_committed)
            found.segment_repair().repair(number * 512, peer.copy_committed)  # what a start does not look at
            last = found.last.index
            assert last >= committed
            assert bodies_of(found) == bodies[: last + 1]
            abandon(found)
            shutil.rmtree(disk)
    assert len(seen) >= fewer(8, 4)
    abandon(store)
    abandon(peer)


@pytest.mark.sweep
@pytest.mark.parametrize("flushed", [True, False])
@pytest.mark.parametrize("kept", [0, 3])
def test_a_power_cut_after_a_truncation_is_no_reason_for_doubt(*, flushed: bool, kept: int, tmp_path: Path) -> None:
    """Of what was written since the last sync any sectors are lost: then they are zeros, not the dropped entries'.

    That they are tells a torn write from damage; all members of a group may have truncated when its power fails.
    """
    base, fs = tmp_path / "run", RecordingFs()
    store = open_store(small_config(base), fs)
    store.hard_state.save(HardState(Term(1), NodeId("n0"), Standing.FULL))
    fill(store, kept)
    store.flush()
    fill(store, 5, size=400)
    if flushed:
        store.flush()
    store.truncate(LogIndex(kept))
    start = len(fs.changes)
    fill(store, 4, size=450, term=2, batch=1)

    dice = random.Random(kept)
    for at in range(start, len(fs.changes) + 1):
        for _ in range(fewer(30)):
            disk = tmp_path / "disk"
            sectors_lost(fs.changes, at, store.data_directories[0] / f"{0:020d}", dice).write_to(base, disk)
            (disk / "dledger-n0" / BOOT_RECORD_FILE).unlink(missing_ok=True)  # of files that were not copied
            found = open_store(small_config(disk))
            assert found.hard_state.load().doubt == ""
            assert found.last.index >= kept - 1
            abandon(found)
            shutil.rmtree(disk)
    abandon(store)


def test_a_first_start_can_be_cut_anywhere(tmp_path: Path) -> None:
    """A directory that was never completed is simply created again."""
    fs = RecordingFs()
    base = tmp_path / "run"
    abandon(open_store(small_config(base), fs))

    for at in range(len(fs.changes) + 1):
        for state in crash_states(fs.changes, at):
            disk = tmp_path / "disk"
            state.write_to(base, disk)
            store = open_store(small_config(disk))
            assert store.last.index == -1
            assert store.hard_state.load() == HardState()
            store.close()
            shutil.rmtree(disk, ignore_errors=True)


def test_a_vote_survives_a_crash_at_any_call(tmp_path: Path) -> None:
    """Once save returned, that state or a later one is loaded: no second vote in a term (Raft §5.2, trap 1)."""
    fs = RecordingFs()
    base = tmp_path / "run"
    base.mkdir()
    create_hard_state(fs, base, HardState())
    saved = FileHardState(fs, base)
    standings = {1: Standing.BLANK, 2: Standing.FULL, 3: Standing.DOUBTFUL}
    states = [HardState(), *(HardState(Term(t), NodeId(f"n{t}"), standings[t]) for t in (1, 2, 3))]
    done = [len(fs.changes)]
    for state in states[1:]:
        saved.save(state)
        done.append(len(fs.changes))
    saved.close()

    for at in range(done[0], done[-1] + 1):
        acknowledged = max(n for n, when in enumerate(done) if when <= at)
        for crash in crash_states(fs.changes, at):
            disk = tmp_path / "disk"
            crash.write_to(base, disk)
            found = FileHardState(UnsyncedFs(), disk)
            assert found.load() in states[acknowledged : acknowledged + 2]
            found.close()
            shutil.rmtree(disk)
