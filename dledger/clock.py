"""Time as an argument: the monotonic clock for every timer, wall time only for retention and for people.

``Backoff`` counts pauses between attempts, for callers that wait in their own way: for a due time, an event, or as a
coroutine.
"""

from __future__ import annotations

import time


class Clock:
    """The machine's clocks, in milliseconds; ``monotonic_ms`` drives timers, ``wall_ms`` (Unix time) never does."""

    def monotonic_ms(self) -> int:
        """Milliseconds since an arbitrary start; never goes back."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Milliseconds since 1970; may jump."""
        return time.time_ns() // 1_000_000


class Backoff:
    """Pauses from ``least`` to ``most``, each twice the one before. Not thread-safe."""

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most
        self._next = least
        self._has_paused = False
        self._hurried = True

    def has_paused(self) -> bool:
        """Whether there was a pause since the last success."""
        return self._has_paused

    def pause(self) -> float:
        """How long to wait after a failure."""
        pause = min(self._next, self._most) if self._hurried else self._most
        self._next = min(2 * self._next, self._most)
        self._has_paused = True
        return pause

    def succeeded(self) -> None:
        """Reset the pause to the shortest one."""
        self._next = self._least
        self._has_paused = False
        self._hurried = True

    def calm_down(self) -> None:
        """Use the longest pause until the next success."""
        self._hurried = False
