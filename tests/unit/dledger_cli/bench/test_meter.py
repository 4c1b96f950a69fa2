"""Figures of a load."""

from __future__ import annotations

import statistics

import pytest

from dledger.errors import PendingFullError, RequestTimeoutError, UnavailableError
from dledger_cli.commands.bench import BOUNDS_S, Meter


def test_percentiles_are_true_to_two_percent() -> None:
    """Nearest rank, from a table of fixed size: 1 to 10,000 ms, each once."""
    meter = Meter()
    for milliseconds in range(1, 10_001):
        meter.acknowledge(milliseconds / 1000)

    found = meter.read()

    assert found.acknowledged == 10_000
    assert found.average_s == pytest.approx(statistics.mean(range(1, 10_001)) / 1000)
    assert found.percentiles_s == pytest.approx({50.0: 5.0, 95.0: 9.5, 99.0: 9.9, 99.9: 9.99}, rel=0.021)
    assert found.max_s == 10.0


@pytest.mark.parametrize(("seconds", "median_s"), [((1, 2, 3), 2.0), ((1, 2, 3, 4), 2.0)])
def test_a_percentile_is_the_nearest_rank(seconds: tuple[int, ...], median_s: float) -> None:
    """The first value that so many do not exceed."""
    meter = Meter()
    for one in seconds:
        meter.acknowledge(one)

    assert meter.read().percentiles_s[50.0] == pytest.approx(median_s, rel=0.021)


def test_no_percentile_exceeds_the_longest() -> None:
    """One record: all figures are its own."""
    meter = Meter()
    meter.acknowledge(0.0123)

    found = meter.read()

    assert {*found.percentiles_s.values(), found.average_s, found.max_s} == {0.0123}


@pytest.mark.parametrize("latency_s", [0.0, BOUNDS_S[-1] * 2])
def test_latencies_outside_the_table_are_counted(latency_s: float) -> None:
    """Nothing is left out, however fast or slow."""
    meter = Meter()
    meter.acknowledge(latency_s)

    assert meter.read().max_s == meter.read().percentiles_s[50.0] == latency_s


def test_nothing_acknowledged_has_no_latency() -> None:
    """None, and not 0, which would be a very good figure."""
    meter = Meter()
    meter.fail(UnavailableError("nobody there"))

    found = meter.read()

    assert (found.average_s, found.percentiles_s, found.max_s) == (None, {}, None)
    assert found.failed == 1


def test_errors_are_counted_by_kind_with_the_first_text() -> None:
    """However many there are, one line for each kind."""
    meter = Meter()
    for number in range(3):
        meter.fail(UnavailableError(f"n{number}\nis away"))
    meter.fail(PendingFullError("full"))
    unknown = RequestTimeoutError("no answer")
    unknown.outcome = "unknown"
    meter.fail(unknown)

    errors = {(one.kind, one.outcome): (one.count, one.first) for one in meter.read().errors}

    assert errors == {
        ("UnavailableError", "not_applied"): (3, "n0 is away"),
        ("PendingFullError", "not_applied"): (1, "full"),
        ("RequestTimeoutError", "unknown"): (1, "no answer"),
    }
    assert meter.failed == 5


def test_recent_figures_begin_anew_each_time() -> None:
    """What the line of a second shows is of that second."""
    meter = Meter()
    meter.acknowledge(0.5)
    meter.acknowledge(1.5)

    assert meter.take_recent() == (2, 1.0, 1.5)
    assert meter.take_recent() == (0, 0.0, 0.0)
