"""Cutting the log into ranges for tasks: complete, disjoint, even in bytes, always the same."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_spark.source.client_log import Cutting, IndexRange, cut, end_within
from tests.support.fake_group_log import FakeGroupLog

SIZES = st.lists(st.integers(48, 5000), min_size=1, max_size=60)


@settings(deadline=None)
@given(SIZES, st.data(), st.integers(1, 20_000), st.integers(0, 20), st.integers(0, 80))
def test_ranges_hold_every_entry_once_within_the_limits(
    sizes: list[int], data: st.DataObject, split: int, entries_max: int, ranges_min: int
) -> None:
    """Whatever the sizes: in order, without gap or overlap, none empty, as many as asked for, none with too many."""
    first = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(first + 1, len(sizes)))

    ranges = cut(IndexRange(first, end), Cutting(split, entries_max, ranges_min), FakeGroupLog(sizes))

    assert (ranges[0].first, ranges[-1].end) == (first, end)
    assert all(one.end == other.first for one, other in pairwise(ranges))
    assert all(one.count > 0 for one in ranges)
    assert len(ranges) >= min(ranges_min, end - first)
    assert not entries_max or max(one.count for one in ranges) <= entries_max


@settings(deadline=None)
@given(SIZES, st.integers(200, 20_000))
def test_ranges_are_of_even_bytes_under_skew(sizes: list[int], split: int) -> None:
    """No range has more bytes than its share, but for the entry that it must hold whole at either end."""
    starts = [0, *accumulate(sizes)]

    ranges = cut(IndexRange(0, len(sizes)), Cutting(split), FakeGroupLog(sizes))

    for one in ranges:
        assert starts[one.end] - starts[one.first] <= split + 2 * max(sizes)


def test_skewed_half_gets_most_of_the_ranges() -> None:
    """Ten small entries and ten hundred times larger: a cut by numbers would give one task nearly everything."""
    ranges = cut(IndexRange(0, 20), Cutting(1 << 30, ranges_min=5), FakeGroupLog([100] * 10 + [10_000] * 10))

    assert ranges[0].first == 0
    assert all(one.count <= 3 for one in ranges[1:])


def test_cut_does_not_depend_on_what_follows() -> None:
    """A batch that is planned again when the log has grown is cut as before, also where a blank came after it."""
    sizes = [100, 900, 50, 700, 300, 60]
    before = cut(IndexRange(0, 6), Cutting(500), FakeGroupLog(sizes))

    grown = FakeGroupLog([*sizes, 100, 100])
    grown.sizes[5] += 4000  # the blank at the end of a segment, as the next entry's place shows it

    assert cut(IndexRange(0, 6), Cutting(500), grown) == before


def test_empty_stretch_is_one_empty_range() -> None:
    """Spark wants a partition for every batch."""
    assert cut(IndexRange(7, 7), Cutting(100, 1, 5), FakeGroupLog([50] * 9)) == [IndexRange(7, 7)]


@settings(deadline=None)
@given(SIZES, st.integers(0, 100_000), st.data())
def test_end_within_bytes_is_the_furthest_that_fits(sizes: list[int], limit: int, data: st.DataObject) -> None:
    """As many entries as fit, at least one, found by a bounded number of questions."""
    first = data.draw(st.integers(0, len(sizes) - 1))
    log = FakeGroupLog(sizes)

    end = end_within(IndexRange(first, len(sizes)), limit, log)

    fitting = [last for last in range(first + 1, len(sizes) + 1) if sum(sizes[first:last]) <= limit]
    assert end == max([first + 1, *fitting])
    assert log.calls <= 3
