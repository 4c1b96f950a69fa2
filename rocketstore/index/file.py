"""One file of the key index: a header, hash slots and entries, byte for byte RocketMQ's ``IndexFile``.

Layout, all big-endian: header (40 bytes), ``slots`` numbers of 4 bytes, ``entries`` entries of 20 bytes. A slot holds
the number of its newest entry, an entry the number of the slot's previous entry; 0 means none. Entry: hash of the key
(4), physical offset of the record (8), seconds since the file's begin (4), number of the previous entry (4).

Entries and header are written with ``pwrite``, so a full disk is an error. Slots change all over the file, two per
message; they are written through a mapping whose blocks are allocated beforehand, so no page can lack space. A change
is written in the order entries, header, slots. So if only the process dies, no slot is ahead of its entry, and at most
the slots of the last batch are behind. After a power cut, any page may be older or newer than another; ``recover`` goes
back to what is known to be durable, and rebuilds the slots from that.

Everything that is read is verified by its block's checksum (``rocketstore.index.format``), or not returned. A file
without sums, such as RocketMQ's, gets them when it is first used, after it was found to be consistent.

One thread writes; any number may call ``select`` meanwhile. Readers see header and sums as a whole; they read the slot
first, so the header, published before the slots, covers every entry in a slot.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dledger.errors import CorruptLogError
from dledger.store.fs import FileSystem, create_durably
from rocketstore.index.format import (
    BLOCK_ENTRIES,
    BLOCK_SLOTS,
    ENTRIES,
    ENTRY,
    ENTRY_BYTES,
    HEADER,
    HEADER_LAYOUT,
    SLOT,
    EntrySums,
    IndexHeader,
    IndexSums,
    chained,
    crc_of,
    move_slot,
    move_slots,
    second_since,
    seconds_since,
    slot_blocks,
    sum_of_slots,
    sums_of_slots,
)

HEADER_BYTES: Final = HEADER.size
SLOT_BYTES: Final = SLOT.itemsize
_AT_ONCE: Final = BLOCK_ENTRIES << 8
_READ_AT_ONCE: Final = 1 << 20
ADVICE: Final = "It will be rebuilt from the log"
_Entries = np.ndarray[tuple[int], np.dtype[np.void]]


class IndexShape(NamedTuple):
    """How many slots and entries a file has; entry 0 is never used."""

    slots: int
    entries: int

    @property
    def entries_at(self) -> int:
        """The offset of entry 0."""
        return HEADER_BYTES + self.slots * SLOT_BYTES

    @property
    def file_bytes(self) -> int:
        """Length of a file."""
        return self.entries_at + self.entries * ENTRY_BYTES


class NewEntry(NamedTuple):
    """A key's hash, and its record's physical offset and store time."""

    key: int
    offset: int
    store_ms: int


class _Published(NamedTuple):
    """The state used by readers: the header, and the CRC of the last block of entries counted by the header."""

    header: IndexHeader
    tail: int


class _Handle:
    """A descriptor that lives as long as it is in use."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self.fd = fs.open(path)
        weakref.finalize(self, fs.close, self.fd)


