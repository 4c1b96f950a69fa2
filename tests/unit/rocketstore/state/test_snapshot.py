"""The snapshot file, and RocketMQ's files that are taken over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dledger.store.fs import RealFileSystem
from rocketstore.state.changes import CommitOffsets, PutTopic, QueueOffset, SetDelayOffsets, TopicConfig
from rocketstore.state.imports import read_rocketmq_files
from rocketstore.state.snapshot import SNAPSHOT_FILE, Snapshot, read_snapshot, write_snapshot
from rocketstore.state.tables import Tables

SNAPSHOT = Snapshot(
    (PutTopic(TopicConfig("T")), CommitOffsets("g", (QueueOffset("T", 1, 5),))),
    next_offset=12,
    last_record=(4096, 77),
    complete=False,
)


def test_a_snapshot_comes_back(tmp_path: Path) -> None:
    write_snapshot(RealFileSystem(), tmp_path / "config", SNAPSHOT)

    assert read_snapshot(tmp_path / "config") == SNAPSHOT


def test_no_file_is_no_snapshot(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path) is None


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    write_snapshot(RealFileSystem(), tmp_path, SNAPSHOT)
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


def test_a_snapshot_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketstore.state.snapshot.SNAPSHOT_VERSION", 2)
    write_snapshot(RealFileSystem(), tmp_path, SNAPSHOT)
    monkeypatch.undo()

    assert read_snapshot(tmp_path) is None


def test_rocketmq_files_are_taken_over(tmp_path: Path) -> None:
    topics = {
        "dataVersion": {"counter": 1, "timestamp": 2},
        "topicConfigTable": {
            "Orders": {"perm": 6, "readQueueNums": 8, "topicName": "Orders", "writeQueueNums": 4, "order": False},
            "Odd": {"perm": 6, "readQueueNums": 0, "topicName": "Odd", "writeQueueNums": 0},
            "RMQ_SYS_BROKER_STATE": {"perm": 6, "readQueueNums": 1, "writeQueueNums": 1},
        },
    }
    (tmp_path / "topics.json").write_text(json.dumps(topics))
    (tmp_path / "subscriptionGroup.json").write_text('{"subscriptionGroupTable":{"idle":{"groupName":"idle"}}}')
    (tmp_path / "consumerOffset.json").write_text('{\n\t"offsetTable":{"Orders@readers":{0:17,1:5\n\t\t}\n\t}\n}')
    (tmp_path / "delayOffset.json").write_text('{"offsetTable":{1:3,"2":4}}')

    tables = Tables(read_rocketmq_files(tmp_path))

    assert tables.topics == {"Orders": TopicConfig("Orders", 8, 4, 6)}
    assert tables.groups == {"idle": {}, "readers": {("Orders", 0): 17, ("Orders", 1): 5}}
    assert tables.delay_offsets == {1: 3, 2: 4}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"offsetTable":{"T@g":{"0":-5}}}', '{"offsetTable":{"T@g":3}}'])
def test_a_file_that_is_no_such_file_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "consumerOffset.json").write_text(text)
    (tmp_path / "delayOffset.json").write_text('{"offsetTable":{"2":4}}')

    assert read_rocketmq_files(tmp_path) == (SetDelayOffsets(((2, 4),)),)


def test_numbers_in_names_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "consumerOffset.json").write_text('{"offsetTable":{"a,1:@g":{0:17}, "T@g2":{"0":1}}}')

    assert read_rocketmq_files(tmp_path) == ()  # no such topic can be, so the name was read as it is
