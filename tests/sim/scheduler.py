"""Virtual time: a heap of events, ordered by time and then by the order in which they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Scheduler:
    """Runs events in order of their time (microseconds); one of the same time runs in order of its scheduling."""

    def __init__(self) -> None:
        self.now_us = 0
        self._sequence = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []

    def at(self, time_us: int, call: Callable[..., None], *arguments: object) -> None:
        """Run ``call(*arguments)`` at ``time_us``, or now if that has passed."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(time_us, self.now_us), self._sequence, call, arguments))

    def after(self, delay_us: int, call: Callable[..., None], *arguments: object) -> None:
        """Run ``call(*arguments)`` ``delay_us`` from now."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_us + delay_us, self._sequence, call, arguments))

    def run_next(self) -> bool:
        """Run one event; False if there is none."""
        if not self._heap:
            return False
        self.now_us, _, call, arguments = heapq.heappop(self._heap)
        call(*arguments)
        return True
