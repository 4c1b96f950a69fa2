"""Notices a wall clock that was set, or that is behind the times of messages that are stored already.

Nothing depends on it: delays, checks and positions go on. But times in resets, queries and ``--from`` mean other
messages than people think.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.clock import Clock
from dledger.conditions import ConditionKind, Conditions

JUMP_MS: Final = 60_000
AHEAD_MS: Final = 60_000
TOLD_MS: Final = 3_600_000
_JUMP: Final = "jump"
_AHEAD: Final = "ahead"


class ClockWatch:
    """One thread calls ``look`` every now and then. ``newest_ms``: when the newest message was stored (0: none)."""

    def __init__(self, clock: Clock, conditions: Conditions, newest_ms: Callable[[], int]) -> None:
        self._clock = clock
        self._conditions = conditions
        self._newest_ms = newest_ms
        self._last = clock.wall_ms(), clock.monotonic_ms()

    def look(self) -> None:
        """Begin and end conditions."""
        wall_ms, now_ms = self._clock.wall_ms(), self._clock.monotonic_ms()
        jump_ms = (wall_ms - self._last[0]) - (now_ms - self._last[1])
        self._last = wall_ms, now_ms
        if abs(jump_ms) > JUMP_MS:
            how = "forward (or the machine slept)" if jump_ms > 0 else "back"
            self._conditions.set(
                ConditionKind.CLOCK,
                f"the clock was set {how} by {abs(jump_ms) // 1000} s: times of messages from before and after "
                "disagree, so give offsets instead of times around it",
                subject=_JUMP,
                for_ms=TOLD_MS,
            )
        ahead_ms = self._newest_ms() - wall_ms
        if ahead_ms > AHEAD_MS:
            self._conditions.set(
                ConditionKind.CLOCK,
                f"the newest message is dated {ahead_ms // 1000} s after the present: this clock is behind, or that of "
                "this broker or of an earlier master was ahead. Set it right (NTP); positions by time find that "
                "message until its time has come",
                subject=_AHEAD,
            )
        else:
            self._conditions.clear(ConditionKind.CLOCK, _AHEAD)
