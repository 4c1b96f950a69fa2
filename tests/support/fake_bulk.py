"""``BulkLog`` over a fake node's list of entries: what large reads of a node without files give."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from crc32c import crc32c

from dledger.errors import DLedgerError, IndexBeforeBeginError, IndexOutOfRangeError, UntimedLogError
from dledger.records import ENTRY_HEADER_BYTES
from dledger.store.format import encode_record
from dledger.types import BlockDigest, Entry, LogChunk, LogIndex, LogPlace, LogRange, Position

if TYPE_CHECKING:
    from tests.support.fake_node import FakeNode


class FakeBulkLog:
    """One segment; chain CRCs are not continued."""

    def __init__(self, node: FakeNode) -> None:
        self._node = node
        self._data = b""
        self.asked = 0
        """How often it was asked what there is."""
        self.reads = 0
        """How many chunks and digests were read."""
        self.fail_reads: list[DLedgerError | None] = []
        """What the next reads fail with, first one first; None lets one pass."""
        self.fail_places: DLedgerError | None = None
        """What every question for a place fails with."""
        self.gate: threading.Event | None = None
        """If set, reads wait for it."""
        self.waiting = 0
        """How many do."""

    def committed_range(self) -> LogRange:
        node = self._node
        self.asked += 1
        return LogRange(self._place(node.begin_index), self._place(node.committed + 1))

    def read_chunk(self, first_index: LogIndex, end_index: LogIndex, max_bytes: int) -> LogChunk:
        self._note_read()
        node = self._node
        if first_index < node.begin_index:
            raise IndexBeforeBeginError(f"entry {first_index} is no longer kept: the log starts at {node.begin_index}")
        if first_index > node.committed:
            raise IndexOutOfRangeError(
                f"entry {first_index} is not committed: the last one that is, is {node.committed}"
            )
        records: list[bytes] = []
        for entry in node.entries[first_index : min(end_index, node.committed + 1)]:
            record = _record(entry)
            if records and sum(map(len, records)) + len(record) > max_bytes:
                break
            records.append(record)
        return LogChunk(
            first_index=first_index,
            count=len(records),
            position=node.entries[first_index].position,
            segment_base=Position(0),
            data=b"".join(records),
            committed_index=LogIndex(node.committed),
            begin_index=LogIndex(node.begin_index),
        )

    def place_of_index(self, index: LogIndex) -> LogPlace:
        self._check_places()
        if index > self._node.committed + 1:
            raise IndexOutOfRangeError(f"entry {index} is not committed")
        return self._place(index)

    def place_at_position(self, position: int) -> LogPlace:
        self._check_places()
        node = self._node
        found = (one.index for one in node.entries[node.begin_index : node.committed + 1] if one.position >= position)
        return self._place(next(found, LogIndex(node.committed + 1)))

    def place_at_time(self, store_time_ms: int) -> LogPlace:
        raise UntimedLogError(f"no entry has a time, {store_time_ms} or another")

    def digest(self, position: int, end_position: int, block_bytes: int) -> BlockDigest | None:
        self._note_read()
        known = self.committed_range()
        start = max(position - position % block_bytes, known.begin.position)
        stop = min(position - position % block_bytes + block_bytes, end_position, known.end.position)
        if max(position, start) >= stop:
            return None
        data = self._data if len(self._data) == known.end.position else b"".join(map(_record, self._node.entries))
        self._data = data
        first, past = self.place_at_position(start).index, self.place_at_position(stop).index
        return BlockDigest(Position(start), stop - start, crc32c(data[start:stop]), first, LogIndex(past - 1), 0)

    def _place(self, index: int) -> LogPlace:
        entries = self._node.entries
        if index < len(entries):
            return LogPlace(LogIndex(index), entries[index].position)
        end = entries[-1].position + ENTRY_HEADER_BYTES + len(entries[-1].body) if entries else 0
        return LogPlace(LogIndex(index), Position(end))

    def _check_places(self) -> None:
        if self.fail_places is not None:
            raise self.fail_places

    def _note_read(self) -> None:
        if self.gate is not None:
            self.waiting += 1
            self.gate.wait(60)
            self.waiting -= 1
        self.reads += 1
        error = self.fail_reads.pop(0) if self.fail_reads else None
        if error is not None:
            raise error


def _record(entry: Entry) -> bytes:
    return encode_record(entry.term, entry.index, entry.position, entry.body, 0)[0]
