"""The simulator's log: the store's memory twin with a disk that may be full and a crash that is as bad as a real one.

Changes since the last flush are kept in order; ``crash`` keeps the first so many of them. So also an unflushed
truncation, reset or expiry may come undone, and a batch may survive in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dledger.errors import DiskFullError, invariant
from dledger.store.format import columns_of
from dledger.store.fs import FileSystem
from dledger.types import (
    GENESIS,
    NO_INDEX,
    AppendedBatch,
    Body,
    Boundary,
    CheckedRun,
    Configuration,
    EntryColumns,
    EntryId,
    FlushMark,
    LogIndex,
    Magic,
    Term,
)
from tests.sim.configurations import configuration_in
from tests.support.memory_store import MemoryStore


class Stored(NamedTuple):
    """One entry on the disk."""

    record: bytes
    position: int
    term: Term
    chain_crc: int


class Started(NamedTuple):
    """The log was emptied and starts after ``begin``."""

    begin: Boundary


Change = Stored | LogIndex | Started | Boundary
"""An entry was written, entries from an index on were cut, the log was started anew, or its head expired."""


class Disk:
    """What would be there after a power cut."""

    def __init__(self) -> None:
        self.begin = GENESIS
        self.entries: list[Stored] = []
        self.committed: LogIndex = NO_INDEX

    @property
    def last(self) -> EntryId:
        """Where the log ends."""
        if not self.entries:
            return EntryId(self.begin.term, self.begin.index)
        return EntryId(self.entries[-1].term, LogIndex(self.begin.index + len(self.entries)))

    def copy(self) -> Disk:
        """One that changes on its own."""
        other = Disk()
        other.begin, other.entries, other.committed = self.begin, list(self.entries), self.committed
        return other

    def apply(self, change: Change) -> None:
        """Make one more change durable."""
        if isinstance(change, Stored):
            self.entries.append(change)
        elif isinstance(change, Started):
            self.begin = change.begin
            self.entries.clear()
        elif isinstance(change, Boundary):
            del self.entries[: change.index - self.begin.index]
            self.begin = change
        else:
            del self.entries[change - self.begin.index - 1 :]


class SimLog(MemoryStore):
    """See ``dledger.core.ports.Log``; what a state machine asks of a store, too, where there is one."""

    file_system: FileSystem
    directory: Path

    def __init__(self, segment_bytes: int, disk: Disk | None = None) -> None:
        super().__init__(segment_bytes)
        self._disk = disk or Disk()
        self._changes: list[Change] = []
        if disk is not None:
            self.crash()

    def _start(self, begin: Boundary) -> None:
        super()._start(begin)
        self.configurations: list[Configuration] = []
        """Those that its entries hold."""

    def _add(self, record: bytes, position: int, term: Term, chain_crc: int) -> None:
        super()._add(record, position, term, chain_crc)
        configuration = configuration_in(record, EntryId(term, LogIndex(self._begin.index + len(self._records))))
        if configuration is not None:
            self.configurations.append(configuration)

    def _drop_from(self, offset: int) -> None:
        super()._drop_from(offset)
        while self.configurations and self.configurations[-1].index > self._last.index:
            self.configurations.pop()

    def copy_of_disk(self) -> Disk:
        """What a power cut would leave at this moment."""
        return self._disk.copy()

    def record_bytes(self, index: LogIndex) -> bytes:
        """The stored bytes of one entry."""
        return self._records[self._offset_of(index)]

    def chain_crcs(self) -> list[int]:
        """Those of all kept entries."""
        return self._chains

    def cut(self, entries: int) -> None:
        """The disk loses its last entries, flushed or not; only while nothing runs on it."""
        del self._disk.entries[len(self._disk.entries) - entries :]
        self.crash()

    def _note_from(self, offset: int) -> None:
        for at in range(offset, len(self._records)):
            self._changes.append(Stored(self._records[at], self._positions[at], self._terms[at], self._chains[at]))

    def check_append(self, bodies: Sequence[Body]) -> None:
        super().check_append(bodies)
        if self.disk_full:
            raise DiskFullError("the disk is full")

    def append_as_leader(
        self, term: Term, bodies: Sequence[Body], magic: Magic = Magic.NORMAL, *, channel: int = 0
    ) -> AppendedBatch:
        offset = len(self._records)
        batch = super().append_as_leader(term, bodies, magic, channel=channel)
        self._note_from(offset)
        return batch

    def append_run(self, checked: CheckedRun, from_index: LogIndex) -> EntryId:
        position = checked.run.position + checked.offset_of(from_index)
        if self.disk_full and position // self._segment_bytes != max(0, self._end - 1) // self._segment_bytes:
            raise DiskFullError("the disk is full, and the run needs the next file")
        offset = len(self._records)
        last = super().append_run(checked, from_index)
        self._note_from(offset)
        return last

    def truncate(self, from_index: LogIndex) -> None:
        before = self.last
        super().truncate(from_index)
        if self.last != before:
            self._changes.append(from_index)

    def reset(self, begin: Boundary, configuration: Configuration | None = None) -> None:
        super().reset(begin, configuration)
        self._changes.append(Started(begin))

    def drop_before(self, index: LogIndex) -> None:
        invariant(index <= min(self.committed_index, self.flushed.index), "only durable committed entries expire")
        before = self.begin
        super().drop_before(index)
        if self.begin != before:
            self._changes.append(self.begin)
            while self.configurations and self.configurations[0].index <= self.begin.index:
                del self.configurations[0]

    def read_columns(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> EntryColumns:
        """See ``FileStore``."""
        return columns_of(self.read_range(first_index, last_index, max_bytes))

    def flush(self) -> FlushMark:
        for change in self._changes:
            self._disk.apply(change)
        self._changes.clear()
        self._disk.committed = self.committed_index
        return super().flush()

    @property
    def unflushed_changes(self) -> int:
        """How many changes a crash may take back."""
        return len(self._changes)

    def crash(self, keep_unflushed: int = 0) -> None:
        """Come back after a crash: the first ``keep_unflushed`` changes after the last flush have survived."""
        disk = self._disk
        for change in self._changes[:keep_unflushed]:
            disk.apply(change)
        self._changes.clear()
        self._start(disk.begin)
        for entry in disk.entries:
            self._add(*entry)
        if disk.entries:
            last = disk.entries[-1]
            self._last = EntryId(last.term, LogIndex(disk.begin.index + len(disk.entries)))
            self._chain, self._end = last.chain_crc, last.position + len(last.record)
        self._committed = max(min(disk.committed, self._last.index), disk.begin.index)
        self._sequence, self._closed = 0, False
        self._flushed = FlushMark(self._last.index, 0)
