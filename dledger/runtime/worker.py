"""One thread per part: step it, then sleep until it is due or woken. No polling."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from dledger.clock import Clock
from dledger.runtime.supervisor import Supervisor

JOIN_TIMEOUT_S: Final = 10.0
"""How long a stop waits for a thread's step in progress."""


class Gate:
    """A remembered wake-up: ``open`` before ``wait`` lets the next ``wait`` pass at once.

    A bare lock used as a binary semaphore: several times cheaper than ``threading.Condition``, which allocates one per
    wait, and this is on the path of every append.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let one waiter pass, now or when it comes."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # already open

    def wait(self, timeout_s: float | None) -> None:
        """Return when opened, or after ``timeout_s`` (None: no timeout)."""
        self._lock.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))


class Worker:
    """A supervised thread that calls ``step`` until stopped; ``step`` returns its next due time (monotonic ms)."""

    def __init__(self, name: str, step: Callable[[], int | None], clock: Clock, supervisor: Supervisor) -> None:
        self._step = step
        self._clock = clock
        self._gate = Gate()
        self._stopping = False
        self._thread = supervisor.thread(name, self._run)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Make the thread step soon; cheap, from any thread."""
        self._gate.open()

    @property
    def is_alive(self) -> bool:
        """Whether the thread has been started and has not ended."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stopping = True
        self._gate.open()

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end and wait for it; False if it did not in time."""
        self.end()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            due_ms = self._step()
            if due_ms is None:
                self._gate.wait(None)
                continue
            wait_ms = due_ms - self._clock.monotonic_ms()
            if wait_ms > 0:
                self._gate.wait(wait_ms / 1000)
