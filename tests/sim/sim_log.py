"""A log for the simulator: the ``Log`` port over lists of real record bytes, and what a crash leaves of it.

Changes since the last flush are kept as a list; ``crash`` keeps the first so many of them, which is how a log that is
written in order and recovered by its checksums comes back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

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
    NO_INDEX,
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

_HEADER: Final = Struct(">iiqqqiIIi")
_UNIT: Final = Struct(">iqiqq")
_MIN_BLANK: Final = 8


class Record(NamedTuple):
    """One stored entry and what is asked of it most."""

    term: Term
    position: int
    chain_crc: int
    data: bytes


class _State:
    """What the log holds: a boundary and the records after it."""

    def __init__(self) -> None:
        self.begin = GENESIS
        self.records: list[Record] = []

    def copy(self) -> _State:
        twin = _State()
        twin.begin, twin.records = self.begin, list(self.records)
        return twin

    def apply(self, change: Record | LogIndex | Boundary) -> None:
        """A record is appended, an index is truncated from, a boundary cuts the head or starts anew."""
        if isinstance(change, Record):
            self.records.append(change)
        elif isinstance(change, Boundary):
            kept = change.index - self.begin.index
            same = 0 < kept <= len(self.records) and self.records[kept - 1].chain_crc == change.chain_crc
            self.records = self.records[kept:] if same else []
            self.begin = change
        else:
            del self.records[change - self.begin.index - 1 :]


class SimLog:
    """See ``dledger.core.ports.Log``; plus ``crash`` and ``expire``."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._state = _State()
        self._durable = _State()
        self._changes: list[Record | LogIndex | Boundary] = []
        self._durable_committed = NO_INDEX
        self.begin = GENESIS
        self.last = EntryId(GENESIS.term, GENESIS.index)
        self.last_chain_crc = 0
        self.end_position = Position(0)
        self.flushed = FlushMark(NO_INDEX, 0)
        self.write_sequence = 0
        self.committed_index: LogIndex = NO_INDEX
        self.disk_full = False

    # -- looking -------------------------------------------------------------------------------------------------

    def _record(self, index: LogIndex) -> Record:
        if index > self.last.index or index < 0:
            raise IndexOutOfRangeError(f"index {index} is beyond {self.last.index}")
        if index <= self.begin.index:
            raise IndexBeforeBeginError(f"index {index} is not above {self.begin.index}")
        return self._state.records[index - self.begin.index - 1]

    def term_at(self, index: LogIndex) -> Term:
        return self.begin.term if index == self.begin.index else self._record(index).term

    def chain_crc_at(self, index: LogIndex) -> int:
        return self.begin.chain_crc if index == self.begin.index else self._record(index).chain_crc

    def first_index_of_term(self, term: Term) -> LogIndex:
        at = bisect_left(self._state.records, term, key=lambda record: record.term)
        return LogIndex(self.begin.index + 1 + at)

    def record_bytes(self, index: LogIndex) -> bytes:
        """The stored bytes of one entry."""
        return self._record(index).data

    # -- changing ------------------------------------------------------------------------------------------------

    def _place(self, size: int) -> int:
        room = self._segment_bytes - self.end_position % self._segment_bytes
        if size + _MIN_BLANK > self._segment_bytes:
            raise InvalidRequestError("an entry must fit a segment")
        return self.end_position if size + _MIN_BLANK <= room else self.end_position + room

    def _change(self, change: Record | LogIndex | Boundary) -> None:
        self._state.apply(change)
        self._changes.append(change)

    def _changed(self) -> None:
        self.write_sequence += 1
        self._refresh()

    def _refresh(self) -> None:
        state = self._state
        self.begin = state.begin
        if state.records:
            record = state.records[-1]
            self.last = EntryId(record.term, LogIndex(self.begin.index + len(state.records)))
            self.last_chain_crc = record.chain_crc
            self.end_position = Position(record.position + len(record.data))
        else:
            self.last = EntryId(self.begin.term, self.begin.index)
            self.last_chain_crc = self.begin.chain_crc
            self.end_position = self.begin.position

    def append_as_leader(self, term: Term, bodies: Sequence[bytes], magic: Magic = Magic.NORMAL) -> AppendedBatch:
        if not bodies:
            raise InvalidRequestError("an empty batch")
        if self.disk_full:
            raise DiskFullError("the disk is full")
        first = LogIndex(self.last.index + 1)
        positions: list[int] = []
        for index, body in enumerate(bodies, first):
            size = _HEADER.size + len(body)
            position = self._place(size)
            body_crc = crc32c(body)
            header = _HEADER.pack(magic, size, index, term, position, 0, 0, body_crc, len(body))
            chain_crc = crc32c(header[:36] + header[40:], self.last_chain_crc)
            header = _HEADER.pack(magic, size, index, term, position, 0, chain_crc, body_crc, len(body))
            self._change(Record(term, position, chain_crc, header + body))
            self._refresh()
            positions.append(position)
        self._changed()
        return AppendedBatch(term, first, self.last.index, tuple(positions))

    def append_run(self, checked: CheckedRun, from_index: LogIndex) -> EntryId:
        if self.disk_full:
            raise DiskFullError("the disk is full")
        if from_index != self.last.index + 1:
            raise DiskError(f"index {from_index} does not follow {self.last.index}")
        data = checked.run.data
        for index in range(from_index, checked.last.index + 1):
            offset = checked.offset_of(LogIndex(index))
            _, size, _, term, position, _, chain_crc, _, _ = _HEADER.unpack_from(data, offset)
            record = Record(Term(term), position, chain_crc, data[offset : offset + size])
            chain = crc32c(record.data[:36] + record.data[40:48], self.last_chain_crc)
            if position != self._place(size) or term < self.last.term or chain != chain_crc:
                raise DiskError(f"entry {index} does not continue the log")
            self._change(record)
            self._refresh()
        self._changed()
        return self.last

    def truncate(self, from_index: LogIndex) -> None:
        if from_index > self.last.index:
            return
        invariant(from_index > self.committed_index, "a committed entry is cut", index=from_index)
        invariant(from_index > self.begin.index, "an expired entry is cut", index=from_index)
        self._change(from_index)
        self.flushed = FlushMark(min(self.flushed.index, LogIndex(from_index - 1)), self.flushed.sequence)
        self._changed()

    def reset(self, begin: Boundary) -> None:
        self._change(begin)
        self._changed()
        self.flushed = FlushMark(min(self.flushed.index, begin.index), self.flushed.sequence)

    def expire(self, index: LogIndex) -> None:
        """Retention: forget everything up to ``index``, which is committed and durable."""
        invariant(index <= min(self.committed_index, self.flushed.index), "only durable committed entries expire")
        if index <= self.begin.index:
            return
        record = self._record(index)
        self._change(Boundary(index, record.term, Position(record.position + len(record.data)), record.chain_crc))
        self._changed()

    def set_committed(self, index: LogIndex) -> None:
        invariant(self.committed_index <= index <= self.last.index, "commit never goes back", index=index)
        self.committed_index = index

    # -- runs and flushes ----------------------------------------------------------------------------------------

    def slice_run(self, first_index: LogIndex, max_bytes: int) -> LogIndex:
        first = self._record(first_index)
        end = min(
            first.position + max_bytes, first.position - first.position % self._segment_bytes + self._segment_bytes
        )
        last = first_index
        for record in self._state.records[first_index - self.begin.index :]:
            if record.position + len(record.data) > end:
                break
            last = LogIndex(last + 1)
        return last

    def check_run(self, run: EntryRun) -> CheckedRun:
        offset, term, chain = 0, run.previous.term, run.previous_chain_crc
        units: list[bytes] = []
        for index in range(run.first_index, run.last_index + 1):
            magic, size, own, own_term, position, _, chain_crc, body_crc, length = _HEADER.unpack_from(run.data, offset)
            header = run.data[offset : offset + 36] + run.data[offset + 40 : offset + 48]
            chain = crc32c(header, chain)
            fits = own == index and own_term >= term and position == run.position + offset and size == 48 + length
            if not fits or chain != chain_crc or crc32c(run.data[offset + 48 : offset + size]) != body_crc:
                raise InvalidRequestError(f"entry {index} of a run is wrong")
            units.append(_UNIT.pack(magic, position, size, index, own_term))
            offset, term = offset + size, own_term
        if offset != len(run.data):
            raise InvalidRequestError("a run has a rest")
        return CheckedRun(run, EntryId(term, run.last_index), chain, b"".join(units))

    def flush(self) -> FlushMark:
        for change in self._changes:
            self._durable.apply(change)
        self._changes.clear()
        self._durable_committed = self.committed_index
        self.flushed = FlushMark(self.last.index, self.write_sequence)
        return self.flushed

    def read_run(self, first_index: LogIndex, last_index: LogIndex) -> EntryRun:
        previous = LogIndex(first_index - 1)
        self._record(first_index), self._record(last_index)
        records = self._state.records[first_index - self.begin.index - 1 : last_index - self.begin.index]
        return EntryRun(
            EntryId(self.term_at(previous), previous),
            self.chain_crc_at(previous),
            first_index,
            last_index,
            Position(records[0].position),
            b"".join([record.data for record in records]),
        )

    def read(self, index: LogIndex) -> Entry:
        record = self._record(index)
        magic, _, _, _, _, channel, _, body_crc, _ = _HEADER.unpack_from(record.data)
        body = record.data[48:]
        position = Position(record.position)
        return Entry(index, record.term, position, body, Magic(magic), channel, body_crc, record.chain_crc)

    def read_range(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> list[Entry]:
        return [self.read(LogIndex(index)) for index in range(first_index, last_index + 1)]

    def read_at(self, position: Position) -> Entry:
        raise IndexOutOfRangeError("the simulator does not read by position")

    def close(self) -> None:
        self.flush()

    # -- crashes -------------------------------------------------------------------------------------------------

    @property
    def unflushed_changes(self) -> int:
        """How many changes a power cut may take back."""
        return len(self._changes)

    def crash(self, keep_unflushed: int) -> None:
        """Come back as after a crash: the first ``keep_unflushed`` changes after the last flush have survived."""
        for change in self._changes[:keep_unflushed]:
            self._durable.apply(change)
        self._changes.clear()
        self._state = self._durable.copy()
        self._refresh()
        self.committed_index = max(min(self._durable_committed, self.last.index), self.begin.index)
        self.flushed = FlushMark(self.last.index, self.write_sequence)
