"""All that is built from a log: how it is recovered at startup, and how it becomes durable.

That is consume queues, key index, the next offset of every queue, and when timed messages are due.

**Recovery.** The log recovers itself; the queues and the index are derived from it, so the only question is from where
to rebuild them. ``plan`` answers it from findings, ``recover`` carries it out. The possible cases:

1. *Clean stop.* Everything is durable up to ``replay_from``, the end. Nothing to do.
2. *Crash.* What was appended to queues and index after the checkpoint may exist completely, partly, torn, or not at
   all, and one queue's tail may exist while another's is lost. So queues and index are cut at what the checkpoint knows
   to be durable, and rebuilt from there. RocketMQ, in its DLedger mode, continues at the end of the most advanced
   queue; lost tails of the others are never rebuilt (its issues 1397, 7355).
3. *The log lost its tail* in a power cut. Queues and index are cut at its end, so that messages stored there later are
   found. In a replicated log this is the end of what the member has, not the commit position, which it may have
   forgotten: messages in its queues were committed once, and still are.
4. *Some or all of the queue files were removed, or replaced* by other queues' or older ones. The last unit of every
   queue must be its own message at that offset; a queue for which it is not starts over. So no queue counts more
   messages than it has, and if all together do not count fewer than at the checkpoint, none lacks any. Otherwise
   everything is rebuilt. The same goes for the index.
5. *RocketMQ used the directory.* It leaves no exact position: after its clean stop, rebuilding continues at the end of
   the most advanced queue, as RocketMQ itself would; after its crash, at the first file whose times say that it is new.

**Durability.** First log, queues and index are flushed, then the checkpoint that relies on them is written. The order
matters: the position in a checkpoint is taken before anything is flushed, so everything before it is durable once all
flushes have ended. If one of them fails, the checkpoint stays unchanged, and the others are still flushed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from dledger.clock import Clock
from dledger.errors import CorruptLogError, DiskError, DiskFullError, DLedgerError, invariant
from dledger.monitoring import ConditionKind, Conditions
from dledger.store.fs import FileSystem
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.consume_queue.files import QUEUE_ENDS_FILE, read_queue_ends, write_queue_ends
from rocketstore.consume_queue.queue import QueueContext
from rocketstore.consume_queue.queue_check import QueueCheck
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.index.service import IndexLoad, IndexService
from rocketstore.queue_numbers import LoggedNumbering, RepeatAlarm
from rocketstore.store.directory import (
    CHECKPOINT_FILE,
    DELETED_FILE,
    UNKNOWN,
    DeletedQueues,
    StoreCheckpoint,
    StoreCheckpointFile,
)
from rocketstore.store.dispatch import DispatchService
from rocketstore.timer.files import TimerFiles
from rocketstore.types import TIMED_TOPIC, RecordHead

_PROBE_BYTES: Final = 64 * KIB


class QueueFindings(NamedTuple):
    """The state of the consume queues after each has recovered by itself."""

    units: int
    max_physical: int
    """The end of the last record that any of them has; -1 if there is none."""
    are_sound: bool = True
    """Whether the last unit of each is a message of that queue at that offset."""


@dataclass(frozen=True, slots=True)
class RecoveryFindings:
    """Everything the plan depends on.

    ``queues`` are as they are once cut (``_cut_of``): anything after the cut may be torn, and is ignored.
    ``file_by_time`` is the start according to RocketMQ's checkpoint.
    """

    clean_stop: bool
    checkpoint: StoreCheckpoint
    log_min: int
    log_end: int
    queues: QueueFindings
    index: IndexLoad | None
    file_by_time: int


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """Queues were cut at ``cut_queues``; dispatch starts at ``replay_from``."""

    cut_queues: int
    replay_from: int
    reason: str
    queues_are_whole: bool = True
    """The queues' contents reach the log's begin: they have missed nothing that the log no longer contains."""


def plan(findings: RecoveryFindings, *, index_safe: bool) -> RecoveryPlan:
    """Decide what must be rebuilt. ``index_safe``: including what only the index lacks."""
    checkpoint, end = findings.checkpoint, findings.log_end
    start, reason = _queues_from(findings)
    whole = findings.queues.are_sound and findings.queues.units >= checkpoint.queue_units
    if not findings.queues.are_sound:
        start, reason = findings.log_min, "consume queues do not end with their own messages"
    elif not whole:
        start, reason = findings.log_min, "files of consume queues are missing"
    whole = whole and (findings.queues.units > 0 if checkpoint.replay_from == UNKNOWN else start >= findings.log_min)
    index_from = _index_from(findings) if index_safe else None
    if index_from is not None and index_from < start:
        start, reason = index_from, "files of the index are missing"
    start = min(max(start, findings.log_min), max(end, findings.log_min))
    invariant(start <= max(end, findings.log_min), "replay begins beyond the log", start=start, end=end)
    cut = _cut_of(checkpoint, end, findings.file_by_time, clean_stop=findings.clean_stop)
    return RecoveryPlan(cut, start, reason, whole or not findings.log_min)


def _cut_of(checkpoint: StoreCheckpoint, log_end: int, file_by_time: int, *, clean_stop: bool) -> int:
    """Where the queues are cut: at the log's end, or after a crash at the end of what is known to be whole."""
    if clean_stop:
        return log_end
    known = file_by_time if checkpoint.replay_from == UNKNOWN else checkpoint.replay_from
    return min(known, log_end)


