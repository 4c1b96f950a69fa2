"""The snapshot file, and RocketMQ's files that are taken over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dledger.store.fs import FileSystem
from rocketstore.state.applier import SNAPSHOT_FILE, BrokerSnapshot, read_snapshot, write_snapshot
from rocketstore.state.changes import CommitOffsets, PutTopic, QueueOffset, TopicConfig

SNAPSHOT = BrokerSnapshot(
    (PutTopic(TopicConfig("T")), CommitOffsets("g", (QueueOffset("T", 1, 5),))),
    next_offset=12,
    last_record=(4096, 77),
    complete=False,
)


def test_a_snapshot_comes_back(tmp_path: Path) -> None:
    write_snapshot(FileSystem(), tmp_path / "config", SNAPSHOT)

    assert read_snapshot(tmp_path / "config") == SNAPSHOT


def test_no_file_is_no_snapshot(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path) is None


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    write_snapshot(FileSystem(), tmp_path, SNAPSHOT)
    path = tmp_path / SNAPSHOT_FILE
    content = path.read_bytes()
    accepted = []
    for at in range(len(content)):
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]):
            path.write_bytes(damaged)
            found = read_snapshot(tmp_path)
            if found is not None:
                accepted.append(found)

    assert all(found == SNAPSHOT for found in accepted)  # white space at the end does not matter


def test_a_snapshot_that_was_lengthened_beyond_measure_is_not_used(tmp_path: Path) -> None:
    write_snapshot(FileSystem(), tmp_path, SNAPSHOT)
    os.truncate(tmp_path / SNAPSHOT_FILE, 1 << 40)

    assert read_snapshot(tmp_path) is None


def test_a_snapshot_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketstore.state.applier.SNAPSHOT_VERSION", 2)
    write_snapshot(FileSystem(), tmp_path, SNAPSHOT)
    monkeypatch.undo()

    assert read_snapshot(tmp_path) is None