class IndexFile:
    """An open index file. All methods but ``select``, ``verify`` and the properties belong to the one writer."""

    def __init__(self, fs: FileSystem, path: Path, shape: IndexShape, sums: IndexSums | None = None) -> None:
        """Open an existing file of the right length, with its ``sums`` if they are known.

        Raises ``OSError``, and ``CorruptLogError`` for a bad header.
        """
        self.path = path
        self.shape = shape
        self._fs = fs
        self._handle = _Handle(fs, path)
        self._slots: NDArray[np.uint32] | None = None
        self._writing = threading.Lock()  # held while slots and their sums change
        self._slot_sums = np.zeros(slot_blocks(shape.slots), np.uint64)
        self._entry_sums = EntrySums(shape.entries)
        self._published = _Published(self._read_header(), 0)
        self._proven = False
        """Whether sums cover the whole contents."""
        self.differs = sums is not None and sums.header != self.header
        """Whether it differs from its state when the sums were stored."""
        if sums is not None and not self.differs:
            self._slot_sums = sums.slots.copy()
            self._entry_sums.take(sums.entries, self.header.next_entry)
            self._publish(self.header)
            self._proven = True
        self.dirty = False
        """Whether it may contain something that ``sync`` has not made durable."""
        self.sums_kept = self._proven
        """Whether the stored sums match the file as of its last flush."""

    @classmethod
    def create(cls, fs: FileSystem, path: Path, shape: IndexShape, before: IndexHeader | None = None) -> IndexFile:
        """Create an empty file that follows the file with header ``before``. Raises ``OSError``.

        Entries get no blocks yet: on disk, a file is only as large as what was written to it.
        """
        first = IndexHeader(0, 0, 0, 0, 0, 1)
        if before is not None:
            first = IndexHeader(before.end_ms, before.end_ms, before.end_offset, before.end_offset, 0, 1)

        def fill(fd: int) -> None:
            fs.allocate(fd, shape.entries_at)
            fs.write(fd, b"\0", shape.file_bytes - 1)
            fs.write(fd, HEADER.pack(*first), 0)

        create_durably(fs, path, fill)
        file = cls(fs, path, shape)
        file._publish(first)
        file._proven = True
        return file

    @property
    def header(self) -> IndexHeader:
        return self._published.header

    @property
    def is_empty(self) -> bool:
        """Whether it has no entry."""
        return self.header.next_entry <= 1

    @property
    def room(self) -> int:
        """How many more entries fit."""
        return self.shape.entries - self.header.next_entry

    @property
    def sums(self) -> IndexSums | None:
        """The sums to store; None if it has not been verified yet. For the writer, or while nobody writes."""
        with self._writing:
            if not self._proven:
                return None
            return IndexSums(self.header, self._slot_sums.copy(), self._entry_sums.all())

    # Writing

    def put(self, key: int, offset: int, store_ms: int) -> bool:
        """Add one entry; False if the file is full. Raises ``OSError``, ``CorruptLogError``."""
        if self.room < 1:
            return False
        self.put_few([NewEntry(key, offset, store_ms)])
        return True

    def put_few(self, entries: Sequence[NewEntry]) -> None:
        """Like ``put_all``, without arrays: five times as fast for one entry."""
        slots = self.open_for_writing()
        old = self.header
        first = old.next_entry
        if self.is_empty:
            old = old._replace(begin_ms=entries[0].store_ms, begin_offset=entries[0].offset)
        moves: dict[int, tuple[int, int]] = {}  # by slot: its number before and after
        used_slots = old.used_slots
        data: list[bytes] = []
        for number, (key, offset, store_ms) in enumerate(entries, first):
            place = key % self.shape.slots
            known = moves.get(place)
            before = _slot_value(slots, place) if known is None else known[0]
            previous = before if known is None else known[1]
            if not 0 <= previous < number:
                previous = 0
            used_slots += previous == 0
            moves[place] = before, number
            data.append(ENTRY.pack(key, offset, second_since(store_ms, old.begin_ms), previous))
        header = IndexHeader(
            old.begin_ms, entries[-1].store_ms, old.begin_offset, entries[-1].offset, used_slots, first + len(entries)
        )
        with self._adding(b"".join(data), header):
            for place, (before, after) in moves.items():
                move_slot(self._slot_sums, place, before, after)
                slots[place] = _as_stored(after)

    def put_all(self, keys: NDArray[np.int32], offsets: NDArray[np.int64], store_ms: NDArray[np.int64]) -> None:
        """Add entries, which must fit (``room``), in this order. After ``OSError``, none was added.

        The first call raises ``CorruptLogError`` if the existing contents are damaged.
        """
        slots = self.open_for_writing()
        old = self.header
        first, count = old.next_entry, len(keys)
        if self.is_empty:
            old = old._replace(begin_ms=int(store_ms[0]), begin_offset=int(offsets[0]))
        places = keys % np.int32(self.shape.slots)
        numbers = np.arange(first, first + count, dtype=np.int32)
        named = slots[places].view(SLOT).astype(np.int32)
        previous = named.copy()
        previous[(previous < 0) | (previous >= first)] = 0
        is_last = _chain(places, numbers, previous)
        block = np.empty(count, ENTRIES)
        block["hash"], block["offset"], block["previous"] = keys, offsets, previous
        block["seconds"] = seconds_since(store_ms, old.begin_ms)
        header = old._replace(
            end_ms=int(store_ms[-1]),
            end_offset=int(offsets[-1]),
            used_slots=old.used_slots + int(np.count_nonzero(previous == 0)),
            next_entry=first + count,
        )
        with self._adding(block.tobytes(), header):
            move_slots(self._slot_sums, places[is_last], named[is_last], numbers[is_last])
            slots[places[is_last]] = numbers[is_last].astype(SLOT).view(np.uint32)

    @contextmanager
    def _adding(self, data: bytes, header: IndexHeader) -> Iterator[None]:
        """Write entries and the header that counts them; the block then changes the slots and their sums."""
        self.dirty = True
        self._fs.write(self._handle.fd, data, self._entry_at(self.header.next_entry))
        with self._writing:
            self._fs.write(self._handle.fd, HEADER.pack(*header), 0)
            self._entry_sums.add(data)
            self._publish(header)
            yield
        self.dirty = True  # set again: a sync may have run meanwhile

    def truncate(self, physical: int) -> None:
        """Remove the entries of records at or after ``physical``. Raises ``OSError``, ``CorruptLogError``."""
        self._prove()
        keep = self._first_entry_from(physical)
        header = self.header
        if keep == header.next_entry:
            return
        if keep > 1:
            last = self._entries(keep - 1, keep)[0]
            end_ms = min(header.end_ms, header.begin_ms + int(last["seconds"]) * 1000 + 999)
            header = header._replace(end_ms=end_ms, end_offset=int(last["offset"]), next_entry=keep)
        else:
            header = IndexHeader(0, 0, 0, 0, 0, 1)
        self._set_end(header)
        self.sync()

    def _set_end(self, header: IndexHeader) -> None:
        """Continue after the entries counted by ``header``, with slots rebuilt from them."""
        newest, sums = np.zeros(self.shape.slots, np.int32), EntrySums(self.shape.entries)
        for numbers, entries in self._chunks(header.next_entry):
            newest[self._places(entries)] = numbers  # of several numbers for one place, numpy keeps the last
            sums.add(entries.tobytes())
        header = header._replace(used_slots=int(np.count_nonzero(newest)))
        slots = self._map_slots()
        wrong = slots.view(SLOT).astype(np.int32) != newest
        self.dirty = True
        with self._writing:
            self._fs.write(self._handle.fd, HEADER.pack(*header), 0)
            slots[wrong] = newest[wrong].astype(SLOT).view(np.uint32)
            self._slot_sums, self._entry_sums = sums_of_slots(newest), sums
            self._publish(header)
            self._proven, self.sums_kept = True, False

    def sync(self) -> None:
        """Make it durable. Raises ``OSError``."""
        self.dirty = False
        self.sums_kept = False
        try:
            self._fs.sync(self._handle.fd)
        except OSError:
            self.dirty = True
            raise

    def seal(self) -> None:
        """Release the mapping; no more entries will be added."""
        self._slots = None

    def _publish(self, header: IndexHeader) -> None:
        self._published = _Published(header, self._entry_sums.tail)

    # Reading

    def covers(self, begin_ms: int, end_ms: int) -> bool:
        """Whether it may contain records stored in ``[begin_ms, end_ms]``."""
        return begin_ms <= self.header.end_ms and end_ms >= self.header.begin_ms

    def select(self, key: int, limit: int, begin_ms: int, end_ms: int) -> list[int]:
        """Physical offsets of records whose keys have this hash, newest first, stored in ``[begin_ms, end_ms]``.

        Times are stored in whole seconds, so results may include up to a second too much, never too little. Raises
        ``OSError``, and ``CorruptLogError`` if the chain is not as it was written.
        """
        self._prove()
        number = self._slot(key % self.shape.slots)
        published = self._published
        header = published.header
        found: list[int] = []
        block, held = -1, b""
        while 0 < number < header.next_entry and len(found) < limit:
            if block != number // BLOCK_ENTRIES:
                block = number // BLOCK_ENTRIES
                held = self._block(block, published)
            hash_, offset, seconds, previous = ENTRY.unpack_from(held, number % BLOCK_ENTRIES * ENTRY_BYTES)
            stored_ms = header.begin_ms + seconds * 1000
            if seconds < 0 or stored_ms + 999 < begin_ms:  # the remaining ones are older still
                break
            if hash_ == key and stored_ms <= end_ms:
                found.append(offset)
            if previous >= number:  # chains only go back; anything else might never end
                break
            number = previous
        return found

    def verify(self, block: int) -> int:
        """Verify one of its blocks: the header, then those of slots, then those of entries.

        Returns the number of bytes; 0: there are no more. Raises ``OSError``, ``CorruptLogError``.
        """
        self._prove()
        published = self._published
        if block == 0:
            with self._writing:
                if self._read_header() != self.header:
                    raise self._damage(0, "the header's fields")
            return HEADER_BYTES
        block -= 1
        if block < len(self._slot_sums):
            return len(self._slot_block(block)) * SLOT_BYTES
        block -= len(self._slot_sums)
        if block * BLOCK_ENTRIES >= published.header.next_entry:
            return 0
        return len(self._block(block, published))

    def _slot(self, place: int) -> int:
        return int(self._slot_block(place // BLOCK_SLOTS)[place % BLOCK_SLOTS])

    def _slot_block(self, block: int) -> NDArray[np.int32]:
        values = self._read_slots(block)
        if sum_of_slots(values) != int(self._slot_sums[block]):
            with self._writing:  # unless they were being changed
                values = self._read_slots(block)
                if sum_of_slots(values) != int(self._slot_sums[block]):
                    raise self._damage(HEADER_BYTES + block * BLOCK_SLOTS * SLOT_BYTES, "the hash slots from there on")
        return values

    def _read_slots(self, block: int) -> NDArray[np.int32]:
        slots, first = self._slots, block * BLOCK_SLOTS
        count = min(BLOCK_SLOTS, self.shape.slots - first)
        if slots is not None:
            return slots[first : first + count].view(SLOT).astype(np.int32)
        stored = os.pread(self._handle.fd, count * SLOT_BYTES, HEADER_BYTES + first * SLOT_BYTES)
        if len(stored) < count * SLOT_BYTES:
            raise self._damage(HEADER_BYTES + first * SLOT_BYTES, "the file is too short")
        return np.frombuffer(stored, SLOT).astype(np.int32)

    def _block(self, block: int, published: _Published) -> bytes:
        """The published entries of a block."""
        first = block * BLOCK_ENTRIES
        count = min(BLOCK_ENTRIES, published.header.next_entry - first)
        expected = self._entry_sums.of_block(block) if count == BLOCK_ENTRIES else published.tail
        held = os.pread(self._handle.fd, count * ENTRY_BYTES, self._entry_at(first))
        if len(held) < count * ENTRY_BYTES or crc_of(held) != expected:
            raise self._damage(self._entry_at(first), "the entries from there on")
        return held

    def _damage(self, offset: int, what: str) -> CorruptLogError:
        return CorruptLogError(self.path, offset, f"{what} differ from what was written", ADVICE)

    # Opening

    def _prove(self) -> None:
        """Create the sums of a file without any, if it is consistent. Raises ``OSError``, ``CorruptLogError``."""
        if self._proven:
            return
        with self._writing:
            header, entry_sums = self.header, EntrySums(self.shape.entries)
            slots, end_offset = np.zeros(self.shape.slots, np.int32), header.begin_offset
            for numbers, entries in self._chunks(header.next_entry):
                bad = entries["previous"] != chained(slots, self._places(entries), numbers)
                offsets = np.concatenate(([end_offset], entries["offset"].astype(np.int64)))
                bad |= (entries["hash"] < 0) | (entries["seconds"] < 0) | (np.diff(offsets) < 0)
                if bad.any():
                    at = self._entry_at(int(numbers[np.argmax(bad)]))
                    raise CorruptLogError(self.path, at, "an entry does not fit the ones before it", ADVICE)
                end_offset = int(offsets[-1])
                entry_sums.add(entries.tobytes())
            if header.next_entry > 1 and end_offset != header.end_offset:
                raise CorruptLogError(self.path, 24, "the last entry belongs to another record", ADVICE)
            stored = np.concatenate([self._read_slots(block) for block in range(len(self._slot_sums))])
            wrong = np.flatnonzero(stored != slots)
            if len(wrong):
                at = HEADER_BYTES + int(wrong[0]) * SLOT_BYTES
                raise CorruptLogError(self.path, at, "a hash slot does not name its newest entry", ADVICE)
            self._slot_sums, self._entry_sums = sums_of_slots(slots), entry_sums
            self._publish(header)
            self.dirty, self._proven, self.sums_kept = True, True, False

    def recover(self, durable_end: int | None = None, durable_entries: int = -1, sums: IndexSums | None = None) -> bool:
        """After a crash: remove what is newer than the record at ``durable_end``, and rebuild the slots.

        Everything up to that record was durable, and so were ``durable_entries`` entries, if known. The rest may be
        anything, including leftovers of an earlier crash, so it is not even read then. None: everything counted by the
        header is taken for durable, but a slot may be behind. ``sums`` were stored when the file was flushed, perhaps
        later than that. False if the durable part is inconsistent: the file must be rebuilt. Changes become durable
        with the next ``sync``; until a checkpoint relies on them, the next start repeats them. Raises ``OSError``.
        """
        header, kept = self.header, self._checked_entries(durable_end, durable_entries)
        if kept.next_entry < header.next_entry and durable_end is None:
            return False
        if not self.is_empty and (kept.begin_offset, kept.end_offset) != (
            header.begin_offset,
            header.end_offset if durable_end is None else durable_end,
        ):
            return False
        if sums is not None and not self._holds(sums):
            return False
        self._set_end(kept if not self.is_empty else header)
        return True

    def _holds(self, sums: IndexSums) -> bool:
        """Whether the entries covered by ``sums`` are still the same."""
        found = EntrySums(self.shape.entries)
        for _, entries in self._chunks(min(sums.header.next_entry, self.shape.entries)):
            found.add(entries.tobytes())
        begins = self.is_empty or sums.header.next_entry <= 1 or sums.header.begin_ms == self.header.begin_ms
        return begins and bool(np.array_equal(found.all(), sums.entries))

    def _checked_entries(self, durable_end: int | None, durable_entries: int) -> IndexHeader:
        """The header of a file that ends before the first entry that is bad, or newer than what is durable."""
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
                    next_entry=kept.next_entry + count,
                )
            if count < len(entries):
                break
        return kept

    def _chunks(self, end: int) -> Iterator[tuple[NDArray[np.int32], _Entries]]:
        """Entries before ``end``, some at a time, with their numbers. Raises ``OSError``."""
        for start in range(1, end, _AT_ONCE):
            entries = self._entries(start, min(start + _AT_ONCE, end))
            yield np.arange(start, start + len(entries), dtype=np.int32), entries

    def _places(self, entries: _Entries) -> NDArray[np.int32]:
        return np.maximum(entries["hash"].astype(np.int32), 0) % np.int32(self.shape.slots)

    def _read_header(self) -> IndexHeader:
        stored = os.pread(self._handle.fd, HEADER_BYTES, 0)
        header = IndexHeader(*HEADER.unpack(stored))
        header = header._replace(next_entry=max(header.next_entry, 1))
        if header.next_entry > self.shape.entries:
            raise CorruptLogError(
                self.path,
                HEADER_LAYOUT.at("next_entry"),
                f"{header.next_entry} entries",
                "Remove the file; it is rebuilt.",
            )
        if header.next_entry > 1 and not 0 <= header.begin_offset <= header.end_offset:
            raise CorruptLogError(
                self.path, HEADER_LAYOUT.at("begin_offset"), "the last record is before the first", "Remove the file."
            )
        return header

    def open_for_writing(self) -> NDArray[np.uint32]:
        """The slots, verified when they are mapped. Raises ``OSError``, ``CorruptLogError``."""
        if self._slots is None:
            self._prove()
            for block in range(len(self._slot_sums)):
                self._slot_block(block)
        return self._map_slots()

    def _map_slots(self) -> NDArray[np.uint32]:
        """The slots as on disk, that is big-endian, in a type that is loaded and stored atomically."""
        if self._slots is None:
            fd, length = self._handle.fd, self.shape.entries_at
            self._fs.allocate(fd, length)  # RocketMQ's own files have holes
            for at in range(0, length, _READ_AT_ONCE):  # makes a bad sector an error here, not a signal later
                os.pread(fd, _READ_AT_ONCE, at)
            mapping = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self._slots = np.frombuffer(mapping, np.uint32, self.shape.slots, HEADER_BYTES)
        return self._slots

    def _entry_at(self, number: int) -> int:
        return self.shape.entries_at + number * ENTRY_BYTES

    def _entries(self, first: int, end: int) -> _Entries:
        stored = os.pread(self._handle.fd, (end - first) * ENTRY_BYTES, self._entry_at(first))
        return np.frombuffer(stored[: len(stored) // ENTRY_BYTES * ENTRY_BYTES], ENTRIES)

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


def _chain(places: NDArray[np.int32], numbers: NDArray[np.int32], previous: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Link entries of one batch that share a slot: the earlier one precedes the later one.

    Returns which are the last of their slots.
    """
    order = np.argsort(places, kind="stable")
    sorted_places = places[order]
    same = sorted_places[1:] == sorted_places[:-1]
    again = np.flatnonzero(same)
    previous[order[again + 1]] = numbers[order[again]]
    is_last = np.ones(len(places), np.bool_)
    is_last[order[again]] = False
    return is_last


def _slot_value(slots: NDArray[np.uint32], place: int) -> int:
    return int.from_bytes(slots.item(place).to_bytes(SLOT_BYTES, sys.byteorder), "big", signed=True)


def _as_stored(number: int) -> int:
    """A slot's number as ``_map_slots`` has it."""
    return int.from_bytes(number.to_bytes(SLOT_BYTES, "big"), sys.byteorder)
