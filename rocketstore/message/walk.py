"""Finds the starts of records by walking from header to header, each of which contains its record's length.

The one loop per record, at 0.2 µs each, for callers that then process many at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from mmap import mmap
from struct import Struct
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dledger import layout as entries
from dledger.types import Magic
from rocketstore.message.record import BLANK, BLANK_MAGIC, MESSAGE_MAGICS, OVERHEAD

Readable = bytes | memoryview | mmap
Framing = Literal["entry", "plain"]
"""``entry``: records have the header of a replicated log's entry. ``plain``: messages of a plain commit log."""


class _Frame(NamedTuple):
    """The start of an element: its magic number and its size, in either order."""

    head: Struct
    magic_first: bool
    magics: Collection[int]
    blank_magic: int
    least: int
    noun: str


_FRAMES: Final[dict[Framing, _Frame]] = {
    "entry": _Frame(
        entries.BLANK_HEAD.struct(),
        magic_first=True,
        magics=frozenset(map(int, Magic)),
        blank_magic=entries.BLANK_MAGIC,
        least=entries.ENTRY_HEADER_BYTES,
        noun="entry",
    ),
    "plain": _Frame(
        BLANK, magic_first=False, magics=MESSAGE_MAGICS, blank_magic=BLANK_MAGIC, least=OVERHEAD, noun="message"
    ),
}


class WalkEnd(Enum):
    """Why a walk ended."""

    LIMIT = "limit"
    """At the end of the data, between two records."""
    CUT = "cut"
    """The next record extends beyond the data; ``needed`` is its length, 0 if even that is missing."""
    BLANK = "blank"
    """The rest of the segment is empty; ``needed`` is the blank's length."""
    ZERO = "zero"
    """Never written."""
    BAD = "bad"


Ended = tuple[WalkEnd, int, str]
"""The reason, how many bytes the next record needs, and what is there instead of one."""
_AT_LIMIT: Final[Ended] = (WalkEnd.LIMIT, 0, "")


@dataclass(frozen=True, slots=True)
class RecordWalk:
    """The records found: their starts in the data, the end of the last one, and why the walk ended there."""

    starts: NDArray[np.int64]
    end: int
    kind: WalkEnd
    needed: int = 0
    reason: str = ""


def walk(data: Readable, framing: Framing, start: int = 0, stop: int | None = None) -> RecordWalk:
    """Walk the records of ``data[start:stop]``; the first one starts at ``start``."""
    end = len(data) if stop is None else stop
    starts, at = record_starts(data, framing, start, end)
    return RecordWalk(np.array(starts, np.int64), at, *why_ended(data, framing, at, end))


def record_starts(data: Readable, framing: Framing, start: int, end: int) -> tuple[list[int], int]:
    """The starts of the records in ``data[start:end]``, and the end of the last one."""
    head, magic_first, magics, _, least, _ = _FRAMES[framing]
    unpack = head.unpack_from
    starts: list[int] = []
    add = starts.append
    at, last = start, end - least
    while at <= last:
        size, magic = unpack(data, at)
        if magic_first:
            size, magic = magic, size
        following = at + size
        if following > end or size < least or magic not in magics:
            break
        add(at)
        at = following
    return starts, at


def why_ended(data: Readable, framing: Framing, at: int, end: int) -> Ended:
    """Why there is no whole record of ``data[:end]`` at ``at``."""
    if at == end:
        return _AT_LIMIT
    frame = _FRAMES[framing]
    if end - at < frame.head.size:
        return WalkEnd.CUT, 0, ""
    size, magic = frame.head.unpack_from(data, at)
    if frame.magic_first:
        size, magic = magic, size
    if magic == frame.blank_magic and size >= frame.head.size:
        return WalkEnd.BLANK, size, ""
    if magic in frame.magics and size >= frame.least:
        return WalkEnd.CUT, size, ""
    if size == magic == 0 and not any(data[at : min(end, at + frame.least)]):
        return WalkEnd.ZERO, 0, ""
    return WalkEnd.BAD, 0, f"no {frame.noun} starts here (magic {magic & 0xFFFFFFFF:#x}, size {size})"
