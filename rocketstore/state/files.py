"""The state's files: a snapshot, and RocketMQ's own. Neither is ever ahead of what the log has durably.

``unserved`` names the parts of RocketMQ 5's store that nothing here reads, so that messages would be missing without a
word. Two kinds of messages are in its log without a place in an ordinary queue. Those with a time of delivery of their
own wait in the topic ``rmq_sys_wheel_timer``, and ``timerwheel`` says when they are due. Those of topics of the queue
type BatchCQ are stored many in one record.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from typing import Any, Final, Generic, TypeVar

import numpy as np

from dledger.clock import Clock
from dledger.errors import CorruptLogError
from dledger.store.fs import FileSystem
from rocketstore.state.applier import SNAPSHOT_FILE, BrokerSnapshot, StateApplier, read_snapshot, write_snapshot
from rocketstore.state.changes import SetTimedProgress
from rocketstore.state.rocketmq_files import (
    RocketmqFiles,
    batch_topics,
    edited_by_hand,
    newer_changes,
    once_replaced,
    read_rocketmq_files,
    written_by_rocketmq,
)
from rocketstore.state.tables import Tables
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BROKER_STATE_TOPIC

RETRY_MS: Final = 1000
_WRITING_SHARE: Final = 20
"""RocketMQ's files take at most one part in this many of the time: with a million offsets, writing them takes long."""

_T = TypeVar("_T")
_log = logging.getLogger("rocketstore")


def stored_state(config_dir: Path, *, has_log: bool, edits: bool = False) -> tuple[BrokerSnapshot | None, bool]:
    """The snapshot; or RocketMQ's own files if there is neither a snapshot nor a log of state, and those that it has
    written since. Also whether anything comes from RocketMQ's files. ``edits``: what somebody has changed in our files
    by hand is in force, too.
    """
    edited = edited_by_hand(config_dir)
    if edited and not edits:
        _log.warning(
            "%s: edited by hand, and not in force: %s; the topics, groups and offsets are those of the group's log: "
            "change them with `dledger topic`, `dledger consumer` or mqadmin while it runs",
            config_dir, ", ".join(edited),
        )  # fmt: skip
    snapshot = read_snapshot(config_dir)
    if snapshot is not None:
        newer = newer_changes(config_dir, snapshot.imported, snapshot.changes, edits=edits)
        if newer is None:
            return snapshot, False
        _log.warning(
            "%s: RocketMQ has used this store since, or its files were edited: imported %s",
            config_dir,
            ", ".join(newer.names),
        )
        return replace(snapshot, changes=newer.changes, imported=newer.sums), True
    if has_log:
        foreign = written_by_rocketmq(config_dir)
        if foreign:
            _log.warning(
                "%s: not imported, although RocketMQ wrote it last: %s; without %s, the topics, groups and offsets are "
                "those of the log",
                config_dir, ", ".join(foreign), SNAPSHOT_FILE,
            )  # fmt: skip
        return None, False
    found = read_rocketmq_files(config_dir)
    return BrokerSnapshot(found.changes, imported=found.sums), bool(found.changes)


@dataclass(slots=True)
class _Writing(Generic[_T]):
    """When to write something again, and what of it is on disk."""

    interval_ms: int
    due_ms: int = 0
    saved: int = -1
    """The number of changes in what is on disk."""
    unsaved: tuple[int, int, _T] | None = None
    """To be written once the log is durable up to it: number of changes, the log's offset, contents."""


