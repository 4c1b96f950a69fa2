"""How long whoever waits for results waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dledger.sending import futures
from dledger.sending.batch import OutgoingBatch
from dledger.sending.futures import SentMany, wait_for


def unfinished() -> OutgoingBatch[None, int]:
    return OutgoingBatch(1, 0.0, 5000.0, 5000.0)


@pytest.mark.parametrize("timeout_s", [0.0, -0.5, -1.0])
def test_what_is_left_of_a_time_that_is_over_is_nothing(timeout_s: float) -> None:
    """And least of all for ever, which is what -1 means to a lock."""
    with pytest.raises(TimeoutError):
        wait_for(unfinished(), timeout_s)


def test_all_batches_together_have_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each of them all of it."""
    now_s = 1000.0
    waited: list[float | None] = []

    def wait(_batch: OutgoingBatch[None, int], timeout_s: float | None) -> None:
        nonlocal now_s
        waited.append(timeout_s)
        now_s += 3.0

    monkeypatch.setattr(futures, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(futures, "wait_for", wait)
    SentMany([(unfinished(), 0, 1) for _ in range(3)]).wait(10.0)

    assert waited == [10.0, 7.0, 4.0]
