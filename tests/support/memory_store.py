"""The log in memory: the same promises as ``FileStore``, for tests and the simulator.

It keeps encoded records, with the same CRCs, positions and blanks as on disk. ``crash`` is what a restart after a power
cut leaves. For one thread at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby

from dledger.core.ports import BatchHook
from dledger.errors import (
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvalidRequestError,
    MisplacedRunError,
    ShutdownError,
    invariant,
)
from dledger.records import ENTRY_HEADER_BYTES, MIN_BLANK_BYTES
from dledger.store import format as records
from dledger.types import (
    GENESIS,
    AppendedBatch,
    Body,
    Boundary,
    CheckedRun,
    Configuration,
    Entry,
    EntryId,
    EntryRun,
    FlushMark,
    HardState,
    LogIndex,
    Magic,
    Position,
    Term,
)
from dledger.values import MIB


class MemoryStore:
    """Implements ``dledger.core.ports.Log``. Lists are indexed by entry index minus ``begin.index`` minus 1."""

    def __init__(self, segment_bytes: int = 1024 * MIB, max_entry_bytes: int = 4 * MIB) -> None:
        self._segment_bytes = segment_bytes
        self._entry_bytes_limit = min(max_entry_bytes, segment_bytes - MIN_BLANK_BYTES)
        self._batch_hooks: tuple[BatchHook, ...] = ()
        self._sequence = 0
        self.installed_configuration: Configuration | None = None
        """What the last ``reset`` that brought one brought."""
        self._committed = LogIndex(-1)
        self.disk_full = False
        self._closed = False
        self._start(GENESIS)
        self._flushed = FlushMark(self._begin.index, 0)

    def _start(self, begin: Boundary) -> None:
        self._begin = begin
        self._last = EntryId(begin.term, begin.index)
        self._chain, self._end = begin.chain_crc, int(begin.position)
        self._records: list[bytes] = []
        self._positions: list[int] = []
        self._terms: list[Term] = []
        self._chains: list[int] = []

    @property
    def begin(self) -> Boundary:
        return self._begin

    @property
    def last(self) -> EntryId:
        return self._last

    @property
    def last_chain_crc(self) -> int:
        return self._chain

    @property
    def end_position(self) -> Position:
        return Position(self._end)

    @property
    def flushed(self) -> FlushMark:
        return self._flushed

    @property
    def write_sequence(self) -> int:
        return self._sequence

    @property
    def committed_index(self) -> LogIndex:
        return self._committed

    def add_batch_hook(self, hook: BatchHook) -> None:
        """Have ``hook`` called for all of them at once, in the order of registration."""
        self._batch_hooks = (*self._batch_hooks, hook)

    def term_at(self, index: LogIndex) -> Term:
        at = index - self._begin.index - 1
        if 0 <= at < len(self._terms) and not self._closed:
            return self._terms[at]
        self._check_index(index)
        return self._begin.term

    def chain_crc_at(self, index: LogIndex) -> int:
        at = index - self._begin.index - 1
        if 0 <= at < len(self._chains) and not self._closed:
            return self._chains[at]
        self._check_index(index)
        return self._begin.chain_crc

    def _check_index(self, index: int) -> None:
        if self._closed:
            raise ShutdownError("the store is closed")
        if index > self._last.index or index < -1:
            raise IndexOutOfRangeError(f"entry {index} does not exist: the last entry is {self._last.index}")
        if index < self._begin.index:
            raise IndexBeforeBeginError(
                f"entry {index} is no longer kept here: the first entry kept is {self._begin.index + 1}"
            )

    def _offset_of(self, index: int) -> int:
        self._check_index(index)
        if index == self._begin.index:
            raise IndexBeforeBeginError(f"entry {index} is no longer kept here: the first entry kept is {index + 1}")
        return index - self._begin.index - 1

    def first_index_of_term(self, term: Term) -> LogIndex:
        return LogIndex(self._begin.index + 1 + bisect_left(self._terms, term))

    def append_as_leader(
        self, term: Term, bodies: Sequence[Body], magic: Magic = Magic.NORMAL, *, channel: int = 0
    ) -> AppendedBatch:
        self.check_append(bodies)
        invariant(term >= self._last.term, "terms never decrease", term=term, last=self._last)
        first = index = self._last.index + 1
        count = len(self._positions)
        for piece in records.split_batch(bodies, self._end, self._segment_bytes, channel):
            if self._batch_hooks and magic is Magic.NORMAL:
                piece = records.apply_batch_hooks(self._batch_hooks, piece)
            position = piece.position
            for body in piece.bodies:
                record, self._chain = records.encode_record(term, index, position, body, self._chain, magic, channel)
                self._add(record, position, term, self._chain)
                position += len(record)
                index += 1
            self._end = position
        self._last = EntryId(term, LogIndex(index - 1))
        self._sequence += 1
        return AppendedBatch(term, LogIndex(first), self._last.index, tuple(self._positions[count:]))

    def _add(self, record: bytes, position: int, term: Term, chain_crc: int) -> None:
        self._records.append(record)
        self._positions.append(position)
        self._terms.append(term)
        self._chains.append(chain_crc)

    def _check_open(self) -> None:
        if self._closed:
            raise ShutdownError("the store is closed")

    def check_append(self, bodies: Sequence[Body]) -> None:
        records.check_batch(bodies, self._entry_bytes_limit)
        self._check_open()

    def append_run(self, checked: CheckedRun, from_index: LogIndex) -> EntryId:
        self._check_open()
        run = checked.run
        problem = records.run_problem(checked, from_index, self._last, self._chain)
        if not problem:
            offset = checked.offset_of(from_index)
            position, size = run.position + offset, len(run.data) - offset
            problem = records.run_place_problem(position, size, self._end, self._segment_bytes)
        if problem:
            raise MisplacedRunError(f"the run does not follow the end of the log: {problem}")
        for number in range(from_index, checked.last.index + 1):
            index = LogIndex(number)
            start = checked.offset_of(index)
            stop = checked.offset_of(LogIndex(number + 1)) if number < checked.last.index else len(run.data)
            self._add(run.data[start:stop], run.position + start, checked.term_of(index), checked.chain_crc_of(index))
        self._end = run.position + len(run.data)
        self._chain, self._last = checked.last_chain_crc, checked.last
        self._sequence += 1
        return self._last

    def slice_run(self, first_index: LogIndex, max_bytes: int) -> LogIndex:
        first = self._offset_of(first_index)
        start = self._positions[first]
        stop = min(start + max_bytes, start - start % self._segment_bytes + self._segment_bytes)
        past = bisect_right(self._positions, stop, first)
        # The entry before ``past`` starts by ``stop`` but may end beyond it; the one before that ends where it starts.
        last = past - 1
        if last > first and self._positions[last] + len(self._records[last]) > stop:
            last -= 1
        return LogIndex(self._begin.index + 1 + last)

    def truncate(self, from_index: LogIndex) -> None:
        if from_index > self._last.index:
            return
        self._check_open()
        invariant(from_index > self._committed, "truncation of committed entries", at=from_index)
        invariant(from_index > self._begin.index, "truncation below begin", at=from_index, begin=self._begin)
        self._drop_from(from_index - self._begin.index - 1)
        self._sequence += 1

    def _drop_from(self, offset: int) -> None:
        for column in (self._records, self._positions, self._terms, self._chains):
            del column[offset:]
        begin = self._begin
        if offset:
            self._last = EntryId(self._terms[-1], LogIndex(begin.index + offset))
            self._chain, self._end = self._chains[-1], self._positions[-1] + len(self._records[-1])
        else:
            self._last = EntryId(begin.term, begin.index)
            self._chain, self._end = begin.chain_crc, begin.position
        self._flushed = FlushMark(min(self._flushed.index, self._last.index), self._flushed.sequence)

    def reset(self, begin: Boundary, configuration: Configuration | None = None) -> None:
        self._check_open()
        self.installed_configuration = configuration or self.installed_configuration
        invariant(begin.index >= self._committed, "reset below the commit index", begin=begin)
        self._start(begin)
        self._committed = begin.index
        self._sequence += 1
        self._flushed = FlushMark(begin.index, self._flushed.sequence)

    def drop_before(self, index: LogIndex) -> None:
        """Forget the entries before ``index``, as retention does on disk; the last entry always stays."""
        offset = self._offset_of(index)
        if offset == 0:
            return
        before = LogIndex(index - 1)
        begin = Boundary(before, self.term_at(before), Position(self._positions[offset]), self.chain_crc_at(before))
        for column in (self._records, self._positions, self._terms, self._chains):
            del column[:offset]
        self._begin = begin

    def set_committed(self, index: LogIndex) -> None:
        if index <= self._committed:
            return
        invariant(index <= self._last.index, "commit beyond the log's end", index=index, last=self._last)
        self._committed = index

    def check_run(self, run: EntryRun) -> CheckedRun:
        return records.check_run(run)

    def flush(self) -> FlushMark:
        self._check_open()
        self._flushed = FlushMark(self._last.index, self._sequence)
        return self._flushed

    def read_run(self, first_index: LogIndex, last_index: LogIndex, *, verified: bool = False) -> EntryRun:
        first, last = self._offset_of(first_index), self._offset_of(last_index)
        position, size = self._positions[first], self._segment_bytes
        if last < first or position // size != self._positions[last] // size:
            raise InvalidRequestError(f"entries {first_index} to {last_index} do not lie within one segment")
        previous = LogIndex(first_index - 1)
        return EntryRun(
            previous=EntryId(self.term_at(previous), previous),
            previous_chain_crc=self.chain_crc_at(previous),
            first_index=first_index,
            last_index=last_index,
            position=Position(position),
            data=self._records[first] if first == last else b"".join(self._records[first : last + 1]),
        )

    def read(self, index: LogIndex) -> Entry:
        offset = self._offset_of(index)
        entry = records.decode_entry(self._records[offset])
        invariant(entry.chain_crc == self._chains[offset], "a record changed in memory", index=index)
        return entry

    def read_range(self, first_index: LogIndex, last_index: LogIndex, max_bytes: int) -> list[Entry]:
        if last_index < first_index:
            raise IndexOutOfRangeError(f"no entry between {first_index} and {last_index}")
        entries = [self.read(first_index)]
        used = len(entries[0].body) + ENTRY_HEADER_BYTES
        for number in range(first_index + 1, min(last_index, self._last.index) + 1):
            entry = self.read(LogIndex(number))
            used += len(entry.body) + ENTRY_HEADER_BYTES
            if used > max_bytes:
                break
            entries.append(entry)
        return entries

    def read_at(self, position: Position) -> Entry:
        self._check_open()
        if 0 <= position < self._begin.position:
            raise IndexBeforeBeginError(
                f"position {position} is no longer kept: the log starts at {self._begin.position}"
            )
        offset = bisect_left(self._positions, position)
        if offset == len(self._positions) or self._positions[offset] != position:
            raise IndexOutOfRangeError(f"no entry starts at position {position}")
        return self.read(LogIndex(self._begin.index + 1 + offset))

    def positions(self, first_index: LogIndex, last_index: LogIndex) -> tuple[int, ...]:
        first, last = self._offset_of(first_index), self._offset_of(last_index)
        return tuple(self._positions[first : last + 1])

    def channel_runs(self, first_index: LogIndex, last_index: LogIndex) -> list[tuple[int, int, int]]:
        first, last = self._offset_of(first_index), self._offset_of(last_index)
        runs: list[tuple[int, int, int]] = []
        index = int(first_index)
        for channel, same in groupby(map(records.channel_of, self._records[first : last + 1])):
            count = sum(1 for _ in same)
            runs.append((channel, index, count))
            index += count
        return runs

    def crash(self, keep_unflushed: int = 0) -> None:
        """Lose what was not flushed, except the first ``keep_unflushed`` entries of it, and be open again.

        What remains counts as flushed, as after recovery; sequences start over.
        """
        keep = self._flushed.index + keep_unflushed - self._begin.index
        self._committed = LogIndex(max(min(self._committed, self._flushed.index), self._begin.index))
        if keep < len(self._records):
            self._drop_from(keep)
        self._sequence, self._closed = 0, False
        self._flushed = FlushMark(self._last.index, 0)

    def close(self) -> None:
        if not self._closed:
            self.flush()
            self._closed = True


class MemoryHardState:
    """As ``HardStateFile``: what is saved survives everything but this object."""

    def __init__(self, state: HardState | None = None) -> None:
        self._state = state or HardState()

    def load(self) -> HardState:
        return self._state

    def save(self, state: HardState) -> None:
        self._state = state
