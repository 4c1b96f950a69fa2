"""The whole store over a plain log: what a start accepts, refuses, and reads after a clean stop."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.errors import ConfigError, CorruptLogError, DirectoryLockedError
from rocketstore.config import MessageStoreConfig
from rocketstore.store.directory import decode_checkpoint
from rocketstore.types import GetMessageStatus
from tests.crash.crash_fs import OpeningFs
from tests.unit.rocketstore.bench import EVENS, ODDS, bodies, fill, make_store, running, with_key


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
