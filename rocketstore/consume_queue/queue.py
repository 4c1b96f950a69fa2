"""One consume queue: message i is unit i, 20 bytes at byte i * 20 of a series of files, as in RocketMQ.

Places without a message hold the *filler*: before the first unit of a queue that starts inside a file, as in RocketMQ,
and where queue offsets are missing in the log, where RocketMQ would shift all later messages to wrong offsets. A filler
is not a message: searches skip it, and it does not show how far the log is dispatched.

One thread appends units in log order; a unit whose record ends at or before ``max_physical_offset`` is already there.
Any thread may read; a unit is readable once it is completely written. ``_lock`` separates appends and removal; old
files may be removed at any time. Files are read with ``pread``, so a bad sector is an error, and reading old units does
not stop the other threads. They are open only while in use (``rocketstore.mapped.file``).
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from dledger.errors import CorruptLogError, DiskError, DiskFullError
from dledger.store.format import segment_name
from dledger.store.fs import FileSystem
from dledger.store.mmap_file import Placement
from rocketstore.consume_queue.files import (
    BROKEN,
    FILLER,
    FILLER_BYTES,
    UNIT_BYTES,
    QueueDirectories,
    QueueEnd,
    QueueRecovery,
    last_record_offset,
    pack_columns,
    pack_unit,
    pack_units,
    parse_units,
    prepare_directory,
    scan_file,
    unit_columns,
)
from rocketstore.mapped.file import DescriptorCache, StoreFile, is_out_of_descriptors
from rocketstore.mapped.queue import MappedFileQueue, Unflushed
from rocketstore.message.columns import Ints, UnitColumns
from rocketstore.types import QueueKey, QueueUnit, RecordHead

_log = logging.getLogger(__name__)
_SCANNED_FILES: Final = 3
"""At least this many files are read at startup."""
FOREVER: Final = (1 << 63) - 1
"""A physical offset after every record."""
_GAP_FILES_MAX: Final = 16
"""A gap of more units than fit into this many files counts as damage: it must not fill the disk with fillers."""
_FILLERS_AT_ONCE: Final = 1 << 16
_LOOKED_UNITS: Final = 1 << 16
"""How many units are examined at once."""
_STEP_UNITS: Final = 1024
_UNKNOWN: Final = (1, 0)
"""An empty range."""
_queue_offset: Final = operator.itemgetter(6)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Queue offsets from ``first`` on were repeated, in records of which the first one ends at ``physical_end``.

    Their places hold other messages, so they get none. ``count`` of them arrived, ``expected`` was the next offset.
    """

    topic: str
    queue_id: int
    first: int
    count: int
    expected: int
    physical_end: int

    @property
    def lost(self) -> int:
        """How many of them cannot be read from the queue."""
        return min(self.count, self.expected - self.first)

    def __str__(self) -> str:
        return (
            f"queue {self.queue_id} of topic {self.topic}: {self.lost} messages are unreadable: their queue "
            f"offsets, from {self.first} on (the record that ends at {self.physical_end}), were already in use "
            f"(the next was {self.expected})"
        )


class First(NamedTuple):
    """The offsets of a message in the log."""

    offset: int
    physical: int


@dataclass(frozen=True, slots=True)
class QueueContext:
    """The parts of the store that queues use."""

    log_begin: Callable[[], int] = lambda: 0
    """The begin of the log."""
    repeated: Callable[[Repeated], None] = lambda found: _log.error("%s", found)
    """Called for messages that get no place in their queue."""
    durable: Callable[[], int] = lambda: FOREVER
    """Units of records that end at or before this offset are durable."""
    descriptors: DescriptorCache | None = None
    """Opens the files of all queues; None: each queue has its own."""
    believe: Callable[[ConsumeQueue, int, QueueUnit], QueueUnit | None] = lambda _queue, _offset, unit: (
        unit if unit != BROKEN else None
    )
    """The unit that the log confirms at an offset, None if there is no message; a wrong unit is rewritten."""
    firsts: Callable[[int], Mapping[QueueKey, First]] = lambda _physical: {}
    """The first messages of queues soon after an offset, according to the log."""


