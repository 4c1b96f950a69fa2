"""The whole store over a plain log: gate, life, recovery, upkeep."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dledger.conditions import ConditionKind
from dledger.errors import ConfigError, CorruptLogError, DirectoryLockedError, DiskError, DLedgerError, ShutdownError
from dledger.store.fs import DiskUsage
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.put_waiter import PutWaiter
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import SYS_FLAG_PREPARED, HostAddress, Message
from rocketstore.message.record import decode_record
from rocketstore.store.checkpoint import decode_checkpoint
from rocketstore.store.dispatch import CALM_NAP_S, SLAVE_NAP_S
from rocketstore.store.message_store import MessageStore
from rocketstore.types import (
    BROKER_STATE_TOPIC,
    SCHEDULE_TOPIC,
    BrokerRole,
    FlushDiskType,
    GetMessageStatus,
    PutMessageStatus,
    PutResult,
    RecordHead,
)
from tests.crash.crash_fs import FailingFs, OpeningFs
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import (
    FOREVER_MS,
    WAIT_S,
    UnsyncedFs,
    bodies,
    crashed,
    fill,
    make_store,
    running,
    small_config,
    with_key,
)

EVENS, ODDS = list(range(0, 100, 2)), list(range(1, 100, 2))


@pytest.fixture
def config(tmp_path: Path) -> MessageStoreConfig:
    return small_config(tmp_path / "store")


def at(config: MessageStoreConfig, root: Path) -> MessageStoreConfig:
    return replace(config, store_path_root_dir=root)


# -- puts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ip", [b"\x7f\0\0\1", bytes(15) + b"\1"])
def test_what_is_put_is_got(config: MessageStoreConfig, ip: bytes) -> None:
    """DefaultMessageStoreTest: write and read, IPv4 and IPv6."""
    host = HostAddress(ip, 10911)
    with running(config) as store:
        result = store.put(Message("T", b"body", 3, {"KEYS": "a b", "TAGS": "x"}, born_host=host, store_host=host))
        assert store.wait_dispatched(WAIT_S)

        found = store.get("T", 3, 0, max_count=10)
        message = decode_record(found.records[0])
        assert result.status is PutMessageStatus.PUT_OK
        assert result.stored is not None
        assert (message.body, message.offset, message.born_host) == (b"body", result.stored.offset, host)
        assert store.read_record(result.stored.offset) == found.records[0]
        assert store.query("T", "b", 10, 0, FOREVER_MS) == [found.records[0]]
        assert store.queues() == [("T", 3)]


def test_messages_gather_on_slaves_and_while_nobody_waits_for_them(config: MessageStoreConfig) -> None:
    """By itself a store cannot know who waits: then everything is dispatched at once."""
    store = make_store(config)
    assert store._nap_s_min() == 0
    awaited = True
    store.let_messages_gather(unless=lambda: awaited)
    assert store._nap_s_min() == 0
    awaited = False
    assert store._nap_s_min() == CALM_NAP_S
    store.become_slave()
    assert store._nap_s_min() == SLAVE_NAP_S
    awaited = True
    assert store._nap_s_min() == 0


def test_the_gate_refuses_in_order(config: MessageStoreConfig) -> None:
    """store.md 3.1."""
    store = make_store(config)
    message = Message("T", b"x")

    def refused() -> str:
        result = store.put(message)
        assert result.outcome == "not_applied"
        return f"{result.status} {result.reason}"

    assert refused() == "SERVICE_NOT_AVAILABLE the store is not running"
    store.load()
    assert refused() == "SERVICE_NOT_AVAILABLE the store is not running"
    store.start()
    store.become_slave()
    store.allow_writing(allowed=False)
    assert refused() == "SERVICE_NOT_AVAILABLE this node is a slave"
    store.become_master(BrokerRole.SYNC_MASTER)
    assert refused() == "SERVICE_NOT_AVAILABLE writing is disabled"
    store.allow_writing(allowed=True)
    assert store.put(message).status is PutMessageStatus.PUT_OK
    store.shutdown()
    assert refused() == "SERVICE_NOT_AVAILABLE the store is not running"


def test_a_put_lock_held_for_long_means_busy(config: MessageStoreConfig) -> None:
    class Slow(PlainCommitLog):
        held_ms = 1001

        @property
        def put_lock_ms(self) -> int:
            return self.held_ms

    fs = UnsyncedFs()
    store = make_store(config, fs=fs)
    log = Slow(config, clock=store._clock, fs=fs)
    store = MessageStore(config, log, fs=fs)
    store.load()
    store.start()

    assert store.put(Message("T", b"x")).status is PutMessageStatus.OS_PAGECACHE_BUSY
    log.held_ms = 1000
    assert store.put(Message("T", b"x")).status is PutMessageStatus.PUT_OK
    assert store.stats.failed_puts == 1
    store.shutdown()


def test_puts_wait_for_queues_and_index_that_are_far_behind(config: MessageStoreConfig) -> None:
    """Else consumers and queries fall behind without a bound, with messages that cost more to index than to store."""
    go_on = threading.Event()
    with running(replace(config, dispatch_behind_bytes_max=2000)) as store:
        store.add_arrival_listener(lambda _heads: assert_set(go_on))
        fill(store, 1)
        results = [store.put(Message("T", b"x" * 500)) for _ in range(10)]
        taken = [one for one in results if one.ok]
        refused = results[-1]
        assert 3 <= len(taken) <= 5
        assert (refused.status, refused.outcome) == (PutMessageStatus.OS_PAGECACHE_BUSY, "not_applied")
        assert "behind the log" in refused.reason
        assert "dispatch_behind_bytes_max" in refused.reason
        own = PutWaiter()
        store.submit([Message("T", b"x" * 500)], own.done, own=True)
        assert (own.wait(WAIT_S) or [refused])[0].ok, "clients do not shut out the broker's own writers"

        go_on.set()
        wait_until(lambda: store.put(Message("T", b"x" * 500)).ok, "puts are taken again", WAIT_S)


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_one_illegal_message_refuses_all(config: MessageStoreConfig) -> None:
    with running(config) as store:
        results = store.put_many([Message("T", b"x"), Message("no/topic", b"x")])

        assert [result.status for result in results] == [PutMessageStatus.MESSAGE_ILLEGAL] * 2
        assert store.log.max_offset == 0


def test_a_put_that_nothing_answers_is_unknown(config: MessageStoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketstore.store.message_store._PUT_SLACK_S", 0.0)
    with running(replace(config, sync_flush_timeout=10, slave_timeout=10)) as store:
        monkeypatch.setattr(store.log, "submit", lambda *_, **__: None)

        result = store.put(Message("T", b"x"))

        assert (result.status, result.outcome) == (PutMessageStatus.UNKNOWN_ERROR, "unknown")


def test_messages_get_consecutive_offsets_per_queue(config: MessageStoreConfig) -> None:
    with running(config) as store:
        results = store.put_many([Message("T", b"x", number % 2) for number in range(6)])

        assert [result.stored.queue_offset for result in results if result.stored] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", list(FlushDiskType))
def test_many_producers_and_a_reader_over_many_files(config: MessageStoreConfig, kind: FlushDiskType) -> None:
    """What the reader finds while producers write is what is there in the end."""
    with running(replace(config, flush_disk_type=kind)) as store:
        answers: list[PutResult] = []

        def produce(producer: int) -> None:
            for number in range(150):
                store.submit((Message("T", f"{producer} {number}".encode()),), answers.extend)

        producers = [threading.Thread(target=produce, args=(producer,)) for producer in range(4)]
        for thread in producers:
            thread.start()
        read: list[Message] = []
        wait_until(lambda: take(store, read) == 600, "all messages are read")
        for thread in producers:
            thread.join()

        assert [message.queue_offset for message in read] == list(range(600))
        for producer in range(4):
            mine = [message.body for message in read if message.body.startswith(b"%d " % producer)]
            assert mine == [b"%d %d" % (producer, number) for number in range(150)]
        wait_until(lambda: len(answers) == 600, "all answers")
        assert all(result.status is PutMessageStatus.PUT_OK for result in answers)
        assert store.stats.puts == store.stats.topics()["T"].messages == 600


def take(store: MessageStore, read: list[Message]) -> int:
    """Read on; how many were read."""
    read += map(decode_record, store.get("T", 0, len(read), max_count=32).records)
    return len(read)


def test_delayed_and_hidden_messages_have_queues(config: MessageStoreConfig) -> None:
    with running(config) as store:
        store.put(Message("T", b"later", properties={"DELAY": "3"}))
        store.put(Message(BROKER_STATE_TOPIC, b"{}"))
        assert store.wait_dispatched(WAIT_S)

        assert store.get(SCHEDULE_TOPIC, 2, 0, max_count=1).status is GetMessageStatus.FOUND
        assert store.get(BROKER_STATE_TOPIC, 0, 0, max_count=1).status is GetMessageStatus.FOUND
        assert store.max_offset("T", 0) == 0


def test_prepared_messages_have_no_place_in_a_queue(config: MessageStoreConfig) -> None:
    with running(config) as store:
        store.put(Message("T", b"1", sys_flag=SYS_FLAG_PREPARED))
        fill(store, 2, queues=1)

        assert bodies(store) == [0, 1]
    with running(config) as store:
        assert bodies(store) == [0, 1]


def test_listeners_hear_of_messages_that_can_be_got(config: MessageStoreConfig) -> None:
    with running(config) as store:
        heard: list[tuple[int, GetMessageStatus]] = []

        def listen(heads: Sequence[RecordHead]) -> None:
            for head in heads:
                got = store.get(head.topic, head.queue_id, head.queue_offset, max_count=1)
                heard.append((head.queue_offset, got.status))

        store.add_arrival_listener(listen)
        fill(store, 5, queues=1)
        wait_until(lambda: len(heard) == 5, "all heard")

        assert heard == [(number, GetMessageStatus.FOUND) for number in range(5)]


def test_with_sync_flush_nothing_is_read_that_a_crash_could_take_back(config: MessageStoreConfig) -> None:
    """Else a consumer commits an offset that another message gets after the crash."""

    class Held(FailingFs):
        held = False

        def sync(self, fd: int) -> None:
            if "commitlog" in self._path(fd):
                wait_until(lambda: not self.held, "the disk")

    fs = Held()
    with running(replace(config, flush_disk_type=FlushDiskType.SYNC_FLUSH), fs=fs) as store:
        fill(store, 1, queues=1)
        fs.held = True
        answers: list[PutResult] = []
        store.submit((Message("T", b"1"),), answers.extend)
        assert store.wait_dispatched(WAIT_S)
        before = (bodies(store), answers[:])
        fs.held = False
        wait_until(lambda: len(answers) == 1, "the answer")
        assert store.wait_dispatched(WAIT_S)

        assert before == ([0], [])
        assert bodies(store) == [0, 1]


# -- reads -----------------------------------------------------------------------------------------------------------


def test_offsets_by_time(config: MessageStoreConfig) -> None:
    """DefaultMessageStoreTest: exact, and far away, where the first message at or after the time is meant."""
    with running(config) as store:
        fill(store, 20, queues=1)
        times = [store.store_time("T", 0, number) for number in range(20)]

        assert store.offset_by_time("T", 0, times[7]) == times.index(times[7])
        assert store.offset_by_time("T", 0, times[0] - 10_000) == 0
        assert store.offset_by_time("T", 0, times[-1] + 10_000) == 20
        assert store.earliest_message_time() == times[0]


def test_an_unknown_queue_is_no_error(config: MessageStoreConfig) -> None:
    """DefaultMessageStoreTest: 0 and -1."""
    with running(config) as store:
        assert (store.min_offset("T", 0), store.max_offset("T", 0), store.offset_by_time("T", 0, 5)) == (-1, 0, 0)
        assert store.get("T", 0, 0, max_count=1).status is GetMessageStatus.NO_MATCHED_LOGIC_QUEUE
        assert store.store_time("T", 0, 0) == -1


def test_a_store_that_is_not_running_gives_nothing(config: MessageStoreConfig) -> None:
    store = make_store(config)

    with pytest.raises(ShutdownError):
        store.get("T", 0, 0, max_count=1)
    with pytest.raises(ShutdownError):
        store.read_record(0)
    with pytest.raises(ShutdownError):
        store.query("T", "k", 1, 0, 1)


def test_runtime_info_has_rocketmqs_keys(config: MessageStoreConfig) -> None:
    with running(config) as store:
        fill(store, 3)
        store.get("T", 0, 0, max_count=1)
        store.get("T", 0, 99, max_count=1)
        info = store.runtime_info()

        assert info["commitLogMaxOffset"] == str(store.log.max_offset)
        assert {"commitLogDiskRatio", "consumeQueueDiskRatio", "putTps", "dispatchBehindBytes"} <= set(info)
        assert {"remainHowManyDataToFlush", "pageCacheLockTimeMills", "earliestMessageTimeStamp"} <= set(info)
        assert (store.stats.gets_found, store.stats.gets_missed) == (1, 1)


# -- stopping and starting -------------------------------------------------------------------------------------------


def test_a_directory_has_one_store(config: MessageStoreConfig) -> None:
    with running(config), pytest.raises(DirectoryLockedError):
        make_store(config).load()


def test_a_clean_stop_needs_no_recovery(config: MessageStoreConfig) -> None:
    abort = config.store_path_root_dir / "abort"
    with running(config) as store:
        assert abort.exists()
        fill(store, 100)
        end = store.log.max_offset
    assert not abort.exists()

    store = make_store(config)
    done = store.load()
    store.start()
    assert (done.replay_from, done.reason) == (end, "clean stop")
    assert (bodies(store), bodies(store, 1)) == (EVENS, ODDS)
    assert with_key(store, 42) == [42]
    fill(store, 2, first=100)
    assert bodies(store) == [*EVENS, 100]
    store.shutdown()
    store.shutdown()


def test_a_reader_beyond_the_end_of_a_queue_that_lost_its_disk_begins_anew(config: MessageStoreConfig) -> None:
    """It has seen none of what is there. A queue that only lost its tail goes on at its end: the rest has been read."""
    with running(config) as store:
        fill(store, 6, queues=1)
        lost_all = store.get("T", 0, 20, max_count=1)
    with running(config) as store:
        lost_tail = store.get("T", 0, 20, max_count=1)
        fill(store, 1, queues=1, first=6)
        still = store.get("T", 0, 20, max_count=1)

    assert {one.status for one in (lost_all, lost_tail, still)} == {GetMessageStatus.OFFSET_OVERFLOW_BADLY}
    assert [one.next_offset for one in (lost_all, lost_tail, still)] == [0, 6, 7]


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's contents and time."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@pytest.mark.parametrize("count", [10, 500], ids=["one log file", "several"])
@pytest.mark.parametrize("factor", [0.25, 4])
def test_a_start_with_other_file_sizes_is_refused_and_changes_nothing(
    config: MessageStoreConfig, caplog: pytest.LogCaptureFixture, count: int, factor: float
) -> None:
    """As a forgotten conf file gives: the error names the setting and its right value, with which all is there."""
    with running(config) as store:
        fill(store, count, queues=1)
    root, file_bytes = config.store_path_root_dir, config.mapped_file_size_commit_log
    before = snapshot(root)
    caplog.clear()

    other = replace(config, mapped_file_size_commit_log=int(file_bytes * factor), mapped_file_size_consume_queue=8000)
    store = make_store(other)
    with pytest.raises(ConfigError, match=f"mappedFileSizeCommitLog.*{file_bytes}"):
        store.load()
    store.shutdown()

    assert snapshot(root) == before
    assert not caplog.records
    store = make_store(config)
    assert store.load().reason == "clean stop"
    store.start()
    assert bodies(store) == list(range(count))
    store.shutdown()


@pytest.mark.parametrize("count", [10, 500], ids=["one log file", "several"])
def test_a_store_that_a_start_with_larger_files_has_padded_is_explained(config: MessageStoreConfig, count: int) -> None:
    """Its first file is longer than it should be, with zeros at the end: cutting it makes everything readable."""
    with running(config) as store:
        fill(store, count, queues=1)
    first = min(config.commit_log_dirs[0].iterdir())
    os.truncate(first, 4 * config.mapped_file_size_commit_log)

    store = make_store(config)
    with pytest.raises((ConfigError, CorruptLogError)) as caught:
        store.load()
    store.shutdown()

    advice = f"truncate -s {config.mapped_file_size_commit_log} {first}"
    assert advice in str(caught.value)
    assert "move it" not in str(caught.value)
    subprocess.run(advice.split(), check=True)
    with running(config) as store:
        assert bodies(store) == list(range(count))


def test_a_start_that_the_log_refuses_leaves_a_clean_stop_clean(
    config: MessageStoreConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not say that the store did not stop cleanly; with the missing file back, nothing is rebuilt."""
    with running(config) as store:
        fill(store, 500, queues=1)
    middle = sorted(config.commit_log_dirs[0].iterdir())[1]
    aside = middle.rename(config.store_path_root_dir / "aside")
    caplog.clear()

    store = make_store(config)
    with pytest.raises(CorruptLogError):
        store.load()
    store.shutdown()

    assert "cleanly" not in caplog.text
    aside.rename(middle)
    store = make_store(config)
    assert store.load().reason == "clean stop"
    store.start()
    assert bodies(store) == list(range(500))
    store.shutdown()


