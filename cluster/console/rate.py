"""How often something may be done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class RateBound:
    """At most ``most`` times within any ``per_s`` seconds. Used on one event loop."""

    def __init__(self, most: int, per_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._per_s = per_s
        self._clock_s = clock_s
        self._times: deque[float] = deque()

    def admit(self) -> bool:
        """Whether it may be done now; then it counts."""
        now = self._clock_s()
        while self._times and self._times[0] <= now - self._per_s:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
