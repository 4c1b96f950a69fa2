"""Checks consume queues against the log, and rewrites wrong units.

A unit is valid only if the record it refers to names the same topic, queue and offset. Otherwise the log between the
nearest valid units on both sides determines the correct units, which are rewritten in place. Damage in the log itself
raises ``CorruptLogError``.

A tags code that lets a filter skip a message is trusted only after it was compared with the message's record. That is
remembered per block, with a hash of the units, so that later changes on disk are noticed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Final
from zlib import crc32

from dledger.errors import CorruptLogError
from rocketstore.commit_log.port import CommitLog
from rocketstore.consume_queue.files import BROKEN, FILLER
from rocketstore.consume_queue.queue import ConsumeQueue, First
from rocketstore.message.message import DelayLevels
from rocketstore.message.record import (
    CRC_MASK,
    HEAD_V4,
    HEAD_V4_BYTES,
    HOST_V6_FLAGS,
    OVERHEAD,
    CorruptRecordError,
    body_behind_v6,
    tail_of,
)
from rocketstore.message.scan import scan_records
from rocketstore.types import QueueKey, QueueUnit, RecordHead

_log = logging.getLogger(__name__)
BLOCK_UNITS: Final = 500
"""Units whose tags codes are remembered together; RocketMQ's files hold a multiple of it."""
BLOCKS_MAX: Final = 1 << 16
_SCAN_BYTES: Final = 1 << 20
_HEAD: Final = HEAD_V4.struct(
    "size", "magic", "crc", "queue_id", "queue_offset", "physical_offset", "sys_flag", "body_length"
)


def is_message(record: bytes, unit: QueueUnit, queue: ConsumeQueue, number: int, *, check_body: bool) -> bool:
    """Whether ``record``, to which ``unit`` refers, is the message at offset ``number`` of ``queue``, and is
    consistent.
    """
    size = len(record)
    if size < OVERHEAD:
        return False
    length, magic, crc, queue_id, queue_offset, offset, flags, body_bytes = _HEAD.unpack_from(record)
    if queue_offset != number or offset != unit[0] or length != unit[1] or length != size or queue_id != queue.queue_id:
        return False
    body = HEAD_V4_BYTES
    if flags & HOST_V6_FLAGS:
        body, body_bytes = body_behind_v6(record, flags)
    try:
        body_end, topic, topic_end, _ = tail_of(record, magic, body, body_bytes, size)
    except CorruptRecordError:
        return False
    if record[topic:topic_end] != queue.topic.encode():
        return False
    return not check_body or crc32(record[body:body_end]) & CRC_MASK == crc


