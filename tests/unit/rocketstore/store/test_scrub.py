"""The whole store over a plain log: full disks, retention, deletion, flushes by time."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dledger.errors import DLedgerError
from dledger.monitoring import ConditionKind
from dledger.store.fs import DiskUsage
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetMessageStatus
from tests.crash.crash_fs import FailingFs
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import UnsyncedFs, at, bodies, crashed, fill, make_store, running, with_key


class Disk(UnsyncedFs):
    """A disk as full as it is told to be."""

    percent = 50

    def usage(self, path: Path) -> DiskUsage:
        return DiskUsage(100, 100 - self.percent, self.percent)


def is_writable(store: MessageStore, *, expected: bool) -> bool:
    return (store.refusal is None) == expected


def test_a_full_disk_stops_puts_and_room_lets_them_go_on(config: MessageStoreConfig) -> None:
    """DefaultMessageStoreCleanFilesTest; without a restart."""
    disk = Disk()
    with running(replace(config, disk_space_warning_level_ratio=90), fs=disk) as store:
        fill(store, 2)
        for percent, writable in ((91, False), (90, True), (99, False), (10, True)):
            disk.percent = percent
            store.request_clean()
            wait_until(partial(is_writable, store, expected=writable), f"writable at {percent} %: {writable}")
        fill(store, 2, first=2)

        assert bodies(store) == [0, 2]


def test_a_disk_that_fills_up_refuses_messages_and_keeps_every_acknowledged_one(config: MessageStoreConfig) -> None:
    """With RocketMQ's ratios and the default of ``clean_file_forcibly_enable``, nothing goes before it has expired."""
    disk = Disk()
    defaults = MessageStoreConfig()
    config = replace(
        config,
        clean_file_forcibly_enable=defaults.clean_file_forcibly_enable,
        disk_max_used_space_ratio=defaults.disk_max_used_space_ratio,
        disk_space_clean_forcibly_ratio=defaults.disk_space_clean_forcibly_ratio,
        disk_space_warning_level_ratio=defaults.disk_space_warning_level_ratio,
    )
    with running(config, fs=disk) as store:
        fill(store, 500, queues=1)
        files = sorted(config.commit_log_dirs[0].iterdir())
        disk.percent = 97
        for _ in range(5):
            store._rounds.clean()
        refused = store.put(Message("T", b"500", 0))

        assert refused.outcome == "not_applied"
        assert "the disk is full" in refused.reason
        assert sorted(config.commit_log_dirs[0].iterdir()) == files
        assert bodies(store) == list(range(500))
        assert store.forced_files == 0
        disk.percent = 50
        store._rounds.clean()
        fill(store, 1, queues=1, first=500)
        assert bodies(store) == list(range(501))


