"""``PlainLogWriter``: files of records; ``HalfPlaces``: where half messages went."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.store.fs import FileSystem
from rocketstore.upgrade import directories
from rocketstore.upgrade.directories import HalfPlaces, PlainLogWriter
from tests.crash.crash_fs import RecordingFs


def test_a_closed_log_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file after its last write, the last one included, and their names: the export gets its name after that."""
    monkeypatch.setattr(directories, "_WRITE_BYTES", 250)
    fs = RecordingFs()
    log = PlainLogWriter(fs, tmp_path, 1000, 0)
    for _ in range(25):
        log.place(100)
        log.append(bytearray(b"r" * 100))
    log.close()

    created = [one.inode for one in fs.changes if one.kind == "create"]
    assert len(created) == log.count == 3
    for inode in created:
        kinds = [one.kind for one in fs.changes if one.inode == inode]
        assert kinds[-1] == "sync"
        assert kinds.count("write") > 2
    assert fs.changes[-1].kind == "sync_dir"


def test_every_half_message_is_found_in_memory_or_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be more than memory holds; what never was is not found."""
    monkeypatch.setattr(directories, "_PAIRS_IN_MEMORY", 10)
    path = tmp_path / "halves"
    places = HalfPlaces(FileSystem(), path)
    for number in range(57):
        places.add(1000 + 7 * number, number)

    assert path.stat().st_size == 50 * 16
    assert [places.find(1000 + 7 * number) for number in range(57)] == list(range(57))
    assert [places.find(offset) for offset in (0, 999, 1001, 1349, 1351, 1393, 5000)] == [None] * 7

    places.close()
    assert not path.exists()
