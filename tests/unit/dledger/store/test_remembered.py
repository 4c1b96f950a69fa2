"""What a member knows the others to have held survives its restart, and never keeps it from starting."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.store.fs import FileSystem
from dledger.store.remembered import REMEMBERED_FILE, RememberedFile, read_remembered
from dledger.store.repair import set_aside_damaged
from dledger.types import EntryId, HardState, LogIndex, NodeId, Standing, Term
from tests.unit.dledger.store.support import open_store, small_config

HELD = {NodeId("n1"): EntryId(Term(3), LogIndex(70)), NodeId("n2"): EntryId(Term(2), LogIndex(9))}


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    """The newest; a directory of an earlier version has none."""
    file = RememberedFile(FileSystem(), tmp_path)
    assert read_remembered(tmp_path) == {}

    file.save({NodeId("n1"): EntryId(Term(1), LogIndex(1))})
    file.save(HELD)

    assert read_remembered(tmp_path) == HELD


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    """An idle group costs no disk anything."""
    file = RememberedFile(FileSystem(), tmp_path)
    file.save(HELD)
    (tmp_path / REMEMBERED_FILE).unlink()

    file.save(dict(HELD))

    assert not (tmp_path / REMEMBERED_FILE).exists()


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_a_damaged_file_tells_nothing(tmp_path: Path, at: int) -> None:
    """A wrong memory would make a sound member doubt itself."""
    RememberedFile(FileSystem(), tmp_path).save(HELD)
    path = tmp_path / REMEMBERED_FILE
    raw = bytearray(path.read_bytes())
    raw[min(at, len(raw) - 1)] ^= 1
    path.write_bytes(raw)

    assert read_remembered(tmp_path) == {}


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    """It is tried again with the next save."""
    file = RememberedFile(FileSystem(), tmp_path / "absent")
    file.save(HELD)
    (tmp_path / "absent").mkdir()

    file.save(HELD)

    assert read_remembered(tmp_path / "absent") == HELD


@pytest.mark.parametrize("fenced", [True, False])
def test_a_log_that_is_set_aside_takes_along_what_is_remembered_of_another_history(
    tmp_path: Path, *, fenced: bool
) -> None:
    """Told to the group, it would take the standing of sound members. What is of the group's history stays."""
    store = open_store(small_config(tmp_path))
    state = HardState(Term(1), None, Standing.FULL)
    store.hard_state.save(state.fence("another history") if fenced else state)
    RememberedFile(FileSystem(), store.directory).save(HELD)
    store.close()

    aside = set_aside_damaged(small_config(tmp_path), "n0")

    assert read_remembered(store.directory) == ({} if fenced else HELD)
    assert read_remembered(aside) == (HELD if fenced else {})
