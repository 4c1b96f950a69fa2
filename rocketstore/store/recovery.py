"""Start-up: bringing the consume queues and the index to where the log is.

The log recovers itself; the queues and the index are derived from it, so the only question is from where to build them
again. ``plan`` answers it out of facts, ``recover`` carries it out. What can have happened:

1. *Clean stop.* All is durable up to ``replay_from``, the end. Nothing to do.
2. *Crash.* What was appended to queues and index after the checkpoint may be there wholly, partly, torn, or not at all,
   and one queue's tail may be there while another's is lost. So queues and index are cut at what the checkpoint knows
   to be durable, and built from there. RocketMQ, in its DLedger mode, goes on at the end of the queue that came
   furthest; tails that the others lost are never built (its issues 1397, 7355).
3. *The log lost its tail* with the power. Queues and index are cut at its end, so that the messages that come to lie
   there are found. In a replicated log this is the end of what the member has, not the commit position, which it may
   have forgotten: what its queues know was committed once, and still is.
4. *Somebody removed a queue's files, or all.* Fewer messages are counted than at the checkpoint: all is built again.
   The same goes for the index.
5. *RocketMQ used the directory.* It leaves no exact position: after its clean stop building goes on at the end of the
   queue that came furthest, as it would itself; after its crash at the first file whose times say that it is new.
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


class QueueFacts(NamedTuple):
    """What the consume queues hold after they have recovered each by itself."""

    units: int
    max_physical: int
    """End of the last record that any of them has; -1 if there is none."""


@dataclass(frozen=True, slots=True)
class RecoveryFacts:
    """Everything the plan depends on.

    ``queues`` are as they are once cut (``cut_of``): what is behind the cut, and may be torn, counts for nothing.
    ``file_by_time`` is where RocketMQ's checkpoint says to begin.
    """

    clean_stop: bool
    checkpoint: StoreCheckpoint
    log_min: int
    log_end: int
    queues: QueueFacts
    index: IndexLoad | None
    file_by_time: int


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """Queues were cut at ``cut_queues``; dispatch from ``replay_from`` on."""

    cut_queues: int
    replay_from: int
    reason: str
    queues_are_whole: bool = True
    """What the queues have goes on to where the log begins: they have missed nothing that the log no longer holds."""


def plan(facts: RecoveryFacts, *, index_safe: bool) -> RecoveryPlan:
    """Decide what must be built again. ``index_safe``: also what only the index lacks."""
    checkpoint, end = facts.checkpoint, facts.log_end
    start, reason = _queues_from(facts)
    whole = facts.queues.units >= checkpoint.queue_units
    if not whole:
        start, reason = facts.log_min, "files of consume queues are missing"
    whole = whole and (facts.queues.units > 0 if checkpoint.replay_from == UNKNOWN else start >= facts.log_min)
    index_from = _index_from(facts) if index_safe else None
    if index_from is not None and index_from < start:
        start, reason = index_from, "files of the index are missing"
    start = min(max(start, facts.log_min), max(end, facts.log_min))
    invariant(start <= max(end, facts.log_min), "replay begins beyond the log", start=start, end=end)
    cut = cut_of(checkpoint, end, facts.file_by_time, clean_stop=facts.clean_stop)
    return RecoveryPlan(cut, start, reason, whole or not facts.log_min)


def cut_of(checkpoint: StoreCheckpoint, log_end: int, file_by_time: int, *, clean_stop: bool) -> int:
    """Where the queues are cut: at the log's end, and after a crash at what is known to be whole, if that is before."""
    if clean_stop:
        return log_end
    known = file_by_time if checkpoint.replay_from == UNKNOWN else checkpoint.replay_from
    return min(known, log_end)


def _queues_from(facts: RecoveryFacts) -> tuple[int, str]:
    checkpoint = facts.checkpoint
    if checkpoint.replay_from != UNKNOWN:
        return checkpoint.replay_from, "clean stop" if facts.clean_stop else "the last stop was not clean"
    if facts.clean_stop and facts.queues.max_physical >= 0:
        return facts.queues.max_physical, "the last clean stop was RocketMQ's"
    if facts.clean_stop:
        return facts.log_min, "there are no consume queues"
    start = min(facts.file_by_time, max(facts.queues.max_physical, facts.log_min))  # no gap behind what the queues have
    return start, "the last stop was not clean, and there is no checkpoint of this store"


def _index_from(facts: RecoveryFacts) -> int | None:
    if facts.index is None:
        return None
    missing = facts.index.replay_from
    if facts.index.indexed_to < facts.checkpoint.index_end:
        missing = facts.index.indexed_to if missing is None else min(missing, facts.index.indexed_to)
    return missing


def file_by_time(log: CommitLog, before_ms: int) -> int:
    """The start of the newest file whose first message was stored by ``before_ms``; the log's begin if none was."""
    found = at = log.min_offset
    while at < log.max_offset:
        try:
            heads: Sequence[RecordHead] = log.scan(at, _PROBE_BYTES).heads
        except CorruptLogError:  # dispatch will tell; to begin before it is never wrong
            break
        if heads and heads[0].store_timestamp > before_ms:
            break
        if heads:
            found = at
        at = log.next_file_offset(at)
    return found


def queue_units(queues: ConsumeQueueTable) -> int:
    """How many messages the queues count; it only grows, but for topics that are deleted."""
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
    """Recover the queues, load the index, cut both, and say from where to dispatch. Log and queues have been loaded.

    Raises ``CorruptLogError``, ``DiskError``.
    """
    end = log.end_offset
    guess = not clean_stop and checkpoint.replay_from == UNKNOWN
    time_ms = checkpoint.replay_time(with_index=index is not None and index_safe)
    first_file = file_by_time(log, time_ms) if guess else log.min_offset
    queues.recover(cut_of(checkpoint, end, first_file, clean_stop=clean_stop), whole=clean_stop)
    found = None
    if index is not None:
        # Without an end, but with a time, the checkpoint was written while no index was kept: files may be older.
        known = checkpoint.replay_from != UNKNOWN and (checkpoint.index_end != UNKNOWN or checkpoint.index_ms == 0)
        found = index.load(
            clean_stop=clean_stop,
            index_timestamp_ms=checkpoint.index_ms,
            durable_end=checkpoint.index_end if known else None,
            durable_entries=checkpoint.index_entries,
        )
        if index.indexed_to >= end:
            index.truncate(end)
    facts = RecoveryFacts(
        clean_stop=clean_stop,
        checkpoint=checkpoint,
        log_min=log.min_offset,
        log_end=end,
        queues=QueueFacts(queue_units(queues), queues.max_physical_offset),
        index=found,
        file_by_time=first_file,
    )
    decided = plan(facts, index_safe=index_safe)
    if decided.replay_from < log.max_offset:
        _log.info(
            "building queues and index from %d to %d of the log: %s",
            decided.replay_from,
            log.max_offset,
            decided.reason,
        )
    return decided
