"""What both commit logs do to a message before it is stored: the rewrite of delayed ones, and queue offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dledger.errors import DLedgerError, ResponseCode
from rocketstore.config import KIB
from rocketstore.message.delay import DelayLevels
from rocketstore.message.message import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    SYS_FLAG_PREPARED,
    Message,
)
from rocketstore.types import QUEUE_NUMBERS_TOPIC, SCHEDULE_TOPIC, Outcome, PutMessageStatus, PutResult, StoredPlace

TAKES_NO_QUEUE_OFFSET: Final = SYS_FLAG_PREPARED
"""The bit that prepared and rolled-back messages have and others do not: they get offset 0 and no place in a queue."""


def prepare(message: Message, delay_levels: DelayLevels) -> None:
    """Send a delayed message to the queue of its level in ``SCHEDULE_TOPIC``, noting where it really belongs.

    Levels beyond the highest are capped. Prepared and rolled-back messages are not delayed, nor is a message that was
    rewritten before (it is submitted again).
    """
    properties = message.properties
    if PROPERTY_DELAY not in properties or message.topic == SCHEDULE_TOPIC:
        return
    level = delay_levels.cap(message.delay_level)
    if level == 0 or message.sys_flag & TAKES_NO_QUEUE_OFFSET:
        return
    message.properties = {
        **properties,
        PROPERTY_DELAY: str(level),  # a level beyond the highest is stored as that, as in RocketMQ
        PROPERTY_REAL_TOPIC: message.topic,
        PROPERTY_REAL_QUEUE_ID: str(message.queue_id),
    }
    message.topic = SCHEDULE_TOPIC
    message.queue_id = level - 1


NUMBERING_BYTES_MAX: Final = 128 * KIB
"""Of a body with queue numbers."""


def numbering_messages(bodies: Sequence[bytes], now_ms: int) -> list[Message]:
    """The messages that say where queues' numbering is."""
    return [Message(QUEUE_NUMBERS_TOPIC, body, born_timestamp=now_ms) for body in bodies]


PRODUCER_STATUSES: Final = {
    ResponseCode.OUT_OF_ORDER_SEQUENCE: PutMessageStatus.OUT_OF_ORDER_SEQUENCE,
    ResponseCode.UNKNOWN_PRODUCER: PutMessageStatus.UNKNOWN_PRODUCER,
    ResponseCode.TOO_MANY_PRODUCERS: PutMessageStatus.TOO_MANY_PRODUCERS,
}
"""What refuses numbered messages."""


class QueueOffsets:
    """The next queue offset of every queue, in memory. Under the put lock.

    Offsets are assigned to a run of messages that is written together, and kept only once it is written: a message
    whose write fails does not use one up.
    """

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: dict[tuple[str, int], int] = {}
        """(topic, queue id) to the next offset."""

    def replace(self, offsets: dict[tuple[str, int], int]) -> None:
        """Take over a table, as a copy."""
        self.table = dict(offsets)

    def assign(self, messages: Sequence[Message]) -> dict[tuple[str, int], int]:
        """Set ``queue_offset`` in each message; gives what ``keep`` makes the queues' next offsets."""
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
        """The messages that ``assign`` gave this for are written."""
        self.table.update(following)


def stored_result(message: Message) -> PutResult:
    """The result of a message that is stored as its fields say."""
    stored = StoredPlace(message.offset, message.size, message.queue_id, message.queue_offset, message.store_timestamp)
    return PutResult(PutMessageStatus.PUT_OK, stored)


def status_of_producer(error: DLedgerError) -> PutMessageStatus:
    """The status of a batch that its producer's numbers have refused."""
    return PRODUCER_STATUSES.get(error.code, PutMessageStatus.MESSAGE_ILLEGAL)


def refused(status: PutMessageStatus, reason: str, outcome: Outcome = "not_applied") -> PutResult:
    """The result of a message that is not stored, or not known to be."""
    return PutResult(status, None, outcome, reason)
