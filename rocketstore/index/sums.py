"""Checksums of an index file, block by block, to verify everything read from it; RocketMQ's format has none.

The index cannot be checked against the log: an entry refers to a record, but no record shows that a slot or a link
skips it. The sums are in memory while the file is open, and stored in a file beside the index (``<index>-sums/<name>``)
at each flush, because RocketMQ must find only its own files in the index directory. They are written after the index
file was flushed: those of entries stay valid, those of slots only if nothing changed later.

Entries are append-only and have a CRC32 per block. Slots change anywhere: a block's sum is the sum of its values times
odd factors, one per place, modulo 2**64, and is updated with each change; a single changed slot always changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rocketstore.index.chains import ENTRY, HEADER, IndexHeader

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
        """The file's contents."""
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
