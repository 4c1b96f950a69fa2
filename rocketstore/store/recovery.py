"""Startup: brings the consume queues and the index up to the log.

The log recovers itself; the queues and the index are derived from it, so the only question is from where to rebuild
them. ``plan`` answers it from findings, ``recover`` carries it out. The possible cases:

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
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dledger.errors import CorruptLogError, invariant
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import KIB
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.index.service import IndexLoad, IndexService
from rocketstore.store.checkpoint import UNKNOWN, StoreCheckpoint
from rocketstore.types import RecordHead

_log = logging.getLogger("rocketstore")
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

    ``queues`` are as they are once cut (``cut_of``): anything after the cut may be torn, and is ignored.
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
    cut = cut_of(checkpoint, end, findings.file_by_time, clean_stop=findings.clean_stop)
    return RecoveryPlan(cut, start, reason, whole or not findings.log_min)


def cut_of(checkpoint: StoreCheckpoint, log_end: int, file_by_time: int, *, clean_stop: bool) -> int:
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
    repaired = queues.recover(cut_of(checkpoint, end, first_file, clean_stop=clean_stop), whole=clean_stop)
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
