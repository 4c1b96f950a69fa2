"""Builds the hour files of timed messages that were found damaged again, from the log, while the store runs.

Every record of ``TIMED_TOPIC`` is read, as its queue names them, so the file becomes what it was, except for records
that the log no longer holds. Until then delivery waits where that hour begins, and anyone who asks for it is told so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from dledger.conditions import ConditionKind
from dledger.errors import CorruptLogError, DiskError, DiskFullError
from rocketstore.config import MIB
from rocketstore.consume_queue.units import FILLER
from rocketstore.message.scan import scan_records
from rocketstore.store.derived import Derived
from rocketstore.timer.entries import TimedEntry, entry_of
from rocketstore.types import TIMED_TOPIC, QueueUnit

UNITS: Final = 1024
"""Records read at a time,"""
BYTES: Final = MIB
"""and about their bytes."""
RETRY_MS: Final = 5_000

_log = logging.getLogger("rocketstore")


class TimerRepair:
    """For the scrub thread. ``pause`` is called now and then, and may raise."""

    def __init__(self, derived: Derived, pause: Callable[[], None]) -> None:
        self._timers = derived.timers
        self._queues = derived.queues
        self._log = derived.log
        self._conditions = derived.conditions
        self._clock = derived.clock
        self._pause = pause
        self._due_ms = 0
        self.repaired = 0
        """How many files were built again."""

    def step(self) -> int | None:
        """Try all that are damaged; returns when to try again."""
        damaged = self._timers.damaged()
        if not damaged:
            return None
        if self._clock.monotonic_ms() < self._due_ms:
            return self._due_ms
        for hour in damaged:
            self._repair(hour)
        self._due_ms = self._clock.monotonic_ms() + RETRY_MS
        return self._due_ms if self._timers.damaged() else None

    def _repair(self, hour: int) -> None:
        subject = str(self._timers.path(hour))
        self._conditions.set(ConditionKind.REPAIRING, "building it again from the log", subject=subject)
        try:
            self._build(hour)
        except (OSError, CorruptLogError, DiskError, DiskFullError) as error:
            text = f"damaged, so the timed messages of its hour wait, and cannot be built again yet: {error}"
            self._conditions.set(ConditionKind.DAMAGED, text, subject=subject)
        else:
            self.repaired += 1
            self._conditions.clear(ConditionKind.DAMAGED, subject)
            _log.warning("%s was damaged and has been built again from the log", subject,
                         extra={"event": "repair", "file": subject})  # fmt: skip
        finally:
            self._conditions.clear(ConditionKind.REPAIRING, subject)

    def _build(self, hour: int) -> None:
        repair = self._timers.begin_repair(hour)
        if repair is None:
            return  # it is settled by now
        queue = self._queues.find(TIMED_TOPIC, 0)
        at = repair.until if queue is None else queue.min_offset
        while queue is not None and at < repair.until:
            units = queue.units(at, min(UNITS, repair.until - at))
            if not units or units[0] == FILLER:
                reason = f"the queue of timed messages has nothing at offset {at} yet"
                raise CorruptLogError(self._timers.path(hour), 0, reason, "It is tried again.")
            units = _some(units)
            repair.take(self._entries(units))
            at += len(units)
            self._pause()
        self._timers.end_repair(repair)

    def _entries(self, units: list[QueueUnit]) -> Iterator[TimedEntry]:
        records = self._log.read_together([(one.offset, one.size) for one in units])
        for unit, found in zip(units, records, strict=True):
            record = found or self._record(unit)
            for head in () if record is None else scan_records(record, unit.offset, check_crc=False).heads:
                entry = entry_of(head)
                if entry is not None:
                    yield entry

    def _record(self, unit: QueueUnit) -> bytes | None:
        """None: it has expired, or is lost."""
        try:
            record = self._log.read(unit.offset, unit.size)
        except CorruptLogError as error:
            if error.index is not None and self._log.is_repaired:  # only entries are repaired
                raise
            _log.error("the record of a timed message at %d of the log is lost: %s", unit.offset, error)
            return None
        if record is None and unit.offset >= self._log.min_offset:
            reason = f"the log cannot be read at {unit.offset} yet"
            raise CorruptLogError(self._timers.directory, 0, reason, "It is tried again.")
        return record


def _some(units: list[QueueUnit]) -> list[QueueUnit]:
    """At least one, up to the next that never was written."""
    size = 0
    for place, unit in enumerate(units):
        if place and (unit == FILLER or size + unit.size > BYTES):
            return units[:place]
        size += unit.size
    return units
