"""The arithmetic of the figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import stats


@pytest.mark.parametrize(("percent", "expected"), [(1, 1.0), (50, 2.0), (51, 3.0), (75, 3.0), (99, 4.0), (100, 4.0)])
def test_percentile_is_the_nearest_rank(percent: float, expected: float) -> None:
    """The p-th percentile is a real sample: the first that p % of them do not exceed."""
    assert stats.percentile([3.0, 1.0, 4.0, 2.0], percent) == expected


@given(st.lists(st.floats(allow_nan=False), min_size=1), st.floats(min_value=0.001, max_value=100))
def test_percentile_covers_its_share(samples: list[float], percent: float) -> None:
    """At least ``percent`` % of the samples are at or below the answer, and the answer is one of them."""
    answer = stats.percentile(samples, percent)

    assert answer in samples
    assert sum(sample <= answer for sample in samples) * 100 >= percent * len(samples) - 1e-6


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_percentile_refuses_what_has_no_answer(samples: list[float], percent: float) -> None:
    """No samples and a senseless percentage are errors, not zeros."""
    with pytest.raises(ValueError, match="percent"):
        stats.percentile(samples, percent)


def test_median_of_three_rounds_ignores_one_disturbed_round() -> None:
    """One round hit by noise does not move the result."""
    assert stats.median([10.0, 1.0, 9.0]) == 9.0


@pytest.mark.parametrize(("baseline", "expected"), [(4.0, 2.5), (None, None), (0.0, None)])
def test_ratio_is_null_without_a_usable_baseline(baseline: float | None, expected: float | None) -> None:
    """A missing baseline never turns into a ratio that could pass a target."""
    assert stats.ratio(10.0, baseline) == expected
