"""Properties of one mapped file (RocketMQ's MappedFileTest, and the transient pool's part)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dledger.errors import DiskError
from rocketstore.mapped.allocation import TransientStorePool
from rocketstore.mapped.file import PAGE_BYTES, StoreFile, create_file, create_sparse_file
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs
from tests.support.page_cache import _all_in_memory as _all_in_memory

SIZE = 4 * PAGE_BYTES


def new_file(directory: Path, fs: FailingFs | None = None) -> StoreFile:
    """A file of four pages that begins at offset 0."""
    return create_file(fs or FailingFs(), directory / "file", 0, SIZE)


def test_a_slice_is_what_was_appended_there(tmp_path: Path) -> None:
    """And nothing outside of what is readable."""
    file = new_file(tmp_path)

    assert file.append(b"Never forget")
    assert file.append(b"!")

    assert file.read(6, 7) == b"forget!"
    assert file.read(0, 13, cold=True) == b"Never forget!"
    assert file.read(6, 8) is None
    assert file.read(-1, 1) is None
    assert file.read(0, -1) is None


@pytest.mark.usefixtures("_all_in_memory")
def test_a_slice_in_memory_is_read_at_once(tmp_path: Path) -> None:
    """And nothing outside of what is readable."""
    file = new_file(tmp_path)
    file.append(b"Never forget!")

    assert file.read_at_once(6, 7) == b"forget!"
    assert file.read_at_once(6, 8) is None
    assert file.read_at_once(-1, 1) is None
    assert file.read_at_once(0, -1) is None


def test_a_slice_of_which_only_a_part_is_in_memory_is_not_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Properties of messages in a plain log have no CRC: zeros in their place would be delivered."""
    file = new_file(tmp_path)
    file.append(b"Never forget!")
    monkeypatch.setattr(os, "preadv", lambda _fd, buffers, _offset, _flags: len(buffers[0]) - 1)

    assert file.read_at_once(0, 13) is None


def test_an_append_fits_or_does_nothing(tmp_path: Path) -> None:
    """The last byte can be used."""
    file = new_file(tmp_path)

    done = [file.append(data) for data in (bytes(SIZE - 1), b"ab", b"a", b"b", b"")]

    assert done == [True, False, True, False, True]
    assert file.is_full


def test_a_deleted_file_can_be_read_while_it_is_held(tmp_path: Path) -> None:
    """Nothing faults and nothing hangs: the mapping lives as long as its reader."""
    file = new_file(tmp_path)
    file.append(b"still here")

    file.path.unlink()

    assert file.read(0, 10) == b"still here"
    assert file.read(0, 10, cold=True) == b"still here"


@pytest.mark.parametrize(
    ("wrote", "flushed", "least_pages", "due"),
    [
        (0, 0, 0, False),
        (1, 0, 0, True),
        (1, 1, 0, False),
        (PAGE_BYTES - 1, 0, 1, False),
        (PAGE_BYTES, 0, 1, True),
        (PAGE_BYTES, PAGE_BYTES - 1, 1, True),
        (3 * PAGE_BYTES, PAGE_BYTES, 3, False),
        (SIZE, SIZE - 1, 4, True),
        (SIZE, SIZE, 0, False),
        (SIZE, SIZE, 1, False),
    ],
)
def test_when_a_flush_is_due(tmp_path: Path, wrote: int, flushed: int, least_pages: int, due: bool) -> None:
    """Whole pages are counted; a full file is always due, but not again once it is durable."""
    file = new_file(tmp_path)
    file.append(bytes(wrote))
    file.flushed = flushed

    assert file.flush_due(least_pages) is due


def test_what_is_flushed_was_readable_before_the_sync_began(tmp_path: Path) -> None:
    """An append during the sync is not taken as durable."""
    fs = FailingFs()
    file = new_file(tmp_path, fs)
    file.append(b"before")

    def append_too(call: str, _path: str) -> None:
        if call == "sync":
            file.append(b"during")

    fs.fails = append_too
    file.flush()

    assert (file.wrote, file.flushed) == (12, 6)


def test_a_write_that_fails_is_a_disk_error(tmp_path: Path) -> None:
    """The position stays where it was."""
    fs = FailingFs()
    file = new_file(tmp_path, fs)
    fs.fails = lambda call, _path: IO_ERROR if call == "write" else None

    with pytest.raises(DiskError, match="at offset 0"):
        file.append(b"x")

    assert file.wrote == 0