class QueueCheck:
    """Compares consume queues with the log; usable by any number of threads."""

    def __init__(self, log: CommitLog, delay_levels: DelayLevels) -> None:
        self._log = log
        self._delay_levels = delay_levels
        self._lock = Lock()  # guards _known
        self._known: OrderedDict[tuple[str, int, int], tuple[int, int]] = OrderedDict()

    def record_at(self, queue: ConsumeQueue, number: int, unit: QueueUnit) -> bytes | None:
        """The record a unit refers to, if it is the message of that place."""
        if unit.offset < 0 or unit.size < OVERHEAD:
            return None
        record = self._log.read(unit.offset, unit.size)
        if record is None:
            return None
        check_body = not self._log.is_replicated
        return record if is_message(record, unit, queue, number, check_body=check_body) else None

    def records_at(self, queue: ConsumeQueue, numbers: Sequence[int], units: Sequence[QueueUnit]) -> dict[int, bytes]:
        """The same for many units, by number; those missing in the result must be checked one by one."""
        check_body = not self._log.is_replicated
        records = self._log.read_together([unit[:2] for unit in units])
        return {
            number: record
            for number, unit, record in zip(numbers, units, records, strict=True)
            if record is not None and is_message(record, unit, queue, number, check_body=check_body)
        }

    def records_at_once(self, queue: ConsumeQueue, first: int, units: Sequence[QueueUnit]) -> list[bytes]:
        """The records of units from ``first`` on without a disk: up to the first one that is not in memory or not the
        message of its place.
        """
        check_body = not self._log.is_replicated
        found: list[bytes] = []
        for unit, record in zip(units, self._log.read_at_once([unit[:2] for unit in units]), strict=True):
            if record is None or not is_message(record, unit, queue, first + len(found), check_body=check_body):
                break
            found.append(record)
        return found

    def unit_at(self, queue: ConsumeQueue, number: int, unit: QueueUnit) -> QueueUnit | None:
        """The unit at ``number`` according to the log; None if there is no message. A wrong ``unit`` is rewritten.

        If the record may not be read yet, the unit is returned as it is. Raises ``CorruptLogError``, ``DiskError``.
        """
        if self.record_at(queue, number, unit) is not None:
            return unit
        if 0 <= unit.offset < self._log.min_offset and number < queue.min_offset:
            return unit
        if unit.offset >= 0 and self._log.max_offset < unit.offset + unit.size <= self._log.end_offset:
            return unit
        return self.restore(queue, number)

    def believed_unit(self, queue: ConsumeQueue, number: int, unit: QueueUnit) -> QueueUnit | None:
        """Like ``unit_at``, but where the log is damaged, the unit is returned as it is. Raises ``DiskError``."""
        try:
            return self.unit_at(queue, number, unit)
        except CorruptLogError:  # reported to callers that need the record
            return unit if unit != BROKEN else None

    def first_messages(self, physical: int) -> dict[QueueKey, First]:
        """The first messages of the queues that have one soon after ``physical``."""
        found: dict[QueueKey, First] = {}
        if self._log.min_offset <= physical < self._log.max_offset:
            heads: Sequence[RecordHead] = ()
            with suppress(CorruptLogError):
                heads = self._log.scan(physical, _SCAN_BYTES).heads
            for head in heads:
                if head.queue_offset >= 0:
                    found.setdefault((head.topic, head.queue_id), First(head.queue_offset, head.offset))
        return found

    def restore(self, queue: ConsumeQueue, number: int) -> QueueUnit | None:
        """Rewrite wrong units around ``number``; returns the unit there, None if there is no message.

        Raises ``CorruptLogError``, ``DiskError``.
        """
        first, end = queue.min_offset, queue.max_offset
        low, high = number, number + 1
        start, stop = self._log.min_offset, self._log.max_offset
        enclosed, step = False, 1  # increasing strides, because very many units may be invalid
        while low > first:
            low = max(first, low - step)
            step *= 2
            believed = self._believed(queue, low)
            if believed is not None:
                start, enclosed, low = believed.offset, True, low + 1
                break
        step = 1
        while high < end:
            believed = self._believed(queue, high)
            if believed is not None:
                stop = believed.offset
                break
            high = min(end, high + step)
            step *= 2
        found = self._found(queue, range(low, high), start, stop)
        if enclosed and high < end and self._log.is_replicated:  # what is not found does not exist
            found = dict.fromkeys(range(low, high), FILLER) | found
        for at, unit in sorted(found.items()):
            if list(queue.units(at, 1)) != [unit]:
                queue.rewrite(at, unit)
                _log.warning(
                    "queue %d of topic %s: unit %d was wrong and has been rewritten from the log",
                    queue.queue_id, queue.topic, at, extra={"event": "repair"},
                )  # fmt: skip
        unit = found.get(number, FILLER)
        return None if unit == FILLER else unit

    def _believed(self, queue: ConsumeQueue, number: int) -> QueueUnit | None:
        unit = next(iter(queue.units(number, 1)), FILLER)
        if unit == FILLER or self.record_at(queue, number, unit) is None:
            return None
        return unit

    def _found(self, queue: ConsumeQueue, numbers: range, start: int, stop: int) -> dict[int, QueueUnit]:
        found: dict[int, QueueUnit] = {}
        while start < stop:
            scanned = self._log.scan(start, _SCAN_BYTES)
            for head in scanned.heads:
                if (head.topic, head.queue_id) == (queue.topic, queue.queue_id) and head.queue_offset in numbers:
                    found.setdefault(head.queue_offset, QueueUnit(head.offset, head.size, head.tags_code))
            if scanned.next_offset <= start:
                break
            start = scanned.next_offset
        return found

    def tagged_units(self, queue: ConsumeQueue, number: int, log_end: int, bytes_max: int) -> Sequence[QueueUnit]:
        """Units from ``number`` on whose tags codes match their records; one that ends after ``log_end`` is the last.

        Reads at most about ``bytes_max`` bytes of records. Raises ``CorruptLogError`` if the first one cannot be
        determined.
        """
        first = max(number - number % BLOCK_UNITS, queue.min_offset)
        units = _block(queue, first)
        key = (queue.topic, queue.queue_id, first)
        with self._lock:
            count, known = self._known.get(key, (0, 0))
        if count > len(units) or hash(tuple(units[:count])) != known:
            count = 0
        at = count
        while at < len(units) and (bytes_max > 0 or at <= number - first):
            unit = units[at]
            if unit != FILLER and unit.offset + unit.size <= log_end:
                bytes_max -= unit.size
                units[at] = self._with_true_tags(queue, first + at, unit)
            elif unit != FILLER:
                true = self.restore(queue, first + at) if at <= number - first else None
                if true is None or true.offset + true.size > log_end:
                    break
                units[at] = true
            at += 1
        self._remember(key, at, hash(tuple(units[:at])))
        return units[number - first : max(at, number - first + 1)]

    def _with_true_tags(self, queue: ConsumeQueue, number: int, unit: QueueUnit) -> QueueUnit:
        record = self.record_at(queue, number, unit)
        if record is not None:
            heads = scan_records(record, unit.offset, check_crc=False, delay_levels=self._delay_levels).heads
            if heads and heads[0].tags_code == unit.tags_code:
                return unit
        return self.restore(queue, number) or unit

    def _remember(self, key: tuple[str, int, int], count: int, known: int) -> None:
        with self._lock:
            self._known[key] = (count, known)
            self._known.move_to_end(key)
            while len(self._known) > BLOCKS_MAX:
                self._known.popitem(last=False)


def _block(queue: ConsumeQueue, first: int) -> list[QueueUnit]:
    """The units from ``first`` to the end of its block, from as many files as that takes."""
    units: list[QueueUnit] = []
    end = first + BLOCK_UNITS - first % BLOCK_UNITS
    while more := queue.units(first + len(units), end - first - len(units)):
        units += more
    return units