def test_each_file_removed_before_it_expired_is_told(
    config: MessageStoreConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Those messages were acknowledged: a warning with offsets and age, a count, and a condition."""
    disk = Disk()
    config = replace(
        config,
        clean_file_forcibly_enable=True,
        disk_space_clean_forcibly_ratio=85,
        disk_space_warning_level_ratio=99,
    )
    with running(config, fs=disk) as store:
        fill(store, 500, queues=1)
        store.flush()
        disk.percent = 95
        store._rounds.clean()
        begin = store.log.min_offset
        told = [one for one in caplog.records if getattr(one, "event", "") == "forced_removal"]

        assert begin > 0
        assert (told[0].__dict__["first_offset"], told[-1].__dict__["last_offset"]) == (0, begin - 1)
        assert all(one.levelname == "WARNING" and "not expired" in one.getMessage() for one in told)
        assert store.forced_files == len(told)
        assert store._derived.conditions.holds(ConditionKind.REMOVED_EARLY)
        disk.percent = 50


def test_expired_files_go_and_queues_and_index_follow(config: MessageStoreConfig) -> None:
    disk = Disk()
    config = replace(
        config,
        clean_file_forcibly_enable=True,
        disk_space_clean_forcibly_ratio=85,
        disk_space_warning_level_ratio=99,
        max_hash_slot_num=10,
        max_index_num=100,
    )
    with running(config, fs=disk) as store:
        fill(store, 500, queues=1)
        files = len(list(config.commit_log_dirs[0].iterdir()))
        disk.percent = 95
        store.request_clean()
        wait_until(lambda: min(config.consume_queue_dir.glob("T/0/*")).name != "0" * 20, "cleaned")
        disk.percent = 50
        left = bodies(store)

        assert len(list(config.commit_log_dirs[0].iterdir())) < files
        assert left == list(range(store.min_offset("T", 0), 500))
        assert store.get("T", 0, 0, max_count=1).status is GetMessageStatus.OFFSET_TOO_SMALL
        assert with_key(store, 0) == []
        assert with_key(store, 499) == [499]
    with running(config, fs=disk) as store:
        assert bodies(store) == left
        fill(store, 1, queues=1, first=500)
        assert bodies(store) == [*left, 500]


def test_retention_waits_for_queues_and_index_to_be_durable(
    config: MessageStoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut would take units and keys that nothing could make again; and for whoever else needs the log."""
    disk = Disk()
    config = replace(
        config,
        clean_file_forcibly_enable=True,
        disk_space_clean_forcibly_ratio=85,
        disk_space_warning_level_ratio=99,
    )
    with running(config, fs=disk) as store:
        fill(store, 100, queues=1)
        store.flush()
        durable = store.dispatch_position
        needed = [0]
        store.keep_for(lambda at: min(at, needed[0]))
        fill(store, 400, queues=1, first=100)
        disk.percent = 95
        monkeypatch.setattr(store._rounds.cleaner, "_on_held_back", lambda: None)

        for _ in range(20):
            store._rounds.clean()
        assert store.log.min_offset == 0
        needed[0] = 1 << 60
        monkeypatch.setattr(store._derived.numbering, "keep_from", lambda _dispatched, **_: None)
        for _ in range(20):
            store._rounds.clean()

        assert 0 < store.log.min_offset <= durable
        begin = store.log.min_offset
        monkeypatch.setattr(store._rounds.cleaner, "_on_held_back", store._durability.flush)
        store._rounds.clean()
        assert store.log.min_offset > begin
        disk.percent = 50


def test_a_rebuilt_queue_begins_where_the_log_does(config: MessageStoreConfig) -> None:
    """Pre-fill: the first message left has an offset other than 0."""
    disk = Disk()
    forced = replace(config, clean_file_forcibly_enable=True, disk_space_clean_forcibly_ratio=85)
    with running(forced, fs=disk) as store:
        fill(store, 500, queues=1)
        disk.percent = 95
        store.request_clean()
        wait_until(lambda: min(config.consume_queue_dir.glob("T/0/*")).name != "0" * 20, "cleaned")
        disk.percent = 50
        left = bodies(store)
    shutil.rmtree(config.consume_queue_dir)

    with running(config) as store:
        assert bodies(store) == left
        assert store.min_offset("T", 0) == left[0]


def test_a_deleted_topic_is_gone_and_its_numbering_goes_on(config: MessageStoreConfig) -> None:
    with running(config) as store:
        fill(store, 10)
        fill(store, 10, topic="U")
        store.delete_topic("T")

        assert [topic for topic, _ in store.queues()] == ["U", "U"]
        assert store.get("T", 0, 0, max_count=1).status is GetMessageStatus.NO_MATCHED_LOGIC_QUEUE
        fill(store, 2)
        assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (5, 6)
        store.delete_topic("T")
    shutil.rmtree(config.consume_queue_dir)
    with running(config) as store:
        assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (0, 6)
        store.delete_topic("T")
    with running(config) as store:
        fill(store, 1)
        assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (6, 7)


def test_a_store_on_a_full_disk_opens_and_is_read(config: MessageStoreConfig, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with crashed(config, killed) as store:
        fill(store, 10)
        store.flush()
    fs = FailingFs(lambda call, path: errno.ENOSPC if call == "write" and path.endswith("checkpoint.tmp") else None)
    fs.disk = DiskUsage(100, 0, 100)

    with running(replace(at(config, killed), disk_space_warning_level_ratio=90), fs=fs) as store:
        wait_until(lambda: store.refusal is not None, "closed to puts")
        assert bodies(store) == [0, 2, 4, 6, 8]
        fs.fails = lambda _call, _path: None


def test_a_failed_flush_of_a_queue_closes_the_store(config: MessageStoreConfig) -> None:
    fs = FailingFs()
    store = make_store(replace(config, flush_interval_consume_queue=5, flush_consume_queue_thorough_interval=5), fs=fs)
    store.load()
    store.start()
    fill(store, 4)
    fs.fails = lambda call, path: errno.EIO if call == "sync" and "consumequeue" in path else None
    store.put(Message("T", b"one more, so that there is something to flush; it may come too late"))

    wait_until(lambda: store.refusal is not None, "closed")

    assert "flush" in store.put(Message("T", b"x")).reason
    with pytest.raises(DLedgerError):
        store.shutdown()


def test_flushing_and_checkpointing_go_on_by_themselves(config: MessageStoreConfig) -> None:
    config = replace(config, flush_interval_consume_queue=5, flush_consume_queue_thorough_interval=5)
    with running(config) as store:
        fill(store, 4)
        wait_until(lambda: (config.store_path_root_dir / "checkpoint").exists(), "a checkpoint")
        assert store.refusal is None


def test_who_is_told_of_a_message_can_read_it_also_while_the_store_stops(config: MessageStoreConfig) -> None:
    store = make_store(config)
    store.load()
    store.start()
    found: list[GetMessageStatus] = []
    store.add_arrival_listener(
        lambda heads: found.extend(
            store.get(head.topic, head.queue_id, head.queue_offset, max_count=1).status for head in heads
        )
    )
    results = store.put_many([Message("T", b"x") for _ in range(300)])
    store.shutdown()

    assert all(result.ok for result in results)
    assert found == [GetMessageStatus.FOUND] * 300
    assert store.failure is None
    assert not (config.store_path_root_dir / "abort").exists()
