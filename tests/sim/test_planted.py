"""A simulator that never fails proves nothing: bugs planted in the core must be found."""

from __future__ import annotations

import pytest

from tests.sim.planted import PLANTS, run_planted

FOUND_BY = {
    "ack-before-flush": 0,
    "any-log-wins": 1,
    "campaign-in-old-term": 1,
    "commit-old-terms": 3,
    "commit-without-quorum": 0,
    "leader-counts-unflushed": 0,
    "no-push-deadline": 0,
    "read-before-noop": 1,
    "stale-push": 53,
}
"""Planted bug to a seed that finds it quickly."""


@pytest.mark.parametrize("plant", sorted(FOUND_BY))
def test_planted_bug_is_found(plant: str) -> None:
    """The seed fails with the bug."""
    result = run_planted(FOUND_BY[plant], 10_000, plant)

    assert plant in PLANTS
    assert result.failure is not None
    assert result.tail
