"""What of a store of RocketMQ 5 is not served, and that this is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from struct import pack

import pytest

from dledger.store.fs import FileSystem
from rocketstore.state.changes import PutTopic, TopicConfig
from rocketstore.state.files import timed_messages, unserved
from rocketstore.state.rocketmq_files import RocketmqFiles, read_rocketmq_files
from rocketstore.state.tables import Tables

NOW_MS = 1_795_796_700_000
DAY_S = 86_400


def write_timers(root: Path, slots: Mapping[int, int], *, taken: int, precision_ms: int = 1000) -> None:
    """``slots``: how many messages are due in so many seconds; ``taken``: the next offset that the wheel wants."""
    wheel = bytearray(32 * 2 * 7 * DAY_S)
    for due_s, count in slots.items():
        time = (NOW_MS + due_s * 1000) // precision_ms
        at = time % (2 * 7 * DAY_S) * 32
        wheel[at : at + 32] = pack(">qqqii", time, 0, 52, count, 0)
    (root / "timerwheel").write_bytes(wheel)
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "timercheck").write_bytes(pack(">qqq", NOW_MS, 312, taken).ljust(4096, b"\0"))


def test_a_store_without_such_messages_says_nothing(tmp_path: Path) -> None:
    """Also where RocketMQ 5 has made the files that it makes in every store."""
    assert unserved(tmp_path, 0) == []

    write_timers(tmp_path, {-5: 3, -DAY_S: 1}, taken=4)
    (tmp_path / "compaction").mkdir()
    (tmp_path / "compaction" / "position-checkpoint").touch()
    (tmp_path / "batchconsumequeue").mkdir()
    (tmp_path / "config" / "topics.json").write_text('{"topicConfigTable":{"T":{"perm":6,"attributes":{}}}}')

    assert unserved(tmp_path, 4) == []


@pytest.mark.parametrize("precision_ms", [1000, 500, 200, 100])
def test_messages_that_wait_for_their_time_are_counted(tmp_path: Path, precision_ms: int) -> None:
    """Those due later than what was delivered, and those that the wheel had not yet taken."""
    write_timers(tmp_path, {-5: 3, 3600: 2, 2 * DAY_S: 1}, taken=6, precision_ms=precision_ms)

    assert timed_messages(tmp_path, 6) == 3
    assert timed_messages(tmp_path, 8) == 5
    (said,) = unserved(tmp_path, 8)
    assert "up to 5 messages" in said


def test_without_the_wheel_all_of_the_topic_may_wait(tmp_path: Path) -> None:
    """A slave of RocketMQ's master has the log only."""
    (said,) = unserved(tmp_path, 2)

    assert "up to 2 messages" in said


@pytest.mark.parametrize("damage", [b"", b"\0" * 31, b"\xff" * 40])
def test_a_damaged_wheel_is_no_reason_not_to_start(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "timerwheel").write_bytes(damage)

    assert timed_messages(tmp_path, 0) == 0


def topics_json(directory: Path) -> None:
    batches = {"perm": 6, "readQueueNums": 1, "writeQueueNums": 1, "attributes": {"queue.type": "BatchCQ"}}
    plain = {"perm": 6, "readQueueNums": 4, "writeQueueNums": 4, "attributes": {"queue.type": "SimpleCQ"}}
    directory.mkdir(exist_ok=True)
    (directory / "topics.json").write_text(json.dumps({"topicConfigTable": {"Batches": batches, "Plain": plain}}))


def test_topics_of_batches_are_named(tmp_path: Path) -> None:
    """By their settings, and by their queues where the settings are lost."""
    topics_json(tmp_path / "config")
    (tmp_path / "batchconsumequeue" / "Other").mkdir(parents=True)

    (said,) = unserved(tmp_path, 0)

    assert said.endswith("Batches, Other")


def test_topics_in_rocksdb_are_named(tmp_path: Path) -> None:
    """Otherwise a store without topics would seem to be new."""
    (tmp_path / "config" / "metadata").mkdir(parents=True)
    (tmp_path / "config" / "metadata" / "CURRENT").touch()

    (said,) = unserved(tmp_path, 0)

    assert said.startswith("config/metadata")


def test_nobody_gets_ten_messages_as_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A topic of batches can be neither read nor written here, and goes back to RocketMQ as it came."""
    topics_json(tmp_path)
    before = json.loads((tmp_path / "topics.json").read_text())["topicConfigTable"]["Batches"]

    changes = read_rocketmq_files(tmp_path).changes

    assert changes == (PutTopic(TopicConfig("Batches", 1, 1, 0)), PutTopic(TopicConfig("Plain", 4, 4, 6)))
    assert "messages of topic Batches" in caplog.text
    files = RocketmqFiles(FileSystem(), tmp_path)
    tables = Tables(changes)
    files.write(tables, 1)
    assert json.loads((tmp_path / "topics.json").read_text())["topicConfigTable"]["Batches"] == before
    tables.apply(PutTopic(TopicConfig("Batches", 1, 1, 6)))
    files.write(tables, 2)
    assert json.loads((tmp_path / "topics.json").read_text())["topicConfigTable"]["Batches"]["perm"] == 6
