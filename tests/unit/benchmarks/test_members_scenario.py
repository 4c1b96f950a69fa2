"""The longest time without an acknowledgement, and the check of what was stored."""

from __future__ import annotations

from typing import cast

from benchmarks.scenarios.members import SteadyLoad
from dledger.client import DLedgerClient


def _load(moments: list[float]) -> SteadyLoad:
    load = SteadyLoad(cast("DLedgerClient", None))
    load._acknowledged_at = moments
    return load


def test_a_gap_lies_between_acknowledgements() -> None:
    assert _load([1.0, 1.1, 1.5, 1.6]).longest_gap(1.0, 1.7) == 1.5 - 1.1


def test_a_gap_may_last_until_the_end_of_what_is_asked_for() -> None:
    assert _load([1.0, 1.25]).longest_gap(1.0, 9.0) == 9.0 - 1.25


def test_acknowledgements_outside_do_not_count() -> None:
    assert _load([1.0, 2.0, 5.0]).longest_gap(3.0, 4.0) == 1.0
