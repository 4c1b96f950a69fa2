"""How much of a long sweep (of cuts, seeds, examples, lengths) is tried: all of it, or an even part in ``make test``.

A test that calls ``thinned`` or ``fewer`` is marked ``sweep``: ``make test`` runs a part of it, and what ``make
test-all`` runs after that includes the whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeVar

THIN: Final = "SWEEPS"
"""A variable, because sweeps are also parameters of tests, which are made when their module is loaded."""

T = TypeVar("T")


def thin() -> bool:
    """Whether parts are enough."""
    return os.environ.get(THIN) == "thin"


def thinned(values: Sequence[T], every: int = 8) -> Sequence[T]:
    """Every so many of them, the first and the last among them; or all."""
    if not thin() or len(values) <= 2:
        return values
    chosen = list(values[:-1:every])
    return [*chosen, values[-1]]


def fewer(count: int, divisor: int = 8, least: int = 1) -> int:
    """A part of a number of seeds or rounds, at least ``least``; or all."""
    return min(count, max(least, count // divisor)) if thin() else count
