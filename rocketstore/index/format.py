"""The format of index files: header, slots, linked entries, the hashes of keys; and the checksums beside.

A record is indexed under ``topic#key`` for its unique key and for each of its business keys, in this order. The hash is
Java's ``String.hashCode`` made non-negative. It is linear, ``h(a + b) = h(a) * 31**len(b) + h(b)``, so the part before
the key is hashed once per topic. Records are hashed thousands at a time, as arrays.

**Checksums** are block by block, to verify everything read from an index file; RocketMQ's format has none. The index
cannot be checked against the log: an entry refers to a record, but no record shows that a slot or a link skips it. The
sums are in memory while the file is open, and stored in a file beside the index (``<index>-sums/<name>``) at each
flush, because RocketMQ must find only its own files in the index directory. They are written after the index file was
flushed: those of entries stay valid, those of slots only if nothing changed later.

Entries are append-only and have a CRC32 per block. Slots change anywhere: a block's sum is the sum of its values times
odd factors, one per place, modulo 2**64, and is updated with each change; a single changed slot always changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dledger.records import RecordLayout
from rocketstore.config import KEYS_INDEXED_MAX
from rocketstore.message.columns import Hashes, Places, PropertyTexts, RecordColumns, Values
from rocketstore.message.message import PROPERTY_KEYS, PROPERTY_UNIQUE_KEY, SYS_FLAG_ROLLED_BACK, SYS_FLAG_TRANSACTION
from rocketstore.message.properties import find_property_bytes, java_hash
from rocketstore.types import RecordHead

HEADER_LAYOUT: Final = RecordLayout(
    (
        ("begin_ms", "i8"),
        ("end_ms", "i8"),
        ("begin_offset", "i8"),
        ("end_offset", "i8"),
        ("used_slots", "i4"),
        ("next_entry", "i4"),
    )
)
HEADER: Final = HEADER_LAYOUT.struct()
_ENTRY_LAYOUT: Final = RecordLayout((("hash", "i4"), ("offset", "i8"), ("seconds", "i4"), ("previous", "i4")))
ENTRY: Final = _ENTRY_LAYOUT.struct()
ENTRIES: Final = _ENTRY_LAYOUT.dtype()
SLOT: Final = np.dtype(">i4")
"""A slot, between the header and the entries: the number of its newest entry."""
KEY: Final = np.dtype([("hash", "<i4"), ("offset", "<i8"), ("store_ms", "<i8")])
"""A key to be indexed."""
_SECONDS_MAX: Final = (1 << 31) - 1


class IndexHeader(NamedTuple):
    """First and last record of a file (milliseconds, physical offsets), used slots, number of the next entry.

    A file without entries (``next_entry`` 1) holds the end of the previous file, as in RocketMQ.
    """

    begin_ms: int
    end_ms: int
    begin_offset: int
    end_offset: int
    used_slots: int
    next_entry: int


def chained(slots: NDArray[np.int32], places: NDArray[np.int32], numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Put entries into their slots; returns for each the number of the previous entry in its slot, 0 for none."""
    previous = slots[places]
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    previous[order[again + 1]] = numbers[order[again]]
    slots[places] = numbers  # of several numbers for one slot, numpy keeps the last
    return previous


