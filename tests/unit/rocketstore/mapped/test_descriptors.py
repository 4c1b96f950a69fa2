"""The cache of open descriptors: bounded, and nobody who uses a file notices."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dledger.errors import DiskError, DiskFullError
from dledger.store.fs import FileSystem
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.mapped.file import CachedFile, Descriptor, DescriptorCache
from tests.support.page_cache import _all_in_memory as _all_in_memory
from tests.unit.rocketstore.heads import heads

FILE_BYTES = 40


class CountingFs(FileSystem):
    """Counts what is open, and opens no more than ``allowed``."""

    def __init__(self, allowed: int = 1000) -> None:
        self.allowed = allowed
        self.fds: set[int] = set()
        self.most = 0

    def _opened(self, fd: int) -> int:
        self.fds.add(fd)
        self.most = max(self.most, len(self.fds))
        return fd

    def _check(self) -> None:
        if len(self.fds) >= self.allowed:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def create(self, path: Path) -> int:
        self._check()
        return self._opened(super().create(path))

    def open(self, path: Path, *, writable: bool = True) -> int:
        self._check()
        return self._opened(super().open(path, writable=writable))

    def close(self, fd: int) -> None:
        self.fds.discard(fd)
        super().close(fd)


def files(cache: DescriptorCache, directory: Path, count: int) -> list[CachedFile]:
    made = []
    for number in range(count):
        path = directory / str(number)
        path.write_bytes(b"%d" % (number % 10) * FILE_BYTES)
        made.append(CachedFile(cache, path, 0, FILE_BYTES, writable=True))
    return made


def test_no_more_files_are_open_than_the_cache_may_hold(tmp_path: Path) -> None:
    """Whatever is done with how many of them; and those used last stay open."""
    fs = CountingFs()
    cache = DescriptorCache(fs, 4)
    many = files(cache, tmp_path, 20)

    for _ in range(2):
        for number, file in enumerate(many):
            file.write(1, b"x")
            assert file.read(0, 2) == b"%dx" % (number % 10)
            file.sync()
            assert file.non_zero_end(0) == FILE_BYTES

    assert cache.open_count == 4
    assert fs.most <= 5  # one more while it is exchanged
    fs.allowed = 0
    assert [file.read(1, 1) for file in many[-4:]] == [b"x"] * 4


def test_a_descriptor_in_use_is_not_closed_by_who_needs_room(tmp_path: Path) -> None:
    """It stays open until its user lets go of it, and is closed then."""
    fs = CountingFs()
    cache = DescriptorCache(fs, 1)
    first, second = files(cache, tmp_path, 2)

    used = cache.of(first)
    second.read(0, 1)
    assert os.pread(used.fd, 1, 0) == b"0"
    assert len(fs.fds) == 2

    del used
    assert len(fs.fds) == 1


class Crowded(DescriptorCache):
    """As soon as somebody has got a descriptor, others need its room."""

    others: Sequence[CachedFile] = ()

    def of(self, file: CachedFile) -> Descriptor:
        used = super().of(file)
        for other in self.others:
            super().of(other)
        return used


@pytest.mark.parametrize(
    "use",
    [
        lambda file: file.read(0, FILE_BYTES),
        lambda file: file.write(0, b"x"),
        lambda file: file.zero(0, 1),
        lambda file: file.sync(),
        lambda file: file.non_zero_end(0),
    ],
    ids=["read", "write", "zero", "sync", "non_zero_end"],
)
def test_whatever_is_done_with_a_file_holds_its_descriptor(tmp_path: Path, use: Callable[[CachedFile], object]) -> None:
    """Else the number may belong to another file by then, which would be read or, worse, written."""
    fs = CountingFs()
    cache = Crowded(fs, 1)
    file, *cache.others = files(cache, tmp_path, 3)

    use(file)

    assert file.descriptor is None
    assert len(fs.fds) == 1


def test_a_process_that_runs_out_of_descriptors_goes_on_with_fewer_files_open(tmp_path: Path) -> None:
    """EMFILE makes the cache give up half of what it holds, and keep to that."""
    fs = CountingFs()
    cache = DescriptorCache(fs, 64)
    many = files(cache, tmp_path, 64)
    for file in many:
        file.read(0, 1)

    fs.allowed = 64
    one_more = CachedFile(cache, many[0].path, 0, FILE_BYTES, writable=True)
    assert one_more.read(0, 1) == b"0"

    assert cache.capacity == 32
    assert all(file.read(0, 1) for file in many)
    assert cache.open_count == 32


def test_a_file_that_cannot_be_opened_at_all_is_an_error_that_says_so(tmp_path: Path) -> None:
    """Nothing is left to give up."""
    fs = CountingFs(allowed=0)
    (file,) = files(DescriptorCache(fs, 4), tmp_path, 1)

    with pytest.raises(DiskError, match="Too many open files"):
        file.read(0, 1)


def test_a_file_that_was_removed_is_empty_for_who_comes_late(tmp_path: Path) -> None:
    """As if he had come before it was written; a file that somebody else took away is an error."""
    cache = DescriptorCache(FileSystem(), 4)
    removed, taken = files(cache, tmp_path, 2)

    removed.close()
    removed.path.unlink()
    taken.path.unlink()

    assert removed.read(0, 1) == b""
    removed.sync()
    with pytest.raises(DiskError, match="No such file"):
        taken.read(0, 1)


def test_a_file_that_was_let_go_of_is_not_kept_open(tmp_path: Path) -> None:
    """Who still reads it opens it for that read alone: else the disk space of removed files were never given back."""
    fs = CountingFs()
    cache = DescriptorCache(fs, 4)
    (file,) = files(cache, tmp_path, 1)

    file.close()

    assert file.read(0, 1) == b"0"
    assert cache.open_count == 0
    assert not fs.fds


def test_queues_need_no_descriptor_each(tmp_path: Path) -> None:
    """Forty queues with room for four open files: appended to in turn, flushed, opened again, read.

    Eight threads flush at once: each may use one that made room meanwhile, and close another for which it made room.
    """
    fs = CountingFs()
    for start in (0, 3):
        table = ConsumeQueueTable(tmp_path, FILE_BYTES * 10, fs)
        table.descriptors.capacity = 4
        table.load()
        table.recover()
        assert len(table.all()) == (40 if start else 0)
        for offset in range(start, start + 3):
            for queue_id in range(40):
                table.append([one._replace(queue_id=queue_id) for one in heads(offset, offset + 1)])
        table.flush()
        assert fs.most <= 4 + 2 * 8
        for queue in table.all():
            assert [unit.offset for unit in queue.units(0, 10)] == [number * 100 for number in range(start + 3)]
        table.close()
        assert not fs.fds


def test_an_append_without_a_descriptor_may_be_repeated(tmp_path: Path) -> None:
    """It is no failure of the disk: nothing is appended, and once a descriptor is free the same call does it."""
    fs = CountingFs()
    table = ConsumeQueueTable(tmp_path, FILE_BYTES, fs)
    table.load()
    fs.allowed = len(fs.fds)

    with pytest.raises(DiskFullError, match="no file descriptor is left"):
        table.append(heads(0, 1))
    fs.allowed = 10
    table.append(heads(0, 1))

    assert table.all()[0].max_offset == 1


@pytest.mark.usefixtures("_all_in_memory")
def test_a_file_that_is_not_open_is_not_read_at_once(tmp_path: Path) -> None:
    """Opening it may need a disk. What is read that way counts as used."""
    cache = DescriptorCache(CountingFs(), 1)
    first, second = files(cache, tmp_path, 2)

    assert first.read_at_once(0, 2) is None
    assert first.read(0, 2) == b"00"
    assert first.read_at_once(0, 2) == b"00"
    assert first.recent
    second.close()
    assert second.read_at_once(0, 2) is None
