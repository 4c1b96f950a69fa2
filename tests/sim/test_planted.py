"""A simulator that never fails proves nothing: bugs planted in the core must be found."""

from __future__ import annotations

import pytest

from tests.sim.planted import PLANTS, run_planted

FOUND_BY = {
    "ack-before-flush": 0,
    "any-log-wins": 1,
    "campaign-in-old-term": 1,
    "commit-old-terms": 144,
    "commit-without-quorum": 0,
    "expired-producers": 3,
    "forgotten-producers": 0,
    "leader-counts-unflushed": 0,
    "no-push-deadline": 1,
    "producers-of-what-is-committed": 1,
    "read-before-noop": 9,
    "repeated-answered-early": 0,
    "stale-push": 34,
}
"""Planted bug to a seed that found it; a change of core or simulator may move that to one of the next."""
SEEDS_TRIED = 40


@pytest.mark.parametrize("plant", sorted(FOUND_BY))
def test_planted_bug_is_found(plant: str) -> None:
    """One of a few seeds fails with the bug."""
    first = FOUND_BY[plant]
    results = (run_planted(seed, 10_000, plant) for seed in range(first, first + SEEDS_TRIED))
    found = next((result for result in results if result.failure is not None), None)

    assert plant in PLANTS
    assert found is not None
    assert found.tail
