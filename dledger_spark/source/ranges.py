"""Cuts a stretch of the log into ranges of entries for tasks, with about as many bytes each, whatever the entry sizes.

The result depends only on the log and the options, so the same stretch is always cut in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dledger_spark.options import SPLITS_MAX
from dledger_spark.source.client_log import ClientLog


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Entries from ``first`` up to ``end`` (exclusive); empty if they are equal."""

    first: int
    end: int

    @property
    def count(self) -> int:
        """The number of entries."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Cutting:
    """Limits for cutting: maximum bytes and entries per range, minimum number of ranges; 0: no limit."""

    split_bytes: int
    entries_max: int = 0
    ranges_min: int = 0


def cut(whole: IndexRange, cutting: Cutting, places: ClientLog) -> list[IndexRange]:
    """The ranges, in order, at least one: an empty stretch is one empty range."""
    if whole.count <= 0:
        return [IndexRange(whole.first, whole.first)]
    # Use the start of the last entry instead of the stretch's end, because a blank may be added after that entry
    # later.
    begin, last = places.positions_of((whole.first, whole.end - 1))
    wanted = min(max(1, cutting.ranges_min, _ceil(last - begin, cutting.split_bytes)), whole.count, SPLITS_MAX)
    bounds = [whole.first, whole.end]
    if wanted > 1:
        targets = [begin + (last - begin) * number // wanted for number in range(1, wanted)]
        bounds[1:1] = places.indexes_at(targets)
    bounds = _spread(bounds)
    if cutting.entries_max:
        bounds = _divided(bounds, cutting.entries_max)
    return [IndexRange(first, end) for first, end in pairwise(bounds)]


def end_within(whole: IndexRange, bytes_max: int, places: ClientLog) -> int:
    """The furthest end such that the entries before it take at most ``bytes_max`` bytes; at least one entry."""
    if whole.count <= 1:
        return whole.end
    begin, end = places.positions_of((whole.first, whole.end))
    if end - begin <= bytes_max:
        return whole.end
    beyond = min(places.indexes_at((begin + bytes_max,))[0], whole.end)  # the previous entry may exceed the limit
    if beyond > whole.first + 1 and places.positions_of((beyond,))[0] - begin > bytes_max:
        beyond -= 1
    return max(beyond, whole.first + 1)


def _spread(bounds: list[int]) -> list[int]:
    """Make bounds strictly ascending: a huge entry makes several cuts coincide.

    There are at least as many entries as ranges.
    """
    spread = [bounds[0]]
    for number, bound in enumerate(bounds[1:], 1):
        after = len(bounds) - 1 - number
        spread.append(min(max(bound, spread[-1] + 1), bounds[-1] - after))
    return spread


def _divided(bounds: list[int], entries_max: int) -> list[int]:
    divided = [bounds[0]]
    for first, end in pairwise(bounds):
        parts = _ceil(end - first, entries_max)
        divided += [first + (end - first) * part // parts for part in range(1, parts + 1)]
    return divided


def _ceil(amount: int, size: int) -> int:
    return -(-amount // size)
