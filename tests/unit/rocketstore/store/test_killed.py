"""The whole store over a plain log: what a start finds and rebuilds after a kill, a loss or an error."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError, DiskError, DLedgerError
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.types import PutMessageStatus, RecordHead
from tests.crash.crash_fs import FailingFs
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import EVENS, ODDS, at, bodies, crashed, fill, make_store, running, with_key


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
    os.utime(min(config.commit_log_dirs[0].iterdir()))  # so that the log is read, and made durable
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