@pytest.mark.parametrize("changed", ["", "checkpoint", "ends", "abort"])
def test_only_the_ends_of_queues_are_read_after_a_clean_stop_that_nothing_has_touched(
    config: MessageStoreConfig, changed: str
) -> None:
    """Where they ended then counts for that stop alone: with another checkpoint, or after a crash, more is read."""
    with running(config) as store:
        fill(store, 100)
    root = config.store_path_root_dir
    if changed == "checkpoint":
        checkpoint = decode_checkpoint((root / "checkpoint").read_bytes())
        (root / "checkpoint").write_bytes(replace(checkpoint, queue_units=checkpoint.queue_units - 1).encode())
    elif changed == "ends":
        ends = root / "config" / "queueEnds.json"
        ends.write_bytes(ends.read_bytes().replace(b'"T"', b'"U"'))
    elif changed == "abort":
        (root / "abort").touch()

    fs = OpeningFs()
    with running(config, fs=fs) as store:
        opened = [path for call, path in fs.calls if call == "open" and "consumequeue" in path]
        last = [str(max((config.consume_queue_dir / "T" / str(queue)).iterdir())) for queue in range(2)]
        assert (sorted(opened) == last) is not bool(changed)
        assert (bodies(store), bodies(store, 1)) == (EVENS, ODDS)


