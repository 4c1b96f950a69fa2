"""Reads hour files of timed messages, and believes nothing that is not what was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np

from dledger.errors import CorruptLogError
from rocketstore.timer.entries import ENTRY, ENTRY_ROW, Entries, decode_entries

ADVICE: Final = "It is built again from the log, and the messages of its hour wait for that: try again"
CHANGED: Final = "it is not what was written"
PIECE_BYTES: Final = 16_384 * ENTRY.size
"""Read at a time to find one message."""


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
