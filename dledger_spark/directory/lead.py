"""Determines the checksum chain before a split, which its first entry continues.

Planning only records where the preceding entries are. If checksums matter, the task reads two of them, located by the
index; without an index it walks the headers of the preceding segment.
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
    """A stretch of entries that ends where a split starts, apart from a blank. Positions are those of the log."""

    segment: LogSegment
    begin: int
    end: int


def chain_before(lead: Lead, index_directory: str, first_index: int) -> Chain | None:
    """The chain before the split's first entry; None if unknown. ``first_index``: that entry's; -1 if unknown.

    It is also unknown if the preceding entries were trimmed or truncated meanwhile. Raises ``OSError``.
    """
    try:
        return _chain_before(lead, index_directory, first_index)
    except (FileNotFoundError, ValueError):  # a file that became shorter cannot be mapped
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
    """The starts of the last two entries, or of one if the other is outside the stretch; none if not in the index."""
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
