"""Waiting for conditions instead of sleeping: a deadline, and a message when it passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dledger.clock import Clock

PATIENCE_S = 120.0
"""Only a test that fails waits so long; a busy machine may stall one that passes for half a minute."""
POLL_S = 0.01


def wait_until(
    condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S, *, poll_s: float = POLL_S
) -> None:
    """Return once ``condition()`` holds; fail with ``what`` after ``timeout_s``. It looks every ``poll_s``."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        pause.wait(poll_s)


class ManualClock(Clock):
    """A clock that moves when told to."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.now_ms = now_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms
