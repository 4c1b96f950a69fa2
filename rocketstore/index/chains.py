"""Entries of index files as arrays, and the links between entries of a slot."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dledger.layout import RecordLayout

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
