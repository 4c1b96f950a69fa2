"""Reads messages: from a queue, by key, by physical offset, by time.

Unlike RocketMQ, this never skips or guesses:

- A queue may extend beyond what may be read: a restarted member of a replicated log has units after the commit
  position. Such a unit ends the read; it is not skipped as if its record were gone.
- A unit whose record lies inside the log but is invalid is damage: an error, not the next message.
- The index contains only hashes, so its results are compared with the requested key.
- A physical offset from a client is accepted only if a record that contains that offset starts there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from dledger.errors import CorruptLogError
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import MIB, MessageStoreConfig
from rocketstore.consume_queue.files import BROKEN, FILLER, UNIT_BYTES
from rocketstore.consume_queue.queue import ConsumeQueue
from rocketstore.consume_queue.queue_check import QueueCheck
from rocketstore.index.format import key_hash
from rocketstore.index.service import IndexService
from rocketstore.message.message import DelayLevels, Message
from rocketstore.message.record import HEAD_V4, MESSAGE_MAGICS, decode_record, store_timestamp
from rocketstore.types import GetMessageStatus, GetResult, QueueUnit

_FILLER_SIZE: Final = FILLER.size
_UNITS_PER_GET_MIN: Final = 800
"""The number of units a get examines for messages that pass its filter; more if it may return more messages."""
PASSED_BYTES_MAX: Final = 16 * MIB
"""The maximum bytes of records that a get reads only to find that they do not pass its filter."""
FILTER_S_MAX: Final = 0.25
"""How long a get searches for messages that pass its filter, whose conditions may be long."""
_QUERY_ROUNDS_MAX: Final = 3
_INDEX_STEP_MS: Final = 1000
_MEMORY_BYTES_FALLBACK: Final = 24 << 30
_HEAD: Final = HEAD_V4.struct("size", "magic", "physical_offset")
_LOG_ADVICE: Final = "Keep the file. Copy the log from another broker, if it was replicated, or from a backup"
_ADVICE: Final = "Keep the files. Delete the consume queue's directory and restart: it will be rebuilt from the log"

TagFilter = Callable[[int], bool]
RecordFilter = Callable[[bytes], bool]


class GetLimits(NamedTuple):
    """How much one get may return, depending on whether its messages are probably in memory."""

    messages: int
    size_bytes: int


class StoreReader:
    """Reads one store; stateless, for any number of threads."""

    def __init__(
        self,
        log: CommitLog,
        find_queue: Callable[[str, int], ConsumeQueue | None],
        index: IndexService | None,
        config: MessageStoreConfig,
        *,
        memory_bytes: int | None = None,
        since_ms: int | None = None,
    ) -> None:
        """``since_ms``: when this start of the store began; what was stored later, no earlier reader has seen."""
        self._log = log
        self._find_queue = find_queue
        self._index = index
        self._config = config
        self._since_ms = since_ms
        self.queue_check: Final = QueueCheck(log, DelayLevels.parse(config.message_delay_level))
        self._units_per_file = config.consume_queue_file_bytes // UNIT_BYTES
        memory = _physical_memory() if memory_bytes is None else memory_bytes
        self.memory_bytes_max: Final = memory * config.access_message_in_memory_max_ratio // 100
        """Messages less than this far from the end of the log are assumed to be in memory."""
        self._in_memory = GetLimits(
            config.max_transfer_count_on_message_in_memory, config.max_transfer_bytes_on_message_in_memory
        )
        self._in_disk = GetLimits(
            config.max_transfer_count_on_message_in_disk, config.max_transfer_bytes_on_message_in_disk
        )

    def get(  # noqa: PLR0913  # RocketMQ's getMessage
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_count: int,
        max_bytes: int,
        matches_tags: TagFilter | None,
        matches_record: RecordFilter | None,
        correct_offset: bool,
    ) -> GetResult:
        """Messages of a queue from ``offset`` on (RocketMQ's getMessage; its statuses and next offsets).

        ``correct_offset`` False: an offset outside the queue is not corrected, and the caller should ask another node.
        Raises ``CorruptLogError``.
        """
        queue = self._find_queue(topic, queue_id)
        low, high = (queue.min_offset, queue.max_offset) if queue is not None else (0, 0)
        if high < offset <= self._log.queue_offsets.get((topic, queue_id), 0):  # stored, and not dispatched yet
            return GetResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
        if queue is None:
            return GetResult(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 0 if correct_offset else offset, 0, 0)
        outside = _outside(offset, low, high)
        if outside is not None:
            status, proper = outside
            if status is GetMessageStatus.OFFSET_OVERFLOW_BADLY and low == 0 and self._was_emptied(topic, queue_id):
                proper = 0
            return GetResult(status, proper if correct_offset else offset, low, high)
        log_end = self._log.max_offset  # read after the queue's end, so everything dispatched up to there is readable
        max_count = min(max_count, max(self._in_memory.messages, self._in_disk.messages))
        read = _Get(self, queue, offset, log_end, GetLimits(max_count, max_bytes), matches_tags, matches_record)
        status, next_offset = read.run(min(high, offset + max(_UNITS_PER_GET_MIN, max_count)))
        suggest_slave = read.last_offset >= 0 and log_end - read.last_offset > self.memory_bytes_max
        return GetResult(status, next_offset, low, high, tuple(read.records), suggest_slave)

    def _was_emptied(self, topic: str, queue_id: int) -> bool:
        """Whether all messages of a queue that begins at 0 are newer than this start: its disk was lost, so a reader
        that is beyond its end has seen none of them. RocketMQ takes each such queue for one, also one that has lost
        its tail, and has all of it read again.
        """
        return self._since_ms is not None and self.store_time(topic, queue_id, 0) >= self._since_ms

    def get_at_once(
        self, topic: str, queue_id: int, offset: int, *, max_count: int, max_bytes: int
    ) -> GetResult | None:
        """Like ``get`` without filters if there are sound messages in memory, or none yet; None if ``get`` must decide.

        Needs no disk and repairs nothing, so it may run on an event loop.
        """
        queue = self._find_queue(topic, queue_id)
        if queue is None or not (low := queue.min_offset) <= offset <= (high := queue.max_offset):
            return None
        if offset == high > 0:
            return GetResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
        log_end = self._log.max_offset
        units = queue.units_at_once(offset, min(max_count, self._in_memory.messages, high - offset))
        if not units or log_end - units[0].offset > self.memory_bytes_max:
            return None
        count, room = 0, min(self._in_memory.size_bytes, max_bytes)
        for unit_offset, size, _ in units:
            if not 0 <= size <= room or unit_offset + size > log_end:
                break
            room -= size
            count += 1
        records = self.queue_check.records_at_once(queue, offset, units[:count]) if count else None
        if not records:
            return None
        return GetResult(GetMessageStatus.FOUND, offset + len(records), low, high, tuple(records))

    def read_record(self, offset: int) -> bytes | None:
        """The record at an untrusted physical offset; None unless one really starts there."""
        if not self._log.min_offset <= offset < self._log.max_offset:
            return None
        record = self._log.read_record(offset)
        return record if record is not None and is_record_at(record, offset) else None

    def query(
        self,
        topic: str,
        key: str,
        max_num: int,
        begin_ms: int,
        end_ms: int,
        *,
        unique: bool = False,
        max_bytes: int = 0,
    ) -> list[bytes]:
        """The newest ``max_num`` messages with ``key`` stored within ``[begin_ms, end_ms]``, in log order.

        ``unique``: the key is a producer's unique id; then at most ``default_query_max_num``. ``max_bytes`` (0: no
        limit): fewer, but at least one, so that they fit together.
        """
        if self._index is None or not key:
            return []
        wanted = min(self._config.default_query_max_num if unique else max_num, self._config.max_msgs_num_batch)
        seen: set[int] = set()
        found: dict[int, bytes] = {}
        until_ms, found_bytes, passed_bytes = end_ms, 0, 0
        for _ in range(_QUERY_ROUNDS_MAX):
            # The index stores whole seconds, rounded down: an entry before begin_ms may belong to a later message.
            hits = self._index.query(topic, key, self._config.max_msgs_num_batch, begin_ms - _INDEX_STEP_MS, until_ms)
            fresh = [offset for offset in hits.offsets if offset not in seen]
            seen.update(fresh)
            oldest_ms = until_ms
            for offset in fresh:
                record = self.read_record(offset)
                if record is None:
                    if self._log.min_offset <= offset < self._log.max_offset:
                        self._index.contradicted(offset)
                    continue
                message = decode_record(record, check_crc=False)
                oldest_ms = min(oldest_ms, message.store_timestamp)
                if begin_ms <= message.store_timestamp <= end_ms and _has_key(message, topic, key, unique=unique):
                    found_bytes += len(record)
                    if found and 0 < max_bytes < found_bytes:
                        return [found[one] for one in sorted(found)[-wanted:]]
                    found[offset] = record
                else:
                    passed_bytes += len(record)
                    if not _has_hash(message, topic, key):
                        self._index.contradicted(offset)
            if passed_bytes > PASSED_BYTES_MAX:
                break
            if len(found) >= wanted or len(hits.offsets) < self._config.max_msgs_num_batch or not fresh:
                break
            until_ms = oldest_ms
        return [found[offset] for offset in sorted(found)[-wanted:]]

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The offset of the first message stored then or later, or the queue's end; 0 if the queue is unknown."""
        queue = self._find_queue(topic, queue_id)
        return queue.offset_by_time(timestamp_ms, self.record_time) if queue is not None else 0

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """When the message at a queue offset was stored; -1 if it does not exist. Raises ``CorruptLogError``."""
        unit = self.unit(topic, queue_id, offset)
        return -1 if unit is None else self.record_time(unit.offset, unit.size)

    def unit(self, topic: str, queue_id: int, offset: int) -> QueueUnit | None:
        """The unit of the message at a queue offset; None if there is none. Raises ``CorruptLogError``."""
        queue = self._find_queue(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return None
        unit = next(iter(queue.units(offset, 1)), BROKEN)
        return None if unit == FILLER else self.queue_check.unit_at(queue, offset, unit)

    def record_time(self, offset: int, size: int) -> int:
        """Store timestamp of a record; -1 if it is gone."""
        if offset < self._log.min_offset:
            return -1
        record = self._log.read(offset, size)
        return -1 if record is None else store_timestamp(record)

    def limits(self, behind_bytes: int) -> GetLimits:
        """The limits of a get that far behind the log's end."""
        return self._in_disk if behind_bytes > self.memory_bytes_max else self._in_memory

    def record_of(self, queue: ConsumeQueue, number: int, unit: QueueUnit, log_end: int) -> bytes | GetMessageStatus:
        """The message at a queue offset, or the status if there is none; a wrong unit is rewritten.

        Raises ``CorruptLogError``.
        """
        if unit.offset + unit.size <= log_end:
            record = self.queue_check.record_at(queue, number, unit)
            if record is not None:
                return record
        true = self.queue_check.restore(queue, number)
        if true is None:
            if next(iter(queue.units(number, 1)), None) == FILLER:  # the log has no message for this place
                return GetMessageStatus.NO_MATCHED_MESSAGE
            if unit.offset + unit.size > log_end:
                return GetMessageStatus.OFFSET_OVERFLOW_ONE
            if unit.offset < self._log.min_offset:
                return GetMessageStatus.MESSAGE_WAS_REMOVING
        elif true.offset + true.size > log_end:  # it became readable in the meantime
            return GetMessageStatus.OFFSET_OVERFLOW_ONE
        elif true != unit:
            record = self.queue_check.record_at(queue, number, true)
            if record is not None:
                return record
            unit = true
        raise self._damage(unit, in_log=true is not None)

    def records_of(self, queue: ConsumeQueue, numbers: Sequence[int], units: Sequence[QueueUnit]) -> dict[int, bytes]:
        """Messages by their queue offsets, read together; missing ones must be read by ``record_of``."""
        return self.queue_check.records_at(queue, numbers, units)

    def _damage(self, unit: QueueUnit, *, in_log: bool) -> CorruptLogError:
        if not in_log:
            reason = (
                f"a consume queue points to a record of {unit.size} bytes at {unit.offset} of the log, but there "
                "is none"
            )
            return CorruptLogError(Path(self._config.consume_queue_dir), unit.offset, reason, _ADVICE)
        size = self._config.mapped_file_size_commit_log
        base = unit.offset - unit.offset % size
        paths = [directory / f"{base:020d}" for directory in self._config.commit_log_dirs]
        path = next((one for one in paths if one.exists()), paths[0])
        return CorruptLogError(path, unit.offset - base, "the message does not match its CRC", _LOG_ADVICE)

    def units_of(
        self, queue: ConsumeQueue, number: int, count: int, log_end: int, *, tagged: bool
    ) -> Sequence[QueueUnit]:
        """Units from ``number`` on; ``tagged``: with tags codes verified against their records."""
        if tagged:
            units = self.queue_check.tagged_units(queue, number, log_end, PASSED_BYTES_MAX)[:count]
        else:
            units = queue.units(number, count)
        if not units and self.queue_check.restore(queue, number) is not None:  # the unit looked never written
            units = queue.units(number, 1)
        return units

    def next_file_offset(self, offset: int) -> int:
        """The start of the log's next file."""
        return self._log.next_file_offset(offset)

    def next_queue_file(self, queue_offset: int) -> int:
        """The first queue offset of the next file of a queue."""
        return queue_offset + self._units_per_file - queue_offset % self._units_per_file


class _Get:
    """One get's progress along a queue."""

    def __init__(
        self,
        reader: StoreReader,
        queue: ConsumeQueue,
        offset: int,
        log_end: int,
        wanted: GetLimits,
        matches_tags: TagFilter | None,
        matches_record: RecordFilter | None,
    ) -> None:
        self._reader = reader
        self._queue = queue
        self._begin = self._at = offset
        self._deadline = inf if matches_record is None else monotonic() + FILTER_S_MAX
        self._log_end = log_end
        self._max_count, self._max_bytes = wanted
        self._matches_tags = matches_tags
        self._matches_record = matches_record
        self._bytes = 0
        self._passed_bytes = 0
        self._skip_below = -(1 << 63)
        self._outcome = GetMessageStatus.NO_MATCHED_MESSAGE
        self._ahead: dict[int, bytes] = {}
        self.records: list[bytes] = []
        self.last_offset = -1
        """Physical offset of the last unit examined."""

    def run(self, last: int) -> tuple[GetMessageStatus, int]:
        """Examine units before ``last``; returns the status and the next offset."""
        while self._at < last:
            count, tagged = min(last - self._at, max(self._max_count, 32)), self._matches_tags is not None
            units = self._reader.units_of(self._queue, self._at, count, self._log_end, tagged=tagged)
            if not units:
                if self._at == self._begin:
                    return GetMessageStatus.OFFSET_FOUND_NULL, self._reader.next_queue_file(self._begin)
                break
            if not self._take(units):
                break
        return (GetMessageStatus.FOUND if self.records else self._outcome), self._at

    def _take(self, units: Sequence[QueueUnit]) -> bool:
        """Process units; False if the get ends before the unit at ``_at``."""
        self._read_ahead(units)
        for unit in units[self._take_ahead(units) :]:
            if unit.size != _FILLER_SIZE and unit.offset >= self._skip_below:
                if self._full(unit) or self._has_passed_enough():
                    return False
                self.last_offset = unit.offset
                behind = unit.offset + unit.size > self._log_end  # not yet readable, whatever its tag
                if (behind or self._matches_tags is None or self._matches_tags(unit.tags_code)) and not self._add(unit):
                    return False
            self._at += 1
        return True

    def _read_ahead(self, units: Sequence[QueueUnit]) -> None:
        """Read ahead the records that ``_take`` will request, as far as the get's limits allow."""
        self._ahead = {}
        limits = self._reader.limits(self._log_end - units[0].offset)
        room = min(limits.size_bytes, self._max_bytes if self._max_bytes > 0 else limits.size_bytes) - self._bytes
        count = min(self._max_count, limits.messages) - len(self.records)
        numbers: list[int] = []
        wanted: list[QueueUnit] = []
        matches, log_end, skip_below = self._matches_tags, self._log_end, self._skip_below
        for number, unit in enumerate(units, self._at):
            offset, size, tags_code = unit
            if size == _FILLER_SIZE or offset < skip_below or not (matches is None or matches(tags_code)):
                continue
            if len(wanted) >= count or not 0 <= size <= room or offset + size > log_end:
                break
            room -= size
            numbers.append(number)
            wanted.append(unit)
        if len(wanted) > 1:
            self._ahead = self._reader.records_of(self._queue, numbers, wanted)

    def _take_ahead(self, units: Sequence[QueueUnit]) -> int:
        """Use the records read ahead, from the first unit up to the first gap; returns how many."""
        begin, ahead = self._at, self._ahead
        if self._matches_record is not None or begin not in ahead:
            return 0
        end = next((number for number in range(begin, begin + len(ahead)) if number not in ahead), begin + len(ahead))
        records = [ahead[number] for number in range(begin, end)]
        self.records += records
        self._bytes += sum(map(len, records))
        self.last_offset = units[end - begin - 1].offset
        self._at = end
        return end - begin

    def _add(self, unit: QueueUnit) -> bool:
        try:
            record: bytes | GetMessageStatus = self._ahead.get(self._at) or self._reader.record_of(
                self._queue, self._at, unit, self._log_end
            )
        except CorruptLogError:
            if self.records:  # they are sound; the error is raised when reading continues after them
                return False
            raise
        if isinstance(record, bytes):
            if self._matches_record is None or self._matches_record(record):
                self.records.append(record)
                self._bytes += unit.size
            else:
                self._passed_bytes += unit.size
            return True
        if record is GetMessageStatus.NO_MATCHED_MESSAGE:
            return True
        self._outcome = record
        if record is GetMessageStatus.MESSAGE_WAS_REMOVING:
            self._skip_below = self._reader.next_file_offset(unit.offset)
            return True
        return False

    def _has_passed_enough(self) -> bool:
        """Whether it must end although nothing may have passed the filter; never at the first unit."""
        return self._passed_bytes > PASSED_BYTES_MAX or (self._at > self._begin and monotonic() > self._deadline)

    def _full(self, unit: QueueUnit) -> bool:
        count = len(self.records)
        if not count:
            return self._max_count <= 0
        limits = self._reader.limits(self._log_end - unit.offset)
        size_bytes = self._bytes + unit.size
        return (
            count >= self._max_count
            or count >= limits.messages
            or size_bytes > limits.size_bytes
            or (0 < self._max_bytes < size_bytes)
        )


def _outside(offset: int, low: int, high: int) -> tuple[GetMessageStatus, int] | None:
    if high == 0:
        return GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0
    if offset < low:
        return GetMessageStatus.OFFSET_TOO_SMALL, low
    if offset == high:
        return GetMessageStatus.OFFSET_OVERFLOW_ONE, offset
    if offset > high:
        return GetMessageStatus.OFFSET_OVERFLOW_BADLY, high
    return None


def is_record_at(record: bytes, offset: int) -> bool:
    """Whether these bytes start with a message that was stored at physical ``offset``."""
    if len(record) < _HEAD.size:
        return False
    length, magic, stored_at = _HEAD.unpack_from(record)
    return length == len(record) and magic in MESSAGE_MAGICS and stored_at == offset


def _has_key(message: Message, topic: str, key: str, *, unique: bool) -> bool:
    return message.topic == topic and (message.unique_key == key or (not unique and key in message.keys))


def _has_hash(message: Message, topic: str, key: str) -> bool:
    """Whether the message is correctly indexed under the hash of ``key``."""
    hash_ = key_hash(topic, key)
    return any(key_hash(message.topic, one) == hash_ for one in (message.unique_key, *message.keys) if one)


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return _MEMORY_BYTES_FALLBACK
