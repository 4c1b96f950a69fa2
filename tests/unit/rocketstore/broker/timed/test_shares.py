"""How many timed messages an owner has waiting, as the broker counts them."""

from __future__ import annotations

import pytest

from rocketstore.broker.timed import shares as shares_module
from rocketstore.broker.timed.shares import HOUR_MS, MINUTE_MS, TimedShares

NOW_MS = 1_000 * HOUR_MS


def test_a_message_counts_for_its_owner_until_it_is_due_and_hardly_longer() -> None:
    """Else a stream of short delays would fill a share that is meant for those that wait."""
    shares = TimedShares()
    for due_ms in (NOW_MS + 1, NOW_MS + 30 * MINUTE_MS, NOW_MS + 30 * HOUR_MS):
        shares.add("a", due_ms, NOW_MS)
    shares.add("b", NOW_MS + HOUR_MS, NOW_MS)

    def waiting(after_ms: int) -> tuple[int, int]:
        now_ms = NOW_MS + after_ms
        return shares.waiting("a", now_ms), shares.waiting("b", now_ms)

    assert waiting(0) == (3, 1)
    assert waiting(MINUTE_MS) == (2, 1)
    assert waiting(30 * MINUTE_MS) == (2, 1)
    assert waiting(31 * MINUTE_MS) == (1, 1)
    assert waiting(61 * MINUTE_MS) == (1, 0)
    assert waiting(30 * HOUR_MS) == (1, 0)
    assert waiting(31 * HOUR_MS) == (0, 0)


def test_a_later_message_does_not_keep_an_earlier_one_counted() -> None:
    """Whichever of them came first."""
    shares = TimedShares()
    for due_ms in (NOW_MS + 30 * HOUR_MS, NOW_MS + 1):
        shares.add("a", due_ms, NOW_MS)
    assert shares.waiting("a", NOW_MS + MINUTE_MS) == 1


def test_owners_and_times_without_end_take_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes then counts for a period that is there; what is due makes room."""
    monkeypatch.setattr(shares_module, "PERIODS_MAX", 3)
    shares = TimedShares()
    for hours in range(5):
        shares.add("a", NOW_MS + hours * HOUR_MS, NOW_MS)
    assert shares.waiting("a", NOW_MS) == 5
    assert shares.periods == 3
    assert shares.waiting("a", NOW_MS + 4 * HOUR_MS) == 0
    assert shares.periods == 0
