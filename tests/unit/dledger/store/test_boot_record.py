"""What a start finds out about the life before it: exact marks after a kill, doubt after power cuts and copies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from dledger.config import FlushMode, StoreConfig
from dledger.errors import CorruptLogError, DiskError
from dledger.store import durable_state
from dledger.store.durable_state import (
    BOOT_RECORD_FILE,
    FileHardState,
    Inode,
    LogCheckpoint,
    LogCheckpointFile,
    last_life,
)
from dledger.store.file_store import FileStore
from dledger.store.quarantine import set_aside_damaged
from dledger.store.recovery import SECTOR_BYTES
from dledger.types import HardState, LogIndex, NodeId, Standing, Term
from tests.unit.dledger.store.support import abandon, fill, open_store, small_config

_VOTER = HardState(Term(1), NodeId("n0"), Standing.FULL)


def _new(config: StoreConfig) -> FileStore:
    """A member with standing and a log of 20 entries, all acknowledged one by one."""
    store = open_store(config)
    store.hard_state.save(_VOTER)
    for _ in range(20):
        fill(store, 1, size=700)
        store.flush()
    return store


def _standing(store: FileStore) -> tuple[Standing, str]:
    state = store.hard_state.load()
    store.close()
    return state.standing, state.doubt


def _turn(store: FileStore, index: int, offset: int) -> None:
    position = store.positions(LogIndex(index), LogIndex(index))[0] + offset
    path = store.data_directories[0] / f"{position - position % 4096:020d}"
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, position % 4096)[0] ^ 4]), position % 4096)
    os.close(fd)


def _put_back(path: Path, content: bytes) -> None:
    """Set a file back in place, as a power cut does to what was not synced."""
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, content, 0)
    os.close(fd)


@pytest.mark.parametrize("index", [0, 10, 18, 19])
@pytest.mark.parametrize("mode", FlushMode)
def test_a_turned_bit_in_what_was_flushed_before_a_kill_is_refused(tmp_path: Path, index: int, mode: FlushMode) -> None:
    """The mark is written before anybody is told of a flush: after a kill nothing acknowledged is taken for torn."""
    config = small_config(tmp_path, flush_mode=mode, recovery_verify_bytes=1 << 20)
    store = _new(config)
    _turn(store, index, 100)
    abandon(store)

    with pytest.raises(CorruptLogError, match=f"bodyCrc of entry {index} does not match"):
        open_store(config)


def test_nobody_hears_of_a_flush_before_a_mark_tells_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any thread may acknowledge what is told as flushed; after a kill the mark alone proves that it was."""
    store = open_store(small_config(tmp_path))
    marks: list[tuple[int, int]] = []
    write = LogCheckpointFile.write

    def written(file: LogCheckpointFile, current: Callable[[], LogCheckpoint]) -> None:
        marks.append((store.flushed.index, current().flushed.index))
        write(file, current)

    with monkeypatch.context() as patch:
        patch.setattr(LogCheckpointFile, "write", written)
        for _ in range(2):
            fill(store, 5)
            store.flush()
    assert store.flushed.index == 9
    store.close()

    assert marks == [(-1, 4), (4, 9)]


def test_a_flush_that_a_truncation_overtakes_leaves_no_mark_above_the_log(tmp_path: Path) -> None:
    """What is written down as flushed is lowered with what is told, whichever of them is further."""
    config = small_config(tmp_path)
    store = _new(config)
    state = store._state

    def truncated() -> durable_state.LastLife:
        store.truncate(LogIndex(10))
        return durable_state.LastLife()

    fill(store, 1)
    begun = state.begin_flush()
    assert begun is not None
    state.synced()
    store._checkpoint_file.write(state.checkpoint)
    truncated()
    state.end_flush(begun[1])
    abandon(store)

    reopened = open_store(config)

    assert reopened.last.index == 9
    assert _standing(reopened) == (Standing.FULL, "")