def test_a_killed_store_loses_nothing(config: MessageStoreConfig, tmp_path: Path) -> None:
    """DefaultMessageStoreTest, DLedgerCommitlogTest.testRecover."""
    with crashed(config, tmp_path / "killed") as store:
        fill(store, 50)
        store.flush()
        fill(store, 50, first=50)

    with running(at(config, tmp_path / "killed")) as store:
        assert (bodies(store), bodies(store, 1)) == (EVENS, ODDS)
        assert [with_key(store, number) for number in (0, 49, 50, 99)] == [[0], [49], [50], [99]]
        fill(store, 2, first=100)
        assert bodies(store) == [*EVENS, 100]


def test_after_a_kill_only_what_came_after_the_checkpoint_is_dispatched_again(
    config: MessageStoreConfig, tmp_path: Path
) -> None:
    """Of the index, too, whose last file may hold millions of records."""
    killed = tmp_path / "killed"
    with crashed(config, killed) as store:
        fill(store, 10)
        store.flush()
        durable = store.dispatch_position
        fill(store, 3, first=10)

    store = make_store(replace(config, store_path_root_dir=killed))
    plan = store.load()
    store.start()

    assert plan.replay_from == durable
    assert (bodies(store), bodies(store, 1)) == (list(range(0, 13, 2)), list(range(1, 13, 2)))
    assert [with_key(store, number) for number in range(13)] == [[number] for number in range(13)]
    store.shutdown()


