"""Cutting a stretch of the log into ranges of entries for tasks, of about as many bytes each, however sizes differ.

All of it depends on the log and the options only, so that the same stretch is always cut in the same way.
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
        """How many entries there are."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Cutting:
    """How to cut: bytes and entries at most in a range, and how many ranges at least; 0: does not matter."""

    split_bytes: int
    entries_max: int = 0
    ranges_min: int = 0


def cut(whole: IndexRange, cutting: Cutting, places: ClientLog) -> list[IndexRange]:
    """The ranges, in order, at least one: an empty stretch is one empty range."""
    if whole.count <= 0:
        return [IndexRange(whole.first, whole.first)]
    # Where the last entry begins, not where the stretch ends: what follows an entry may be a blank, but only later.
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
    beyond = min(places.indexes_at((begin + bytes_max,))[0], whole.end)  # the one before it may reach over the limit
    if beyond > whole.first + 1 and places.positions_of((beyond,))[0] - begin > bytes_max:
        beyond -= 1
    return max(beyond, whole.first + 1)


def _spread(bounds: list[int]) -> list[int]:
    """The bounds, each at least one after the other: a huge entry makes several cuts fall on one place.

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
