"""Where a sync of a whole file system may be relied on: only where it would tell of every failure."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dledger.store.fs import FileSystem
from tests.support import lacking

MEMORY = Path("/dev/shm")


@pytest.fixture
def fd() -> Iterator[int]:
    """A directory of a tmpfs, which reports failures."""
    if not os.path.ismount(MEMORY):
        lacking.lacks(str(MEMORY), f"mount -t tmpfs none {MEMORY}")
    opened = FileSystem().open(MEMORY, writable=False)
    yield opened
    os.close(opened)


def outcome(fd: int) -> int:
    """The error's number; 0 if there was none."""
    try:
        FileSystem().sync_all(fd)
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("4.4.0", errno.ENOSYS),
        ("5.8.0-63-generic", errno.ENOSYS),  # it reports failed writes of data, but not of the journal
        ("5.16.20", errno.ENOSYS),
        ("5.17.0", 0),
        ("6.1.0-13-amd64", 0),
        ("10.2", 0),
    ],
)
def test_a_kernel_that_reports_less_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch, fd: int, release: str, expected: int
) -> None:
    """Before 5.17, syncfs(2) passes over what the file system's own part of it returns."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    assert outcome(fd) == expected


def test_a_file_system_of_an_unknown_kind_is_not_relied_on() -> None:
    """A layer above another need not pass on that one's failures."""
    fd = FileSystem().open(Path("/proc/self"), writable=False)
    try:
        assert outcome(fd) == errno.ENOTSUP
    finally:
        os.close(fd)


def test_a_file_system_that_has_become_read_only_has_synced_nothing(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    """Errors of the disk make ext4 and Btrfs read-only; syncfs(2) then succeeds without writing what is dirty."""
    found = SimpleNamespace(f_flag=os.ST_RDONLY | os.ST_NODEV)
    monkeypatch.setattr(os, "fstatvfs", lambda _fd: found)
    assert outcome(fd) == errno.EROFS
    found.f_flag = os.ST_NODEV
    assert outcome(fd) == 0


def test_a_failed_write_is_told(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    """By the error of the call itself."""
    real = ctypes.CDLL(None, use_errno=True)

    def syncfs(_fd: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fstatfs=real.fstatfs, syncfs=syncfs))
    assert outcome(fd) == errno.EIO


def test_an_error_is_told(fd: int) -> None:
    """Of a descriptor that names no file, too."""
    other = os.dup(fd)
    os.close(other)
    assert outcome(other) != 0
