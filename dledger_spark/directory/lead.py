"""What comes before a split: the chain of checksums that its first entry continues.

Planning says where the entries before it are, which costs nothing. If checksums matter, the task looks at two of them,
which the index finds; without one it goes through the headers of the segment before.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dledger.layout import ENTRY_HEADER_BYTES
from dledger_spark.decode import WalkEnd, walk
from dledger_spark.decode.checksums import chain_after
from dledger_spark.decode.context import Chain
from dledger_spark.directory.files import IndexFiles, LogSegment


@dataclass(frozen=True, slots=True)
class Lead:
    """A stretch of entries that ends where a split begins, but for a blank. Positions are the log's."""

    segment: LogSegment
    begin: int
    end: int


def chain_before(lead: Lead, index_directory: str, first_index: int) -> Chain | None:
    """What the split's first entry continues; None if it cannot be told. ``first_index``: its own; -1 if not known.

    Nor can it if what is before the split was trimmed or cut meanwhile. Raises ``OSError``.
    """
    try:
        return _chain_before(lead, index_directory, first_index)
    except (FileNotFoundError, ValueError):  # a file that is shorter cannot be mapped
        return None


def _chain_before(lead: Lead, index_directory: str, first_index: int) -> Chain | None:
    places = _by_index(lead, IndexFiles(Path(index_directory)), first_index) if first_index > 0 else ()
    if not places:
        places = _by_walking(lead)
    if not places:
        return None
    heads = b"".join(lead.segment.read(one, ENTRY_HEADER_BYTES) for one in places)
    if len(heads) != len(places) * ENTRY_HEADER_BYTES:
        return None
    return chain_after(np.frombuffer(heads, np.uint8), np.arange(len(places), dtype=np.int64) * ENTRY_HEADER_BYTES)


def _by_index(lead: Lead, index: IndexFiles, first_index: int) -> Sequence[int]:
    """Where the last two entries begin, or one if the other is not in the stretch; none if the index does not tell."""
    last = index.place(first_index - 1)
    if last is None or not lead.begin <= last[0] < last[0] + last[1] <= lead.end:
        return ()
    before = index.place(first_index - 2)
    if before is None or before[0] < lead.begin or sum(before) != last[0]:
        return (last[0],)
    return before[0], last[0]


def _by_walking(lead: Lead) -> Sequence[int]:
    segment = lead.segment
    with segment.path.open("rb") as file, mmap.mmap(file.fileno(), segment.size, access=mmap.ACCESS_READ) as mapped:
        found = walk(mapped, segment.framing, lead.begin - segment.base, lead.end - segment.base)
    if found.kind not in (WalkEnd.LIMIT, WalkEnd.BLANK):
        return ()
    return [int(one) + segment.base for one in found.starts[-2:]]
