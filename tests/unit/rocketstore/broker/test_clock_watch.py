"""Clocks that were set."""

from __future__ import annotations

import pytest

from dledger.monitoring import ConditionKind, Conditions
from rocketstore.server import ClockWatch
from tests.support.waiting import ManualClock


class _SetClock(ManualClock):
    """Whose wall clock may be set."""

    set_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.set_ms


@pytest.mark.parametrize(
    ("set_ms", "word"), [(3_600_000, "forward"), (-3_600_000, "back"), (50_000, ""), (-50_000, "")]
)
def test_a_clock_that_is_set_is_a_condition_for_an_hour(set_ms: int, word: str) -> None:
    """Small corrections are none, and time that passes neither."""
    clock = _SetClock()
    conditions = Conditions("b", clock)
    watch = ClockWatch(clock, conditions, lambda: 0)
    clock.now_ms += 10_000_000
    watch.look()
    assert not conditions.now()
    clock.set_ms += set_ms
    for _ in range(3):
        watch.look()
    found = [(one.kind, one.subject) for one in conditions.now()]
    assert found == ([(ConditionKind.CLOCK, "jump")] if word else [])
    assert all(word in one.message for one in conditions.now())
    clock.now_ms += 3_600_001
    watch.look()
    assert not conditions.now()


def test_a_message_from_the_future_is_a_condition_until_its_time_has_come() -> None:
    """A start finds it, too: the clock may have been right again before."""
    clock = _SetClock()
    conditions = Conditions("b", clock)
    ahead = clock.wall_ms()
    watch = ClockWatch(clock, conditions, lambda: ahead + 3_600_000)
    watch.look()
    (condition,) = conditions.now()
    assert (condition.kind, condition.subject) == (ConditionKind.CLOCK, "ahead")
    assert "3600 s after the present" in condition.message
    clock.now_ms += 3_600_000
    watch.look()
    assert not conditions.now()


def test_a_clock_that_is_brought_round_slowly_was_not_set() -> None:
    """What NTP corrects bit by bit never adds up to a jump, however much it is in all."""
    clock = _SetClock()
    conditions = Conditions("b", clock)
    watch = ClockWatch(clock, conditions, lambda: 0)
    for _ in range(100):
        clock.now_ms += 10_000
        clock.set_ms += 2_000
        watch.look()
        assert not conditions.now()
