"""A log in memory for tests of the core: the ``Log`` port over a list of entries, with a disk that a crash can lose."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from crc32c import crc32c

from dledger.errors import (
    DiskError,
    DiskFullError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    invariant,
)
from dledger.types import (
    GENESIS,
    AppendedBatch,
    Boundary,
    CheckedRun,
    Entry,
    EntryId,
    EntryRun,
    FlushMark,
    LogIndex,
    Magic,
    Position,
    Term,
)

_CHAINED = Struct(">iiqqqiIi")
_HEADER = Struct(">iiqqqiIIi")
_UNIT = Struct(">iqiqq")
_HEADER_BYTES = 48


def make_entry(before: Entry | Boundary, end_position: int, term: Term, body: bytes, magic: Magic) -> Entry:
    """The entry that follows ``before`` at ``end_position``, with both CRCs computed."""
    index = LogIndex(before.index + 1)
    header = _CHAINED.pack(magic, _HEADER_BYTES + len(body), index, term, end_position, 0, crc32c(body), len(body))
    chain = crc32c(header, before.chain_crc)
    return Entry(index, term, Position(end_position), body, magic, 0, crc32c(body), chain)


def pack_entry(entry: Entry) -> bytes:
    """The entry's record."""
    size = _HEADER_BYTES + len(entry.body)
    head = (entry.magic, size, entry.index, entry.term, entry.position, entry.channel)
    return _HEADER.pack(*head, entry.chain_crc, entry.body_crc, len(entry.body)) + entry.body


def unpack_entry(data: bytes, offset: int) -> Entry:
    """The entry whose record starts at ``offset``."""
    magic, size, index, term, position, channel, chain, body_crc, _ = _HEADER.unpack_from(data, offset)
    body = data[offset + _HEADER_BYTES : offset + size]
    return Entry(LogIndex(index), Term(term), Position(position), body, Magic(magic), channel, body_crc, chain)