class ConsumeQueue:
    """One queue of a topic. Offsets are queue offsets (unit numbers) unless they are called physical."""

    def __init__(  # the last two are shared by the table
        self,
        topic: str,
        queue_id: int,
        directory: Path,
        file_bytes: int,
        fs: FileSystem,
        directories: QueueDirectories | None = None,
        context: QueueContext | None = None,
    ) -> None:
        """``file_bytes`` must be a multiple of 20. Nothing is created before the first unit is added.

        ``directories`` creates those of all queues.
        """
        self._context = context or QueueContext()
        self.topic = topic
        self.queue_id = queue_id
        self.directory = directory
        self._fs = fs
        self._directories = directories or QueueDirectories(fs)
        descriptors = self._context.descriptors or DescriptorCache(fs)
        self._files = MappedFileQueue(fs, Placement((directory,)), file_bytes, descriptors=descriptors)
        self._lock = threading.Lock()
        self._begin = 0
        """Units before this one are fillers, or their records are gone."""
        self._begin_for = _UNKNOWN
        """While the log's begin is between these two, the queue's begin is valid."""
        self._looked = (0, 0)
        """A begin of the log, and the queue's begin then: everything before that was examined."""
        self._max_physical_offset = -1
        self._floor = 0
        """According to the log, offsets below this one were assigned, whatever units there are; see ``raise_to``."""
        self._destroyed = False
        self._removed: list[str] = []
        self._unsynced_parents = False
        self.is_adopted = False
        """Whether it was opened without reading its files."""
        self._times: dict[int, int] = {}
        """When files were modified (ns), by their starts, as far as they have not changed since the last stop."""
        self._foreign: int | None = None
        """The last unit, if ``recover`` found that the log has no such message."""

    # Bounds

    @property
    def units_per_file(self) -> int:
        """How many units a file holds."""
        return self._files.file_bytes // UNIT_BYTES

    @property
    def min_offset(self) -> int:
        """The first message's offset; ``max_offset`` if there is none."""
        return min(max(self._begin, self._files.min_offset // UNIT_BYTES), self.max_offset)

    @property
    def max_offset(self) -> int:
        """The next message's offset; 0 in a queue that never had one."""
        return max(self._files.max_offset // UNIT_BYTES, self._floor)

    @property
    def stored_end(self) -> int:
        """The end of the units on disk, which a restart finds unless files were removed."""
        return self._files.max_offset // UNIT_BYTES

    @property
    def max_physical_offset(self) -> int:
        """The end of the last record that has a unit; -1 if there is none."""
        return self._max_physical_offset

    def next_file(self, offset: int) -> int:
        """The first unit of the file after the one ``offset`` lies in (RocketMQ's ``rollNextFile``)."""
        return offset + self.units_per_file - offset % self.units_per_file

    # Opening

    def load(self) -> None:
        """Open the files, removing those that cannot belong to the queue (``recover`` reports them). Raises
        ``DiskError``.
        """
        try:
            self._removed = prepare_directory(self._fs, self.directory, self._files.file_bytes)
        except OSError as error:
            raise DiskError(f"opening {self.directory} failed: {error}") from error
        self._files.load()

    def adopt(self, end: QueueEnd) -> bool:
        """Used instead of ``load``: take over the queue as a clean stop left it; False if its files have changed.

        The files are not read: ``recover`` looks at the last unit, and readers check each one against its record.
        Raises ``DiskError``.
        """
        expected = {segment_name(base): (self._files.file_bytes, changed_ns) for base, changed_ns in end.files}
        if self._stat_files() != expected:
            return False
        self._files.adopt([base for base, _ in end.files], end.end)
        self._times = {one[0]: one[1] for one in end.files}
        self._begin, self._begin_for, self._max_physical_offset = end.begin, end.begin_for, end.max_physical
        if end.begin_for[0] <= end.begin_for[1]:
            self._looked = (end.begin_for[0], end.begin)
        self.is_adopted = True
        return True

    def at_rest(self) -> QueueEnd | None:
        """The input of ``adopt`` for the next start, for a queue that is flushed and no longer written; None:
        unavailable.

        Raises ``DiskError``.
        """
        times = self._times
        try:
            places = [
                [file.base, times.get(file.base) or os.stat(file.path).st_mtime_ns] for file in self._files.files()
            ]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DiskError(f"looking at the files of {self.directory} failed: {error}") from error
        if not places:
            return None
        begin = min(self._begin, self.stored_end)
        return QueueEnd(places, self._files.max_offset, begin, self._begin_for, self._max_physical_offset)

    def _stat_files(self) -> dict[str, tuple[int, int]]:
        """Size and modification time (ns) of the directory's entries."""
        try:
            with os.scandir(self.directory) as entries:
                return {one.name: (status.st_size, status.st_mtime_ns) for one in entries if (status := one.stat())}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise DiskError(f"listing {self.directory} failed: {error}") from error

    def recover(self, limit: int = FOREVER, *, whole: bool = True) -> QueueRecovery:
        """Find the end, and cut what is bad or belongs to records that end after physical ``limit``.

        ``whole``: everything ever appended is there, as after a clean stop; otherwise only units of records that end by
        ``limit`` are. A power cut may leave any part of the rest: zeros, pages from the middle, units torn between two
        sectors. None of it counts, and no binary search relies on it. Cuts become durable with the next flush: until a
        checkpoint covers more, the next start cuts at the same place. Called once, after ``load``, or after ``adopt``,
        when there is nothing to do unless the limit requires it. Raises ``DiskError``.
        """
        if self.is_adopted:
            if whole and self._max_physical_offset <= limit and self._ends_as_left():
                return QueueRecovery(self._max_physical_offset, None, ())
            self.is_adopted, self._times = False, {}
            self.load()
        files = self._files.files()
        first = max(0, min(self._newest_sure(files, limit), len(files) - _SCANNED_FILES))
        end, physical, bad = self._scan(files[first:], limit)
        if physical < 0 and first:  # only fillers there, or damage
            end, physical, bad = self._scan(files, limit)
        if physical < 0 and not whole:
            end = 0  # the rest may be a later file of a queue that lost its first one's name: start over
        bad = bad and whole and any(not file.is_blank(max(end - file.base, 0)) for file in files if file.end > end)
        repairs, self._removed = self._removed if whole else [], []
        if bad:
            repairs.append(f"{self.directory} was cut at unit {end // UNIT_BYTES}: what followed was damaged")
        self._files.truncate(end, durable=False)
        if end and not self._files.files():
            self._files.last_file(end)  # an existing queue keeps one file, so that offsets are not assigned again
        self._max_physical_offset = self._end_of_last(physical, limit)
        if self._foreign is not None:
            return self._start_over(self._foreign)
        self._begin = self._first_real(self._files.min_offset // UNIT_BYTES if self._files.files() else 0)
        self._begin_for, self._looked = _UNKNOWN, (0, 0)
        return QueueRecovery(physical, physical if repairs else None, tuple(repairs))

    def _end_of_last(self, physical: int, limit: int) -> int:
        """The end of the last unit's record, according to the log: units of earlier records are not appended any more.

        If that is not the message of this place, nothing in these files can be relied on, the end least of all: they
        may be another queue's.
        """
        low, high, begin = self._files.min_offset // UNIT_BYTES, self.stored_end, self._context.log_begin()
        while physical >= 0 and (at := self._last_real(low, high)) >= 0:
            unit = next(iter(self._read(at, 1)), BROKEN)
            if 0 <= unit.offset < begin:
                return unit.offset + unit.size
            true = self._context.believe(self, at, unit)
            if true is not None and true.offset + true.size <= limit:
                return true.offset + true.size
            if true is None:
                self._foreign = at
                break
            self._files.truncate(at * UNIT_BYTES, durable=False)
            high = at
        return min(physical, begin)

    def _ends_as_left(self) -> bool:
        """Whether the last unit of an adopted queue still is the one that its stop recorded: one read, not of the log.

        Not asked if its messages have expired: nothing can be read from it any more.
        """
        if self._max_physical_offset <= self._context.log_begin():
            return True
        unit = self._last_unit()
        if unit == FILLER:
            at = self._last_real(self._files.min_offset // UNIT_BYTES, self.stored_end)
            unit = next(iter(self._read(at, 1)), BROKEN) if at >= 0 else BROKEN
        return unit.offset + unit.size == self._max_physical_offset

    def _last_unit(self) -> QueueUnit:
        """The last unit, from a file that does not stay open: a start looks at very many. Raises ``DiskError``."""
        at = self._files.max_offset - UNIT_BYTES
        file = self._files.find(at)
        return next(iter(parse_units(file.read_once(at - file.base, UNIT_BYTES))), BROKEN) if file else BROKEN

    def _start_over(self, foreign: int) -> QueueRecovery:
        """Remove all units, to be appended again from the log's begin on."""
        self._files.truncate(0, durable=False)
        self._begin, self._begin_for, self._looked, self._max_physical_offset = 0, _UNKNOWN, (0, 0), -1
        why = f"{self.directory} is rebuilt: its last unit, {foreign}, leads to no message of this queue at that offset"
        return QueueRecovery(-1, -1, (why,))

    def _newest_sure(self, files: Sequence[StoreFile], limit: int) -> int:
        """The number of the newest file known to be good up to its start: its first unit belongs to a record that ends
        by ``limit``. That unit lies in one sector, so it exists or not, but is never torn.
        """
        for number in range(len(files) - 1, 0, -1):
            first = next(iter(parse_units(files[number].read(0, UNIT_BYTES, cold=True) or b"")), FILLER)
            if first != FILLER and first.offset >= 0 and first.offset + first.size <= limit:
                return number
        return 0

    def _scan(self, files: Sequence[StoreFile], limit: int) -> tuple[int, int, bool]:
        """The end of the good units, the end of the last one's record, and whether anything may follow.

        A unit of a record beyond the limit is as bad as any other: after a clean stop, the log had them all.
        """
        end, physical = 0, -1
        for file in files:
            found = scan_file(file, physical, limit)
            end, physical = file.base + found.good_bytes, found.max_physical_offset
            if found.good_bytes < file.size:
                return end, physical, True
        return end, physical, False

    # Appending

    def append(self, records: Sequence[RecordHead] | UnitColumns) -> bool:
        """Append the units of this queue's records, in log order; existing ones are skipped.

        False if the queue was removed meanwhile. After ``DiskFullError`` or ``DiskError``, a part may be appended, and
        the same call may be repeated. Raises ``CorruptLogError`` if queue offsets jump implausibly far.
        """
        with self._lock:
            if self._destroyed:
                return False
            known = self._max_physical_offset
            runs = _runs_of_columns(records, known) if isinstance(records, UnitColumns) else _runs(records, known)
            for first, ends, units in runs:
                self._append_run(first, ends, units)
        return True

    def raise_to(self, offset: int) -> None:
        """According to the log, all offsets below ``offset`` were assigned: continue there. Raises ``DiskError``.

        If the units below it are missing here, their records are gone from the log, so nothing can be read there.
        """
        with self._lock:
            if not self._destroyed and offset > self.max_offset:
                if self._is_expired():
                    self._forget_units()
                    self._begin, self._begin_for = offset, _UNKNOWN
                else:
                    _log.warning("%s: offsets %d to %d have no record", self.directory, self.max_offset, offset - 1)
                self._floor = offset

    def _is_expired(self) -> bool:
        """Whether the log has no record left that has a unit here."""
        return self._max_physical_offset <= self._context.log_begin()

    def _forget_units(self) -> None:
        """Remove all files, whose records are gone from the log, so that no gap up to the next offset is filled."""
        if self._files.files():
            _log.info("%s: all its messages have expired; removing its old files", self.directory)
            self._files.destroy()

    def _append_run(self, first: int, ends: Sequence[int] | Ints, units: bytes) -> None:
        """Append consecutive units; ``ends`` are the physical ends of their records."""
        expected = self.max_offset
        if first < expected:
            self._context.repeated(Repeated(self.topic, self.queue_id, first, len(ends), expected, int(ends[0])))
            ends, units, first = ends[expected - first :], units[(expected - first) * UNIT_BYTES :], expected
            if not units:
                return
        if first > expected and self._is_expired():
            self._forget_units()
        fresh = not self._files.files()
        expected = first - first % self.units_per_file if fresh else self.stored_end
        if first - expected > _GAP_FILES_MAX * self.units_per_file:
            at = parse_units(units[:UNIT_BYTES])[0].offset
            reason = f"after queue offset {expected - 1} comes {first}, of the record at {at}"
            raise CorruptLogError(self.directory, expected, reason, "Remove this directory: the queue will be rebuilt.")
        if fresh or self._begin >= expected:  # it holds no message
            physical = parse_units(units[:UNIT_BYTES])[0].offset
            self._begin, self._begin_for = first, (0 if fresh else physical, physical)
        if fresh:
            self._make_directory()
        elif first > expected:
            _log.warning("%s: queue offsets %d to %d are missing", self.directory, expected, first - 1)
        for missing in range(first - expected, 0, -_FILLERS_AT_ONCE):
            fillers, done = FILLER_BYTES * min(missing, _FILLERS_AT_ONCE), 0
            while done < len(fillers):
                done += self._write(first * UNIT_BYTES, fillers, done)
        done = 0
        while done < len(units):
            done += self._write(first * UNIT_BYTES, units, done)
            self._max_physical_offset = int(ends[done // UNIT_BYTES - 1])

    def _write(self, start: int, data: bytes, done: int) -> int:
        """Write what fits into the last file, or into a new one; the first file of all contains byte ``start``."""
        file = self._files.last_file(start)
        if file is None:
            raise DiskError(f"{self.directory} has no file to append to")
        part = data[done : done + file.size - file.wrote]
        self._times.pop(file.base, None)
        self._files.append_to(file, part)
        return len(part)

    def _make_directory(self) -> None:
        try:
            self._directories.make(self.directory)
        except OSError as error:
            raise DiskError(f"creating {self.directory} failed: {error}") from error
        self._unsynced_parents = True

    def flush(self, least_pages: int) -> bool:
        """Make units durable (0 pages: all of them); True if there was nothing to do.

        After ``DiskError``, the queue accepts no more units, and its durable end is unknown.
        """
        idle, target = True, self._files.max_offset
        while not self._files.flush(least_pages):
            idle = False
            if self._files.flushed_where >= target:  # later appends must not keep us here forever
                break
        if self._unsynced_parents and not (idle and least_pages):  # they may remain from a failed flush
            self._unsynced_parents = False
            try:
                self._directories.sync()
            except OSError as error:
                self._unsynced_parents = True
                if is_out_of_descriptors(error):
                    raise DiskFullError(f"no file descriptor is left to flush {self.directory}") from error
                raise self._files.poisoned("flushing directories", error) from error
        return idle

    def begin_flush(self) -> Unflushed:
        """See ``MappedFileQueue.begin_flush``, whose caller syncs the directories above the queue, too."""
        self._unsynced_parents, found = False, self._files.begin_flush()
        return found

    def end_flush(self, found: Unflushed, *, durable: bool) -> None:
        """See ``MappedFileQueue.end_flush``."""
        self._unsynced_parents = self._unsynced_parents or not durable
        self._files.end_flush(found, durable=durable)

    # Reading

    def unit(self, offset: int) -> QueueUnit | None:
        """The unit of the message at ``offset``; None if there is no message. Raises ``DiskError``."""
        found = self.units(offset, 1)
        return found[0] if found and found[0] != FILLER else None

    def units(self, offset: int, count: int) -> list[QueueUnit]:
        """Up to ``count`` units from ``offset`` on, never beyond a file's end; empty before ``min_offset``.

        Unit k of the result has queue offset ``offset + k``, so fillers are included: skip those equal to ``FILLER``.
        Raises ``DiskError``.
        """
        return self._read(offset, count) if offset >= self.min_offset else []

    def units_at_once(self, offset: int, count: int) -> list[QueueUnit]:
        """The same if that needs no disk; otherwise none."""
        return self._read(offset, count, at_once=True) if offset >= self.min_offset else []

    def _read(self, offset: int, count: int, *, at_once: bool = False) -> list[QueueUnit]:
        position = offset * UNIT_BYTES
        file = self._files.find(position)
        if file is None:
            return []
        at = position - file.base
        size = min(count * UNIT_BYTES, file.readable - at)
        if size <= 0:
            return []
        return parse_units((file.read_at_once(at, size) if at_once else file.read(at, size, cold=True)) or b"")

    def offset_by_time(self, time_ms: int, store_time_of: Callable[[int, int], int]) -> int:
        """The offset of the first message stored at ``time_ms`` or later; ``max_offset`` if there is none.

        As RocketMQ 5; RocketMQ 4.9 takes the nearest message, which may be an older one. Where a clock was set back,
        times fall: the search then ends at one of the places where they pass ``time_ms``, and every message behind
        the last of these places is found.

        ``store_time_of(physical offset, size)`` returns a record's store time, or a negative number if the record is
        gone; such messages are skipped. All files are searched: a file's modification time, with which RocketMQ starts,
        says little after a copy or a repair. Raises ``DiskError``.
        """
        begin, end = self.min_offset, self.max_offset
        return self._search(begin, end, lambda unit: store_time_of(unit.offset, unit.size) >= max(time_ms, 0))[0]

    def offset_by_position(self, physical: int) -> int:
        """The offset of the first message whose record starts at or after ``physical``; ``max_offset`` if there is
        none.

        Raises ``DiskError``.
        """
        return self._search(self.min_offset, self.max_offset, lambda unit: unit.offset >= physical)[0]

    def rewrite(self, offset: int, unit: QueueUnit) -> None:
        """Rewrite a unit that is wrong according to the log, durably. Raises ``DiskError``."""
        with self._lock:
            file = self._files.find(offset * UNIT_BYTES)
            if file is None or self._destroyed or offset >= self.stored_end:
                return
            self._begin_for = _UNKNOWN
            if offset < self._looked[1]:
                self._looked = (0, 0)
            self._times.pop(file.base, None)
            try:
                file.rewrite(offset * UNIT_BYTES - file.base, pack_unit(unit))
            except OSError as error:
                raise self._files.poisoned("rewriting units", error) from error

    # Removing

    def correct_min_offset(self, physical: int, first: First | None = None) -> int:
        """Start with the first message whose record is at or after ``physical``; returns ``min_offset``.

        ``first`` is that message, if the log was asked. Otherwise units whose records seem to be gone are believed,
        unless the order of the units before the begin is broken. Raises ``DiskError``.
        """
        if not self._begin_for[0] <= physical <= self._begin_for[1]:
            self._begin = self._beginning(physical, first)
            self._looked = (physical, self._begin)
            unit = next(iter(self._read(self._begin, 1)), FILLER)
            self._begin_for = _UNKNOWN if unit == FILLER else (physical, unit.offset)
        return self.min_offset

    def _beginning(self, physical: int, first: First | None) -> int:
        low, end = max(self._files.min_offset // UNIT_BYTES, 0), self.max_offset
        if first is not None and low <= first.offset < end and self._leads_to(first):
            return first.offset
        begin = self._expired_end(low, end, physical, believe=False)
        if (begin < end and not self._leads_behind(begin, physical)) or self._misled(low, begin, physical) is not None:
            begin = self._expired_end(low, end, physical, believe=True)
            while (earlier := self._misled(low, begin, physical)) is not None:
                begin = self._expired_end(low, earlier, physical, believe=True)
        return begin

    def _leads_to(self, first: First) -> bool:
        unit = next(iter(self._read(first.offset, 1)), BROKEN)
        return unit.offset == first.physical or self._leads_behind(first.offset, first.physical)

    def _leads_behind(self, offset: int, physical: int, unit: QueueUnit | None = None) -> bool:
        """Whether the record of a unit, as corrected by the log, is at ``physical`` or after it."""
        unit = unit or next(iter(self._read(offset, 1)), BROKEN)
        true = None if unit == FILLER else self._context.believe(self, offset, unit)
        return true is not None and true.offset >= physical

    def _expired_end(self, low: int, high: int, physical: int, *, believe: bool) -> int:
        """The first unit in ``[low, high)`` whose record is not before ``physical``; ``believe``: confirmed by the log.

        For a unit that looks never written, the log is always asked.
        """
        end = high
        while low < high:
            middle = (low + high) // 2
            at, unit = next(self._reals(middle, high), (high, FILLER))
            is_before = unit.offset < physical
            if at < high and (unit == BROKEN or (believe and not 0 <= unit.offset < physical)):
                is_before = not self._leads_behind(at, physical)
            if at < high and is_before:
                low = at + 1
            else:
                high = middle
        return next(self._reals(low, end), (end, FILLER))[0]

    def _misled(self, low: int, begin: int, physical: int) -> int | None:
        """A unit before ``begin`` whose record is not before ``physical``, which means that the search was misled; or
        None.

        Lost units, or those of another place, break the order somewhere, however many they are. Only then is the log
        asked: about the last unit, since the records of all others precede its record. That may rewrite units
        correctly. Units examined for an earlier begin of the log are not examined again, so each unit is examined
        once per run, and the files' expired units once after a start. Bad sectors among these do not prevent removal.
        """
        looked_for, looked = self._looked if physical >= self._looked[0] else (0, 0)
        low = max(low, looked)
        if self._is_ordered(low, begin, looked_for if low == looked else 0, physical):
            return None
        last = self._last_real(low, begin)
        if last >= 0 and self._leads_behind(last, physical, BROKEN):
            return last
        claims: list[int] = []
        with suppress(DiskError):
            claims.extend(at for at, unit in self._reals(low, begin) if unit.offset >= physical)
        return next((at for at in claims[-1:] + claims[:1] if self._leads_behind(at, physical)), None)

    def _is_ordered(self, low: int, high: int, least: int, physical: int) -> bool:
        """Whether the records of the units in ``[low, high)`` ascend from ``least`` on and stay before ``physical``."""
        while low < high and (file := self._files.find(low * UNIT_BYTES)) is not None:
            at = low * UNIT_BYTES - file.base
            count = min(_LOOKED_UNITS, high - low, (file.readable - at) // UNIT_BYTES)
            try:
                data = file.read(at, count * UNIT_BYTES, cold=True) if count > 0 else None
            except DiskError:
                return False
            offsets, sizes, fillers = unit_columns(data or b"")
            if not len(offsets):  # removed meanwhile
                break
            real = offsets[~fillers]
            if (sizes <= 0).any() or (np.diff(real, prepend=least - 1, append=physical) <= 0).any():
                return False
            least = int(real[-1]) + 1 if len(real) else least
            low += len(offsets)
        return True

    def delete_expired(self, physical: int) -> int:
        """Remove the oldest files whose records all lie before ``physical``, never the last one; returns how many.

        A file is also kept if no unit after it is known to be durable: after a crash, nothing might show the queue's
        end. Raises ``DiskError``.
        """
        in_first_file = self._begin // self.units_per_file * self._files.file_bytes <= self._files.min_offset
        if in_first_file and self._begin_for[0] <= physical <= self._begin_for[1]:
            return 0
        count, durable = 0, self._context.durable()
        for file, following in itertools.pairwise(self._files.files()):
            after = self._first_real(following.base // UNIT_BYTES)
            unit = self._read(after, 1)
            if last_record_offset(file, file.size) >= physical or not unit or unit[0].offset + unit[0].size > durable:
                break
            if not self._files.delete_first(file):
                break
            count += 1
        return count

    def destroy(self) -> None:
        """Remove the queue's files and directory. Raises ``DiskError``."""
        with self._lock:
            self._destroyed = True
            self._files.destroy()
            with suppress(OSError):  # not empty: someone else put something there
                self.directory.rmdir()

    def close(self) -> None:
        self._files.close()

    # Searching

    def _search(self, low: int, high: int, reached: Callable[[QueueUnit], bool]) -> tuple[int, QueueUnit]:
        """The first message in ``[low, high)`` for which ``reached`` is true, as for all later ones; otherwise
        ``high``.

        The units passed to it are confirmed by the log.
        """
        end = high
        while low < high:
            middle = (low + high) // 2
            at, unit = self._first_believed(middle, high)
            if at < high and not reached(unit):
                low = at + 1
            else:
                high = middle
        return self._first_believed(low, end) if low < end else (end, FILLER)

    def _first_believed(self, low: int, high: int) -> tuple[int, QueueUnit]:
        for at, unit in self._reals(low, high):
            true = self._context.believe(self, at, unit)
            if true is not None:
                return at, true
        return high, FILLER

    def _reals(self, low: int, high: int) -> Iterator[tuple[int, QueueUnit]]:
        """Messages in ``[low, high)``; ``BROKEN`` for a unit that looks never written."""
        step = 1
        while low < high:
            count = min(step, high - low, self.next_file(low) - low)
            units = self._read(low, count)
            if len(units) < count:
                if self._files.find(low * UNIT_BYTES) is None or low + len(units) >= self.stored_end:
                    return
                units.append(BROKEN)
            for number, unit in enumerate(units, low):
                if unit != FILLER:
                    yield number, unit
            low += len(units)
            step = _STEP_UNITS

    def _first_real(self, low: int) -> int:
        end = self.max_offset
        return next(self._reals(low, end), (end, FILLER))[0]

    def _last_real(self, low: int, high: int) -> int:
        """The last message in ``[low, high)``; -1 if there is none."""
        step = 1
        while low < high:
            start = max(low, high - step, (high - 1) // self.units_per_file * self.units_per_file)
            for number, _ in reversed(list(self._reals(start, high))):
                return number
            high, step = start, _STEP_UNITS
        return -1


_Run = tuple[int, Sequence[int] | Ints, bytes]
"""Records with consecutive queue offsets: the first offset, the records' ends in the log, their units."""


def _runs(heads: Sequence[RecordHead], known: int) -> Iterator[_Run]:
    """The runs of records that end after ``known``, without those that have no place in a queue."""
    if heads and heads[0].offset + heads[0].size <= known:
        heads = [head for head in heads if head.offset + head.size > known]
    if not heads:
        return
    first, offsets = heads[0].queue_offset, list(map(_queue_offset, heads))
    if first >= 0 and offsets == list(range(first, first + len(heads))):  # always the case except for transactions
        yield first, [head[2] + head[3] for head in heads], pack_units(heads)
        return
    placed = [head for head in heads if head.queue_offset >= 0]
    for _, group in itertools.groupby(enumerate(placed), lambda pair: pair[1].queue_offset - pair[0]):
        run = [head for _, head in group]
        yield run[0].queue_offset, [head[2] + head[3] for head in run], pack_units(run)


def _runs_of_columns(columns: UnitColumns, known: int) -> Iterator[_Run]:
    """Like ``_runs``; all of them have a place."""
    ends = columns.offsets + columns.sizes
    if int(ends[0]) <= known:
        columns, ends = columns.select(ends > known), ends[ends > known]
    if not len(ends):
        return
    units = pack_columns(columns)
    bounds = [0, *(np.flatnonzero(np.diff(columns.queue_offsets) != 1) + 1).tolist(), len(ends)]
    for first, end in itertools.pairwise(bounds):
        yield int(columns.queue_offsets[first]), ends[first:end], units[first * UNIT_BYTES : end * UNIT_BYTES]
