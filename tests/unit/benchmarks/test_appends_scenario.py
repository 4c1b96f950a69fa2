"""Appends one after the other: which rounds count."""

from __future__ import annotations

import os

import pytest

from benchmarks.processes import ChildError
from benchmarks.scenarios.appends import OneByOne


def test_a_round_with_two_leaders_has_no_processor_time() -> None:
    """The time of the one is not that of all appends; the appends themselves took as long as they took."""
    leaders = iter([os.getpid(), os.getpid(), os.getpid(), os.getppid()])
    side = OneByOne(len, lambda: next(leaders))

    side.measure(0.01)
    side.measure(0.01)

    assert (len(side.rounds), len(side.processor_ms)) == (2, 1)


def test_leadership_that_always_moves_is_an_error() -> None:
    """Not a figure of 0 ms."""
    leaders = iter([os.getpid(), os.getppid()])
    side = OneByOne(len, lambda: next(leaders))
    side.measure(0.01)

    with pytest.raises(ChildError, match="became leader in every round"):
        side.processor()
