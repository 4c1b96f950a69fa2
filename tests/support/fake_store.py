"""A message store in memory: the part of it that broker state, delayed delivery and the broker's service use.

Several stores may share one ``FakeLog``: then they are the members of a group without delays or losses. What a member
has dispatched can be held back (``dispatched_to``), and so can the results of puts (``hold_results``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dledger.clock import Clock
from dledger.errors import DLedgerError, ShutdownError
from dledger.types import ProducerBatch
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.port import PutDone, SequenceDone
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    DelayLevels,
    Message,
)
from rocketstore.message.properties import encode_properties, find_property, tags_code
from rocketstore.message.record import encode_record
from rocketstore.store.dispatch import Pace
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.hours import TimedProgress
from rocketstore.types import (
    SCHEDULE_TOPIC,
    BrokerRole,
    GetMessageStatus,
    GetResult,
    PutMessageStatus,
    PutResult,
    RecordHead,
    StoredPlace,
)
from tests.support.memory_timers import MemoryTimers
from tests.support.waiting import ManualClock

REFUSED_AS_SLAVE = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason="a slave")


class FakeRecord(NamedTuple):
    """A stored record and what dispatch knows of it."""

    head: RecordHead
    record: bytes


@dataclass
class FakeQueue:
    """One queue; ``records[0]`` has queue offset ``min_offset``."""

    min_offset: int = 0
    records: list[FakeRecord] = field(default_factory=list)

    @property
    def max_offset(self) -> int:
        return self.min_offset + len(self.records)


class FakeLog(PlainCommitLog):
    """The records of a group, in order."""

    flushed_offset = 1 << 62
    queue_offsets: dict[tuple[str, int], int] = {}  # noqa: RUF012  # each has its own

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.records: list[FakeRecord] = []
        self.queue_offsets: dict[tuple[str, int], int] = {}
        self.end = 0
        self.producers: dict[str, list[PutResult]] = {}
        """By name what each number was answered."""
        self.stores: list[FakeStore] = []
        self.is_replicated = True
        self.is_repaired = True
        self.flush_error: DLedgerError | None = None

    @property
    def min_offset(self) -> int:
        return 0

    @property
    def max_offset(self) -> int:
        return self.end

    def flush(self) -> int:
        if self.flush_error is not None:
            raise self.flush_error
        self.flushed_offset = max(self.flushed_offset, self.end)
        return self.flushed_offset


class FakeStore(MessageStore):
    """One member's view of the log; ``role`` may be set at any time."""

    log: FakeLog  # type: ignore[misc]
    role = BrokerRole.SYNC_MASTER
    numbers_known = True
    forced_files = 0
    refusal: PutResult | None = None  # may be set at any time, as the role
    crowded: PutResult | None = None

    def __init__(
        self,
        log: FakeLog | None = None,
        *,
        role: BrokerRole = BrokerRole.SYNC_MASTER,
        clock: Clock | None = None,
        delay_levels: DelayLevels | None = None,
    ) -> None:
        self.log = log or FakeLog()  # type: ignore[misc]  # in the place of what the real constructor sets
        self.role = role
        self.refusals: list[PutResult] = []
        """Each makes one submit fail with it."""
        self.pace = Pace(lambda: self.role)  # type: ignore[misc]  # likewise
        self.hold_results = False
        self.held: list[Callable[[], None]] = []
        self.dispatched_to: int | None = None
        """How many records of the log are in the queues; None: all, always."""
        self.deleted_topics: list[str] = []
        self.keepers: list[Callable[[int], int]] = []
        self.gets = 0
        self.in_memory = False
        """Whether ``get_at_once`` finds anything."""
        self._clock = clock or ManualClock()
        self._delay_levels = delay_levels
        self._kept: dict[tuple[str, int], FakeQueue] = {}
        self._in_queues = 0
        self._listeners: list[Callable[[Sequence[RecordHead]], None]] = []
        self._timers = MemoryTimers()
        with self.log.lock:
            self.log.stores.append(self)
        self.dispatch()

    def submit(
        self,
        messages: Sequence[Message],
        done: PutDone,
        *,
        wait: bool = True,
        producer: ProducerBatch | None = None,
    ) -> None:
        if self.refusals:
            refusal = self.refusals.pop(0)
            done([refusal for _ in messages])
            return
        if self.role is BrokerRole.SLAVE:
            done([REFUSED_AS_SLAVE for _ in messages])
            return
        with self.log.lock:
            known = [] if producer is None else self.log.producers.setdefault(producer.producer, [])
            if producer is not None and producer.sequence > len(known):
                done([PutResult(PutMessageStatus.OUT_OF_ORDER_SEQUENCE, outcome="not_applied")] * len(messages))
                return
            results = [] if producer is None else known[producer.sequence : producer.sequence + len(messages)]
            fresh = [self._append(message) for message in messages[len(results) :]]
            known += fresh
            results += fresh
        if self.hold_results:
            self.held.append(lambda: done(results))
        else:
            done(results)
        for store in self.log.stores:
            store.dispatch()

    def submit_producer(self, name: str, done: SequenceDone) -> None:
        slave = self.role is BrokerRole.SLAVE
        done(ShutdownError("a slave") if slave else len(self.log.producers.get(name, ())))

    def keep_for(self, keeper: Callable[[int], int]) -> None:
        self.keepers.append(keeper)

    def position_of(self, topic: str, queue_id: int, offset: int) -> int:
        queue = self._kept.get((topic, queue_id))
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return -1
        return queue.records[offset - queue.min_offset].head.offset

    def put(self, message: Message) -> PutResult:
        found: list[PutResult] = []
        self.submit([message], found.extend)
        return found[0]

    def put_many(self, messages: Sequence[Message]) -> list[PutResult]:
        found: list[PutResult] = []
        self.submit(messages, found.extend)
        return found

    def release_results(self) -> None:
        """Answer the puts that were held back."""
        self.hold_results = False
        held, self.held = self.held, []
        for answer in held:
            answer()

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_count: int,
        max_bytes: int = 0,
        matches_tags: Callable[[int], bool] | None = None,
        matches_record: Callable[[bytes], bool] | None = None,
        group: str = "",
    ) -> GetResult:
        with self.log.lock:
            self.gets += 1
            queue = self._kept.get((topic, queue_id))
            if queue is None:
                return GetResult(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
            status, next_offset = _without_records(queue, offset)
            found: list[bytes] = []
            if status is GetMessageStatus.FOUND:
                scanned = queue.records[offset - queue.min_offset :][: max(max_count, 1)]
                next_offset = offset + len(scanned)
                found = [one.record for one in scanned if matches_tags is None or matches_tags(one.head.tags_code)]
                found = [record for record in found if matches_record is None or matches_record(record)]
                status = GetMessageStatus.FOUND if found else GetMessageStatus.NO_MATCHED_MESSAGE
            return GetResult(status, next_offset, queue.min_offset, queue.max_offset, tuple(found))

    def read_record(self, offset: int) -> bytes | None:
        with self.log.lock:
            return next((one.record for one in self.log.records if one.head.offset == offset), None)

    @property
    def timers(self) -> MemoryTimers:
        return self._timers

    def forget_timed(self, progress: TimedProgress) -> None:
        self.timers.delete_settled(progress)

    def get_at_once(
        self, topic: str, queue_id: int, offset: int, *, max_count: int, max_bytes: int, group: str = ""
    ) -> GetResult | None:
        if not self.in_memory:
            return None
        result = self.get(topic, queue_id, offset, max_count=max_count, max_bytes=max_bytes, group=group)
        return result if result.records or result.status is GetMessageStatus.OFFSET_OVERFLOW_ONE else None

    def min_offset(self, topic: str, queue_id: int) -> int:
        with self.log.lock:
            queue = self._kept.get((topic, queue_id))
            return queue.min_offset if queue else -1

    def max_offset(self, topic: str, queue_id: int) -> int:
        with self.log.lock:
            queue = self._kept.get((topic, queue_id))
            return queue.max_offset if queue else 0

    def offset_by_position(self, topic: str, queue_id: int, position: int) -> int:
        with self.log.lock:
            queue = self._kept.get((topic, queue_id), FakeQueue())
            return queue.min_offset + sum(one.head.offset < position for one in queue.records)

    @property
    def dispatch_position(self) -> int:
        with self.log.lock:
            rest = self.log.records[self._in_queues :]
            return rest[0].head.offset if rest else self.log.end

    def queues(self) -> list[tuple[str, int]]:
        with self.log.lock:
            return list(self._kept)

    def wait_dispatched(self, timeout: float) -> bool:
        with self.log.lock:
            return self._in_queues == len(self.log.records)

    def delete_topic(self, topic: str) -> None:
        with self.log.lock:
            self.deleted_topics.append(topic)
            for key in [key for key in self._kept if key[0] == topic]:
                del self._kept[key]

    def add_arrival_listener(self, listener: Callable[[Sequence[RecordHead]], None]) -> None:
        self._listeners.append(listener)

    def expire(self, topic: str, queue_id: int, min_offset: int) -> None:
        """Remove a queue's records before ``min_offset``."""
        with self.log.lock:
            queue = self._kept[topic, queue_id]
            del queue.records[: min_offset - queue.min_offset]
            queue.min_offset = min_offset

    def cut(self, topic: str, queue_id: int, max_offset: int) -> None:
        """Remove a queue's records from ``max_offset`` on, as a lost tail of the log does."""
        with self.log.lock:
            queue = self._kept[topic, queue_id]
            del queue.records[max_offset - queue.min_offset :]
            self.log.queue_offsets[topic, queue_id] = max_offset

    def dispatch(self) -> None:
        """Put records of the log into the queues, up to ``dispatched_to``, and call the listeners."""
        while True:
            with self.log.lock:
                limit = len(self.log.records) if self.dispatched_to is None else self.dispatched_to
                if self._in_queues >= min(limit, len(self.log.records)):
                    return
                one = self.log.records[self._in_queues]
                self._in_queues += 1
                queue = self._kept.setdefault((one.head.topic, one.head.queue_id), FakeQueue(one.head.queue_offset))
                queue.records.append(one)
            self.timers.append([one.head])
            for listener in self._listeners:
                listener([one.head])

    def _append(self, message: Message) -> PutResult:
        log = self.log
        message = replace(message, properties=dict(message.properties), store_timestamp=self._clock.wall_ms())
        code = tags_code(message.tags or find_property(message.property_string, PROPERTY_TAGS) or "")
        level = message.delay_level
        if self._delay_levels is not None and level:
            message.properties[PROPERTY_REAL_TOPIC] = message.topic
            message.properties[PROPERTY_REAL_QUEUE_ID] = str(message.queue_id)
            level = self._delay_levels.cap(level)
            message.topic, message.queue_id = SCHEDULE_TOPIC, level - 1
            message.properties[PROPERTY_DELAY] = str(level)
            code = self._delay_levels.due_ms(level, message.store_timestamp)
        key = (message.topic, message.queue_id)
        queue_offset = log.queue_offsets.get(key, 0)
        log.queue_offsets[key] = queue_offset + 1
        record = encode_record(message, queue_offset=queue_offset, physical_offset=log.end)
        head = RecordHead(
            message.topic, message.queue_id, log.end, len(record), code, message.store_timestamp, queue_offset,
            message.sys_flag, message.prepared_offset,
            encode_properties(message.properties) or message.property_string,
        )  # fmt: skip
        log.records.append(FakeRecord(head, record))
        stored = StoredPlace(log.end, len(record), message.queue_id, queue_offset, message.store_timestamp)
        log.end += len(record)
        return PutResult(PutMessageStatus.PUT_OK, stored)


def _without_records(queue: FakeQueue, offset: int) -> tuple[GetMessageStatus, int]:
    """What a get answers that finds nothing, and where it says to go on; ``FOUND`` if it may find something."""
    if queue.max_offset == 0:
        return GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0
    if offset < queue.min_offset:
        return GetMessageStatus.OFFSET_TOO_SMALL, queue.min_offset
    if offset == queue.max_offset:
        return GetMessageStatus.OFFSET_OVERFLOW_ONE, offset
    if offset > queue.max_offset:
        return GetMessageStatus.OFFSET_OVERFLOW_BADLY, queue.max_offset
    return GetMessageStatus.FOUND, offset