def test_a_power_cut_that_takes_the_head_of_a_queue_hides_nothing(config: MessageStoreConfig, tmp_path: Path) -> None:
    """More files than are looked at in any case were not durable, and the pages of the first ones are lost."""
    cut = tmp_path / "cut"
    with crashed(config, cut) as store:
        fill(store, 100, queues=1)
    for path in sorted((cut / "consumequeue" / "T" / "0").iterdir())[:2]:
        path.write_bytes(bytes(path.stat().st_size))

    with running(replace(config, store_path_root_dir=cut)) as again:
        assert bodies(again) == list(range(100))


def test_one_queues_lost_tail_is_built_again(config: MessageStoreConfig, tmp_path: Path) -> None:
    """rocketmq 1397, 7355: the other queue is further than the lost tail."""
    killed = tmp_path / "killed"
    with crashed(config, killed) as store:
        fill(store, 20)
        store.flush()
        fill(store, 80, first=20)
    for file in sorted((killed / "consumequeue" / "T" / "0").iterdir())[1:]:
        file.unlink()

    with running(at(config, killed)) as store:
        assert (bodies(store), bodies(store, 1)) == (EVENS, ODDS)


@pytest.mark.parametrize("stop", ["clean", "killed"])
@pytest.mark.parametrize("lost", ["consumequeue", "consumequeue/T/0", "consumequeue/T", "index", "checkpoint"])
def test_what_is_deleted_is_built_again(config: MessageStoreConfig, tmp_path: Path, stop: str, lost: str) -> None:
    with crashed(config, tmp_path / "killed") as store:
        fill(store, 40)
        fill(store, 10, topic="U")
        store.flush()
        fill(store, 60, first=40)
    root = config.store_path_root_dir if stop == "clean" else tmp_path / "killed"
    target = root / lost
    target.unlink() if target.is_file() else shutil.rmtree(target)

    with running(at(config, root)) as store:
        assert (bodies(store), bodies(store, 1)) == (EVENS, ODDS)
        assert bodies(store, topic="U") == [0, 2, 4, 6, 8]
        assert [with_key(store, number) for number in (0, 39, 99)] == [[0], [39], [99]]
        fill(store, 1, first=100)
        assert bodies(store) == [*EVENS, 100]