class FakeLog:
    """Entries in a list; ``flush`` copies them to what survives ``crash``."""

    def __init__(self) -> None:
        self.begin = GENESIS
        self.disk_full = False
        self.flush_fails = False
        self.write_sequence = 0
        self.flushed = FlushMark(LogIndex(-1), 0)
        self.committed_index = LogIndex(-1)
        self._entries: list[Entry] = []
        self._durable: tuple[Boundary, tuple[Entry, ...], LogIndex] = (GENESIS, (), LogIndex(-1))

    # -- what it holds -------------------------------------------------------------------------------------------

    @property
    def _tail(self) -> Entry | Boundary:
        return self._entries[-1] if self._entries else self.begin

    @property
    def last(self) -> EntryId:
        return EntryId(self._tail.term, self._tail.index)

    @property
    def last_chain_crc(self) -> int:
        return self._tail.chain_crc

    @property
    def end_position(self) -> Position:
        if not self._entries:
            return self.begin.position
        last = self._entries[-1]
        return Position(last.position + _HEADER_BYTES + len(last.body))

    def _at(self, index: LogIndex) -> Entry | Boundary:
        if index < self.begin.index:
            raise IndexBeforeBeginError(f"entry {index} is gone; the log begins after {self.begin.index}")
        if index > self.last.index:
            raise IndexOutOfRangeError(f"entry {index} is beyond the end {self.last.index}")
        return self.begin if index == self.begin.index else self._entries[index - self.begin.index - 1]

    def term_at(self, index: LogIndex) -> Term:
        return self._at(index).term

    def chain_crc_at(self, index: LogIndex) -> int:
        return self._at(index).chain_crc

    def first_index_of_term(self, term: Term) -> LogIndex:
        found = (entry.index for entry in self._entries if entry.term >= term)
        return next(found, LogIndex(self.last.index + 1))

    def read(self, index: LogIndex) -> Entry:
        entry = self._at(index)
        if isinstance(entry, Boundary):
            raise IndexBeforeBeginError(f"entry {index} is gone")
        return entry

    def read_range(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> list[Entry]:
        return [self.read(LogIndex(index)) for index in range(first_index, last_index + 1)]

    def read_at(self, position: Position) -> Entry:
        for entry in self._entries:
            if entry.position == position:
                return entry
        raise IndexOutOfRangeError(f"no entry starts at {position}")

    # -- changes -------------------------------------------------------------------------------------------------

    def append_as_leader(self, term: Term, bodies: Sequence[bytes], magic: Magic = Magic.NORMAL) -> AppendedBatch:
        if not bodies:
            raise InvalidRequestError("the batch is empty")
        if self.disk_full:
            raise DiskFullError("the disk is full")
        first = LogIndex(self.last.index + 1)
        for body in bodies:
            self._entries.append(make_entry(self._tail, self.end_position, term, body, magic))
        self.write_sequence += 1
        return AppendedBatch(term, first, self.last.index, tuple(e.position for e in self._entries[-len(bodies) :]))

    def append_run(self, checked: CheckedRun, from_index: LogIndex) -> EntryId:
        if self.disk_full:
            raise DiskFullError("the disk is full")
        invariant(from_index == self.last.index + 1, "a run continues the log", first=from_index, last=self.last)
        for index in range(from_index, checked.last.index + 1):
            entry = unpack_entry(checked.run.data, checked.offset_of(LogIndex(index)))
            expected = make_entry(self._tail, self.end_position, entry.term, entry.body, entry.magic)
            if entry != expected or entry.term < self.last.term:
                raise DiskError(f"the run does not continue the log: {entry} is not {expected}")
            self._entries.append(entry)
        self.write_sequence += 1
        return self.last

    def truncate(self, from_index: LogIndex) -> None:
        if from_index > self.last.index:
            return
        invariant(from_index > max(self.committed_index, self.begin.index), "nothing committed is cut")
        del self._entries[from_index - self.begin.index - 1 :]
        self.write_sequence += 1
        self.flushed = FlushMark(min(self.flushed.index, self.last.index), self.flushed.sequence)

    def reset(self, begin: Boundary) -> None:
        self._entries.clear()
        self.begin = begin
        self.write_sequence += 1
        self.flushed = FlushMark(begin.index, self.flushed.sequence)
        self.committed_index = max(self.committed_index, begin.index)

    def set_committed(self, index: LogIndex) -> None:
        invariant(index <= self.last.index, "commit <= end")
        self.committed_index = max(self.committed_index, index)

    def expire(self, index: LogIndex) -> None:
        """Forget everything up to ``index``, as retention does."""
        last = self._at(index)
        kept = self._entries[index - self.begin.index :]
        position = kept[0].position if kept else self.end_position
        self.begin = Boundary(last.index, last.term, position, last.chain_crc)
        self._entries = kept

    # -- runs ----------------------------------------------------------------------------------------------------

    def slice_run(self, first_index: LogIndex, max_bytes: int) -> LogIndex:
        size, last = 0, first_index
        for index in range(first_index, self.last.index + 1):
            size += _HEADER_BYTES + len(self.read(LogIndex(index)).body)
            if size > max_bytes and index > first_index:
                break
            last = LogIndex(index)
        return last

    def read_run(self, first_index: LogIndex, last_index: LogIndex) -> EntryRun:
        entries = self.read_range(first_index, last_index, 0)
        before = self._at(LogIndex(first_index - 1))
        data = b"".join(map(pack_entry, entries))
        previous = EntryId(before.term, before.index)
        return EntryRun(previous, before.chain_crc, first_index, last_index, entries[0].position, data)

    def check_run(self, run: EntryRun) -> CheckedRun:
        offset, units = 0, b""
        last, chain = run.previous, run.previous_chain_crc
        while offset < len(run.data):
            entry = unpack_entry(run.data, offset)
            before = Boundary(last.index, last.term, Position(0), chain)
            if entry != make_entry(before, run.position + offset, entry.term, entry.body, entry.magic):
                raise InvalidRequestError(f"entry {last.index + 1} of the run is wrong")
            size = _HEADER_BYTES + len(entry.body)
            units += _UNIT.pack(entry.magic, entry.position, size, entry.index, entry.term)
            last, chain, offset = entry.entry_id, entry.chain_crc, offset + size
        return CheckedRun(run, last, chain, units)

    # -- durability ----------------------------------------------------------------------------------------------

    def flush(self) -> FlushMark:
        if self.flush_fails:
            raise DiskError("the disk failed")
        self._durable = (self.begin, tuple(self._entries), self.committed_index)
        self.flushed = FlushMark(self.last.index, self.write_sequence)
        return self.flushed

    def crash(self) -> None:
        """Lose whatever was not flushed, and count changes from 0 again, as a new process does."""
        self.begin, entries, self.committed_index = self._durable
        self._entries = list(entries)
        self.write_sequence = 0
        self.flushed = FlushMark(self.last.index, 0)

    def close(self) -> None:
        self.flush()
