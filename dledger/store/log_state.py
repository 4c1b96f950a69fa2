"""The published state of a log: its ends, its marks, its dirty files. No I/O.

``lock`` guards every field while it is changed; readers may read single fields without it. An append publishes ``last``
after its bytes are written; a change of bytes below ``last`` first lowers what may be read, then bumps ``generation``,
then changes bytes. So a reader that sees the same generation before and after its copy has copied whole entries.
Rewritten index units are the exception: they agree with the data before and after.

``shape_lock`` is held while entries leave the log at either end and while its index is mended, so that neither meets
the other half-way.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable

from dledger.errors import CorruptLogError, DiskError, IndexBeforeBeginError, IndexOutOfRangeError, ShutdownError
from dledger.store.checkpoint import LogCheckpoint, Mark, mark_of
from dledger.store.mmap_file import MappedFile
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
