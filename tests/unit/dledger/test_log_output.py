"""Log lines that others cause are bounded, and what is left out is counted."""

from __future__ import annotations

import logging

import pytest

from dledger.log_output import LINES_MAX, SPAN_S, BoundedLog


def test_a_flood_costs_few_lines_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The first lines of each span are written; the next span says how many were not."""
    now_s = [100.0]
    log = BoundedLog(logging.getLogger("test"), lambda: now_s[0])
    caplog.set_level(logging.INFO, "test")

    for number in range(LINES_MAX + 500):
        log.info("one %d", number)
    assert caplog.messages == [f"one {number}" for number in range(LINES_MAX)]
    caplog.clear()
    log.flush()
    assert caplog.messages == []
    now_s[0] += SPAN_S
    log.warning("another")
    assert caplog.messages == [f"500 more lines like the last ones were left out within {SPAN_S:.0f} s", "another"]


def test_a_flood_that_is_over_is_told_by_a_flush(caplog: pytest.LogCaptureFixture) -> None:
    """Once; a span in which nothing was left out is not mentioned."""
    now_s = [0.0]
    log = BoundedLog(logging.getLogger("test"), lambda: now_s[0])
    caplog.set_level(logging.INFO, "test")
    for _ in range(LINES_MAX + 1):
        log.info("one")
    now_s[0] += SPAN_S
    caplog.clear()

    log.flush()
    log.flush()
    now_s[0] += SPAN_S
    log.flush()

    assert caplog.messages == [f"1 more lines like the last ones were left out within {SPAN_S:.0f} s"]
