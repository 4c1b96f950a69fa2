"""How long whoever waits for results waits."""

from __future__ import annotations

import pytest

from dledger.sending.batch import OutgoingBatch
from dledger.sending.futures import wait_for


def unfinished() -> OutgoingBatch[None, int]:
    return OutgoingBatch(1, 0.0, 5000.0, 5000.0)


@pytest.mark.parametrize("timeout_s", [0.0, -0.5, -1.0])
def test_what_is_left_of_a_time_that_is_over_is_nothing(timeout_s: float) -> None:
    """And least of all for ever, which is what -1 means to a lock."""
    with pytest.raises(TimeoutError):
        wait_for(unfinished(), timeout_s)