@pytest.mark.parametrize("why", [IO_ERROR, NO_SPACE])
def test_a_full_disk_that_does_not_take_the_zeros_either_is_a_failed_one(tmp_path: Path, why: int) -> None:
    """What was refused may come back: the file must not be appended to, as after any other failed write."""
    fs = FailingFs()
    file = new_file(tmp_path, fs)
    fs.fails = lambda call, _path: {"write": NO_SPACE, "sync": why}.get(call)

    with pytest.raises(DiskError, match="wiping a partly written record at offset 0"):
        file.append(b"x")


def test_what_is_cut_off_cannot_come_back(tmp_path: Path) -> None:
    """The zeros are durable at once, or a flush is due that makes them so, although nothing was appended."""
    fs = FailingFs()
    file = new_file(tmp_path, fs)
    for durable in (True, False):
        file.append(b"x" * 100)
        file.flush()
        fs.calls.clear()

        file.cut(10, durable=durable)

        assert [call for call, _ in fs.calls] == ["write", "sync"][: 1 + durable]
        assert file.is_blank(10)
        assert file.flush_due(0) is not durable
    file.flush()
    assert not file.flush_due(0)


def test_what_is_written_again_is_durable_at_once(tmp_path: Path) -> None:
    fs = FailingFs()
    file = new_file(tmp_path, fs)
    file.append(b"wrong")
    file.flush()
    fs.calls.clear()

    file.rewrite(0, b"right")

    assert [call for call, _ in fs.calls] == ["write", "sync"]
    assert file.read(0, 5) == b"right"


def test_only_what_is_committed_can_be_read_and_flushed(tmp_path: Path) -> None:
    """Appends go to the buffer; a full file gives it back."""
    pool = TransientStorePool(1, SIZE)
    file = new_file(tmp_path)
    buffer = pool.borrow()
    assert buffer is not None
    file.attach_buffer(buffer, pool.give_back)
    file.append(b"x" * 100)

    assert (file.buffered, file.readable, file.read(0, 100), pool.available) == (True, 0, None, 0)
    assert not file.flush_due(0)
    assert not file.commit(1)
    assert file.commit(0)
    assert not file.commit(0)
    assert file.read(0, 100) == b"x" * 100
    assert file.path.read_bytes()[:101] == b"x" * 100 + b"\0"

    file.append(bytes(SIZE - 100))
    assert file.commit(4)
    assert (file.buffered, pool.available, file.readable) == (False, 1, SIZE)


def test_filling_a_used_buffer_leaves_only_zeros_behind_the_blank(tmp_path: Path) -> None:
    """Old content of a buffer never reaches a file."""
    pool = TransientStorePool(1, SIZE)
    buffer = pool.borrow()
    assert buffer is not None
    buffer[:] = b"o" * SIZE
    file = new_file(tmp_path)
    file.attach_buffer(buffer, pool.give_back)

    file.append(b"new")
    file.fill(b"blank")
    file.commit(0)

    assert file.is_full
    assert file.path.read_bytes() == b"newblank" + bytes(SIZE - 8)
    assert not file.fill(b"blank")


def test_letting_go_of_a_buffer_forgets_what_was_not_committed(tmp_path: Path) -> None:
    """It was never readable."""
    pool = TransientStorePool(1, SIZE)
    buffer = pool.borrow()
    assert buffer is not None
    file = new_file(tmp_path)
    file.attach_buffer(buffer, pool.give_back)
    file.append(b"x")

    file.detach_buffer()

    assert (file.wrote, pool.available) == (0, 1)


def test_a_sparse_file_takes_hardly_any_room(tmp_path: Path) -> None:
    """And is as long as any other."""
    file = create_sparse_file(FailingFs(), tmp_path / "sparse", 0, 1 << 20)

    stat = file.path.stat()

    assert stat.st_size == 1 << 20
    assert stat.st_blocks * 512 <= 16_384
    assert file.is_blank()


def test_a_file_in_a_read_only_directory_is_not_written(tmp_path: Path) -> None:
    """Cutting it only moves its end."""
    path = tmp_path / "old"
    path.write_bytes(b"a" * SIZE)
    file = StoreFile(FailingFs(), path, 0, SIZE, writable=False)

    file.cut(10)

    assert file.wrote == 10
    assert path.read_bytes() == b"a" * SIZE
    with pytest.raises(DiskError, match="read-only"):
        file.append(b"x")