def test_log_files_that_are_deleted_cut_queues_and_index(config: MessageStoreConfig, tmp_path: Path) -> None:
    """DLedgerCommitlogTest.testTruncateCQ, over a plain log."""
    killed = tmp_path / "killed"
    with crashed(config, killed) as store:
        fill(store, 300, queues=1)
        store.flush()
    files = sorted((killed / "commitlog").iterdir())
    for file in files[2:]:
        file.unlink()

    with running(at(config, killed)) as store:
        left = bodies(store)
        assert left == list(range(len(left)))
        assert 100 < len(left) < 300
        assert with_key(store, 299) == []
        fill(store, 300 - len(left), queues=1, first=len(left))
        assert bodies(store) == list(range(300))
        assert [with_key(store, number) for number in (len(left) - 1, len(left), 299)] == [
            [len(left) - 1],
            [len(left)],
            [299],
        ]


def test_an_emptied_log_empties_the_queues(config: MessageStoreConfig, tmp_path: Path) -> None:
    """DLedgerCommitlogTest.testTruncateCQ: CQ 0/0."""
    killed = tmp_path / "killed"
    with crashed(config, killed) as store:
        fill(store, 100)
        store.flush()
    shutil.rmtree(killed / "commitlog")

    with running(at(config, killed)) as store:
        assert (store.min_offset("T", 0), store.max_offset("T", 0), store.log.max_offset) == (0, 0, 0)
        fill(store, 4)
        assert bodies(store) == [0, 2]


