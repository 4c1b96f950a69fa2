"""What tests of the plain commit log share: small files, opening, putting."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dledger.clock import Clock
from dledger.store.fs import FileSystem
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.types import PutResult, RecordHead
from tests.crash.crash_fs import FailingFs

FILE_BYTES = 1024


def small_config(directory: Path, **changes: Any) -> MessageStoreConfig:  # noqa: ANN401 - one keyword per setting
    """Files of a few records."""
    config = MessageStoreConfig(
        store_path_root_dir=directory, mapped_file_size_commit_log=FILE_BYTES, delete_commit_log_files_interval=0
    )
    return replace(config, **changes)


def open_log(
    config: MessageStoreConfig,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    **load: Any,  # noqa: ANN401
) -> PlainCommitLog:
    """Load and start a log whose syncs are not real."""
    log = PlainCommitLog(config, clock=clock or Clock(), fs=fs or FailingFs())
    log.load(**{"clean_stop": True, **load})
    log.start()
    return log


def message(body: bytes = b"hello", topic: str = "t", queue_id: int = 0, **fields: Any) -> Message:  # noqa: ANN401
    """A message; its record has 91 bytes, the topic's and the body's."""
    return Message(topic, body, queue_id, **fields)


def put(log: PlainCommitLog, *messages: Message, wait: bool = True) -> Sequence[PutResult]:
    """Store messages as one submission; gives the results."""
    answered = threading.Event()
    results: list[PutResult] = []

    def done(found: Sequence[PutResult]) -> None:
        results.extend(found)
        answered.set()

    log.submit(messages, done, wait=wait)
    assert answered.wait(60), "no answer"
    return results


def heads_of(log: PlainCommitLog, bytes_max: int = 400) -> list[RecordHead]:
    """All records, scanned in small steps."""
    heads: list[RecordHead] = []
    offset = log.min_offset
    while True:
        found = log.scan(offset, bytes_max)
        heads += found.heads
        if found.next_offset == offset:
            return heads
        offset = found.next_offset


def abandon(log: PlainCommitLog) -> None:
    """Leave a log as a kill would: nothing is flushed, no file removed."""
    log._queue.poison = "abandoned"
    log._allocation._ready.clear()
    log._queue._reserved = None
    log.shutdown()
