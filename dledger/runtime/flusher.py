"""Group commit: one flush makes everything durable that was written so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dledger.clock import Clock
from dledger.config import FlushMode, ServerConfig
from dledger.core.ports import Log
from dledger.runtime.supervisor import Supervisor
from dledger.runtime.worker import Worker


class Flusher:
    """The flushes of one node, on its own thread or, for one that cannot gather anything, on the caller's."""

    def __init__(
        self, config: ServerConfig, log: Log, clock: Clock, supervisor: Supervisor, tell: Callable[[], None]
    ) -> None:
        """``tell`` notifies the node that the log became more durable."""
        self._log = log
        self._clock = clock
        self._tell = tell
        self.at_once: Final = config.store.flush_mode is FlushMode.SYNC
        """Whether a write is followed by a flush as soon as possible."""
        self._interval_ms = config.store.flush_interval_ms
        self._told = log.flushed.sequence  # what the node knows; threads that race report it twice at worst
        self._planned = False  # with flush_mode=async: it will wake by itself
        self._due_ms = 0
        flush = self.flush if self.at_once else self.flush_in_time
        self.worker: Final = Worker(f"dledger-flush-{config.node_id}", flush, clock, supervisor)

    def wake(self) -> None:
        """Something was written."""
        if not self._planned:
            self._planned = not self.at_once
            self.worker.wake()

    def flush_in_time(self) -> int | None:
        """``flush_mode=async``: flush at once after a pause, then once per period while anything is written."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._due_ms:
            return self._due_ms
        if not self._is_wanted():
            self._planned = False  # from here on a write wakes this thread
            if not self._is_wanted():
                return None
            self._planned = True
        self.flush()
        self._due_ms = now_ms + self._interval_ms
        return self._due_ms

    def _is_wanted(self) -> bool:
        flushed = self._log.flushed.sequence
        return self._log.write_sequence > flushed or flushed != self._told

    def flush(self) -> None:
        """One round.

        An application that owns the log may have flushed it itself. The node must be notified all the same, or it would
        wait for ever to count what is already durable.
        """
        if self._log.write_sequence > self._log.flushed.sequence:
            self._log.flush()
        flushed = self._log.flushed.sequence
        if flushed != self._told:
            self._told = flushed
            self._tell()
