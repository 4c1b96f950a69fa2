"""A whole store over a plain log in a temporary directory, small enough to look at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dledger.clock import Clock
from dledger.store.fs import FileSystem
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.store.message_store import MessageStore
from rocketstore.types import GetMessageStatus

WAIT_S = 120.0
FOREVER_MS = 1 << 60
EVENS, ODDS = list(range(0, 100, 2)), list(range(1, 100, 2))
"""The numbers of 100 messages in each of two queues."""


class UnsyncedFs(FileSystem):
    """Syncs nothing: quick."""

    def sync(self, fd: int) -> None:
        return

    def sync_all(self, fd: int) -> None:
        return

    def sync_dir(self, path: Path) -> None:
        return


def small_config(root: Path, **changes: Any) -> MessageStoreConfig:  # noqa: ANN401  # any setting
    """Small files; nothing happens by time."""
    config = MessageStoreConfig(
        store_path_root_dir=root,
        mapped_file_size_commit_log=16 * KIB,
        mapped_file_size_consume_queue=400,
        max_hash_slot_num=100,
        max_index_num=400,
        delete_when="",
        delete_commit_log_files_interval=0,
        flush_interval_commit_log=3_600_000,
        flush_interval_consume_queue=3_600_000,
        clean_resource_interval=3_600_000,
        derived_scrub_bytes_per_s=0,
        disk_space_warning_level_ratio=100,
        disk_max_used_space_ratio=95,
        disk_space_clean_forcibly_ratio=100,
    )
    return replace(config, **changes)


def at(config: MessageStoreConfig, root: Path) -> MessageStoreConfig:
    """The same settings for the store in another directory."""
    return replace(config, store_path_root_dir=root)


def make_store(config: MessageStoreConfig, *, fs: FileSystem | None = None, clock: Clock | None = None) -> MessageStore:
    """A store that is not loaded yet."""
    fs, clock = fs or UnsyncedFs(), clock or Clock()
    return MessageStore(config, PlainCommitLog(config, clock=clock, fs=fs), clock=clock, fs=fs)


@contextmanager
def running(
    config: MessageStoreConfig, *, fs: FileSystem | None = None, clock: Clock | None = None
) -> Iterator[MessageStore]:
    """A started store, shut down at the end."""
    store = make_store(config, fs=fs, clock=clock)
    try:
        store.load()
        store.start()
        yield store
    finally:
        store.shutdown()


@contextmanager
def crashed(config: MessageStoreConfig, target: Path) -> Iterator[MessageStore]:
    """A started store whose directory is copied to ``target`` as a killed process leaves it."""
    with running(config) as store:
        yield store
        assert store.wait_dispatched(WAIT_S)
        shutil.copytree(config.store_path_root_dir, target, ignore=shutil.ignore_patterns("*.tmp"))


def fill(
    store: MessageStore, count: int, *, topic: str = "T", queues: int = 2, size: int = 100, first: int = 0
) -> None:
    """Put messages with bodies ``first``, ``first + 1``, … round robin, key ``k<number>``, and wait for dispatch."""
    for number in range(first, first + count):
        body = str(number).encode().ljust(size, b".")
        result = store.put(Message(topic, body, number % queues, {"KEYS": f"k{number}", "TAGS": f"t{number % 3}"}))
        assert result.ok, result
    assert store.wait_dispatched(WAIT_S)


def bodies(store: MessageStore, queue_id: int = 0, *, topic: str = "T", offset: int | None = None) -> list[int]:
    """The numbers of all messages in a queue, whose records must carry their own places."""
    at = max(0, store.min_offset(topic, queue_id)) if offset is None else offset
    found: list[int] = []
    while True:
        result = store.get(topic, queue_id, at, max_count=32)
        if result.status is not GetMessageStatus.FOUND:
            return found
        for number, record in enumerate(result.records, at):
            message = decode_record(record)
            assert (message.topic, message.queue_id, message.queue_offset) == (topic, queue_id, number)
            found.append(int(message.body.rstrip(b".")))
        at = result.next_offset


def with_key(store: MessageStore, number: int, *, topic: str = "T") -> list[int]:
    """The numbers of all messages with a key."""
    records = store.query(topic, f"k{number}", 64, 0, FOREVER_MS)
    return [int(decode_record(record).body.rstrip(b".")) for record in records]
