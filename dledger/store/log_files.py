"""The data and index segments together: bytes at positions, units at indexes. It does not know where the log ends.

Write order: data, then index units; the index is derived and never needed for acknowledged entries to survive.

An index unit is trusted only if the record it names agrees (``located``); values that decide are also verified against
the log's chain (``dledger.store.headers``).

``LogState`` is the published state of a log, without I/O: its ends, its marks, its dirty files. Its ``lock`` guards
every field while it is changed; readers may read single fields without it. An append publishes ``last`` after its bytes
are written; a change of bytes below ``last`` first lowers what may be read, then bumps ``generation``, then changes
bytes. So a reader that sees the same generation before and after its copy has copied whole entries. Rewritten index
units are the exception: they agree with the data before and after.

``shape_lock`` is held while entries leave the log at either end and while its index is mended, so that neither meets
the other half-way.
"""

from __future__ import annotations

import bisect
import errno
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger.errors import CorruptLogError, DiskError, IndexBeforeBeginError, IndexOutOfRangeError, ShutdownError
from dledger.records import INDEX_UNIT_BYTES
from dledger.store.durable_state import LogCheckpoint, Mark, mark_of
from dledger.store.format import HEADER, HEADERS, UNIT, UNITS, EntryHeader, IndexUnit, blank_head
from dledger.store.mmap_file import MappedFile, MappedFileList
from dledger.types import Boundary, EntryId, FlushMark, LogIndex


class LogState:
    """The published state of an open log."""

    def __init__(self, recovered: LogCheckpoint, last: EntryId) -> None:
        self.lock = threading.Lock()
        self.shape_lock = threading.RLock()
        self.generation = 0
        self.begin = recovered.begin
        self.last = last
        self.end = recovered.flushed.position
        self.tip = recovered.flushed
        """``last`` with its end and chain CRC; replaced as a whole, so that readers see consistent values."""
        self.sequence = 0
        self.committed = recovered.committed
        self.durable = recovered.flushed
        """The end of the log on the disk, for checkpoints; not reported before a checkpoint says so."""
        self.flushed = recovered.flushed
        self.flush_mark = FlushMark(LogIndex(self.flushed.index), 0)
        """``flushed`` in the port's form; replaced as a whole."""
        self.indexed = int(recovered.indexed)
        self.dirty_data: set[MappedFile] = set()
        self.dirty_index: set[MappedFile] = set()
        self.poison: str | None = None
        self.closed = False
        self.on_damage: Callable[[CorruptLogError], None] = lambda _damage: None
        """Called for damage in data found by a lookup or a read; on that thread, must only record it."""
        self._flushing = self.flushed
        """The end that the flush in progress will publish; a concurrent truncation lowers it."""
        self._indexing = self.indexed

    def check_usable(self) -> None:
        """Raise ``ShutdownError`` after ``close`` and ``DiskError`` after a failure."""
        if self.poison:
            raise DiskError(self.poison)
        if self.closed:
            raise ShutdownError("the store is closed")

    def check_index(self, index: int) -> None:
        """Raise unless ``index`` lies in ``[begin.index, last.index]``."""
        if self.closed:
            raise ShutdownError("the store is closed")
        if index > self.last.index or index < -1:
            raise IndexOutOfRangeError(f"entry {index} does not exist: the last entry is {self.last.index}")
        if index < self.begin.index:
            raise IndexBeforeBeginError(
                f"entry {index} is no longer kept here: the first entry kept is {self.begin.index + 1}"
            )

    def poisoned(self, what: str, error: OSError) -> DiskError:
        """Poison the store; returns the error to raise."""
        with self.lock:
            self.poison = self.poison or (
                f"{what} failed: no space left, although it was reserved: the thin or copy-on-write volume "
                "underneath is full. The store takes no more writes: free space there, then restart the node"
                if error.errno == errno.ENOSPC
                else f"{what} failed ({error}); the store takes no more writes: restart the node"
            )
            return DiskError(self.poison)

    def publish(self, last: EntryId, end: Mark, data: Iterable[MappedFile], index: Iterable[MappedFile]) -> None:
        """Publish an append that has been written."""
        with self.lock:
            self.dirty_data.update(data)
            self.dirty_index.update(index)
            self.end = end.position
            self.tip = end
            self.sequence += 1
            self.last = last

    def lower(self, last: EntryId, end: Mark) -> bool:
        """Hide everything after ``last`` before it is dropped; returns whether it was marked as flushed."""
        with self.lock:
            self.last, self.end, self.tip = last, end.position, end
            self.generation += 1
            self._flushing = min(self._flushing, end)
            self._indexing = min(self._indexing, end.index)
            self.indexed = min(self.indexed, end.index)
            was_flushed = self.durable.index > end.index
            self.durable = min(self.durable, end)
            self._set_flushed(min(self.flushed, end), self.flush_mark.sequence)
            return was_flushed

    def restart_at(self, begin: Boundary) -> None:
        """Publish an empty log after ``begin``."""
        with self.lock:
            self.begin, self.last = begin, EntryId(begin.term, begin.index)
            self.end = begin.position
            self.tip = self._flushing = self.durable = mark_of(begin)
            self.generation += 1
            self._set_flushed(self.tip, self.flush_mark.sequence)
            self.indexed = self._indexing = begin.index
            self.committed = begin.index

    def raise_begin(self, begin: Boundary) -> None:
        """Hide what retention is about to remove."""
        with self.lock:
            self.begin = begin
            self.generation += 1

    def changed(self, data: Iterable[MappedFile], index: Iterable[MappedFile]) -> None:
        """Count a truncation or reset whose bytes have been written."""
        with self.lock:
            self.dirty_data.update(data)
            self.dirty_index.update(index)
            self.sequence += 1

    def units_written(self, index: Iterable[MappedFile]) -> None:
        """Record index files with rewritten units: the next checkpoint syncs them."""
        with self.lock:
            self.dirty_index.update(index)

    def begin_flush(self) -> tuple[set[MappedFile], int] | None:
        """Take the dirty data files and the sequence number that flushing them reaches; ``None`` if there are none."""
        with self.lock:
            if self.flush_mark.sequence == self.sequence:
                return None
            dirty, self.dirty_data = self.dirty_data, set()
            self._flushing = self.tip
            return dirty, self.sequence

    def synced(self) -> None:
        """Note that the entries ``begin_flush`` took are on the disk: the next checkpoint may record them."""
        with self.lock:
            self.durable = self._flushing

    def end_flush(self, sequence: int) -> FlushMark:
        """Publish a flush once a checkpoint has it: after a kill it must be known as flushed."""
        with self.lock:
            self._set_flushed(self.durable, sequence)
            return self.flush_mark

    def begin_index_sync(self) -> set[MappedFile]:
        """Take the dirty index files."""
        with self.lock:
            dirty, self.dirty_index = self.dirty_index, set()
            self._indexing = self.last.index
            return dirty

    def end_index_sync(self) -> None:
        """Publish what the index durably covers."""
        with self.lock:
            self.indexed = self._indexing

    def _set_flushed(self, flushed: Mark, sequence: int) -> None:
        self.flushed = flushed
        self.flush_mark = FlushMark(LogIndex(flushed.index), sequence)

    def checkpoint(self, *, clean_stop: bool = False) -> LogCheckpoint:
        """The facts to record. The commit index counts only as far as flushed: async flushing may be behind it."""
        with self.lock:
            return LogCheckpoint(
                flushed=self.durable,
                indexed=LogIndex(min(self.indexed, self.durable.index)),
                committed=LogIndex(min(self.committed, self.durable.index)),
                begin=self.begin,
                clean_stop=clean_stop,
            )


