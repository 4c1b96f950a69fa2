"""Time as an argument: the monotonic clock for every timer, wall time only for retention and for people."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Milliseconds; ``monotonic_ms`` drives timers, ``wall_ms`` (Unix time) never does."""

    def monotonic_ms(self) -> int:
        """Milliseconds since an arbitrary start; never goes back."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970; may jump."""


class SystemClock:
    """The machine's clocks."""

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
