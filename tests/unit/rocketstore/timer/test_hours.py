"""Recalls known by heart: never more than allowed, and never a wrong answer."""

from __future__ import annotations

from rocketstore.timer.hours import RecallIndex


def test_what_was_recalled_is_known_by_hour() -> None:
    index = RecallIndex()
    index.add(1, 10)
    index.add(1, 10)
    index.replace(2, [20, 21])
    assert [index.is_recalled(*one) for one in ((1, 10), (2, 10), (2, 21), (3, 1))] == [True, False, True, False]
    assert len(index) == 3
    index.replace(2, [22])
    index.forget(1)
    assert [index.is_recalled(*one) for one in ((1, 10), (2, 21), (2, 22))] == [False, False, True]
    assert len(index) == 1


def test_the_hour_with_one_too_many_is_no_longer_known() -> None:
    """Bounded: the others stay known, and so do later ones, for which there is room again."""
    index = RecallIndex(4)
    index.replace(1, [10])
    for origin in range(20, 24):
        index.add(2, origin)
    assert [index.is_recalled(*one) for one in ((2, 20), (2, 99), (1, 10), (1, 99))] == [None, None, True, False]
    assert len(index) == 1
    index.add(2, 24)
    index.add(3, 30)
    assert (len(index), index.is_recalled(2, 24), index.is_recalled(3, 30)) == (2, None, True)
    index.replace(2, [20])
    assert (len(index), index.is_recalled(2, 20), index.is_recalled(2, 24)) == (3, True, False)
