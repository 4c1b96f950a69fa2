"""The write path of the plain commit log: everything that happens to messages under the put lock.

The lock covers the assignment of store timestamps (which never decrease along the log), queue offsets and positions. A
batch is written with one write per file. Queue offsets are taken only once the bytes are written.

Deliberate differences from RocketMQ: a record larger than a file is refused instead of reported as stored; the next
file is created before the rest of the last one is given up; after a failed write or flush, the log accepts no more
messages.

Numbered messages are in a table in memory: the counterpart of a group's producer table. It counts the log's numbered
messages as a group's counts entries; their positions are remembered per put. A plain broker forgets its producers when
it ends: a producer that continues afterwards is refused as unknown, and the outcome of its last unanswered messages
stays unknown. While the broker runs, nothing is stored twice.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from sys import maxsize
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.config import ReplicationConfig
from dledger.core.producers import KnownProducer, Plan, ProducerTable
from dledger.errors import DiskError, DiskFullError, DLedgerError, InvalidRequestError
from dledger.records import record
from dledger.types import LogIndex, ProducerBatch, StoredRun
from rocketstore.commit_log.flush import commit_all, flush_all
from rocketstore.commit_log.port import (
    TAKES_NO_QUEUE_OFFSET,
    QueueOffsets,
    prepare,
    refused,
    status_of_producer,
    stored_result,
)
from rocketstore.mapped.queue import MappedFileQueue
from rocketstore.message.message import DelayLevels, Message
from rocketstore.message.record import BLANK, BLANK_MAGIC, encode_record_buffer, place_record
from rocketstore.types import PutMessageStatus, PutResult

_PUTS_REMEMBERED: Final = 8192
"""The total for all producers; older puts are known to be stored, but not where."""


@record(frozen=True, slots=True)
class StoredStretch:
    """Messages of a producer that were already stored: ``count`` of them, starting ``skipped`` records after
    ``offset``.

    ``offset`` is the start of the first record of their put; None if it is no longer remembered.
    """

    offset: int | None
    skipped: int
    count: int


class NumberedPuts:
    """Used under the put lock."""

    def __init__(self, *, puts_remembered: int = _PUTS_REMEMBERED) -> None:
        self._table = ProducerTable(ReplicationConfig())
        self._count = 1  # of all numbered messages; index 0 means "not remembered"
        self._firsts: deque[int] = deque(maxlen=puts_remembered)  # per put: the count at its first message
        self._offsets: deque[int] = deque(maxlen=puts_remembered)  # per put: the offset of its first message

    def plan(self, batch: ProducerBatch, now_ms: int) -> Plan | DLedgerError:
        """The part of a batch to store, or why there is none; marks its producer as active."""
        plan = self._table.plan(batch, batch.count)
        if isinstance(plan, Plan) and plan.producer is not None:
            self._table.touch(plan.producer, now_ms)
        return plan

    def places(self, plan: Plan) -> list[StoredStretch]:
        """The positions of messages that need not be stored again."""
        return [stretch for run in plan.duplicates for stretch in self._stretches(run)]

    def _stretches(self, run: StoredRun) -> list[StoredStretch]:
        if not run.first_index:
            return [StoredStretch(None, 0, run.count)]
        found: list[StoredStretch] = []
        first, end = int(run.first_index), run.first_index + run.count
        while first < end:
            put = bisect_right(self._firsts, first) - 1
            following = self._firsts[put + 1] if put + 1 < len(self._firsts) else self._count
            count = min(end, following) - first
            offset = self._offsets[put] if put >= 0 else None
            found.append(StoredStretch(offset, 0 if put < 0 else first - self._firsts[put], count))
            first += count
        return found

    def admit(self, plan: Plan, name: str, now_ms: int) -> KnownProducer | DLedgerError:
        """The producer of the planned batch, which is remembered from now on; or the error if there is no room."""
        if plan.producer is not None:
            return plan.producer
        registration = self._table.registration(name, maxsize, now_ms)
        if isinstance(registration, DLedgerError):
            return registration
        return self._table.register(registration, LogIndex(self._count), 0, now_ms)

    def note(self, producer: KnownProducer, offset: int, count: int, now_ms: int) -> None:
        """One put, starting at ``offset``, stored ``count`` new messages of the producer."""
        self._firsts.append(self._count)
        self._offsets.append(offset)
        self._table.note(producer, self._count, count, now_ms)
        self._count += count

    def ask(self, name: str, now_ms: int) -> int:
        """The producer's next sequence number; 0 if it is unknown."""
        return self._table.ask(name, now_ms)


_BLANK_BYTES: Final = BLANK.size
_CLOSED: Final = "the commit log is not open for writing"


class NumberedResult(NamedTuple):
    """The result of a producer's batch: where its first messages were already stored, and the results of the others."""

    before: tuple[StoredStretch, ...]
    results: list[PutResult]