Write = tuple[int, bytes]
"""An absolute position inside one segment, and the bytes for it."""
_COLD: Final = sys.maxsize
"""Everything that begins below this is read with ``pread``."""
_INDEX_ADVICE: Final = (
    "The index is derived from the data: stop the node, delete the file, and start again to rebuild it"
)
BUSY_BYTES = 128 * 1024
_INDEX_SHARE = 16
"""The index window is this many times smaller than the data window."""


class SuspectEntryError(CorruptLogError):
    """Raised when index, header and chain disagree about entry ``suspect``.

    Which of them is wrong is unknown yet: ``Headers.mend`` determines it.
    """

    def __init__(self, path: Path, offset: int, suspect: int) -> None:
        super().__init__(path, offset, f"no index unit of entry {suspect}", _INDEX_ADVICE)
        self.suspect = suspect


class LogFiles:
    """Both lists. Reading needs no lock; writing needs the node's."""

    def __init__(self, data: MappedFileList, index: MappedFileList) -> None:
        self.data = data
        self.index = index
        self.segment_bytes = data.segment_bytes

    def unit(self, index: int) -> IndexUnit:
        """An entry's index unit. Raises ``IndexBeforeBeginError`` if its segment is gone, ``SuspectEntryError``."""
        position = index * INDEX_UNIT_BYTES
        file = self.index.find(position)
        if file is None:
            raise IndexBeforeBeginError(f"entry {index} is no longer kept here")
        unit = IndexUnit(*UNIT.unpack_from(file.map, position - file.base))
        if unit.index != index:
            raise SuspectEntryError(file.path, position - file.base, index)
        return unit

    def suspect(self, index: int) -> SuspectEntryError:
        """The error for an entry about which index and data disagree."""
        position = index * INDEX_UNIT_BYTES
        file = self.index.find(position)
        if file is None:
            raise IndexBeforeBeginError(f"entry {index} is no longer kept here")
        return SuspectEntryError(file.path, position - file.base, index)

    def header_at(self, position: int, hot_from: int = 0) -> EntryHeader | None:
        """The bytes at a position, as a header; None if no file has room for one there. Raises ``DiskError``."""
        file = self.data.find(position) if position >= 0 else None
        if file is None or position - file.base + HEADER.size > file.size:
            return None
        if position >= hot_from:
            return EntryHeader(*HEADER.unpack_from(file.map, position - file.base))
        data = file.read_cold(position - file.base, HEADER.size)
        return EntryHeader(*HEADER.unpack(data)) if len(data) == HEADER.size else None

    def located(self, index: int, hot_from: int = 0) -> EntryHeader:
        """The header that an entry's index unit names. Raises like ``unit``, also if the two disagree."""
        return self._header_of(self.unit(index), hot_from)

    def _header_of(self, unit: IndexUnit, hot_from: int) -> EntryHeader:
        header = self.header_at(unit.position, hot_from)
        if (
            header is None
            or header.index != unit.index
            or header.position != unit.position
            or header.size != unit.size
            or header.term != unit.term
            or header.magic != unit.magic
        ):
            raise self.suspect(unit.index)
        return header

    def read(self, position: int, length: int, hot_from: int = 0) -> bytes:
        """Bytes inside one data segment. Raises ``IndexBeforeBeginError`` if it is gone.

        Data that begins below ``hot_from`` is read with ``pread``: see ``MappedFile.read_cold``. Raises ``DiskError``.
        """
        file = self.data.find(position)
        if file is None:
            raise IndexBeforeBeginError(f"position {position} is no longer kept here")
        offset = position - file.base
        return file.read(offset, length) if position >= hot_from else file.read_cold(offset, length)

    def read_at_once(self, position: int, length: int) -> bytes:
        """The same bytes if that needs no disk; otherwise none. Raises ``IndexBeforeBeginError``."""
        file = self.data.find(position)
        if file is None:
            raise IndexBeforeBeginError(f"position {position} is no longer kept here")
        return file.read_at_once(position - file.base, length) or b""

    def units(self, first: int, last: int) -> npt.NDArray[np.void]:
        """The index units of a range, as a table of their fields. Raises like ``unit``."""
        parts: list[npt.NDArray[np.void]] = []
        index = first
        while index <= last:
            position = index * INDEX_UNIT_BYTES
            file = self.index.find(position)
            if file is None:
                raise IndexBeforeBeginError(f"entry {index} is no longer kept here")
            offset = position - file.base
            count = min(last + 1 - index, (file.size - offset) // INDEX_UNIT_BYTES)
            parts.append(np.frombuffer(file.read(offset, count * INDEX_UNIT_BYTES), UNITS))
            index += count
        table = parts[0] if len(parts) == 1 else np.concatenate(parts)
        wrong = np.flatnonzero(table["index"] != np.arange(first, last + 1))
        if wrong.size:
            raise self.suspect(first + int(wrong[0]))
        return table

    def located_headers(self, first: int, last: int, hot_from: int) -> npt.NDArray[np.void]:
        """The headers named by the index units of a range, as a table. Raises like ``located``.

        Headers below ``hot_from`` are read one by one, not through the mapping.
        """
        table = self.units(first, last)
        positions = table["position"].astype(np.int64)
        falling = np.flatnonzero(positions[1:] <= positions[:-1])
        if falling.size:
            raise self.suspect(first + int(falling[0]) + 1)
        parts: list[npt.NDArray[np.uint8]] = []
        done = 0
        while done < len(positions):
            file = self.data.find(int(positions[done]))
            if file is None:
                raise self.suspect(first + done)
            past = int(np.searchsorted(positions, file.base + file.size))
            offsets = positions[done:past] - file.base
            if int(offsets[-1]) + HEADER.size > file.size:
                raise self.suspect(first + past - 1)
            cold = int(np.searchsorted(positions[done:past], hot_from))
            heads = b"".join([file.read_cold(offset, HEADER.size) for offset in offsets[:cold].tolist()])
            parts.append(np.frombuffer(heads, np.uint8).reshape(-1, HEADER.size))
            # A view with a row starting at every byte: rows are gathered at once, without their fields.
            anywhere = np.ndarray((file.size - HEADER.size + 1, HEADER.size), np.uint8, file.map, strides=(1, 1))
            parts.append(anywhere[offsets[cold:]])
            done = past
        found = np.concatenate(parts)
        headers = found.view(HEADERS).ravel()
        agree = np.logical_and.reduce([headers[name] == table[name] for name in UNITS.names or ()])
        if not agree.all():
            raise self.suspect(first + int(np.argmin(agree)))
        return headers

    def headers_in(self, data: bytes, position: int, first: int, last: int) -> npt.NDArray[np.void]:
        """The headers of a range, as a table, from ``data``: bytes from ``position`` on that begin with their records.

        The records are adjacent and agree with their index units. Raises like ``located``.
        """
        table = self.units(first, last)
        offsets, sizes = table["position"].astype(np.int64) - position, table["size"].astype(np.int64)
        ends = offsets + sizes
        if offsets[0] or ends[-1] > len(data) or sizes.min() < HEADER.size or (offsets[1:] != ends[:-1]).any():
            raise self.suspect(first)
        anywhere = np.ndarray((len(data) - HEADER.size + 1, HEADER.size), np.uint8, data, strides=(1, 1))
        headers = anywhere[offsets].view(HEADERS).ravel()
        agree = np.logical_and.reduce([headers[name] == table[name] for name in UNITS.names or ()])
        if not agree.all():
            raise self.suspect(first + int(np.argmin(agree)))
        return headers

    def longest_run(self, first: int, last: int, max_bytes: int, hot_from: int = 0) -> tuple[EntryHeader, EntryHeader]:
        """The first and last header of the longest run of entries from ``first`` to at most ``last``.

        It is within one segment and ``max_bytes``. A damaged index unit can make it shorter, but never wrong.
        """
        start = self.located(first, hot_from)
        if first == last:
            return start, start
        stop = min(start.position + max_bytes, self.data.base_of(start.position) + self.segment_bytes)
        unit = self.unit(last)
        if unit.position + unit.size <= stop:
            return start, self._header_of(unit, hot_from)
        found = first + bisect.bisect_right(range(first, last + 1), stop, key=self._end) - 1
        return start, self.located(found, hot_from) if found > first else start

    def _end(self, index: int) -> int:
        unit = self.unit(index)
        return unit.position + unit.size

    def first_index_at(self, position: int, first: int, last: int) -> int:
        """The first index in ``[first, last]`` whose record starts at or after ``position``; ``last + 1`` if none.

        The entries on both sides are checked in data, too: since every entry begins behind the one before it, that
        proves the answer, whatever other index units say.
        """
        found = self.first_unit_at(position, first, last)
        for neighbour in (found - 1, found):
            if first <= neighbour <= last:
                self.located(neighbour, _COLD)
        return found

    def first_unit_at(self, position: int, first: int, last: int) -> int:
        """The same, by index units alone."""
        return first + bisect.bisect_left(range(first, last + 1), position, key=lambda one: self.unit(one).position)

    def first_unit_of_term(self, term: int, first: int, last: int) -> int:
        """The first index in ``[first, last]`` with a unit of ``term`` or later; ``last + 1`` if there is none."""
        return first + bisect.bisect_left(range(first, last + 1), term, key=lambda one: self.unit(one).term)

    def segments_for(self, writes: Iterable[Write]) -> list[MappedFile]:
        """The data segments of a change, one per write, created if needed. Raises ``OSError``."""
        return [self.data.ensure(position) for position, _ in writes]

    def hold(self, writes: Iterable[Write], last_index: int) -> bool:
        """Whether there is a segment for each of ``writes``, and for the index up to ``last_index``."""
        unit = last_index * INDEX_UNIT_BYTES
        return all(self.data.find(position) for position, _ in writes) and self.index.find(unit) is not None

    def index_segments_for(self, first_index: int, units_length: int) -> list[MappedFile]:
        """The index segments of some units, created if needed. Raises ``OSError``."""
        start, stop = first_index * INDEX_UNIT_BYTES, first_index * INDEX_UNIT_BYTES + units_length
        found = [self.index.ensure(start)]
        while (following := found[-1].base + found[-1].size) < stop:
            found.append(self.index.ensure(following))
        return found

    def write_units(self, first_index: int, units: bytes) -> list[MappedFile]:
        """Write index units, creating segments as needed; returns the touched files. Raises ``OSError``."""
        segments = self.index_segments_for(first_index, len(units))
        self.put_units(segments, first_index, units)
        return segments

    @staticmethod
    def put_units(segments: Iterable[MappedFile], first_index: int, units: bytes) -> None:
        """Write index units into their segments. Raises ``OSError``."""
        position, written = first_index * INDEX_UNIT_BYTES, 0
        for file in segments:
            offset = position - file.base
            part = (
                units[written : written + file.size - offset] if written or len(units) > file.size - offset else units
            )
            file.write(offset, part)
            written += len(part)
            position += len(part)

    def first_wrong_unit(self, first_index: int, units: bytes) -> int | None:
        """The first entry of ``units`` whose unit in the index is missing or different; None if all agree."""
        done, position = 0, first_index * INDEX_UNIT_BYTES
        while done < len(units):
            file = self.index.find(position)
            if file is None:
                return position // INDEX_UNIT_BYTES
            part = units[done : done + file.base + file.size - position]
            found = file.read(position - file.base, len(part))
            if found != part:
                places = [slice(at, at + INDEX_UNIT_BYTES) for at in range(0, len(part), INDEX_UNIT_BYTES)]
                return position // INDEX_UNIT_BYTES + next(
                    number for number, place in enumerate(places) if part[place] != found[place]
                )
            done += len(part)
            position += len(part)
        return None

    def cut_data(self, position: int, zero_end: Callable[[MappedFile, int], int]) -> list[MappedFile]:
        """Drop the data from ``position`` on: remove later files, zero the rest of this one up to ``zero_end``."""
        return _cut(self.data, position, zero_end)

    def cut_index(self, index: int, zero_end: Callable[[MappedFile, int], int]) -> list[MappedFile]:
        """Drop the units from ``index`` on, likewise."""
        return _cut(self.index, index * INDEX_UNIT_BYTES, zero_end)

    def tail_blank(self, end: int) -> Write:
        """The blank that fills the segment from ``end`` on (its zeros are already there)."""
        return end, blank_head(self.segment_bytes - end % self.segment_bytes)

    def retire_below(self, position: int, first_index: LogIndex) -> list[Path]:
        """Forget the segments that end before ``position`` and ``first_index``; returns their paths."""
        return self.data.retire_below(position) + self.index.retire_below(first_index * INDEX_UNIT_BYTES)

    def remove_retired(self) -> None:
        """Remove the files of forgotten segments, durably. Raises ``OSError``."""
        self.data.remove_retired()
        self.index.remove_retired()

    def sync_dirs(self) -> None:
        """Make removals durable. Raises ``OSError``."""
        self.data.sync_dirs()
        self.index.sync_dirs()

    def clear(self) -> None:
        self.data.clear()
        self.index.clear()