def damage_last_record(root: Path, store_end: int, size: int) -> None:
    file = max(path for path in (root / "commitlog").iterdir() if int(path.name) < store_end)
    with file.open("r+b") as opened:
        opened.seek(store_end - int(file.name) - size + 4)
        opened.write(b"damage")


def test_a_torn_last_record_is_cut_and_writes_continue(config: MessageStoreConfig, tmp_path: Path) -> None:
    """DefaultMessageStoreTest, recover: log and queue lose the last message, and go on."""
    killed = tmp_path / "killed"
    with crashed(config, killed) as store:
        fill(store, 10, queues=1)
        store.flush()
        fill(store, 10, queues=1, first=10)
        end, size = store.log.max_offset, len(store.get("T", 0, 19, max_count=1).records[0])
    damage_last_record(killed, end, size)

    with running(at(config, killed)) as store:
        assert bodies(store) == list(range(19))
        assert store.log.max_offset == end - size
        fill(store, 1, queues=1, first=19)
        assert bodies(store) == list(range(20))
        assert with_key(store, 19) == [19]


def test_damage_of_what_was_durable_is_refused(config: MessageStoreConfig) -> None:
    """RocketMQ cuts it off, and acknowledged messages are gone without a word."""
    with running(config) as store:
        fill(store, 20, queues=1)
        end, size = store.log.max_offset, len(store.get("T", 0, 19, max_count=1).records[0])
    damage_last_record(config.store_path_root_dir, end, size)

    for _ in range(2):
        store = make_store(config)
        with pytest.raises(CorruptLogError):
            store.load()
        store.shutdown()


def test_a_store_that_could_not_be_loaded_can_be_shut_down_and_tried_again(config: MessageStoreConfig) -> None:
    with running(config) as store:
        fill(store, 10)
    fs = FailingFs(lambda call, path: errno.EIO if call == "sync" and "commitlog" in path else None)
    store = make_store(config, fs=fs)
    with pytest.raises(DiskError):
        store.load()
    store.shutdown()

    with running(config) as store:
        assert bodies(store) == [0, 2, 4, 6, 8]


