"""One file of the key index: a header, hash slots and entries, byte for byte RocketMQ's ``IndexFile``.

Layout, all big-endian: header (40 bytes), ``slots`` numbers of 4 bytes, ``entries`` entries of 20 bytes. A slot holds
the number of its newest entry, an entry the number of the slot's entry before it; number 0 is no entry. Entry: hash of
the key (4), physical offset of the record (8), seconds since the file's begin (4), number before it (4).

Entries and header are written with ``pwrite``, so that a full disk is an error. Slots change all over the file, two per
message; they are written through a mapping, whose blocks are allocated beforehand, so that no page of it can be without
room. A change is written in the order entries, header, slots. So after the end of the process alone a slot is never
ahead of its entry, and at most the slots of the last batch are behind. After a power cut any page may be older or newer
than another; ``recover`` goes back to what is known to be durable, and lets the slots say that.

One thread writes; any number may ``select`` meanwhile. Readers see a header as a whole; they take the slot first, so
that the header, published before the slots, covers every entry a slot names.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dledger.errors import CorruptLogError
from dledger.store.fs import FileSystem, create_durably

HEADER_BYTES: Final = 40
SLOT_BYTES: Final = 4
ENTRY_BYTES: Final = 20
_HEADER: Final = struct.Struct(">qqqqii")
_ENTRY: Final = struct.Struct(">iqii")
_ENTRIES: Final = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_STORED: Final = np.dtype(">i4")
_SECONDS_MAX: Final = (1 << 31) - 1
_CHECKED_ENTRIES: Final = 1 << 16
_CUT_AT_ONCE: Final = 1 << 18
_READ_AT_ONCE: Final = 1 << 20


class IndexShape(NamedTuple):
    """How many slots and entries a file has; entry 0 is never used."""

    slots: int
    entries: int

    @property
    def entries_at(self) -> int:
        """Where entry 0 begins."""
        return HEADER_BYTES + self.slots * SLOT_BYTES

    @property
    def file_bytes(self) -> int:
        """Length of a file."""
        return self.entries_at + self.entries * ENTRY_BYTES


class IndexHeader(NamedTuple):
    """First and last record of a file (milliseconds, physical offsets), used slots, number of the next entry.

    A file without entries (``next_entry`` 1) carries the end of the file before it, as RocketMQ does.
    """

    begin_ms: int
    end_ms: int
    begin_offset: int
    end_offset: int
    used_slots: int
    next_entry: int


class _Handle:
    """A descriptor that lives as long as somebody uses it."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self.fd = fs.open(path)
        weakref.finalize(self, fs.close, self.fd)


