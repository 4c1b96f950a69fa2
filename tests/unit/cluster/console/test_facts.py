"""What a node tells, as pages are told it."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from cluster.console.facts import broker_facts_of
from cluster.console.streams import event
from tests.unit.cluster.console.support import broker_status


@pytest.mark.parametrize("told", [math.nan, math.inf, -math.inf])
def test_no_figure_of_a_broker_ends_the_console(told: float) -> None:
    """JSON has neither NaN nor infinity: what encodes the events for all pages would fail, and end the console."""
    facts = broker_facts_of(broker_status(put_tps=told, get_tps=told, disk_ratio=told))

    assert event("state", asdict(facts)).startswith(b"event: state\n")