def _queues_from(findings: RecoveryFindings) -> tuple[int, str]:
    checkpoint = findings.checkpoint
    if checkpoint.replay_from != UNKNOWN:
        return checkpoint.replay_from, "clean stop" if findings.clean_stop else "the last stop was not clean"
    if findings.clean_stop and findings.queues.max_physical >= 0:
        return findings.queues.max_physical, "the last clean stop was RocketMQ's"
    if findings.clean_stop:
        return findings.log_min, "there are no consume queues"
    start = min(
        findings.file_by_time, max(findings.queues.max_physical, findings.log_min)
    )  # no gap after the queues' contents
    return start, "the last stop was not clean, and there is no checkpoint of this store"


def _index_from(findings: RecoveryFindings) -> int | None:
    if findings.index is None:
        return None
    missing = findings.index.replay_from
    if findings.index.indexed_to < findings.checkpoint.index_end:
        missing = findings.index.indexed_to if missing is None else min(missing, findings.index.indexed_to)
    return missing


def file_by_time(log: CommitLog, before_ms: int) -> int:
    """The start of the newest file whose first message was stored by ``before_ms``; otherwise the log's begin."""
    found = at = log.min_offset
    while at < log.max_offset:
        try:
            heads: Sequence[RecordHead] = log.scan(at, _PROBE_BYTES).heads
        except CorruptLogError:  # dispatch will report it; starting earlier is never wrong
            break
        if heads and heads[0].store_timestamp > before_ms:
            break
        if heads:
            found = at
        at = log.next_file_offset(at)
    return found


def queue_units(queues: ConsumeQueueTable) -> int:
    """How many messages the queues count; it only grows, except when topics are deleted."""
    return sum(queue.stored_end for queue in queues.all())


