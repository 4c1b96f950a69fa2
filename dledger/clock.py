"""Time as an argument: the monotonic clock for every timer, wall time only for retention and for people."""

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
