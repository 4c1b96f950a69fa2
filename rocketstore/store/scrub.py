"""Verifies consume queues, key index and the files of timed messages continuously while a store runs, and repairs them.

One thread (``rocketstore-scrub``). At ``derived_scrub_bytes_per_s``, it goes through the blocks of all index files,
through the files of timed messages, and through the units of all queues with the records they refer to, over and over.
Damage in index and timed messages, found by it or by a reader, is repaired from the log. Queues are repaired
where they are checked (``rocketstore.consume_queue.queue_check``). Damage of the log itself is reported and skipped.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from dledger.conditions import ConditionKind
from dledger.errors import CorruptLogError, DiskError, DiskFullError, ShutdownError
from rocketstore.config import KIB
from rocketstore.consume_queue.queue import ConsumeQueue
from rocketstore.consume_queue.queue_check import BLOCK_UNITS, QueueCheck
from rocketstore.consume_queue.units import FILLER
from rocketstore.index.rebuilding import NotYetReadableError, rebuild
from rocketstore.store.derived import Derived
from rocketstore.store.timer_repair import TimerRepair

_log = logging.getLogger("rocketstore")
STEP_BYTES: Final = 64 * KIB
RETRY_MS: Final = 5_000
TOLD_MS: Final = 60_000
_MESSAGE_BYTES: Final = KIB
"""Minimum charge per message, because small ones cost as much."""


class DerivedScrub:
    """The work of the thread."""

    def __init__(self, derived: Derived, queue_check: QueueCheck) -> None:
        self._log = derived.log
        self._queues = derived.queues
        self._index = derived.index
        self._timers = derived.timers
        self._queue_check = queue_check
        self._conditions = derived.conditions
        self._clock = clock = derived.clock
        self._rate = derived.config.derived_scrub_bytes_per_s
        self._left: list[ConsumeQueue] = []  # queues left in this round
        self._next_offset = 0
        self._in_index = False
        self._hours_left: list[int] = []
        self._scrub_due_ms = clock.monotonic_ms()
        self._rebuild_due_ms = 0
        self._stopping = threading.Event()
        self.repaired = 0
        """How many index files were rebuilt."""
        self._timer_repair = TimerRepair(derived, self._pause)

    def stop(self) -> None:
        """Abort work in progress soon."""
        self._stopping.set()

    def step(self) -> int | None:
        """Do what is due; returns when the next step is."""
        try:
            due = [self._rebuild(), self._timer_repair.step(), self._scrub()]
        except ShutdownError:
            return None
        return min((one for one in due if one is not None), default=None)

    def _pause(self) -> None:
        if self._stopping.is_set():
            raise ShutdownError("the store is stopping")

    # -- the index -------------------------------------------------------------------------------------------------

    def _rebuild(self) -> int | None:
        now_ms = self._clock.monotonic_ms()
        damaged = self._index.damaged if self._index is not None else ()
        if not damaged or now_ms < self._rebuild_due_ms:
            return self._rebuild_due_ms if damaged else None
        for path in damaged:
            self._rebuild_file(path)
        left = self._index is not None and self._index.damaged
        self._rebuild_due_ms = self._clock.monotonic_ms() + RETRY_MS
        return self._rebuild_due_ms if left else None

    def _rebuild_file(self, path: Path) -> None:
        index = self._index
        if index is None:
            return
        self._conditions.set(ConditionKind.REPAIRING, "rebuilding it from the log", subject=str(path))
        try:
            rebuild(index, path, self._log, self._pause)
        except (OSError, CorruptLogError, DiskError, DiskFullError, NotYetReadableError) as error:
            text = f"damaged, and cannot be rebuilt yet: {error}"
            self._conditions.set(ConditionKind.DAMAGED, text, subject=str(path))
        else:
            self.repaired += 1
            self._conditions.clear(ConditionKind.DAMAGED, str(path))
            _log.warning("%s was damaged and has been rebuilt from the log", path,
                         extra={"event": "repair", "file": str(path)})  # fmt: skip
        finally:
            self._conditions.clear(ConditionKind.REPAIRING, str(path))

    # -- verifying -------------------------------------------------------------------------------------------------

    def _scrub(self) -> int | None:
        if not self._rate:
            return None
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._scrub_due_ms:
            done = self._verify(STEP_BYTES)
            self._scrub_due_ms = now_ms + max(1, done * 1000 // self._rate)
        return self._scrub_due_ms

    def _verify(self, bytes_max: int) -> int:
        """Verify the next bytes of an endless walk; returns how many, at least the cost of an idle step."""
        try:
            if self._in_index and self._index is not None:
                done, finished = self._index.verify(bytes_max)
                self._in_index = not finished
                return max(done, 1)
            if self._hours_left:
                return max(self._timers.verify(self._hours_left.pop()), 1)
            return self._verify_queue(bytes_max)
        except (CorruptLogError, DiskError, DiskFullError) as error:
            subject = str(error.path) if isinstance(error, CorruptLogError) else "queues and index"
            self._conditions.set(ConditionKind.DAMAGED, str(error), subject=subject, for_ms=TOLD_MS)
            self._next_offset += BLOCK_UNITS - self._next_offset % BLOCK_UNITS
            return bytes_max

    def _verify_queue(self, bytes_max: int) -> int:
        """Verify units of one queue, with their records; then the next queue, and after all of them the index."""
        if not self._left:
            self._left, self._next_offset = list(self._queues.all()), 0
            self._hours_left = self._timers.hours()
            if not self._left:
                self._in_index = True
                return bytes_max
        queue = self._left[-1]
        at = max(self._next_offset, queue.min_offset)
        end, log_end = queue.max_offset, self._log.max_offset
        units = self._queue_check.tagged_units(queue, at, log_end, bytes_max) if at < end else ()
        if not units and at < end and self._queue_check.restore(queue, at) is not None:  # the unit looked never written
            units = queue.units(at, 1)
        real = [unit for unit in units if unit != FILLER]
        uncommitted = bool(real) and real[-1].offset + real[-1].size > log_end
        if not units or uncommitted or at + len(units) >= end:
            self._left.pop()
            self._next_offset = 0
            self._in_index = not self._left
        else:
            self._next_offset = at + len(units)
        return sum(max(_MESSAGE_BYTES, min(unit.size, bytes_max)) for unit in real) + _MESSAGE_BYTES