@pytest.mark.parametrize("body", [bytes(1200), b"." * 1200], ids=["zeros", "full"])
@pytest.mark.parametrize("torn", [False, True])
def test_after_a_power_cut_only_what_a_torn_write_explains_is_cut_without_doubt(
    tmp_path: Path, body: bytes, *, torn: bool
) -> None:
    """A bit that turned behind an old mark looks like the end of the log; a write in part leaves sectors of zeros.

    So may a body's own.
    """
    config = small_config(tmp_path)
    store = _new(config)
    checkpoint = store.directory / "checkpoint"
    old = checkpoint.read_bytes()
    for _ in range(3):
        store.append_as_leader(Term(1), [b"begin" + body + b"end"])
        store.flush()
    _turn(store, 21, 100)
    if torn:
        _turn(store, 21, 101)
        position = store.positions(LogIndex(21), LogIndex(21))[0] + SECTOR_BYTES
        path = store.data_directories[0] / f"{position - position % 4096:020d}"
        sector = position % 4096 // SECTOR_BYTES * SECTOR_BYTES
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, bytes(SECTOR_BYTES), sector)
        os.close(fd)
    abandon(store)
    _put_back(checkpoint, old)

    reopened = open_store(config)

    assert reopened.last.index == 20
    report = reopened.recovery_report
    standing, doubt = _standing(reopened)
    assert doubt == report.doubt
    if torn:
        assert (standing, doubt) == (Standing.FULL, "")
    else:
        assert standing is Standing.DOUBTFUL
        assert "bodyCrc of entry 21" in doubt


@pytest.mark.parametrize(
    ("mode", "booted", "clean", "standing"),
    [
        (FlushMode.ASYNC, True, False, Standing.DOUBTFUL),
        (FlushMode.ASYNC, True, True, Standing.FULL),
        (FlushMode.ASYNC, False, False, Standing.FULL),
        (FlushMode.SYNC, True, False, Standing.FULL),
    ],
)
def test_late_flushes_and_a_new_boot_of_the_machine_are_a_reason_for_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: FlushMode, standing: Standing, *, booted: bool, clean: bool
) -> None:
    """``flush_mode=async`` acknowledges what a power cut takes: whoever was cut off does not know what it said.

    What counts is how the last life flushed, not how this one is going to.
    """
    config = small_config(tmp_path, flush_mode=mode)
    store = _new(config)
    if clean:
        store.close()
    else:
        abandon(store)
    if booted:
        monkeypatch.setattr(durable_state, "kernel_boot_id", lambda: "another boot")

    reopened = open_store(replace(config, flush_mode=FlushMode.SYNC))

    assert reopened.hard_state.load().standing is standing
    assert ("flush_mode=async" in reopened.recovery_report.doubt) is (standing is Standing.DOUBTFUL)
    reopened.hard_state.save(_VOTER)
    abandon(reopened)
    assert _standing(open_store(config)) == (Standing.FULL, "")


