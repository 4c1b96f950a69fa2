"""Verifies consume queues, key index and the files of timed messages continuously while a store runs, and repairs them.

One thread (``rocketstore-scrub``). At ``derived_scrub_bytes_per_s``, it goes through the blocks of all index files,
through the files of timed messages, and through the units of all queues with the records they refer to, over and over.
Damage in index and timed messages, found by it or by a reader, is repaired from the log. Queues are repaired
where they are checked (``rocketstore.consume_queue.queue_check``). Damage of the log itself is reported and skipped.

*One file of the key index* is rebuilt in place, while the others remain in use. The neighbouring files determine which
records belong in it; for the last file, that is everything indexed, which grows meanwhile. The result is byte for byte
what the file held before the damage, except for records that the log no longer holds.

*Hour files of timed messages* are built again from every record of ``TIMED_TOPIC``, as its queue names them, so a file
becomes what it was, except for records that the log no longer holds. Until then delivery waits where that hour begins,
and anyone who asks for it is told so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError, DiskError, DiskFullError, DLedgerError, ShutdownError
from dledger.monitoring import ConditionKind
from dledger.store.fs import TMP_SUFFIX
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import KIB, MIB
from rocketstore.consume_queue.files import FILLER
from rocketstore.consume_queue.queue import ConsumeQueue
from rocketstore.consume_queue.queue_check import BLOCK_UNITS, QueueCheck
from rocketstore.index.file import ADVICE, IndexFile
from rocketstore.index.format import TopicHashes, key_hashes
from rocketstore.index.service import IndexService, places_of
from rocketstore.message.scan import scan_records
from rocketstore.store.derived import Derived
from rocketstore.timer.hours import TimedEntry, entry_of
from rocketstore.types import TIMED_TOPIC, QueueUnit, ScannedRecords

_SCAN_BYTES: Final = MIB
_RECORD_BYTES_MAX: Final = 64 * MIB


class NotYetReadableError(DLedgerError):
    """Raised if the index extends beyond the readable log: a restarted member does not know yet what is committed."""


def rebuild(index: IndexService, path: Path, log: CommitLog, pause: Callable[[], None] = lambda: None) -> None:
    """Rebuild the file; does nothing if it has expired. ``pause`` is called now and then, and may raise.

    Raises ``OSError``, ``CorruptLogError`` (for the log), ``NotYetReadableError``, without having changed anything.
    """
    file = index.file_at(path)
    if file is None:
        index.forget(path)
        return
    temporary = path.with_name(path.name + TMP_SUFFIX)
    before = index.header_before(file)
    known = -1 if before is None else before.end_offset
    try:
        made = IndexFile.create(index.fs, temporary, index.shape, before)
        filling = _Filling(made, log, max(known, log.min_offset), known)
        while filling.position < index.end_of(file):
            filling.step(index.end_of(file))
            pause()

        def complete() -> None:
            while filling.position < index.end_of(file):
                filling.step(index.end_of(file))

        index.exchange(file, made, complete)
    finally:
        temporary.unlink(missing_ok=True)


class _Filling:
    """A file being filled along the log; ``position`` is the progress."""

    def __init__(self, file: IndexFile, log: CommitLog, position: int, known: int) -> None:
        """Records up to the one at ``known`` are in the previous file."""
        self.position = position
        self._file = file
        self._log = log
        self._known = known
        self._topics = TopicHashes()

    def step(self, end: int) -> None:
        """Add the next records that start before ``end``."""
        scanned = self._scan()
        heads = scanned.heads
        self.position = scanned.next_offset
        if heads and heads[-1].offset >= end:
            self.position = next(head.offset for head in heads if head.offset >= end)
        if heads and (heads[0].offset <= self._known or heads[-1].offset >= end):
            heads = [head for head in heads if self._known < head.offset < end]
        keys, owners = key_hashes(heads, self._topics)
        if not len(keys):
            return
        if len(keys) > self._file.room:
            reason = "the log has more keys between its neighbours than the file can hold"
            raise CorruptLogError(self._file.path, 0, reason, f"Remove the index and start again. {ADVICE}.")
        offsets, store_ms = places_of(heads)
        self._file.put_all(keys, offsets[owners], store_ms[owners])

    def _scan(self) -> ScannedRecords:
        for bytes_max in (_SCAN_BYTES, _RECORD_BYTES_MAX):
            scanned = self._log.scan(self.position, bytes_max)
            if scanned.next_offset > self.position:
                return scanned
        raise NotYetReadableError(f"the log cannot be read beyond {self.position} yet")


UNITS: Final = 1024
"""Records read at a time,"""
BYTES: Final = MIB
"""and about their bytes."""


class _TimerRepair:
    """For the scrub thread. ``pause`` is called now and then, and may raise."""

    def __init__(self, derived: Derived, pause: Callable[[], None]) -> None:
        self._timers = derived.timers
        self._queues = derived.queues
        self._log = derived.log
        self._conditions = derived.conditions
        self._clock = derived.clock
        self._pause = pause
        self._due_ms = 0
        self.repaired = 0
        """How many files were built again."""

    def step(self) -> int | None:
        """Try all that are damaged; returns when to try again."""
        damaged = self._timers.damaged()
        if not damaged:
            return None
        if self._clock.monotonic_ms() < self._due_ms:
            return self._due_ms
        for hour in damaged:
            self._repair(hour)
        self._due_ms = self._clock.monotonic_ms() + RETRY_MS
        return self._due_ms if self._timers.damaged() else None

    def _repair(self, hour: int) -> None:
        subject = str(self._timers.path(hour))
        self._conditions.set(ConditionKind.REPAIRING, "building it again from the log", subject=subject)
        try:
            self._build(hour)
        except (OSError, CorruptLogError, DiskError, DiskFullError) as error:
            text = f"damaged, so the timed messages of its hour wait, and cannot be built again yet: {error}"
            self._conditions.set(ConditionKind.DAMAGED, text, subject=subject)
        else:
            self.repaired += 1
            self._conditions.clear(ConditionKind.DAMAGED, subject)
            _log.warning("%s was damaged and has been built again from the log", subject,
                         extra={"event": "repair", "file": subject})  # fmt: skip
        finally:
            self._conditions.clear(ConditionKind.REPAIRING, subject)

    def _build(self, hour: int) -> None:
        repair = self._timers.begin_repair(hour)
        if repair is None:
            return  # it is settled by now
        queue = self._queues.find(TIMED_TOPIC, 0)
        at = repair.until if queue is None else queue.min_offset
        while queue is not None and at < repair.until:
            units = queue.units(at, min(UNITS, repair.until - at))
            if not units or units[0] == FILLER:
                reason = f"the queue of timed messages has nothing at offset {at} yet"
                raise CorruptLogError(self._timers.path(hour), 0, reason, "It is tried again.")
            units = _some(units)
            repair.take(self._entries(units))
            at += len(units)
            self._pause()
        self._timers.end_repair(repair)

    def _entries(self, units: list[QueueUnit]) -> Iterator[TimedEntry]:
        records = self._log.read_together([(one.offset, one.size) for one in units])
        for unit, found in zip(units, records, strict=True):
            record = found or self._record(unit)
            for head in () if record is None else scan_records(record, unit.offset, check_crc=False).heads:
                entry = entry_of(head)
                if entry is not None:
                    yield entry

    def _record(self, unit: QueueUnit) -> bytes | None:
        """None: it has expired, or is lost."""
        try:
            record = self._log.read(unit.offset, unit.size)
        except CorruptLogError as error:
            if error.index is not None and self._log.is_repaired:  # only entries are repaired
                raise
            _log.error("the record of a timed message at %d of the log is lost: %s", unit.offset, error)
            return None
        if record is None and unit.offset >= self._log.min_offset:
            reason = f"the log cannot be read at {unit.offset} yet"
            raise CorruptLogError(self._timers.directory, 0, reason, "It is tried again.")
        return record


def _some(units: list[QueueUnit]) -> list[QueueUnit]:
    """At least one, up to the next that never was written."""
    size = 0
    for place, unit in enumerate(units):
        if place and (unit == FILLER or size + unit.size > BYTES):
            return units[:place]
        size += unit.size
    return units


_log = logging.getLogger("rocketstore")
STEP_BYTES: Final = 64 * KIB
RETRY_MS: Final = 5_000
TOLD_MS: Final = 60_000
_MESSAGE_BYTES: Final = KIB
"""Minimum charge per message, because small ones cost as much."""


class DerivedScrub:
    """The work of the thread."""

    def __init__(self, derived: Derived, queue_check: QueueCheck) -> None:
        self._log = derived.log
        self._queues = derived.queues
        self._index = derived.index
        self._timers = derived.timers
        self._queue_check = queue_check
        self._conditions = derived.conditions
        self._clock = clock = derived.clock
        self._rate = derived.config.derived_scrub_bytes_per_s
        self._left: list[ConsumeQueue] = []  # queues left in this round
        self._next_offset = 0
        self._in_index = False
        self._hours_left: list[int] = []
        self._scrub_due_ms = clock.monotonic_ms()
        self._rebuild_due_ms = 0
        self._stopping = threading.Event()
        self.repaired = 0
        """How many index files were rebuilt."""
        self._timer_repair = _TimerRepair(derived, self._pause)

    def stop(self) -> None:
        """Abort work in progress soon."""
        self._stopping.set()

    def step(self) -> int | None:
        """Do what is due; returns when the next step is."""
        try:
            due = [self._rebuild(), self._timer_repair.step(), self._scrub()]
        except ShutdownError:
            return None
        return min((one for one in due if one is not None), default=None)

    def _pause(self) -> None:
        if self._stopping.is_set():
            raise ShutdownError("the store is stopping")

    # -- the index -------------------------------------------------------------------------------------------------

    def _rebuild(self) -> int | None:
        now_ms = self._clock.monotonic_ms()
        damaged = self._index.damaged if self._index is not None else ()
        if not damaged or now_ms < self._rebuild_due_ms:
            return self._rebuild_due_ms if damaged else None
        for path in damaged:
            self._rebuild_file(path)
        left = self._index is not None and self._index.damaged
        self._rebuild_due_ms = self._clock.monotonic_ms() + RETRY_MS
        return self._rebuild_due_ms if left else None

    def _rebuild_file(self, path: Path) -> None:
        index = self._index
        if index is None:
            return
        self._conditions.set(ConditionKind.REPAIRING, "rebuilding it from the log", subject=str(path))
        try:
            rebuild(index, path, self._log, self._pause)
        except (OSError, CorruptLogError, DiskError, DiskFullError, NotYetReadableError) as error:
            text = f"damaged, and cannot be rebuilt yet: {error}"
            self._conditions.set(ConditionKind.DAMAGED, text, subject=str(path))
        else:
            self.repaired += 1
            self._conditions.clear(ConditionKind.DAMAGED, str(path))
            _log.warning("%s was damaged and has been rebuilt from the log", path,
                         extra={"event": "repair", "file": str(path)})  # fmt: skip
        finally:
            self._conditions.clear(ConditionKind.REPAIRING, str(path))

    # -- verifying -------------------------------------------------------------------------------------------------

    def _scrub(self) -> int | None:
        if not self._rate:
            return None
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._scrub_due_ms:
            done = self._verify(STEP_BYTES)
            self._scrub_due_ms = now_ms + max(1, done * 1000 // self._rate)
        return self._scrub_due_ms

    def _verify(self, bytes_max: int) -> int:
        """Verify the next bytes of an endless walk; returns how many, at least the cost of an idle step."""
        try:
            if self._in_index and self._index is not None:
                done, finished = self._index.verify(bytes_max)
                self._in_index = not finished
                return max(done, 1)
            if self._hours_left:
                return max(self._timers.verify(self._hours_left.pop()), 1)
            return self._verify_queue(bytes_max)
        except (CorruptLogError, DiskError, DiskFullError) as error:
            subject = str(error.path) if isinstance(error, CorruptLogError) else "queues and index"
            self._conditions.set(ConditionKind.DAMAGED, str(error), subject=subject, for_ms=TOLD_MS)
            self._next_offset += BLOCK_UNITS - self._next_offset % BLOCK_UNITS
            return bytes_max

    def _verify_queue(self, bytes_max: int) -> int:
        """Verify units of one queue, with their records; then the next queue, and after all of them the index."""
        if not self._left:
            self._left, self._next_offset = list(self._queues.all()), 0
            self._hours_left = self._timers.hours()
            if not self._left:
                self._in_index = True
                return bytes_max
        queue = self._left[-1]
        at = max(self._next_offset, queue.min_offset)
        end, log_end = queue.max_offset, self._log.max_offset
        units = self._queue_check.tagged_units(queue, at, log_end, bytes_max) if at < end else ()
        if not units and at < end and self._queue_check.restore(queue, at) is not None:  # the unit looked never written
            units = queue.units(at, 1)
        real = [unit for unit in units if unit != FILLER]
        uncommitted = bool(real) and real[-1].offset + real[-1].size > log_end
        if not units or uncommitted or at + len(units) >= end:
            self._left.pop()
            self._next_offset = 0
            self._in_index = not self._left
        else:
            self._next_offset = at + len(units)
        return sum(max(_MESSAGE_BYTES, min(unit.size, bytes_max)) for unit in real) + _MESSAGE_BYTES
