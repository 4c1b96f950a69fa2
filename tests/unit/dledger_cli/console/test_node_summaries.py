"""What a node tells, as pages are told it."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from dledger_cli.console.group_page import event
from dledger_cli.console.probe import broker_summary_of, summary_of_plain_broker
from tests.unit.dledger_cli.console.support import NAMED, broker_status


@pytest.mark.parametrize("told", [math.nan, math.inf, -math.inf, "", "much"])
def test_no_figure_of_a_broker_ends_the_console(told: object) -> None:
    """JSON has neither NaN nor infinity: what encodes the events for all pages would fail, and end the console."""
    told_ = broker_status(putTps=told, getTransferredTps=told, commitLogDiskRatio=told, bootTimestamp=told)
    summary = broker_summary_of(told_, NAMED)

    assert event("state", asdict(summary)).startswith(b"event: state\n")


def test_a_plain_broker_has_its_own_place_in_bytes() -> None:
    """What is written and not readable yet is between the two ends; what it does not tell is 0."""
    told = broker_status(commitLogMinOffset=10, commitLogMaxOffset=20, dledgerLogEnd=30, dledgerVersion="1.0")

    summary, silent = summary_of_plain_broker(told, NAMED), summary_of_plain_broker(broker_status(), NAMED)

    assert (summary.node_id, summary.group, summary.unit, summary.version) == ("b", "c", "bytes", "1.0")
    assert (summary.begin, summary.committed, summary.end) == (10, 20, 30)
    assert (silent.begin, silent.committed, silent.end) == (0, 0, 0)