def test_the_traces_tell_of_the_newest_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member whose flush mode was changed between two starts, with files and a machine that stayed the same."""
    config = small_config(tmp_path)
    _new(config).close()
    late = replace(config, flush_mode=FlushMode.ASYNC)
    abandon(open_store(late))
    monkeypatch.setattr(durable_state, "kernel_boot_id", lambda: "another boot")

    standing, doubt = _standing(open_store(late))

    assert standing is Standing.DOUBTFUL
    assert "flush_mode=async" in doubt


@pytest.mark.parametrize("clean", [True, False])
def test_a_copy_of_a_directory_is_in_doubt_once(tmp_path: Path, *, clean: bool) -> None:
    """Its member may have spoken after the copy was made. The copy is what counts from then on."""
    (tmp_path / "old").mkdir()
    config = small_config(tmp_path / "old")
    store = _new(config)
    if clean:
        store.close()
    else:
        abandon(store)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    copy = small_config(tmp_path / "new")

    standing, doubt = _standing(open_store(copy))

    assert standing is Standing.DOUBTFUL
    assert doubt == (
        "the directory was copied or restored (checkpoint, hard_state, identity changed since its last start)"
    )
    restored = open_store(copy)
    restored.hard_state.save(_VOTER)
    restored.close()
    assert _standing(open_store(copy)) == (Standing.FULL, "")
    assert _standing(open_store(config)) == (Standing.FULL, "")


def test_a_start_that_ends_before_its_doubt_is_durable_leaves_what_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power may fail twice: whatever tells of the doubt stays until the member's standing does."""
    (tmp_path / "old").mkdir()
    _new(small_config(tmp_path / "old")).close()
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    copy = small_config(tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(FileHardState, "save", Mock(side_effect=DiskError("the power failed")))
        with pytest.raises(DiskError, match="the power failed"):
            open_store(copy)

    assert _standing(open_store(copy))[0] is Standing.DOUBTFUL


def test_an_end_that_puts_a_member_in_doubt_is_cut_once_the_doubt_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the power fails in between, and the next start finds a log that looks whole."""
    config = small_config(tmp_path)
    store = _new(config)
    checkpoint = store.directory / "checkpoint"
    old = checkpoint.read_bytes()
    for _ in range(3):
        store.append_as_leader(Term(1), [b"." * 1200])
        store.flush()
    _turn(store, 21, 100)
    abandon(store)
    _put_back(checkpoint, old)
    with monkeypatch.context() as patch:
        patch.setattr(FileHardState, "save", Mock(side_effect=DiskError("the power failed")))
        with pytest.raises(DiskError, match="the power failed"):
            open_store(config)

    assert _standing(open_store(config))[0] is Standing.DOUBTFUL


def _restarted(store: FileStore) -> None:
    store.close()


def _renamed(store: FileStore) -> None:
    store.close()
    base = store.directory.parent
    base.rename(base.with_name("elsewhere"))
    base.with_name("elsewhere").rename(base)


def _voted(store: FileStore) -> None:
    for term in range(2, 9):
        store.hard_state.save(HardState(Term(term), NodeId("n1"), Standing.FULL))
    abandon(store)


@pytest.mark.parametrize("life", [_restarted, abandon, _renamed, _voted])
def test_ordinary_lives_are_no_reason_for_doubt(tmp_path: Path, life: Callable[[FileStore], None]) -> None:
    """Restarts, kills, moves within a file system, votes: the files stay what they are."""
    (tmp_path / "base").mkdir()
    config = small_config(tmp_path / "base")

    for _ in range(3):
        store = open_store(config)
        store.hard_state.save(replace(store.hard_state.load(), standing=Standing.FULL))
        fill(store, 3)
        life(store)

    assert _standing(open_store(config)) == (Standing.FULL, "")


def test_a_single_file_that_was_restored_is_a_reason_for_doubt(tmp_path: Path) -> None:
    """A copy of the votes put back over them brings back a vote that was taken since."""
    config = small_config(tmp_path)
    store = _new(config)
    store.close()
    path = store.directory / "hard_state"
    backup = path.read_bytes()
    path.rename(tmp_path / "aside")
    path.write_bytes(backup)

    standing, doubt = _standing(open_store(config))

    assert standing is Standing.DOUBTFUL
    assert "(hard_state changed since" in doubt


def test_a_directory_of_an_earlier_version_is_believed_and_leaves_traces_from_then_on(tmp_path: Path) -> None:
    """Nothing is known of its last start."""
    config = small_config(tmp_path)
    store = _new(config)
    store.close()
    sound = (store.directory / BOOT_RECORD_FILE).read_bytes()
    (store.directory / BOOT_RECORD_FILE).unlink()

    assert _standing(open_store(config)) == (Standing.FULL, "")
    assert (store.directory / BOOT_RECORD_FILE).read_bytes() == sound


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"inodes": {"identity": 5}}', b"\xff"])
def test_traces_that_cannot_be_read_are_a_reason_for_doubt(tmp_path: Path, content: bytes) -> None:
    """They are small and say much; without them nobody knows, and doubt does no harm."""
    config = small_config(tmp_path)
    store = _new(config)
    store.close()
    (store.directory / BOOT_RECORD_FILE).write_bytes(content)

    standing, doubt = _standing(open_store(config))

    assert standing is Standing.DOUBTFUL
    assert "unreadable" in doubt
    assert last_life(store.directory).replaced == ""


def test_a_log_set_aside_stays_blank_and_raises_no_doubt_later(tmp_path: Path) -> None:
    """Repair makes the files anew; that is no copy of anything. Why it is blank is remembered."""
    config = small_config(tmp_path)
    _new(config).close()
    set_aside_damaged(config, "n0")

    for _ in range(2):
        standing, why = _standing(open_store(config))
        assert standing is Standing.BLANK
        assert why.startswith("its damaged log was moved to ")


def test_generations_are_compared_where_both_are_known() -> None:
    """A new file may get the number of a removed one, never its generation; some file systems have none."""
    known, unknown = Inode(5, 7), Inode(5, 0)

    assert known.is_another_than(Inode(5, 8))
    assert known.is_another_than(Inode(6, 7))
    assert not known.is_another_than(unknown)
    assert not unknown.is_another_than(known)
    assert not known.is_another_than(Inode(5, 7))


def test_entries_behind_a_clean_stop_are_a_reason_for_doubt(tmp_path: Path) -> None:
    """A checkpoint older than its log was put back: files of different times."""
    config = small_config(tmp_path)
    store = _new(config)
    store.close()
    old = (store.directory / "checkpoint").read_bytes()
    store = open_store(config)
    fill(store, 3)
    store.close()
    _put_back(store.directory / "checkpoint", old)

    standing, doubt = _standing(open_store(config))

    assert standing is Standing.DOUBTFUL
    assert "different times" in doubt
