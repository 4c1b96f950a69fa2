"""The message store's interface to a commit log, implemented by the plain and the replicated one.

Both prepare a message in the same way before it is stored: its delay, its queue offset.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from dledger.errors import DLedgerError, ResponseCode
from dledger.types import ProducerBatch
from rocketstore.config import KIB
from rocketstore.mapped.queue import OnForced, untold
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    SYS_FLAG_PREPARED,
    DelayLevels,
    Message,
)
from rocketstore.types import (
    QUEUE_NUMBERS_TOPIC,
    SCHEDULE_TOPIC,
    Outcome,
    PutMessageStatus,
    PutResult,
    QueueKey,
    ScannedRecords,
    StoredPlace,
)

PutDone = Callable[[Sequence[PutResult]], None]
"""Called once, with one result per message, on any thread, possibly within ``submit``; must not block."""
SequenceDone = Callable[[int | DLedgerError], None]
"""Called once, on any thread, possibly within ``submit_producer``; must not block."""
NumberingEncoder = Callable[[int, Mapping[QueueKey, int], int], Sequence[bytes]]
"""Maps the log's end, the next offsets there and the maximum body size to the bodies that contain those offsets."""


class CommitLog(Protocol):
    """All messages of a broker as one sequence of records.

    Life cycle: ``load`` (open the files and cut a torn tail), ``start``, ``shutdown``. The log assigns queue offsets
    under its put lock from ``queue_offsets``, which the store fills from the consume queues before it accepts writes.
    """

    @property
    def min_offset(self) -> int:
        """The first kept record's physical offset; ``max_offset`` if there is none."""

    @property
    def max_offset(self) -> int:
        """The end of what may be dispatched and read: what a crash does not undo, as far as the log guarantees that.

        In a replicated log the committed part; in a plain one what is flushed (SYNC_FLUSH), or everything
        (ASYNC_FLUSH).
        """

    @property
    def end_offset(self) -> int:
        """The end of everything kept, including what may not be read yet.

        Consume queues are cut here after a restart, never at ``max_offset``: a restarted member may know a lower commit
        position than its queues already hold.
        """

    def listen(self, advanced: Callable[[], None]) -> None:
        """Register ``advanced``, called after ``max_offset`` has grown, on any thread; it must be cheap. Before
        ``start``. Like ``keep_from``, this exists because the caller is constructed with the log.
        """

    @property
    def queue_offsets(self) -> dict[tuple[str, int], int]:
        """Maps (topic, queue id) to the next queue offset. Replaced as a whole by ``set_queue_offsets``."""

    def set_queue_offsets(self, offsets: dict[tuple[str, int], int]) -> None:
        """Replace the table, under the put lock."""

    def check_files(self) -> None:
        """Refuse files that the settings do not describe, before anything is opened or changed. Raises
        ``ConfigError``, ``CorruptLogError``, ``DiskError``.
        """

    def load(
        self, *, clean_stop: bool, from_timestamp_ms: int | None = None, durable_offset: int | None = None
    ) -> None:
        """Open the files and recover the log itself. Raises ``CorruptLogError``, ``DiskError``, ``ConfigError``.

        The arguments come from the store's checkpoint, for a log without evidence of its own: everything before
        ``durable_offset`` was durable, and so was everything stored at or before ``from_timestamp_ms``; None if
        unknown.
        """

    def start(self) -> None:
        """Start flushing (plain), or join the group (replicated)."""

    def shutdown(self) -> None:
        """Flush and close. Idempotent."""

    def submit(
        self,
        messages: Sequence[Message],
        done: PutDone,
        *,
        wait: bool = True,
        producer: ProducerBatch | None = None,
    ) -> None:
        """Store messages in this order, with consecutive queue offsets per queue.

        In a replicated log all of them or none; in a plain one, a prefix may be stored if the disk fails in between,
        and the results say which. ``wait=False``: do not wait for the flush. The messages must be validated. Fields
        that storing changes (store timestamp, delayed topic) are set in the messages.

        ``producer`` numbers the messages: those already stored are answered with their positions and not stored again.
        A batch that does not follow the producer's last one, or of which one message is refused, is refused as a whole.
        ``producer.count`` is the number of messages.
        """

    def submit_producer(self, name: str, done: SequenceDone) -> None:
        """A producer's next sequence number, 0 if unknown, once everything counted by it is stored for good."""

    def submit_numbering(self, encode: NumberingEncoder, done: PutDone) -> None:
        """Store the next offsets of all queues as messages of ``QUEUE_NUMBERS_TOPIC``, if puts are accepted.

        The table is from some earlier end of the log, and must be valid as long as the messages are in the log: a group
        refuses them in any other term than the one in which the table was read.
        """

    def keep_from(self, wanted: Callable[[], int | None], held_back: Callable[[int], None] = lambda _end: None) -> None:
        """Keep everything from the offset that ``wanted`` returns (None: no limit) on. Call before ``start``.

        A log that removes files itself, like a replicated one, calls ``held_back`` with the offset up to which it would
        otherwise have removed files; it must be fast. For others see ``is_held_back``.
        """

    def read(self, offset: int, size: int) -> bytes | None:
        """The record at ``offset``; None if it is gone or not completely readable."""

    def read_together(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """The records at these offsets, of these sizes, as far as they are sound and cheap to read at once.

        None for the others: ``read`` returns them, or reports the problem.
        """

    def read_at_once(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Like ``read_together``, but never waits for a disk: None also for records that are not in memory."""

    def read_record(self, offset: int) -> bytes | None:
        """The record that starts at ``offset``, with its length from its first field; None if there is none."""

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        """Heads of the records from ``offset`` on, up to ``bytes_max`` bytes of log, never beyond ``max_offset``.

        Blanks and entries that are not messages are skipped. ``offset`` must be the start of a record, blank or entry,
        a value returned by an earlier ``scan``, or less than ``min_offset`` (then the scan starts there). Raises
        ``CorruptLogError``.
        """

    def next_file_offset(self, offset: int) -> int:
        """The start of the file after the one that contains ``offset``."""

    @property
    def flushed_offset(self) -> int:
        """The end of what is durable on this node."""

    def flush(self) -> int:
        """Make everything written durable; returns the durable end."""

    def delete_expired(self, *, now_ms: int, immediately: bool, on_forced: OnForced = untold) -> int:
        """Remove expired files (or the oldest, ``immediately``); returns how many. A replicated log: 0.

        ``on_forced`` gets each file that had not expired.
        """

    def is_held_back(self, *, now_ms: int, immediately: bool) -> bool:
        """Whether only ``keep_from`` prevents ``delete_expired`` from removing more. A replicated log: False."""

    @property
    def is_replicated(self) -> bool:
        """Whether storing requires a quorum."""

    @property
    def is_repaired(self) -> bool:
        """Whether damage is repaired while the log runs, with other members' data."""

    @property
    def put_lock_ms(self) -> int:
        """How long the put lock has been held by its current holder; 0 if it is free."""

    def earliest_message_time(self) -> int:
        """Store timestamp of the first kept message; -1 if there is none."""

    def directories(self) -> Sequence[str]:
        """The directories of the log's files, for disk usage."""

    def remaining_to_flush(self) -> int:
        """Bytes written and not yet durable."""


TAKES_NO_QUEUE_OFFSET: Final = SYS_FLAG_PREPARED
"""The bit that only prepared and rolled-back messages have: they get offset 0 and no place in a queue."""


def prepare(message: Message, delay_levels: DelayLevels) -> None:
    """Redirect a delayed message to its level's queue in ``SCHEDULE_TOPIC``, recording its real topic and queue.

    Levels are capped at the highest. Prepared and rolled-back messages are not delayed, nor are messages that were
    already redirected (and are submitted again).
    """
    properties = message.properties
    if PROPERTY_DELAY not in properties or message.topic == SCHEDULE_TOPIC:
        return
    level = delay_levels.cap(message.delay_level)
    if level == 0 or message.sys_flag & TAKES_NO_QUEUE_OFFSET:
        return
    message.properties = {
        **properties,
        PROPERTY_DELAY: str(level),
        PROPERTY_REAL_TOPIC: message.topic,
        PROPERTY_REAL_QUEUE_ID: str(message.queue_id),
    }
    message.topic = SCHEDULE_TOPIC
    message.queue_id = level - 1


NUMBERING_BYTES_MAX: Final = 128 * KIB
"""Maximum size of a body with queue numbers."""


def numbering_messages(bodies: Sequence[bytes], now_ms: int) -> list[Message]:
    """The messages that record the queues' next offsets."""
    return [Message(QUEUE_NUMBERS_TOPIC, body, born_timestamp=now_ms) for body in bodies]


PRODUCER_STATUSES: Final = {
    ResponseCode.OUT_OF_ORDER_SEQUENCE: PutMessageStatus.OUT_OF_ORDER_SEQUENCE,
    ResponseCode.UNKNOWN_PRODUCER: PutMessageStatus.UNKNOWN_PRODUCER,
    ResponseCode.TOO_MANY_PRODUCERS: PutMessageStatus.TOO_MANY_PRODUCERS,
}
"""Statuses for refused numbered messages."""


class QueueOffsets:
    """The next queue offset of every queue, in memory. Used under the put lock.

    Offsets are assigned to messages that are written together, and taken only once they are written: a failed write
    uses up none.
    """

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: dict[tuple[str, int], int] = {}
        """Maps (topic, queue id) to the next offset."""

    def replace(self, offsets: dict[tuple[str, int], int]) -> None:
        """Replace the table by a copy."""
        self.table = dict(offsets)

    def assign(self, messages: Sequence[Message]) -> dict[tuple[str, int], int]:
        """Set ``queue_offset`` in each message; returns the queues' next offsets, to be passed to ``keep``."""
        table, following = self.table, dict[tuple[str, int], int]()
        for message in messages:
            if message.sys_flag & TAKES_NO_QUEUE_OFFSET:
                message.queue_offset = 0
                continue
            key = (message.topic, message.queue_id)
            offset = following.get(key)
            if offset is None:
                offset = table.get(key, 0)
            message.queue_offset = offset
            following[key] = offset + 1
        return following

    def keep(self, following: dict[tuple[str, int], int]) -> None:
        """Take the offsets that ``assign`` returned, because the messages are written."""
        self.table.update(following)


def stored_result(message: Message) -> PutResult:
    """The result of a stored message, from its fields."""
    stored = StoredPlace(message.offset, message.size, message.queue_id, message.queue_offset, message.store_timestamp)
    return PutResult(PutMessageStatus.PUT_OK, stored)


def status_of_producer(error: DLedgerError) -> PutMessageStatus:
    """The status of a batch refused because of its producer's numbers."""
    return PRODUCER_STATUSES.get(error.code, PutMessageStatus.MESSAGE_ILLEGAL)


def refused(status: PutMessageStatus, reason: str, outcome: Outcome = "not_applied") -> PutResult:
    """The result of a message that is not stored, or may not be."""
    return PutResult(status, None, outcome, reason)


class PutWaiter:
    """For one put, with ``done`` as its callback. A bare lock, which is several times cheaper than an event."""

    def __init__(self) -> None:
        self._results: Sequence[PutResult] | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def done(self, results: Sequence[PutResult]) -> None:
        self._results = results
        self._answered.release()

    def wait(self, timeout_s: float) -> Sequence[PutResult] | None:
        """The results; None on timeout."""
        if self._results is None:
            self._answered.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        return self._results