def recover(
    log: CommitLog,
    queues: ConsumeQueueTable,
    index: IndexService | None,
    checkpoint: StoreCheckpoint,
    *,
    clean_stop: bool,
    index_safe: bool,
) -> RecoveryPlan:
    """Recover the queues, load the index, cut both, and return from where to dispatch. Log and queues must be loaded.

    Raises ``CorruptLogError``, ``DiskError``.
    """
    end = log.end_offset
    guess = not clean_stop and checkpoint.replay_from == UNKNOWN
    time_ms = checkpoint.replay_time(with_index=index is not None and index_safe)
    first_file = file_by_time(log, time_ms) if guess else log.min_offset
    repaired = queues.recover(_cut_of(checkpoint, end, first_file, clean_stop=clean_stop), whole=clean_stop)
    found = None
    if index is not None:
        # A time without an end: the checkpoint was written without an index, so files may be older.
        known = checkpoint.replay_from != UNKNOWN and (checkpoint.index_end != UNKNOWN or checkpoint.index_ms == 0)
        found = index.load(
            clean_stop=clean_stop,
            index_timestamp_ms=checkpoint.index_ms,
            durable_end=checkpoint.index_end if known else None,
            durable_entries=checkpoint.index_entries,
        )
        if index.indexed_to >= end:
            index.truncate(end)
    findings = RecoveryFindings(
        clean_stop=clean_stop,
        checkpoint=checkpoint,
        log_min=log.min_offset,
        log_end=end,
        queues=QueueFindings(queue_units(queues), queues.max_physical_offset, are_sound=repaired.replay_from != -1),
        index=found,
        file_by_time=first_file,
    )
    decided = plan(findings, index_safe=index_safe)
    if decided.replay_from < log.max_offset:
        _log.info(
            "building queues and index from %d to %d of the log: %s",
            decided.replay_from,
            log.max_offset,
            decided.reason,
        )
    return decided


_log = logging.getLogger("rocketstore")


class Derived:
    """One store's, with the files that say how far they are durable."""

    def __init__(
        self,
        config: MessageStoreConfig,
        log: CommitLog,
        clock: Clock,
        fs: FileSystem,
        conditions: Conditions,
        queue_check: Callable[[], QueueCheck],
        on_damage: Callable[[], None],
    ) -> None:
        """Queues ask ``queue_check`` about their units; ``on_damage`` of index or timers is called on any thread."""
        self.config: Final = config
        self.log: Final = log
        self.clock: Final = clock
        self.fs: Final = fs
        self.conditions: Final = conditions
        self.durable = 0
        """Everything derived from the log before it is durable, so the log is no longer needed for that."""
        self.alarm: Final = RepeatAlarm(conditions)
        self.queues: Final = ConsumeQueueTable(
            config.consume_queue_dir,
            config.consume_queue_file_bytes,
            fs,
            QueueContext(
                lambda: log.min_offset,
                self.alarm.repeated,
                lambda: self.durable,
                believe=lambda queue, offset, unit: queue_check().believed_unit(queue, offset, unit),
                firsts=lambda physical: queue_check().first_messages(physical),
            ),
        )
        self.index: Final = self._make_index() if config.message_index_enable else None
        self.timers: Final = TimerFiles(config.timers_dir, fs, self._is_damaged)
        self.deleted: Final = DeletedQueues(fs, config.config_dir / DELETED_FILE)
        self.numbering: Final = LoggedNumbering(log, self.queues, deleted=lambda: self.deleted.ends)
        self.checkpoint: Final = StoreCheckpointFile(fs, config.store_path_root_dir / CHECKPOINT_FILE)
        self._ends_path = config.config_dir / QUEUE_ENDS_FILE
        self._on_damage = on_damage

    def _make_index(self) -> IndexService:
        config = self.config
        return IndexService(
            config.index_dir,
            config.max_hash_slot_num,
            config.max_index_num,
            self.fs,
            self.clock,
            on_damage=self._is_damaged,
        )

    def _is_damaged(self, error: CorruptLogError) -> None:
        self.conditions.set(ConditionKind.DAMAGED, str(error), subject=str(error.path))
        self._on_damage()

    @property
    def files(self) -> list[ConsumeQueueTable | IndexService]:
        """The files that take up disk space."""
        return [self.queues] if self.index is None else [self.queues, self.index]

    def recover(self, checkpoint: StoreCheckpoint, *, clean_stop: bool) -> RecoveryPlan:
        """Open queues and index over the recovered log; returns what is to be dispatched again."""
        place = (checkpoint.replay_from, checkpoint.queue_units)
        self.queues.load(read_queue_ends(self._ends_path, place) if clean_stop and UNKNOWN not in place else None)
        decided = recover(
            self.log,
            self.queues,
            self.index,
            checkpoint,
            clean_stop=clean_stop,
            index_safe=self.config.message_index_safe,
        )
        timed = self.queues.find(TIMED_TOPIC, 0)
        is_whole = self.timers.load(decided.cut_queues, has_messages=timed is not None and timed.max_offset > 0)
        return decided if is_whole else replace(decided, replay_from=min(decided.replay_from, self.log.min_offset))

    def note_ends(self) -> None:
        """Write down where queues end, so that the next start need not read them."""
        try:
            write_queue_ends(self.fs, self._ends_path, (self.durable, queue_units(self.queues)), self.queues.at_rest())
        except (OSError, DiskError) as error:
            _log.warning("the next start will read all consume queues: %s", error)