class IndexFile:
    """An open index file. All methods but ``select`` and the properties belong to the one writer."""

    def __init__(self, fs: FileSystem, path: Path, shape: IndexShape) -> None:
        """Open an existing file of the right length. Raises ``OSError``, and ``CorruptLogError`` for a bad header."""
        self.path = path
        self.shape = shape
        self._fs = fs
        self._handle = _Handle(fs, path)
        self._slots: NDArray[np.uint32] | None = None
        self.header = self._read_header()
        self.dirty = False
        """Whether there may be something that ``sync`` has not made durable."""

    @classmethod
    def create(cls, fs: FileSystem, path: Path, shape: IndexShape, before: IndexHeader | None = None) -> IndexFile:
        """Make an empty file that follows the file with header ``before``. Raises ``OSError``.

        Entries get no blocks yet: a file is as large on the disk as what was written to it.
        """
        first = IndexHeader(0, 0, 0, 0, 0, 1)
        if before is not None:
            first = IndexHeader(before.end_ms, before.end_ms, before.end_offset, before.end_offset, 0, 1)

        def fill(fd: int) -> None:
            fs.allocate(fd, shape.entries_at)
            fs.write(fd, b"\0", shape.file_bytes - 1)
            fs.write(fd, _HEADER.pack(*first), 0)

        create_durably(fs, path, fill)
        return cls(fs, path, shape)

    @property
    def is_empty(self) -> bool:
        """Whether it has no entry."""
        return self.header.next_entry <= 1

    @property
    def room(self) -> int:
        """How many more entries fit."""
        return self.shape.entries - self.header.next_entry

    def put(self, key: int, offset: int, store_ms: int) -> bool:
        """Add one entry; False if the file is full. Raises ``OSError``."""
        if self.room < 1:
            return False
        self.put_all(np.array([key], np.int32), np.array([offset], np.int64), np.array([store_ms], np.int64))
        return True

    def put_all(self, keys: NDArray[np.int32], offsets: NDArray[np.int64], store_ms: NDArray[np.int64]) -> None:
        """Add entries, which must fit (``room``), in this order. Raises ``OSError``; then none was added."""
        old = self.header
        first, count = old.next_entry, len(keys)
        if self.is_empty:
            old = old._replace(begin_ms=int(store_ms[0]), begin_offset=int(offsets[0]))
        slots = self._writable_slots()
        places = keys % np.int32(self.shape.slots)
        numbers = np.arange(first, first + count, dtype=np.int32)
        previous = slots[places].view(_STORED).astype(np.int32)
        previous[(previous < 0) | (previous >= first)] = 0
        _chain(places, numbers, previous)
        block = np.empty(count, _ENTRIES)
        block["hash"], block["offset"], block["previous"] = keys, offsets, previous
        block["seconds"] = np.clip((store_ms - old.begin_ms) // 1000, 0, _SECONDS_MAX) if old.begin_ms > 0 else 0
        header = old._replace(
            end_ms=int(store_ms[-1]),
            end_offset=int(offsets[-1]),
            used_slots=old.used_slots + int(np.count_nonzero(previous == 0)),
            next_entry=first + count,
        )
        self.dirty = True
        self._fs.write(self._handle.fd, block.tobytes(), self._entry_at(first))
        self._fs.write(self._handle.fd, _HEADER.pack(*header), 0)
        self.header = header
        slots[places] = numbers.astype(_STORED).view(np.uint32)  # of several numbers for one slot the last stays
        self.dirty = True  # a sync may have run since it was said above

    def covers(self, begin_ms: int, end_ms: int) -> bool:
        """Whether it may hold records stored in ``[begin_ms, end_ms]``."""
        return begin_ms <= self.header.end_ms and end_ms >= self.header.begin_ms

    def select(self, key: int, limit: int, begin_ms: int, end_ms: int) -> list[int]:
        """Physical offsets of records whose keys have this hash, newest first, stored in ``[begin_ms, end_ms]``.

        Times are kept in whole seconds, so up to a second too much is found, never too little. Raises ``OSError``.
        """
        number = self._slot(key % self.shape.slots)
        header = self.header
        found: list[int] = []
        while 0 < number < header.next_entry and len(found) < limit:
            entry = os.pread(self._handle.fd, ENTRY_BYTES, self._entry_at(number))
            if len(entry) < ENTRY_BYTES:
                break
            hash_, offset, seconds, previous = _ENTRY.unpack(entry)
            stored_ms = header.begin_ms + seconds * 1000
            if seconds < 0 or stored_ms + 999 < begin_ms:  # older ones are older still
                break
            if hash_ == key and stored_ms <= end_ms:
                found.append(offset)
            if previous >= number:  # chains only go back; anything else would never end
                break
            number = previous
        return found

    def truncate(self, physical: int) -> None:
        """Take back the entries of records at or after ``physical``. Raises ``OSError``."""
        keep = self._first_entry_from(physical)
        header = self.header
        slots = self._writable_slots()
        for end in range(header.next_entry, keep, -_CUT_AT_ONCE):
            first = max(keep, end - _CUT_AT_ONCE)
            block = self._entries(first, end)[::-1]  # newest first: the oldest one's predecessor stays in the slot
            previous = block["previous"].astype(np.int32)
            slots[block["hash"].astype(np.int32) % np.int32(self.shape.slots)] = previous.astype(_STORED).view(
                np.uint32
            )
            header = header._replace(used_slots=header.used_slots - int(np.count_nonzero(previous == 0)))
        if keep == header.next_entry:
            return
        if keep > 1:
            last = self._entries(keep - 1, keep)[0]
            end_ms = min(header.end_ms, header.begin_ms + int(last["seconds"]) * 1000 + 999)
            header = header._replace(end_ms=end_ms, end_offset=int(last["offset"]), next_entry=keep)
        else:
            header = IndexHeader(0, 0, 0, 0, 0, 1)
        self.dirty = True
        self._fs.write(self._handle.fd, _HEADER.pack(*header), 0)
        self.header = header
        self.sync()

    def recover(self, durable_end: int | None = None, durable_entries: int = -1) -> bool:
        """After a crash: take back what is newer than the record at ``durable_end``, and put the slots right.

        Everything up to that record was durable once, and if that is known, ``durable_entries`` entries. What follows
        them may be anything, also what an earlier crash left, so it is not even looked at then. A slot that names an
        entry up to there is right, and one that names a later one, which may be lost, gets the newest that is kept of
        those that belong there. None: all that the header counts is taken for durable, but a slot may be behind. False
        if what should be there does not check out: the file must be built again. Changes are durable after the next
        ``sync``; until a checkpoint relies on them, the next start makes them again. Raises ``OSError``.
        """
        header, kept = self.header, self._checked_entries(durable_end, durable_entries)
        if kept.next_entry < header.next_entry and durable_end is None:
            return False
        if not self.is_empty and (kept.begin_offset, kept.end_offset) != (
            header.begin_offset,
            header.end_offset if durable_end is None else durable_end,
        ):
            return False
        self._mend_slots(kept.next_entry)
        if kept.next_entry < header.next_entry:
            self.dirty = True
            self._fs.write(self._handle.fd, _HEADER.pack(*kept), 0)
            self.header = kept
        return True

    def _checked_entries(self, durable_end: int | None, durable_entries: int) -> IndexHeader:
        """The header of a file that ends before the first entry that is not good, or newer than what is durable."""
        header = self.header
        kept = header._replace(begin_offset=-1, used_slots=0, next_entry=1)
        end = header.next_entry if durable_entries < 0 else min(durable_entries + 1, header.next_entry)
        for numbers, entries in self._chunks(end):
            offsets, previous = entries["offset"].astype(np.int64), entries["previous"].astype(np.int32)
            before = np.concatenate(([kept.end_offset if kept.next_entry > 1 else 0], offsets[:-1]))
            bad = (entries["hash"] < 0) | (previous < 0) | (previous >= numbers) | (offsets < before)
            if durable_end is not None:
                bad |= offsets > durable_end
            ending = np.flatnonzero(bad)
            count = int(ending[0]) if len(ending) else len(entries)
            if count:
                end_ms = header.begin_ms + int(entries[count - 1]["seconds"]) * 1000 + 999
                kept = kept._replace(
                    begin_offset=int(offsets[0]) if kept.next_entry == 1 else kept.begin_offset,
                    end_offset=int(offsets[count - 1]),
                    end_ms=min(header.end_ms, end_ms) if kept.next_entry + count < header.next_entry else header.end_ms,
                    used_slots=kept.used_slots + int(np.count_nonzero(previous[:count] == 0)),
                    next_entry=kept.next_entry + count,
                )
            if count < len(entries):
                break
        return kept

    def _mend_slots(self, end: int) -> None:
        """Let every slot name the newest of its entries before number ``end``."""
        slots = self._writable_slots()
        named = slots.view(_STORED).astype(np.int32)
        wrong = (named < 0) | (named >= end)
        for numbers, entries in self._chunks(end, max(1, end - _CHECKED_ENTRIES)):
            places = self._places(entries)
            wrong[places[named[places] < numbers]] = True
        if not wrong.any():
            return
        newest = np.zeros(self.shape.slots, np.int32)
        for numbers, entries in self._chunks(end):
            newest[self._places(entries)] = numbers  # of several numbers for one place the last stays
        self.dirty = True
        slots[wrong] = newest[wrong].astype(_STORED).view(np.uint32)

    def _chunks(
        self, end: int, first: int = 1
    ) -> Iterator[tuple[NDArray[np.int32], np.ndarray[tuple[int], np.dtype[np.void]]]]:
        """Entries from ``first`` to before ``end``, some at a time, with their numbers. Raises ``OSError``."""
        for start in range(first, end, _CHECKED_ENTRIES):
            entries = self._entries(start, min(start + _CHECKED_ENTRIES, end))
            yield np.arange(start, start + len(entries), dtype=np.int32), entries

    def _places(self, entries: np.ndarray[tuple[int], np.dtype[np.void]]) -> NDArray[np.int32]:
        return np.maximum(entries["hash"].astype(np.int32), 0) % np.int32(self.shape.slots)

    def sync(self) -> None:
        """Make it durable. Raises ``OSError``."""
        self.dirty = False
        try:
            self._fs.sync(self._handle.fd)
        except OSError:
            self.dirty = True
            raise

    def seal(self) -> None:
        """Give the mapping back; no more entries will come."""
        self._slots = None

    def _read_header(self) -> IndexHeader:
        stored = os.pread(self._handle.fd, HEADER_BYTES, 0)
        header = IndexHeader(*_HEADER.unpack(stored))
        header = header._replace(next_entry=max(header.next_entry, 1))
        if header.next_entry > self.shape.entries:
            raise CorruptLogError(self.path, 36, f"{header.next_entry} entries", "Remove the file; it is rebuilt.")
        if header.next_entry > 1 and not 0 <= header.begin_offset <= header.end_offset:
            raise CorruptLogError(self.path, 16, "the last record is before the first", "Remove the file.")
        return header

    def _writable_slots(self) -> NDArray[np.uint32]:
        """The slots as they are on disk, that is big-endian, in a type that is loaded and stored as a whole."""
        if self._slots is None:
            fd, length = self._handle.fd, self.shape.entries_at
            self._fs.allocate(fd, length)  # RocketMQ's own files have holes
            for at in range(0, length, _READ_AT_ONCE):  # a bad sector shall be an error here, not a signal later
                os.pread(fd, _READ_AT_ONCE, at)
            mapping = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self._slots = np.frombuffer(mapping, np.uint32, self.shape.slots, HEADER_BYTES)
        return self._slots

    def _slot(self, place: int) -> int:
        slots = self._slots
        if slots is not None:
            return int.from_bytes(slots[place].tobytes(), "big", signed=True)
        stored = os.pread(self._handle.fd, SLOT_BYTES, HEADER_BYTES + place * SLOT_BYTES)
        return int.from_bytes(stored, "big", signed=True)

    def _entry_at(self, number: int) -> int:
        return self.shape.entries_at + number * ENTRY_BYTES

    def _entries(self, first: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        stored = os.pread(self._handle.fd, (end - first) * ENTRY_BYTES, self._entry_at(first))
        return np.frombuffer(stored[: len(stored) // ENTRY_BYTES * ENTRY_BYTES], _ENTRIES)

    def _first_entry_from(self, physical: int) -> int:
        """The number of the first entry of a record at or after ``physical``: offsets never decrease."""
        low, high = 1, self.header.next_entry
        while low < high:
            middle = (low + high) // 2
            if int(self._entries(middle, middle + 1)[0]["offset"]) >= physical:
                high = middle
            else:
                low = middle + 1
        return low


def _chain(places: NDArray[np.int32], numbers: NDArray[np.int32], previous: NDArray[np.int32]) -> None:
    """Let entries of one batch that share a slot follow each other: the later one's predecessor is the earlier one."""
    order = np.argsort(places, kind="stable")
    sorted_places = places[order]
    again = np.flatnonzero(sorted_places[1:] == sorted_places[:-1])
    previous[order[again + 1]] = numbers[order[again]]
