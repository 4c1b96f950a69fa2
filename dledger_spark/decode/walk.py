"""Where records begin: by walking from header to header, or from units of the index.

Walking is the one loop per record of this package: 0.2 µs each, for logs whose index is missing or too short.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from mmap import mmap
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dledger.layout import ENTRY_HEADER_BYTES, MIN_BLANK_BYTES
from dledger.store.format import BLANK_MAGIC as ENTRY_BLANK_MAGIC
from dledger.types import Magic
from dledger_spark.decode.context import Framing
from dledger_spark.decode.layout import Ints
from rocketstore.message.record import BLANK_MAGIC, MESSAGE_MAGIC, MESSAGE_MAGIC_V2, OVERHEAD

Readable = bytes | memoryview | mmap
_PAIR: Final = Struct(">ii")
_ENTRY_MAGICS: Final = frozenset(int(one) for one in Magic)
_MESSAGE_MAGICS: Final = frozenset((MESSAGE_MAGIC, MESSAGE_MAGIC_V2))
_NOTHING: Final = 0


class WalkEnd(Enum):
    """Why a walk ended."""

    LIMIT = "limit"
    """At the end of the data, between two records."""
    CUT = "cut"
    """The next record is longer than the data; ``needed`` is its length, 0 if not even that is there."""
    BLANK = "blank"
    """The rest of the segment is empty."""
    ZERO = "zero"
    """Nothing was ever written there."""
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class RecordWalk:
    """The records found: where in the data they begin, where the last one ends, and why the walk ended there."""

    starts: Ints
    end: int
    kind: WalkEnd
    needed: int = 0
    reason: str = ""


def walk(data: Readable, framing: Framing, start: int = 0, stop: int | None = None) -> RecordWalk:
    """Walk the records of ``data[start:stop]``; the first one begins at ``start``."""
    end = len(data) if stop is None else stop
    if framing == "entry":
        return _walk_entries(data, start, end)
    return _walk_messages(data, start, end)


def _walk_entries(data: Readable, start: int, end: int) -> RecordWalk:
    unpack, magics = _PAIR.unpack_from, _ENTRY_MAGICS
    starts: list[int] = []
    add = starts.append
    at = start
    last = end - ENTRY_HEADER_BYTES
    while at <= last:
        magic, size = unpack(data, at)
        following = at + size
        if following > end or size < ENTRY_HEADER_BYTES or magic not in magics:
            break
        add(at)
        at = following
    return _ended(data, starts, at, end, "entry")


def _walk_messages(data: Readable, start: int, end: int) -> RecordWalk:
    unpack, magics = _PAIR.unpack_from, _MESSAGE_MAGICS
    starts: list[int] = []
    add = starts.append
    at = start
    last = end - OVERHEAD
    while at <= last:
        size, magic = unpack(data, at)
        following = at + size
        if following > end or size < OVERHEAD or magic not in magics:
            break
        add(at)
        at = following
    return _ended(data, starts, at, end, "plain")


def _ended(data: Readable, starts: list[int], at: int, end: int, framing: Framing) -> RecordWalk:
    """Say why there is no whole record at ``at``."""
    found = np.array(starts, np.int64)
    if at == end:
        return RecordWalk(found, at, WalkEnd.LIMIT)
    if end - at < MIN_BLANK_BYTES:
        return RecordWalk(found, at, WalkEnd.CUT)
    first, second = _PAIR.unpack_from(data, at)
    magic, size = (first, second) if framing == "entry" else (second, first)
    if magic == (ENTRY_BLANK_MAGIC if framing == "entry" else BLANK_MAGIC) and size >= MIN_BLANK_BYTES:
        return RecordWalk(found, at, WalkEnd.BLANK, size)
    smallest = ENTRY_HEADER_BYTES if framing == "entry" else OVERHEAD
    if magic in (_ENTRY_MAGICS if framing == "entry" else _MESSAGE_MAGICS) and size >= smallest:
        return RecordWalk(found, at, WalkEnd.CUT, size)
    if first == second == _NOTHING and not any(data[at : min(end, at + smallest)]):
        return RecordWalk(found, at, WalkEnd.ZERO)
    kind = "entry" if framing == "entry" else "message"
    return RecordWalk(
        found, at, WalkEnd.BAD, reason=f"no {kind} starts here (magic {magic & 0xFFFFFFFF:#x}, size {size})"
    )


def positions_of(units: NDArray[np.void], first_index: int, position: int) -> Ints | None:
    """Where the entries begin that index units tell of, and at last where they end.

    None unless they begin with entry ``first_index`` at ``position`` and continue one another without a gap.
    """
    count = len(units)
    positions = np.empty(count + 1, np.int64)
    positions[:-1] = units["position"]
    sizes = units["size"].astype(np.int64)
    if not count or int(positions[0]) != position or int(sizes.min()) < ENTRY_HEADER_BYTES:
        return None
    positions[-1] = positions[-2] + sizes[-1]
    indexes = units["index"].astype(np.int64)
    if not np.array_equal(np.diff(positions), sizes) or not np.array_equal(
        indexes, np.arange(first_index, first_index + count)
    ):
        return None
    return positions
