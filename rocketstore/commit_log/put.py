"""Preparation of a message before it is stored, common to both commit logs: delayed messages and queue offsets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from dledger.errors import DLedgerError, ResponseCode
from rocketstore.config import KIB
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    SYS_FLAG_PREPARED,
    DelayLevels,
    Message,
)
from rocketstore.types import QUEUE_NUMBERS_TOPIC, SCHEDULE_TOPIC, Outcome, PutMessageStatus, PutResult, StoredPlace

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
        """Set the results."""
        self._results = results
        self._answered.release()

    def wait(self, timeout_s: float) -> Sequence[PutResult] | None:
        """The results; None on timeout."""
        if self._results is None:
            self._answered.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        return self._results
