"""The arithmetic common to all figures. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least ``percent`` % of all samples do not exceed (nearest rank, no interpolation)."""
    if not samples:
        raise ValueError("a percentile of no samples")
    if not 0 < percent <= 100:
        raise ValueError(f"percent={percent} must be in (0, 100]")
    ordered = sorted(samples)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def median(samples: Sequence[float]) -> float:
    """The median of the rounds' results (the mean of the two middle ones if their number is even)."""
    return statistics.median(samples)


def ratio(value: float, baseline_value: float | None) -> float | None:
    """``value / baseline_value``; None when there is no baseline, or none that can be divided by."""
    if baseline_value is None or baseline_value == 0:
        return None
    return value / baseline_value