def _cut(files: MappedFileList, position: int, zero_end: Callable[[MappedFile, int], int]) -> list[MappedFile]:
    files.drop_from(files.base_of(position) + files.segment_bytes)
    file = files.find(position)
    if file is None:
        return []
    offset = position - file.base
    file.zero(offset, zero_end(file, offset))
    return [file]


def warm_step(files: LogFiles, state: LogState, warm_bytes: int, appended_bytes: int) -> bool:
    """Prepares disk space ahead of appends: one bounded step at a time, without the node's lock.

    A cold page costs an append three times as much as a warm one, and a new segment milliseconds. So a window ahead of
    the end is filled with zeros, and the next segment is created once half of the current one is used.

    Zeros are written where data will be, so everything is written twice; that trades throughput for latency. While
    appends arrive faster than ``BUSY_BYTES`` per step, only segments are prepared: copying and flushing zeros would
    then cost the appends more than it gains them (measured: a fifth of the leader's processor time, a third of a
    follower's).

    Prepare or warm a little; returns whether there is more to do. Raises ``OSError``.

    ``appended_bytes``: how much was appended since the previous warm_step.
    """
    if appended_bytes > BUSY_BYTES:
        warm_bytes = 0
    more = _step_list(files.data, lambda: state.end, warm_bytes)
    return (
        _step_list(files.index, lambda: (state.last.index + 1) * INDEX_UNIT_BYTES, warm_bytes // _INDEX_SHARE) or more
    )


def _step_list(files: MappedFileList, end: Callable[[], int], warm_bytes: int) -> bool:
    position = end()
    file = files.find(position)
    if file is None:
        return files.prepare(position, lambda: files.base_of(end()) == files.base_of(position))
    offset = position - file.base
    if file.warm(offset, min(offset + warm_bytes, file.size)):
        return True
    if offset < file.size // 2:
        return False
    following = file.base + file.size
    if files.prepare(following, lambda: files.base_of(end()) == file.base):
        return True
    next_file = files.find(following)
    target = min(warm_bytes - (file.size - offset), file.size)
    return next_file is not None and next_file.warm(0, target)
