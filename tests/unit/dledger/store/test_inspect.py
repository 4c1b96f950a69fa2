"""Offline inspection: everything is shown, and the first bad offset of a file is found."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from dledger.store.format import UNIT, IndexUnit
from dledger.store.inspect import (
    BlankItem,
    EndItem,
    ProblemItem,
    RecordItem,
    UnitItem,
    begin_of,
    inspect_data,
    inspect_index,
    problems,
    segment_paths,
)
from dledger.types import GENESIS, LogIndex
from tests.unit.dledger.store.support import FakeClock, fill, open_store, small_config


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    store = open_store(small_config(tmp_path))
    fill(store, 60)
    store.close()
    return store.directory


def _patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_every_record_blank_and_unit_is_shown(directory: Path) -> None:
    """60 entries of 148 bytes: 27 and a blank of 100 bytes per segment."""
    data = list(inspect_data(segment_paths(directory / "data")))
    index = list(inspect_index(segment_paths(directory / "index")))

    assert [item.header.index for item in data if isinstance(item, RecordItem)] == list(range(60))
    assert [(item.offset, item.length) for item in data if isinstance(item, BlankItem)] == [(27 * 148, 100)] * 2
    assert [item.offset for item in data if isinstance(item, EndItem)] == [6 * 148]
    assert [item.unit.index for item in index if isinstance(item, UnitItem)] == list(range(60))
    assert not list(problems(directory))


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (148 * 3 + 50, b"!", "bodyCrc of entry 30"),
        (148 * 3 + 36, b"!", "chainCrc of entry 30"),
        (148 * 3, bytes(48), "zeros, although 00000000000000008192 holds more"),
        (0, b"!", "magic"),
        (27 * 148 + 4, b"\x7f", "blank of"),
        (27 * 148 + 7, bytes((101,)), "blank of 101 bytes, but 100 bytes are left"),
    ],
)
def test_the_first_bad_offset_is_found(directory: Path, offset: int, data: bytes, reason: str) -> None:
    """A problem ends its segment; the next segment is shown all the same."""
    path = segment_paths(directory / "data")[1]
    _patch(path, offset, data)

    items = list(inspect_data(segment_paths(directory / "data")))

    bad = [item for item in items if isinstance(item, ProblemItem | EndItem) and item.path == path]
    assert [item.offset for item in bad] == [offset - offset % 148 if offset < 27 * 148 else 27 * 148]
    if isinstance(bad[0], ProblemItem):
        assert reason in bad[0].reason
    assert isinstance(items[-2], RecordItem)
    assert items[-2].header.index == 59


def test_the_least_blank_ends_a_segment(tmp_path: Path) -> None:
    """Eight bytes are left behind the last record of each, and they are no remains of a ninth."""
    store = open_store(small_config(tmp_path))
    fill(store, 3, size=4096 - 48 - 8, batch=1)
    store.close()

    data = list(inspect_data(segment_paths(store.directory / "data")))

    assert [(item.offset, item.length) for item in data if isinstance(item, BlankItem)] == [(4088, 8)] * 2
    assert not list(problems(store.directory))


def test_a_wrong_unit_is_found(directory: Path) -> None:
    """In the index file, and as a disagreement with the data."""
    path = segment_paths(directory / "index")[2]
    _patch(path, 32 * 3 + 20, b"\x55")

    found = list(problems(directory))

    assert (path, 96) in [(item.path, item.offset) for item in found]
    assert any("index and data disagree about entry 23" in item.reason for item in found)


def test_a_log_that_begins_later_is_whole(tmp_path: Path) -> None:
    """After retention the chain is verified from the recorded begin; without a checkpoint from the second record."""
    config = small_config(tmp_path, disk_check_ratio=1e-9, retention_hours=0)
    store = open_store(config, clock=FakeClock(4_000_000_000_000))
    fill(store, 100)
    store.flush()
    store.set_committed(LogIndex(99))
    store.clean(LogIndex(99))
    store.close()

    assert begin_of(store.directory).index > 0
    assert not list(problems(store.directory))
    (store.directory / "checkpoint").unlink()
    assert begin_of(store.directory) == GENESIS
    assert not list(problems(store.directory))


def test_a_cut_off_file_is_a_problem(directory: Path) -> None:
    """A file that ends in the middle of a header or record."""
    path = segment_paths(directory / "data")[2]
    for length in (148 + 4, 148 + 30, 148 + 100, 0):
        path.write_bytes(path.read_bytes()[:length])
        found = [item for item in inspect_data(segment_paths(directory / "data")) if isinstance(item, ProblemItem)]
        assert [item.offset for item in found] == ([148] if length else [])


def test_a_file_that_cannot_be_mapped_is_a_problem(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of that file: the others are shown."""

    def full(*_: object, **_more: object) -> mmap.mmap:
        monkeypatch.undo()
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    paths = segment_paths(directory / "data")
    monkeypatch.setattr("dledger.store.inspect.mmap.mmap", full)
    data = list(inspect_data(paths))
    assert data[0] == ProblemItem(paths[0], 0, "cannot read the file: Cannot allocate memory")
    assert {one.path for one in data[1:]} == set(paths[1:])
    paths = segment_paths(directory / "index")
    monkeypatch.setattr("dledger.store.inspect.mmap.mmap", full)
    index = list(inspect_index(paths))
    assert index[0] == ProblemItem(paths[0], 0, "cannot read the file: Cannot allocate memory")
    assert {one.path for one in index[1:]} == set(paths[1:])