class RecordAppender:
    """Appends messages to a queue of files. Results are always in the order of the messages."""

    def __init__(self, queue: MappedFileQueue, delay_levels: DelayLevels, clock: Clock) -> None:
        self._queue = queue
        self._delay_levels = delay_levels
        self._clock = clock
        self._record_bytes_max = queue.file_bytes - _BLANK_BYTES
        self.lock = threading.Lock()
        """The put lock: guards the fields below and appends to the queue."""
        self.offsets = QueueOffsets()
        self.numbered = NumberedPuts()
        self.last_timestamp = 0
        """Store timestamp of the last message; later ones are not lower."""
        self.is_open = False
        """Whether messages are accepted."""
        self.lock_taken_ms = 0
        """When the lock's current holder acquired it, in monotonic ms; 0 if it is free."""

    def _encode(self, message: Message) -> bytearray | PutResult:
        """The message's record, or the reason for refusing it."""
        if message.properties:
            prepare(message, self._delay_levels)
        try:
            record = encode_record_buffer(message)
        except InvalidRequestError as error:
            return refused(PutMessageStatus.MESSAGE_ILLEGAL, str(error))
        if len(record) > self._record_bytes_max:
            reason = f"the record of {len(record)} bytes is larger than a file of the log"
            return refused(PutMessageStatus.MESSAGE_ILLEGAL, reason)
        return record

    def store_many(self, messages: Sequence[Message]) -> list[PutResult]:
        """Write messages consecutively; one that does not fit into a record is refused individually."""
        encoded = [self._encode(message) for message in messages]
        records = [one for one in encoded if isinstance(one, bytearray)]
        if len(records) < len(messages):
            fine = [message for message, one in zip(messages, encoded, strict=True) if isinstance(one, bytearray)]
            results = iter(self._put(fine, records))
            return [next(results) if isinstance(one, bytearray) else one for one in encoded]
        return self._put(messages, records)

    def _put(self, messages: Sequence[Message], records: list[bytearray]) -> list[PutResult]:
        results: list[PutResult] = []
        with self.lock:
            self.lock_taken_ms = self._clock.monotonic_ms()
            try:
                self._put_all(messages, records, results)
            finally:
                self.lock_taken_ms = 0
        return results

    def store_numbered(self, messages: Sequence[Message], batch: ProducerBatch) -> NumberedResult:
        """Write the new messages of a producer's batch; none if one of them is refused."""
        encoded = [self._encode(message) for message in messages]
        records = [one for one in encoded if isinstance(one, bytearray)]
        if len(records) < len(messages):
            other = refused(PutMessageStatus.OUT_OF_ORDER_SEQUENCE, "another message of the request was refused")
            return NumberedResult((), [one if isinstance(one, PutResult) else other for one in encoded])
        with self.lock:
            self.lock_taken_ms = self._clock.monotonic_ms()
            try:
                return self._put_numbered(messages, records, batch)
            finally:
                self.lock_taken_ms = 0

    def _put_numbered(
        self, messages: Sequence[Message], records: list[bytearray], batch: ProducerBatch
    ) -> NumberedResult:
        now_ms = self._clock.monotonic_ms()
        plan = self.numbered.plan(batch, now_ms)
        if isinstance(plan, DLedgerError):
            return NumberedResult((), [refused(status_of_producer(plan), str(plan))] * len(messages))
        before = tuple(self.numbered.places(plan))
        if plan.stored == len(messages):
            return NumberedResult(before, [])
        if plan.stored:
            messages, records = messages[plan.stored :], records[plan.stored :]
        producer = self.numbered.admit(plan, batch.producer, now_ms)
        if isinstance(producer, DLedgerError):
            return NumberedResult((), [refused(status_of_producer(producer), str(producer))] * len(messages))
        results: list[PutResult] = []
        self._put_all(messages, records, results)
        first, last = results[0].stored, results[-1].stored
        if first is not None:  # the first ones were already stored, usually all of them
            count = len(results) if last is not None else sum(one.stored is not None for one in results)
            self.numbered.note(producer, first.offset, count, now_ms)
        return NumberedResult(before, results)

    def store_one(self, messages: Sequence[Message]) -> list[PutResult]:
        """Like ``store_many``, at half the cost for a single message that fits into the last file."""
        message = messages[0]
        record = self._encode(message)
        if not isinstance(record, bytearray):
            return [record]
        with self.lock:
            self.lock_taken_ms = self._clock.monotonic_ms()
            try:
                result = self._put_one(message, record)
            finally:
                self.lock_taken_ms = 0
        return self._put(messages, [record]) if result is None else [result]

    def _put_one(self, message: Message, record: bytearray) -> PutResult | None:
        """Write a record into the last file; None, without effect, if there is no room or nothing may be written."""
        queue, table = self._queue, self.offsets.table
        file = queue.last_file(create=False)
        if file is None or not self.is_open or queue.poison or len(record) + _BLANK_BYTES > file.size - file.wrote:
            return None
        takes_offset = not message.sys_flag & TAKES_NO_QUEUE_OFFSET
        key = (message.topic, message.queue_id)
        message.queue_offset = queue_offset = table.get(key, 0) if takes_offset else 0
        timestamp = self._clock.wall_ms()
        if timestamp < self.last_timestamp:
            timestamp = self.last_timestamp
        message.store_timestamp = timestamp
        message.offset = offset = file.base + file.wrote
        place_record(record, message, queue_offset, offset)
        try:
            queue.append_to(file, record)
        except DiskFullError as error:
            return refused(PutMessageStatus.SERVICE_NOT_AVAILABLE, str(error))
        except DiskError as error:
            return refused(PutMessageStatus.UNKNOWN_ERROR, str(error), "unknown")
        if takes_offset:
            table[key] = queue_offset + 1
        self.last_timestamp = file.store_timestamp = timestamp
        return stored_result(message)

    def _put_all(self, messages: Sequence[Message], records: list[bytearray], results: list[PutResult]) -> None:
        """Write the records and append one result per message in any case. Requires the put lock."""
        if not self.is_open or self._queue.poison:
            reason = self._queue.poison or _CLOSED
            results += [refused(PutMessageStatus.SERVICE_NOT_AVAILABLE, reason)] * len(messages)
            return
        timestamp = self.last_timestamp = max(self._clock.wall_ms(), self.last_timestamp)
        written = count = 0
        try:
            while written < len(records):
                count = 0
                file = self._queue.last_file()
                if file is None or len(records[written]) + _BLANK_BYTES > file.size - file.wrote:
                    self._roll()
                    continue
                count = _fitting(records, written, file.size - file.wrote)
                chunk = messages[written : written + count] if count < len(messages) else messages
                following = self.offsets.assign(chunk)
                offset = file.base + file.wrote
                for message, record in zip(chunk, records[written : written + count], strict=True):
                    message.store_timestamp = timestamp
                    message.offset = offset
                    place_record(record, message, message.queue_offset, offset)
                    offset += len(record)
                self._queue.append_to(
                    file, records[written] if count == 1 else bytearray().join(records[written : written + count])
                )
                file.store_timestamp = timestamp
                self.offsets.keep(following)
                results += map(stored_result, chunk)
                written += count
        except DiskFullError as error:
            results += [refused(PutMessageStatus.SERVICE_NOT_AVAILABLE, str(error))] * (len(messages) - written)
        except DiskError as error:
            results += self._failed(error, count, len(messages) - written - count)

    def append_received(self, offset: int, data: bytes, store_timestamp: int) -> None:
        """See ``PlainCommitLog.append_received``."""
        with self.lock:
            queue = self._queue
            if not self.is_open:
                raise DiskError(_CLOSED)
            if queue.files() and offset != queue.max_wrote:
                raise InvalidRequestError(f"offset {offset} does not continue the log, which ends at {queue.max_wrote}")
            file = queue.last_file(offset)
            if file is None or file.base + file.wrote != offset or len(data) > file.size - file.wrote:
                raise InvalidRequestError(f"{len(data)} bytes from offset {offset} on are not within one file")
            if file.base and not file.wrote and queue.flushed_where < file.base - queue.file_bytes:
                flush_all(queue)  # as in ``_roll``: recovery takes records that far behind a bad one for damage
            queue.append_to(file, data)
            if store_timestamp:
                self.last_timestamp = file.store_timestamp = max(store_timestamp, self.last_timestamp)

    def _failed(self, error: DiskError, tried: int, left: int) -> list[PutResult]:
        """The results of messages that were not written because of ``error``.

        Bytes of those being written may be on disk and found by recovery, so their outcome is unknown.
        """
        status = PutMessageStatus.CREATE_MAPEDFILE_FAILED
        if self._queue.poison:
            status = PutMessageStatus.SERVICE_NOT_AVAILABLE
        unknown = refused(PutMessageStatus.UNKNOWN_ERROR, str(error), "unknown")
        return [unknown] * tried + [refused(status, str(error))] * left

    def _roll(self) -> None:
        """Fill the rest of the last file with a blank, once there is a next one.

        A file is started only when the last but one is durable: recovery takes records that far behind a bad one as a
        sign of damage. A file without a buffer is started only when everything before it has left the buffers, because
        otherwise killing the process would leave a gap in the log. Raises ``DiskError``, ``DiskFullError``.
        """
        queue = self._queue
        file = queue.last_file(create=False)
        if file is None:
            return
        queue.reserve_next()
        if queue.flushed_where < file.base:
            commit_all(queue)
            flush_all(queue)
        queue.append_to(file, BLANK.pack(file.size - file.wrote, BLANK_MAGIC), fill=True)
        if file.buffered and not queue.next_is_buffered:
            commit_all(queue)


def _fitting(records: list[bytearray], first: int, room: int) -> int:
    """How many records from ``first`` on fit, each followed by room for a blank; at least one, which must fit."""
    if first + 1 == len(records):
        return 1
    number = first
    for number in range(first, len(records)):
        room -= len(records[number])
        if room < _BLANK_BYTES:
            return number - first
    return number + 1 - first