class StateFiles:
    """All methods but ``needed_from`` are for one thread at a time, which applies nothing meanwhile."""

    def __init__(
        self,
        store: MessageStore,
        applier: StateApplier,
        config_dir: Path,
        fs: FileSystem,
        clock: Clock,
        snapshot_interval_ms: int,
        rocketmq_files_interval_ms: int,
    ) -> None:
        self._store = store
        self._applier = applier
        self._config_dir = config_dir
        self._fs = fs
        self._clock = clock
        self._snapshot: _Writing[BrokerSnapshot] = _Writing(snapshot_interval_ms)
        self._rocketmq: _Writing[Tables] = _Writing(rocketmq_files_interval_ms)
        self._rocketmq_files = RocketmqFiles(fs, config_dir)
        self._imported: Mapping[str, str] = {}
        """RocketMQ's files whose contents are in the tables, with their sums, until ours have replaced them; then the
        backups of those."""
        self._saved_imported: Mapping[str, str] = self._imported
        self._saved_next = 0
        """The first message of the state topic that is not in the snapshot on disk."""

    def load(self) -> None:
        """Restore the tables; what comes from RocketMQ's files is saved before ours replace them."""
        edits = not self._store.log.is_replicated
        snapshot, taken_over = stored_state(self._config_dir, has_log=self._applier.end_offset > 0, edits=edits)
        self._applier.restore(snapshot or BrokerSnapshot())
        self._saved_next = 0 if snapshot is None else snapshot.next_offset
        self._imported = {} if snapshot is None else snapshot.imported
        self._saved_imported = self._imported
        if taken_over:
            self._write_snapshot()
        self._snapshot.due_ms = self._clock.monotonic_ms() + self._snapshot.interval_ms

    def flush(self) -> None:
        """Write all now or, if the log is not durable up to it, soon. A disk error is only logged."""
        self._snapshot.unsaved = self._rocketmq.unsaved = None
        self._write_snapshot()
        self._write_rocketmq_files()
        self._write_snapshot()  # which may say no more what was imported

    def step(self, now_ms: int) -> int:
        """Write what is due; returns when to do so again."""
        if now_ms >= self._snapshot.due_ms:
            self._write_snapshot()
        if now_ms >= self._rocketmq.due_ms:
            self._write_rocketmq_files()
        return min(self._snapshot.due_ms, self._rocketmq.due_ms)

    def _write_snapshot(self) -> None:
        """Write the tables, but never what a power cut may undo: later messages would get the same offsets."""
        writing, applier = self._snapshot, self._applier
        writing.due_ms = self._clock.monotonic_ms() + writing.interval_ms
        if writing.unsaved is None:
            if applier.changed == writing.saved and self._imported == self._saved_imported:
                return
            found = replace(applier.snapshot(), imported=self._imported)
            writing.unsaved = (applier.changed, applier.applied_to, found)
        changed, applied_to, snapshot = writing.unsaved
        if self._store.log.flushed_offset < applied_to:
            writing.due_ms = self._clock.monotonic_ms() + RETRY_MS
            return
        writing.unsaved = None
        try:
            write_snapshot(self._fs, self._config_dir, snapshot)
        except OSError as error:
            _log.warning("broker state: cannot write a snapshot, so a restart will replay more of the log: %s", error)
        else:
            writing.saved, self._saved_next, self._saved_imported = changed, snapshot.next_offset, snapshot.imported
            for change in snapshot.changes:
                if isinstance(change, SetTimedProgress):
                    self._store.forget_timed(change.progress)

    def _write_rocketmq_files(self) -> None:
        """Only once there is a snapshot: a file taken over from RocketMQ must not be lost before that."""
        writing, applier, began_ms = self._rocketmq, self._applier, self._clock.monotonic_ms()
        writing.due_ms = began_ms + writing.interval_ms
        if writing.unsaved is None:
            if applier.changed == writing.saved or not applier.complete or self._snapshot.saved < 0:
                return
            with applier.lock:
                writing.unsaved = (applier.changed, applier.applied_to, applier.tables.copy())
        changed, applied_to, tables = writing.unsaved
        if self._store.log.flushed_offset < applied_to:
            writing.due_ms = began_ms + RETRY_MS
            return
        writing.unsaved = None
        try:
            self._rocketmq_files.write(tables, self._clock.wall_ms())
        except OSError as error:
            _log.warning("broker state: cannot write RocketMQ's files: %s", error)
        else:
            writing.saved = changed
            self._imported = once_replaced(self._imported)
        now_ms = self._clock.monotonic_ms()
        writing.due_ms = max(writing.due_ms, now_ms + _WRITING_SHARE * (now_ms - began_ms))

    def needed_from(self, durable: int) -> int:
        """The offset from which the log is needed, at most ``durable``: what no snapshot contains must not expire."""
        if self._applier.blocked or self._saved_next >= self._store.max_offset(BROKER_STATE_TOPIC, 0):
            return durable  # otherwise a newer version's changes would hold back retention until the disk is full
        try:
            position = self._store.position_of(BROKER_STATE_TOPIC, 0, self._saved_next)
        except CorruptLogError:
            return 0  # unknown
        return durable if position < 0 else min(position, durable)


TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
SYS_FLAG_INNER_BATCH: Final = 0x80
"""A record that holds several messages."""
_WHEEL: Final = "timerwheel"
_TIMER_CHECK: Final = "config/timercheck"
_BATCH_QUEUES: Final = "batchconsumequeue"
_CHECK: Final = Struct(">qqq")
"""The time up to which everything was delivered, a position in the timer's log, and the next offset in the topic."""
_SLOT: Final = np.dtype([("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("magic", ">i4")])
_PRECISIONS_MS: Final = (1000, 500, 200, 100)
"""Of the times in the wheel: ``timerPrecisionMs``, which the file does not say."""
_DATABASE: Final = "CURRENT"
"""The file that every RocksDB has."""
_NAMED_MAX: Final = 3
_OTHERS: Final = {
    "compaction": "compacted topics (RocketMQ 5)",
    "config/metadata": "topics and groups in RocksDB (RocketMQ 5): export them to JSON there first",
    "config/topics": "topics in RocksDB (RocketMQ 5): export them to JSON there first",
    "config/consumerOffsets": "offsets in RocksDB (RocketMQ 5): export them to JSON there first",
}
"""Parts of a directory that nothing here reads."""


def unserved(root: Path, timer_end: int, with_batches: Collection[str] = ()) -> list[str]:
    """The messages that a broker on this directory does not serve, in sentences. Raises ``OSError``.

    ``timer_end``: the next offset of ``TIMER_TOPIC``, queue 0; ``with_batches``: topics with such records in the log.
    """
    return [*_sentences(root, timer_end, with_batches)]


def topics_of_batches(root: Path) -> set[str]:
    """Topics whose records hold several messages each. Raises ``OSError``."""
    queues = root / _BATCH_QUEUES
    with_queues = {one.name for one in queues.iterdir() if one.is_dir()} if queues.is_dir() else set()
    return with_queues | batch_topics(root / "config")


def timed_messages(root: Path, timer_end: int) -> int:
    """How many messages at most wait for their time. Raises ``OSError``."""
    try:
        with (root / _TIMER_CHECK).open("rb") as file:
            found = file.read(_CHECK.size)
    except FileNotFoundError:
        found = b""
    numbers: tuple[int, int, int] = _CHECK.unpack(found) if len(found) == _CHECK.size else (0, 0, 0)
    delivered_ms, _, taken = numbers
    return _in_wheel(root / _WHEEL, delivered_ms) + max(0, timer_end - taken)


def _sentences(root: Path, timer_end: int, with_batches: Collection[str]) -> Iterator[str]:
    waiting = timed_messages(root, timer_end)
    if waiting:
        yield (
            f"{_WHEEL}: up to {waiting:,} messages that RocketMQ 5 was to deliver at a time of their own: they are "
            "never delivered here, so let RocketMQ deliver them first"
        )
    batches = sorted(topics_of_batches(root).union(with_batches))
    if batches:
        more = f" and {len(batches) - _NAMED_MAX} more" if len(batches) > _NAMED_MAX else ""
        yield (
            f"{_BATCH_QUEUES}: messages of topics with queues of batches (BatchCQ, RocketMQ 5), which nobody can "
            f"read or write here: {', '.join(batches[:_NAMED_MAX])}{more}"
        )
    for path, what in _OTHERS.items():
        if _is_filled(root / path):
            yield f"{path}: {what}"


def _is_filled(path: Path) -> bool:
    """Whether it is a directory with directories or databases in it: RocketMQ 5 makes some in every store."""
    return path.is_dir() and any(one.is_dir() or one.name == _DATABASE for one in path.iterdir())


def _in_wheel(path: Path, delivered_ms: int) -> int:
    try:
        slots = path.stat().st_size // _SLOT.itemsize
    except FileNotFoundError:
        return 0
    if not slots:
        return 0
    wheel: Any = np.memmap(path, _SLOT, "r", shape=(slots,))  # Any: numpy's types know no fields
    used = wheel[wheel["count"] > 0]
    if not len(used):
        return 0
    latest = int(used["time"].max())
    precision_ms = min(_PRECISIONS_MS, key=lambda one: abs(latest * one - delivered_ms)) if delivered_ms else 1
    return int(used["count"][used["time"] * precision_ms > delivered_ms].sum())