def test_an_index_of_holes_is_looked_through_at_once(directory: Path) -> None:
    """The units before a log's begin may be terabytes that nobody ever wrote."""
    path = directory / f"{0:020d}"
    fields = (1, 5, 48, 1 << 29, 1)
    unit = UnitItem(path, 1 << 34, IndexUnit(*fields))
    with path.open("wb") as file:
        file.truncate((1 << 34) + 4096)
        file.seek(1 << 34)
        file.write(UNIT.pack(*fields))

    assert list(inspect_index([path])) == [unit, EndItem(path, (1 << 34) + 32)]


def test_what_is_no_ordinary_file_is_a_problem(tmp_path: Path) -> None:
    """To open a pipe would wait for a writer; here there is one, which says nothing."""
    pipe, gone = tmp_path / f"{0:020d}", tmp_path / f"{4096:020d}"
    os.mkfifo(pipe)
    gone.symlink_to(tmp_path / "nowhere")
    writer = os.open(pipe, os.O_RDWR)
    try:
        for items in (inspect_data([pipe, gone]), inspect_index([pipe, gone])):
            assert [(item.path, isinstance(item, ProblemItem)) for item in items] == [(pipe, True), (gone, True)]
    finally:
        os.close(writer)


@pytest.mark.parametrize("kind", ["data", "index"])
def test_a_sector_that_cannot_be_read_is_a_problem(directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Its mapping would end the process. What lies before it is shown, and so are the other files."""
    paths = segment_paths(directory / kind)
    os.truncate(paths[0], 3 * 4096)
    with paths[0].open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"!")
    pread, bad = os.pread, paths[0].stat().st_ino

    def failing(fd: int, length: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == bad and offset <= 2 * 4096 + 512 < offset + length:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, length, offset)

    monkeypatch.setattr("dledger.store.inspect.os.pread", failing)
    items = list(inspect_data(paths) if kind == "data" else inspect_index(paths))

    assert [item for item in items if isinstance(item, ProblemItem) and item.path == paths[0]] == [
        ProblemItem(paths[0], 2 * 4096, "it cannot be read: Input/output error")
    ]
    assert sum(isinstance(item, RecordItem | UnitItem) and item.path == paths[0] for item in items) > 0
    assert {item.path for item in items} >= set(paths[1:])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missing_segment_is_a_problem(directory: Path, number: int) -> None:
    """The index still names what was in it."""
    path = segment_paths(directory / "data")[number]
    path.unlink()

    reasons = [item.reason for item in problems(directory)]
    assert f"the index names entry {27 * number}, which has no record" in reasons or number == 1
    assert reasons
