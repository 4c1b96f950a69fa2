"""What ``dledger pipeline follow`` refuses before it starts anything."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dledger_spark.jobs import follow


@pytest.mark.parametrize("window", ["1.9", "1500ms", "0.5"])
def test_a_window_that_is_no_whole_number_of_seconds_is_refused(window: str) -> None:
    """RepeatedFieldLimit in shorter windows than were asked for, every figure would be a wrong one."""
    result = CliRunner().invoke(follow.command, ["-b", "127.0.0.1:1", "-g", "g", "--window", window])

    assert result.exit_code == 2
    assert "--window" in result.output