def test_what_dispatch_did_not_do_keeps_the_mark(config: MessageStoreConfig) -> None:
    """DefaultMessageStoreShutDownTest."""

    def fail(_heads: Sequence[RecordHead]) -> None:
        raise ValueError("listener")

    with running(config) as store:
        fill(store, 10)
        store.add_arrival_listener(fail)
        store.put(Message("T", b"10"))
        wait_until(lambda: store.failure is not None, "the failure")

        refused = store.put(Message("T", b"11"))
        assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert "listener" in refused.reason
        assert store.runtime_info()["storeFailure"] == "listener"
    assert (config.store_path_root_dir / "abort").exists()

    with running(config) as store:
        assert bodies(store) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("part", ["commitlog", "consumequeue", "index", "checkpoint"])
def test_one_parts_error_does_not_lose_the_others_flush(config: MessageStoreConfig, part: str) -> None:
    fs = FailingFs()
    store = make_store(config, fs=fs)
    store.load()
    store.start()
    fill(store, 10)
    before = len(fs.calls)
    fs.fails = lambda call, path: errno.EIO if call == "sync" and part in path else None

    with pytest.raises(DLedgerError):
        store.shutdown()
    store.shutdown()

    synced = [path for call, path in fs.calls[before:] if call == "sync"]
    for other in ("commitlog", "consumequeue", "index"):
        assert any(other in path for path in synced)
    assert (config.store_path_root_dir / "abort").exists()
    with running(config) as store:
        assert bodies(store) == [0, 2, 4, 6, 8]


CHILD = """
import sys
from pathlib import Path
from rocketstore.types import FlushDiskType
from rocketstore.message.message import Message
from tests.unit.rocketstore.bench import make_store, small_config
store = make_store(small_config(Path(sys.argv[1]), flush_disk_type=FlushDiskType.SYNC_FLUSH))
store.load()
store.start()
number = int(sys.argv[2])
while True:
    assert store.put(Message("T", str(number).encode(), number % 2, {"KEYS": f"k{number}"})).ok
    print(number, flush=True)
    number += 1
    if number % 40 == 0:
        store.flush()
"""


def test_a_process_that_is_killed_again_and_again_loses_nothing(config: MessageStoreConfig) -> None:
    acked = -1
    for round_number in range(3):
        with running(config) as store:
            stored = sorted(bodies(store) + bodies(store, 1))
        assert stored[: acked + 1] == list(range(acked + 1))
        assert stored == list(range(len(stored)))
        command = [sys.executable, "-c", CHILD, str(config.store_path_root_dir), str(len(stored))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(70 + 13 * round_number):
                acked = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
    with running(config) as store:
        assert sorted(bodies(store) + bodies(store, 1))[: acked + 1] == list(range(acked + 1))
        assert with_key(store, acked) == [acked]


# -- upkeep ----------------------------------------------------------------------------------------------------------


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
            store._clean_round()
        refused = store.put(Message("T", b"500", 0))

        assert refused.outcome == "not_applied"
        assert "the disk is full" in refused.reason
        assert sorted(config.commit_log_dirs[0].iterdir()) == files
        assert bodies(store) == list(range(500))
        assert store.forced_files == 0
        disk.percent = 50
        store._clean_round()
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
        store._clean_round()
        begin = store.log.min_offset
        told = [one for one in caplog.records if getattr(one, "event", "") == "forced_removal"]

        assert begin > 0
        assert (told[0].__dict__["first_offset"], told[-1].__dict__["last_offset"]) == (0, begin - 1)
        assert all(one.levelname == "WARNING" and "not expired" in one.getMessage() for one in told)
        assert store.forced_files == len(told)
        assert store._conditions.holds(ConditionKind.REMOVED_EARLY)
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
        monkeypatch.setattr(store._cleaner, "_on_held_back", lambda: None)

        for _ in range(20):
            store._clean_round()
        assert store.log.min_offset == 0
        needed[0] = 1 << 60
        monkeypatch.setattr(store._numbering, "keep_from", lambda _dispatched, **_: None)
        for _ in range(20):
            store._clean_round()

        assert 0 < store.log.min_offset <= durable
        begin = store.log.min_offset
        monkeypatch.setattr(store._cleaner, "_on_held_back", store._durability.flush)
        store._clean_round()
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