def seconds_since(store_ms: NDArray[np.int64], begin_ms: int) -> NDArray[np.int64]:
    """An entry's representation of its record's time."""
    if begin_ms <= 0:
        return np.zeros(len(store_ms), np.int64)
    return np.clip((store_ms - begin_ms) // 1000, 0, _SECONDS_MAX)


def second_since(store_ms: int, begin_ms: int) -> int:
    """``seconds_since`` for one record."""
    return min(max((store_ms - begin_ms) // 1000, 0), _SECONDS_MAX) if begin_ms > 0 else 0


BLOCK_SLOTS: Final = 1024
BLOCK_ENTRIES: Final = 256
ENTRY_BYTES: Final = ENTRY.size
SUMS_SUFFIX: Final = "-sums"
"""Suffix of the directory beside that of the index."""
_MAGIC: Final = b"RSX1"
_HEAD: Final = Struct(">4sI")
_CRC: Final = Struct(">I")
_STORED_SLOTS: Final = np.dtype(">u8")
_STORED_ENTRIES: Final = np.dtype(">u4")
_NO_ENTRY: Final = bytes(ENTRY_BYTES)
_MASK: Final = (1 << 64) - 1


def _factors() -> NDArray[np.uint64]:
    """Odd and well mixed (splitmix64); part of the format."""
    mixed = np.arange(1, BLOCK_SLOTS + 1, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


_FACTORS: Final = _factors()


def slot_blocks(slots: int) -> int:
    """The number of blocks for this many slots."""
    return -(-slots // BLOCK_SLOTS)


def sum_of_slots(values: NDArray[np.generic]) -> int:
    """The sum of one block's slots."""
    return int((values.astype(np.uint64) * _FACTORS[: len(values)]).sum(dtype=np.uint64))


def sums_of_slots(values: NDArray[np.generic]) -> NDArray[np.uint64]:
    """The sums of all blocks."""
    padded = np.zeros(slot_blocks(len(values)) * BLOCK_SLOTS, np.uint64)
    padded[: len(values)] = values
    sums: NDArray[np.uint64] = (padded.reshape(-1, BLOCK_SLOTS) * _FACTORS).sum(axis=1, dtype=np.uint64)
    return sums


def move_slots(
    sums: NDArray[np.uint64], places: NDArray[np.int32], before: NDArray[np.int32], after: NDArray[np.int32]
) -> None:
    """Update the blocks' sums after slots at distinct ``places`` have changed."""
    change = (after.astype(np.int64) - before).view(np.uint64) * _FACTORS[places % BLOCK_SLOTS]
    np.add.at(sums, places // BLOCK_SLOTS, change)


def move_slot(sums: NDArray[np.uint64], place: int, before: int, after: int) -> None:
    block = place // BLOCK_SLOTS
    change = (after - before) * _FACTORS.item(place % BLOCK_SLOTS)
    sums[block] = (sums.item(block) + change) & _MASK


def crc_of(entries: bytes) -> int:
    """The CRC of one block's entries."""
    return crc32(entries)


class EntrySums:
    """CRCs of the blocks of a file's entries, updated as entries are added."""

    def __init__(self, entries: int) -> None:
        """For ``entries`` entries; entry 0, which is unused, is already included."""
        self._whole = np.zeros(-(-entries // BLOCK_ENTRIES), np.uint32)
        self.tail = crc32(_NO_ENTRY)
        """CRC of the incomplete last block; 0 if the last block is full."""
        self.next_entry = 1

    def add(self, data: bytes) -> int:
        """Add entries; returns the new tail."""
        at, number, tail = 0, self.next_entry, self.tail
        view = memoryview(data)
        while at < len(data):
            part = view[at : at + (BLOCK_ENTRIES - number % BLOCK_ENTRIES) * ENTRY_BYTES]
            tail = crc32(part, tail)
            at += len(part)
            number += len(part) // ENTRY_BYTES
            if number % BLOCK_ENTRIES == 0:
                self._whole[number // BLOCK_ENTRIES - 1] = tail
                tail = 0
        self.next_entry, self.tail = number, tail
        return tail

    def of_block(self, block: int) -> int:
        """The CRC of a full block."""
        return int(self._whole[block])

    def all(self) -> NDArray[np.uint32]:
        """All CRCs, ending with the tail's if there is one."""
        whole = self._whole[: self.next_entry // BLOCK_ENTRIES]
        return np.append(whole, np.uint32(self.tail)) if self.next_entry % BLOCK_ENTRIES else whole.copy()

    def take(self, sums: NDArray[np.uint32], next_entry: int) -> None:
        """Start with the CRCs of the entries before ``next_entry``, as returned by ``all``."""
        count = next_entry // BLOCK_ENTRIES
        self._whole[:count] = sums[:count]
        self.tail = int(sums[count]) if next_entry % BLOCK_ENTRIES else 0
        self.next_entry = next_entry


@dataclass(frozen=True, slots=True)
class IndexSums:
    """The stored state of one file: its header, and the matching sums of slots and entries."""

    header: IndexHeader
    slots: NDArray[np.uint64]
    entries: NDArray[np.uint32]

    def encode(self) -> bytes:
        content = b"".join(
            (
                _HEAD.pack(_MAGIC, len(self.slots)),
                HEADER.pack(*self.header),
                self.slots.astype(_STORED_SLOTS).tobytes(),
                self.entries.astype(_STORED_ENTRIES).tobytes(),
            )
        )
        return content + _CRC.pack(crc32(content))


def decode_sums(content: bytes, slots: int) -> IndexSums | None:
    """Parse a file's contents; None if it is incomplete, or for a different number of slots."""
    start = _HEAD.size + HEADER.size
    if len(content) < start + _CRC.size or _CRC.unpack(content[-_CRC.size :])[0] != crc32(content[: -_CRC.size]):
        return None
    magic, blocks = _HEAD.unpack_from(content)
    header = IndexHeader(*HEADER.unpack_from(content, _HEAD.size))
    count = -(-header.next_entry // BLOCK_ENTRIES)
    end = start + blocks * _STORED_SLOTS.itemsize
    if (
        magic != _MAGIC
        or blocks != slot_blocks(slots)
        or len(content) != end + count * _STORED_ENTRIES.itemsize + _CRC.size
    ):
        return None
    return IndexSums(
        header,
        np.frombuffer(content, _STORED_SLOTS, blocks, start).astype(np.uint64),
        np.frombuffer(content, _STORED_ENTRIES, count, end).astype(np.uint32),
    )


_UNIQUE: Final = PROPERTY_UNIQUE_KEY.encode() + b"\x01"
_KEYS: Final = PROPERTY_KEYS.encode() + b"\x01"
_INT_MASK: Final = 0xFFFF_FFFF
_MIN: Final = -(1 << 31)
_CACHED_TOPICS: Final = 100_000


class TopicHashes(dict[str, int]):
    """The unsigned hash of ``topic#`` per topic, computed once."""

    def __missing__(self, topic: str) -> int:
        if len(self) >= _CACHED_TOPICS:
            self.clear()
        value = self[topic] = java_hash(f"{topic}#") & _INT_MASK
        return value


def key_hash(topic: str, key: str) -> int:
    """The stored hash of a topic's key: 0 to 2**31 - 1."""
    return _positive(java_hash(f"{topic}#{key}"))


def key_hashes(heads: Sequence[RecordHead], topics: TopicHashes) -> tuple[NDArray[np.int32], Places]:
    """The hashes of all keys of ``heads``, in order, and for each hash the number of its head.

    Rolled-back records have no keys.
    """
    if isinstance(heads, RecordColumns):
        texts = heads.properties
        names = set(heads.topics)
        if len(names) == 1:
            return hashes_in(texts, np.full(len(heads), topics[names.pop()], np.uint32))
        return hashes_in(texts, np.fromiter([topics[name] for name in heads.topics], np.uint32, len(heads)))
    # Fields by number, not by name: this runs for every message.
    strings = [head[9] if head[7] & SYS_FLAG_TRANSACTION != SYS_FLAG_ROLLED_BACK else b"" for head in heads]
    prefixes = np.fromiter([topics[head[0]] for head in heads], np.uint32, len(heads))
    return hashes_in(PropertyTexts.of(strings), prefixes)


def hashes_of(head: RecordHead, topics: TopicHashes) -> list[int]:
    """The same for one record, without arrays."""
    properties = head[9]
    if not properties or head[7] & SYS_FLAG_TRANSACTION == SYS_FLAG_ROLLED_BACK:
        return []
    unique = find_property_bytes(properties, _UNIQUE)
    keys = find_property_bytes(properties, _KEYS)
    found = [] if unique is None else [unique]
    if keys is not None:
        found += [word for word in keys.split(b" ") if word][:KEYS_INDEXED_MAX]
    prefix = topics[head[0]]
    return [_positive(java_hash(key.decode(errors="replace"), prefix)) for key in found]


def hashes_in(properties: PropertyTexts, prefixes: Hashes) -> tuple[NDArray[np.int32], Places]:
    """Like ``key_hashes``, for records that have keys; ``prefixes`` are the ``TopicHashes`` of their topics."""
    unique = properties.named(_UNIQUE)
    keys = properties.named(_KEYS)
    words = _first_of_each(properties.words(keys), len(keys.owners))
    values = properties.in_order(unique, words)  # a record's unique key is first
    signed = properties.hashes(values, prefixes).view(np.int32)
    return np.where(signed == _MIN, np.int32(0), np.abs(signed)), values.owners


def _first_of_each(words: Values, records: int) -> Values:
    """At most ``KEYS_INDEXED_MAX`` words of each record; ``records`` have some."""
    owners = words.owners
    if len(owners) - records < KEYS_INDEXED_MAX:  # none can have more
        return words
    rank = np.arange(len(owners)) - np.searchsorted(owners, owners, "left")
    kept = rank < KEYS_INDEXED_MAX
    return Values(words.begins[kept], words.ends[kept], owners[kept])


def _positive(value: int) -> int:
    """Java's ``Math.abs``, with 0 for the number without a positive counterpart."""
    return 0 if value == _MIN else abs(value)
