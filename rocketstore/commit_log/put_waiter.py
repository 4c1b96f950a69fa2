"""Waits for a put's callback."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rocketstore.types import PutResult


class PutWaiter:
    """For one put, with ``done`` as its callback. A bare lock, which is several times cheaper than an event."""

    def __init__(self) -> None:
        self._results: Sequence[PutResult] | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def done(self, results: Sequence[PutResult]) -> None:
        """Set the results."""
        self._results = results
        self._answered.release()

    def wait(self, timeout_s: float) -> Sequence[PutResult] | None:
        """The results; None on timeout."""
        if self._results is None:
            self._answered.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        return self._results
