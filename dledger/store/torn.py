"""Distinguishes a log's bad end that a power cut left of an unflushed write from damage.

Unflushed sectors reach the disk in any order, or not at all. A sector that did not is what it was before: what an
earlier write left there, and zeros from then on, for there is never anything else behind the end: what a truncation
drops is zeroed durably before anything is written in its place. So a record spoilt by a power cut lacks at least one
sector, which is zero from the record's first byte in it to the sector's end; and what did reach the disk is correct:

- The header continues the chain of the entry before it, or a sector of it is lost, and the rest of it is correct.
- The body's checksum proves nothing while a sector is lost, unless one flipped bit explains it: then nothing is lost,
  and the zeros belong to the body.

Data behind the record proves nothing, not even whole records: all of it may be unflushed. So a durable record of which
a whole sector reads as zeros later is taken for torn, if the power fails before the next checkpoint is durable; the
other members may remember it. If a hole with data behind it counted as damage, then of three members that lose power
together under load, two or more would be in doubt in three cases of four (simulated, sectors lost in any order).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dledger.layout import ENTRY
from dledger.store.format import HEADER, EntryHeader, Follow, header_chain_crc, header_problem

SECTOR_BYTES: Final = 512
"""The unit that a disk writes completely or not at all."""
_POLYNOMIAL: Final = 0x82F63B78
_AT_ONCE: Final = 1 << 18
_Words = npt.NDArray[np.uint32]


def is_torn(segment: memoryview, base: int, offset: int, follow: Follow) -> bool:
    """Whether lost sectors explain that no record after ``follow`` is at ``offset`` of the segment at ``base``."""
    header_end = min(offset + HEADER.size, len(segment))
    lost = [piece for piece in _pieces(offset, header_end, len(segment)) if not any(segment[slice(*piece)])]
    if lost:
        return all(
            segment[at] == wanted
            for at, wanted in _known_bytes(offset, base + offset, follow.index + 1)
            if at < header_end and not any(start <= at < end for start, end in lost)
        )
    if header_end - offset < HEADER.size:
        return False
    header = EntryHeader(*HEADER.unpack_from(segment, offset))
    end = offset + header.size
    if header_problem(header, base + offset, follow) or end > len(segment):
        return False
    if header_chain_crc(header, follow.chain_crc) != header.chain_crc:
        return False
    sectors = (piece for piece in _pieces(offset, end, len(segment)) if piece[0] > offset)
    if all(any(segment[slice(*piece)]) for piece in sectors):
        return False
    body = segment[header_end:end]
    return not _is_one_bit(crc32c(body) ^ header.body_crc, len(body))


def _pieces(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """The part of each of a record's sectors written with it or later: from its first byte there to the end."""
    while start < end:
        stop = min(start - start % SECTOR_BYTES + SECTOR_BYTES, size)
        yield start, stop
        start = stop


def _known_bytes(offset: int, position: int, index: int) -> Iterator[tuple[int, int]]:
    """The known bytes of the next entry's header: where which byte must be."""
    for field, value in (("index", index), ("position", position)):
        yield from enumerate(ENTRY.part(field).pack(value), offset + ENTRY.at(field))


def _is_one_bit(difference: int, length: int) -> bool:
    """Whether the difference of two CRC32C, of ``length`` bytes each, is that of one flipped bit.

    It is if undoing the bytes behind the bit turns it into the difference of a bit in the last byte.
    """
    taken_back, step = np.array([difference], np.uint32), _BACK
    while len(taken_back) < min(length, _AT_ONCE):
        taken_back = np.concatenate((taken_back, _apply(step, taken_back)))
        step = _apply(step, step)
    for done in range(0, length, len(taken_back)):
        if np.isin(taken_back[: length - done], _ONE_BIT).any():
            return True
        taken_back = _apply(step, taken_back)
    return False


def _apply(linear: _Words, words: _Words) -> _Words:
    """Apply a linear map, given by its result for each value of each byte, to ``words``."""
    low: _Words = linear[0][words & 255] ^ linear[1][words >> 8 & 255]
    high: _Words = linear[2][words >> 16 & 255] ^ linear[3][words >> 24]
    return np.bitwise_xor(low, high)


def _table_entry(low: int) -> int:
    """The effect of eight zero bits on a CRC with this lowest byte."""
    for _ in range(8):
        low = low >> 1 ^ (_POLYNOMIAL if low & 1 else 0)
    return low


def _back(word: int) -> int:
    """The CRC before a zero byte; no two of the table's entries have the same highest byte."""
    low = _LOW[word >> 24]
    return (word ^ _TABLE[low]) << 8 & 0xFFFFFFFF | low


_TABLE: Final = tuple(_table_entry(low) for low in range(256))
_LOW: Final = {entry >> 24: low for low, entry in enumerate(_TABLE)}
_BACK: Final = np.array([[_back(byte << shift) for byte in range(256)] for shift in (0, 8, 16, 24)], np.uint32)
_ONE_BIT: Final = np.array([_TABLE[1 << bit] for bit in range(8)], np.uint32)
"""The difference that a flipped bit in the last byte makes."""
