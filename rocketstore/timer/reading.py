"""Reads hour files of timed messages, and believes nothing that is not what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dledger.errors import CorruptLogError
from rocketstore.timer.entries import ENTRY, ENTRY_ROW, Entries, decode_entries, select

ADVICE: Final = "It is built again from the log, and the messages of its hour wait for that: try again"
CHANGED: Final = "it is not what was written"
PIECE_BYTES: Final = 16_384 * ENTRY.size
"""Read at a time to find one message, or a page."""
Wanted = Callable[[Entries], NDArray[np.bool_]]
"""Which of some entries are."""


class HourExtent(NamedTuple):
    """The content of an hour's file: its size (bytes) and its checksum."""

    path: Path
    size: int
    crc: int


def read_rest(extent: HourExtent, size: int = 0, crc: int = 0) -> bytes:
    """The bytes after the first ``size`` bytes, whose checksum is ``crc``. Raises ``OSError``, ``CorruptLogError``."""
    return b"".join(_pieces(extent, size, crc, extent.size))


def length(extent: HourExtent) -> int:
    """The bytes of a file, all of which are read. Raises ``OSError``, ``CorruptLogError``."""
    return sum(map(len, _pieces(extent, 0, 0, PIECE_BYTES)))


def entries_with(extent: HourExtent, origin: int) -> Entries:
    """The entries of one message, of a file that is read piece by piece. Raises ``OSError``, ``CorruptLogError``."""
    found = [b""]
    for piece in _pieces(extent, 0, 0, PIECE_BYTES):
        rows = np.frombuffer(piece, ENTRY_ROW)
        found.append(rows[rows["origin"] == origin].tobytes())
    return decode_entries(b"".join(found))


class FirstDue(NamedTuple):
    """Entries of an hour, in the log's order; ``next_ms``: when the first that was left out is due, or -1."""

    entries: Entries
    next_ms: int = -1

    def cut(self, count: int) -> FirstDue:
        """The first ``count`` by due time, and what is due at the same millisecond as the last of these."""
        due_ms = self.entries["due_ms"]
        if len(due_ms) <= count:
            return self
        is_first = due_ms <= np.partition(due_ms, count - 1)[count - 1]
        left = due_ms[~is_first].tolist() + ([self.next_ms] if self.next_ms >= 0 else [])
        return FirstDue(select(self.entries, is_first), min(left, default=-1))


def first_due(extent: HourExtent, wanted: Wanted, count: int) -> FirstDue:
    """The wanted entries of a file, ``cut`` to ``count``.

    It is read piece by piece, so that an hour of millions takes the memory of these. Raises ``OSError``,
    ``CorruptLogError``.
    """
    found = FirstDue(decode_entries(b""))
    room = 2 * count
    for piece in _pieces(extent, 0, 0, PIECE_BYTES):
        rows = decode_entries(piece)
        found = found._replace(entries=np.concatenate((found.entries, select(rows, wanted(rows)))))
        if len(found.entries) > room:
            found = found.cut(count)
            room = len(found.entries) + count  # those of one millisecond may be many
    return found.cut(count)


def _pieces(extent: HourExtent, done: int, crc: int, size_max: int) -> Iterator[bytes]:
    with extent.path.open("rb") as opened:
        opened.seek(done)
        while done < extent.size and (piece := opened.read(min(size_max, extent.size - done))):
            done, crc = done + len(piece), crc32(piece, crc)
            if len(piece) % ENTRY.size:
                break
            yield piece
    if done != extent.size or crc != extent.crc:
        raise CorruptLogError(extent.path, 0, CHANGED, ADVICE)
