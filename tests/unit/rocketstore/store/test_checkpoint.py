"""The checkpoint is RocketMQ's file, and never misleads recovery."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from struct import pack

import pytest

from dledger.errors import DiskError, DiskFullError
from dledger.store.fs import FileSystem
from rocketstore.store.directory import (
    CHECKPOINT_BYTES,
    UNKNOWN,
    StoreCheckpoint,
    StoreCheckpointFile,
    decode_checkpoint,
)
from tests.crash.crash_fs import IO_ERROR, NO_SPACE, FailingFs

FULL = StoreCheckpoint(10_000, 9_000, 8_000, 1234, 56, 1200, 77)


def test_times_lie_where_rocketmq_reads_them() -> None:
    """store.md 4.4: three big-endian 64 bit times at the beginning of 4096 bytes; 5.x's fields behind them are zero."""
    content = FULL.encode()

    assert len(content) == CHECKPOINT_BYTES
    assert content[:40] == pack(">qqqqq", 10_000, 9_000, 8_000, 0, 0)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    StoreCheckpointFile(FileSystem(), tmp_path / "checkpoint").write(FULL)

    assert StoreCheckpointFile(FileSystem(), tmp_path / "checkpoint").read() == FULL


def test_without_a_file_nothing_is_known(tmp_path: Path) -> None:
    assert StoreCheckpointFile(FileSystem(), tmp_path / "checkpoint").read() == StoreCheckpoint()


def test_rocketmqs_own_file_gives_times_and_no_position() -> None:
    content = pack(">qqq", 10_000, 9_000, 8_000).ljust(CHECKPOINT_BYTES, b"\0")

    assert decode_checkpoint(content) == StoreCheckpoint(10_000, 9_000, 8_000, UNKNOWN, UNKNOWN, UNKNOWN)


def test_nothing_is_believed_after_rocketmq_has_written_into_our_file() -> None:
    """Its times are newer, our position is not: whoever believed either could leave something out."""
    content = pack(">qqq", 99_000, 99_000, 99_000) + FULL.encode()[24:]

    assert decode_checkpoint(content) == StoreCheckpoint()


@pytest.mark.parametrize("at", range(96))
def test_a_changed_byte_means_that_nothing_is_known(at: int) -> None:
    content = bytearray(FULL.encode())
    content[at] ^= 0x40

    known = decode_checkpoint(bytes(content))

    assert known == StoreCheckpoint() or known.replay_from == UNKNOWN


@pytest.mark.parametrize("at", range(96, 112))
def test_a_changed_byte_in_what_was_added_later_takes_that_alone(at: int) -> None:
    """As in the file of a program that does not write it."""
    content = bytearray(FULL.encode())
    content[at] ^= 0x40

    assert decode_checkpoint(bytes(content)) == replace(FULL, index_entries=UNKNOWN)
    assert decode_checkpoint(FULL.encode()[:at]) == replace(FULL, index_entries=UNKNOWN)


@pytest.mark.parametrize("length", [0, 1, 40, 95])
def test_a_short_file_means_that_nothing_is_known(length: int) -> None:
    assert decode_checkpoint(FULL.encode()[:length]) == StoreCheckpoint()


def test_what_somebody_appended_is_not_read(tmp_path: Path) -> None:
    """Nor is the memory asked for that a hole of a terabyte would take."""
    path = tmp_path / "checkpoint"
    StoreCheckpointFile(FileSystem(), path).write(FULL)
    os.truncate(path, 1 << 40)

    assert StoreCheckpointFile(FileSystem(), path).read() == FULL


def test_replay_time_is_three_seconds_before_the_older_of_log_and_queues() -> None:
    """store.md 4.4: minTimestamp and minTimestampIndex."""
    assert FULL.replay_time(with_index=False) == 6_000
    assert StoreCheckpoint(10_000, 9_000, 500).replay_time(with_index=True) == 500
    assert StoreCheckpoint(1000, 1000, 0).replay_time(with_index=False) == 0


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    StoreCheckpointFile(FileSystem(), tmp_path / "checkpoint").write(FULL)
    full = FailingFs(lambda call, _path: NO_SPACE if call == "write" else None)

    with pytest.raises(DiskFullError):
        StoreCheckpointFile(full, tmp_path / "checkpoint").write(StoreCheckpoint())

    assert StoreCheckpointFile(FileSystem(), tmp_path / "checkpoint").read() == FULL


def test_a_checkpoint_that_found_no_room_is_written_once_there_is_some(tmp_path: Path) -> None:
    """Only what is on the disk was written: retention relies on it."""
    fs = FailingFs(lambda call, _path: NO_SPACE if call == "write" else None)
    file = StoreCheckpointFile(fs, tmp_path / "checkpoint")
    with pytest.raises(DiskFullError):
        file.write(FULL)
    fs.fails = lambda _call, _path: None

    file.write(FULL)

    assert StoreCheckpointFile(FileSystem(), tmp_path / "checkpoint").read() == FULL


def test_a_failed_sync_is_an_error(tmp_path: Path) -> None:
    broken = FailingFs(lambda call, _path: IO_ERROR if call == "sync" else None)

    with pytest.raises(DiskError, match="checkpoint"):
        StoreCheckpointFile(broken, tmp_path / "checkpoint").write(FULL)


def test_the_same_checkpoint_is_not_written_twice(tmp_path: Path) -> None:
    fs = FailingFs()
    file = StoreCheckpointFile(fs, tmp_path / "checkpoint")
    file.write(FULL)
    calls = len(fs.calls)

    file.write(FULL)

    assert len(fs.calls) == calls