_T = TypeVar("_T")


class Attempts:
    """Runs steps that must all be tried, and keeps the first error."""

    def __init__(self) -> None:
        self.first: DLedgerError | OSError | None = None
        self.failures = 0

    def run(self, step: Callable[[], _T]) -> _T | None:
        """The result of ``step``, or None if it failed."""
        try:
            return step()
        except (DLedgerError, OSError) as error:
            is_known = isinstance(error, DiskFullError)  # it goes on until there is room
            _log.error("a part of the store failed: %s", error, exc_info=None if is_known else error)
            self.first = self.first or error
            self.failures += 1
            return None

    def conclude(self) -> None:
        """Raise the first error, if there was one."""
        if self.first is not None:
            raise self.first


class Durability:
    """Flushes the parts of one store and writes its checkpoint. Thread-safe: one flush of everything at a time."""

    def __init__(self, derived: Derived, dispatch: DispatchService) -> None:
        self._derived = derived
        self._dispatch = dispatch
        self._lock = threading.Lock()  # one complete flush, or one deletion of a topic, at a time

    def flush(self) -> None:
        """Make everything durable and write the checkpoint. Raises ``DiskError``, ``DiskFullError``."""
        attempts = Attempts()
        self.flush_all(attempts)
        attempts.conclude()

    def flush_all(self, attempts: Attempts) -> None:
        """The same, as one of several attempts."""
        with self._lock:
            before = attempts.failures
            position, last_ms, units, indexed_to, entries = self._dispatch.standstill(self._mark)
            attempts.run(self._derived.log.flush)
            attempts.run(lambda: self._derived.queues.flush(0))
            attempts.run(self._derived.timers.flush)
            index_ms = attempts.run(self._derived.index.flush) if self._derived.index is not None else last_ms
            if attempts.failures == before and index_ms is not None:
                marked = StoreCheckpoint(last_ms, last_ms, index_ms, position, units, indexed_to, entries)
                attempts.run(lambda: self._write(marked))

    def _write(self, marked: StoreCheckpoint) -> None:
        self._derived.checkpoint.write(marked)
        self._derived.durable = marked.replay_from

    def flush_pages(self, least_pages: int) -> None:
        """Flush queues with at least this many waiting pages; skip those that cannot be flushed now. Raises
        ``DiskError``.
        """
        try:
            self._derived.queues.flush(least_pages)
        except DiskFullError as error:
            _log.warning("flushing consume queues is waiting: %s", error)

    def flush_if_room(self) -> None:
        """Like ``flush``; if the disk is too full for a checkpoint, the old one stays. Raises ``DiskError``."""
        try:
            self.flush()
        except DiskFullError as error:
            _log.warning("the checkpoint is waiting: %s", error)

    def delete_topic(self, topic: str) -> None:
        """Remove a topic's queues, recording their ends. Raises ``DiskError``, ``DiskFullError``."""
        with self._lock:
            living, given = self._derived.queues.next_offsets(), self._derived.log.queue_offsets
            ends = {key: max(end, given.get(key, 0)) for key, end in living.items() if key[0] == topic}
            self._derived.deleted.add(ends, living)
            self._derived.queues.delete_topic(topic)
        self.flush()  # otherwise the next start takes the queues for lost and rebuilds them

    def _mark(self) -> tuple[int, int, int, int, int]:
        dispatch, index = self._dispatch, self._derived.index
        indexed = (UNKNOWN, UNKNOWN) if index is None else (index.indexed_to, index.last_entries)
        return dispatch.position, dispatch.last_store_ms, queue_units(self._derived.queues), *indexed
