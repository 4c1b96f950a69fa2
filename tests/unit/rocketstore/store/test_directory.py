"""A root directory belongs to one store, and tells how the last one ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dledger.errors import DirectoryLockedError, DiskError
from dledger.store.fs import FileSystem
from rocketstore.store.directory import StoreDirectory
from tests.crash.crash_fs import IO_ERROR, FailingFs

JAVA_LOCK = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
print("locked", flush=True)
sys.stdin.read()
"""


def open_directory(path: Path) -> StoreDirectory:
    return StoreDirectory(path, FileSystem())


def test_a_new_directory_counts_as_cleanly_stopped(tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "a" / "b")

    assert directory.stopped_cleanly
    directory.release()


def test_a_second_store_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    """DefaultMessageStoreTest: the second start on the same directory fails."""
    first = open_directory(tmp_path)
    with pytest.raises(DirectoryLockedError):
        open_directory(tmp_path)

    first.release()
    first.release()

    open_directory(tmp_path).release()


def test_a_directory_that_cannot_be_made_is_told_without_numbers(tmp_path: Path) -> None:
    """Once, with the reason: no errno, no second path."""
    (tmp_path / "file").touch()

    with pytest.raises(DiskError) as raised:
        open_directory(tmp_path / "file" / "store")

    assert str(raised.value) == f"opening the store directory {tmp_path / 'file' / 'store'} failed: Not a directory"


def test_a_directory_that_rocketmq_has_open_is_refused(tmp_path: Path) -> None:
    """RocketMQ locks the first byte of the lock file by fcntl."""
    command = [sys.executable, "-c", JAVA_LOCK, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()

        with pytest.raises(DirectoryLockedError, match="RocketMQ"):
            open_directory(tmp_path)

        other.communicate(timeout=60)


def test_the_mark_stays_until_it_is_taken_away(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    directory.mark_running()
    directory.release()

    again = open_directory(tmp_path)
    assert (tmp_path / "abort").exists()
    assert not again.stopped_cleanly
    again.mark_clean()
    again.mark_clean()
    again.release()

    last = open_directory(tmp_path)
    assert last.stopped_cleanly
    last.release()


def test_a_failing_disk_is_an_error(tmp_path: Path) -> None:
    fs = FailingFs()
    directory = StoreDirectory(tmp_path, fs)
    fs.fails = lambda call, _path: IO_ERROR if call == "sync_dir" else None

    with pytest.raises(DiskError):
        directory.mark_running()
    with pytest.raises(DiskError):
        directory.mark_clean()
    directory.release()
    with pytest.raises(DiskError):
        StoreDirectory(tmp_path, fs)
