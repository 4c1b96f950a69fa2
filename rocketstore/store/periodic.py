"""Runs an action at intervals, or at once on request, on a separate thread."""

from __future__ import annotations

from collections.abc import Callable

from dledger.clock import Clock
from dledger.runtime.supervisor import Supervisor
from dledger.runtime.worker import Worker


class Periodic:
    """Calls ``action`` every ``interval_ms``, first one interval after ``start``."""

    def __init__(
        self, name: str, interval_ms: int, action: Callable[[], None], *, clock: Clock, supervisor: Supervisor
    ) -> None:
        self._interval_ms = interval_ms
        self._action = action
        self._clock = clock
        self._due_ms: int | None = None
        self._requested = False
        self._worker = Worker(name, self._step, clock, supervisor)

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def request(self) -> None:
        """Run the action as soon as possible."""
        self._requested = True
        self._worker.wake()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False if it did not end in time."""
        return self._worker.stop(timeout_s)

    def _step(self) -> int:
        now_ms = self._clock.monotonic_ms()
        if self._requested or (self._due_ms is not None and now_ms >= self._due_ms):
            self._requested = False
            self._action()
            now_ms = self._clock.monotonic_ms()
            self._due_ms = now_ms + self._interval_ms
        elif self._due_ms is None:
            self._due_ms = now_ms + self._interval_ms
        return self._due_ms
