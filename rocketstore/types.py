"""Types of the message store: statuses, results, and the data of a record used by dispatch.

Names and meanings are RocketMQ's (4.9.8). All offsets are absolute: a *physical* offset counts bytes of the commit log,
a *queue* offset counts messages of one queue. Times are milliseconds since 1970. Pure data.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Final, Literal, NamedTuple

from dledger.records import RecordLayout, record

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
"""Holds waiting delayed messages; one queue per delay level."""
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
"""Holds prepared transactional messages, which no consumer sees."""
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""Says which of them have ended."""
CHECKED_TOO_OFTEN_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Holds those about which no producer would say anything."""
BROKER_STATE_TOPIC: Final = "RMQ_SYS_BROKER_STATE"
"""Hidden: topics, subscription groups, consumer offsets and delay progress, replicated as messages of the log."""
TERM_START_TOPIC: Final = "RMQ_SYS_TERM_START"
"""Hidden: the body of the entry that starts a leader's term, in a form that every RocketMQ reader can parse."""
QUEUE_NUMBERS_TOPIC: Final = "RMQ_SYS_QUEUE_NUMBERS"
"""Hidden: periodically, the next offset of every queue, so that numbering survives retention."""
TRANSACTION_CHECKS_TOPIC: Final = "RMQ_SYS_TRANS_CHECKS"
"""Hidden: when the producers of open transactions were asked, and how far every commit is known to have its op."""
TIMED_TOPIC: Final = "RMQ_SYS_TIMER"
"""Hidden: messages that wait for a time of their own, and recalls of such messages."""
HIDDEN_TOPICS: Final = frozenset(
    {BROKER_STATE_TOPIC, TERM_START_TOPIC, QUEUE_NUMBERS_TOPIC, TRANSACTION_CHECKS_TOPIC, TIMED_TOPIC}
)
"""Topics that clients may not write to and do not see in lists."""

Outcome = Literal["stored", "not_applied", "unknown"]
QueueKey = tuple[str, int]
"""Topic and queue id."""


class FlushDiskType(StrEnum):
    """When a put on a plain commit log is answered: after its flush, or at once."""

    SYNC_FLUSH = "SYNC_FLUSH"
    ASYNC_FLUSH = "ASYNC_FLUSH"


class ConsumeType(IntEnum):
    """Whether a consumer pulls actively; the numbers are those of RocketMQ's C++ client, as in the next two."""

    CONSUME_ACTIVELY = 0
    CONSUME_PASSIVELY = 1


class MessageModel(IntEnum):
    """Whether each consumer of a group receives all messages, or its share."""

    BROADCASTING = 0
    CLUSTERING = 1


class RequestMode(IntEnum):
    """How a consumer shall get its messages, if the broker divides the queues (RocketMQ 5)."""

    PULL = 0
    POP = 1


class ConsumeFromWhere(IntEnum):
    """Where a group without offsets starts."""

    CONSUME_FROM_LAST_OFFSET = 0
    CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST = 1
    CONSUME_FROM_MIN_OFFSET = 2
    CONSUME_FROM_MAX_OFFSET = 3
    CONSUME_FROM_FIRST_OFFSET = 4
    CONSUME_FROM_TIMESTAMP = 5


class BrokerRole(StrEnum):
    """Masters take writes, slaves refuse them."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


class HaHandshake(StrEnum):
    """Whether master and slave introduce themselves, which only ours do."""

    AUTO = "auto"
    REQUIRED = "required"
    OFF = "off"


class PutMessageStatus(StrEnum):
    """The result of a put. The first four mean that the message is stored."""

    PUT_OK = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    CREATE_MAPEDFILE_FAILED = "CREATE_MAPEDFILE_FAILED"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    OS_PAGECACHE_BUSY = "OS_PAGECACHE_BUSY"
    UNKNOWN_ERROR = "UNKNOWN_ERROR"
    NO_PERMISSION = "NO_PERMISSION"
    """Never returned by a store, as the next six: the broker's access control or a setting refused the message."""
    TOPIC_NOT_FOUND = "TOPIC_NOT_FOUND"
    TOPIC_NOT_CREATED = "TOPIC_NOT_CREATED"
    """By sending to it, this time."""
    NOT_WRITABLE = "NOT_WRITABLE"
    """The topic, or the broker, does not allow writes."""
    QUEUE_NOT_FOUND = "QUEUE_NOT_FOUND"
    WRONG_MESSAGE_TYPE = "WRONG_MESSAGE_TYPE"
    """The topic is for messages of another type."""
    FLOW_CONTROL = "FLOW_CONTROL"
    """Too much of this client, or of all, is under way: send it again later."""
    OUT_OF_ORDER_SEQUENCE = "OUT_OF_ORDER_SEQUENCE"
    """Ours, for numbered messages: a previous one is missing, or another of the same request was refused."""
    UNKNOWN_PRODUCER = "UNKNOWN_PRODUCER"
    """Ours: the producer is unknown, or no longer known."""
    TOO_MANY_PRODUCERS = "TOO_MANY_PRODUCERS"
    """Ours: no room for another producer."""


class MessageType(StrEnum):
    """The type of messages that a topic takes, by RocketMQ's names: UNSPECIFIED and MIXED take all of them."""

    UNSPECIFIED = "UNSPECIFIED"
    NORMAL = "NORMAL"
    FIFO = "FIFO"
    """With a message group (sharding key), in whose order they are consumed."""
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    MIXED = "MIXED"
    PRIORITY = "PRIORITY"


class GetMessageStatus(StrEnum):
    """The result of a get from a queue."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


class StoredPlace(NamedTuple):
    """Where one message is stored: its record's position and length, and its place in its queue."""

    offset: int
    size: int
    queue_id: int
    queue_offset: int
    store_timestamp: int


_SENT = frozenset(
    {
        PutMessageStatus.PUT_OK,
        PutMessageStatus.FLUSH_DISK_TIMEOUT,
        PutMessageStatus.FLUSH_SLAVE_TIMEOUT,
        PutMessageStatus.SLAVE_NOT_AVAILABLE,
    }
)


class PutResult(NamedTuple):
    """The result of a put. A tuple, because one is created per message.

    ``stored`` is set if the message has a place in the log, even if it may not stay there (``outcome`` is
    ``"unknown"``: a quorum or a flush did not respond in time). ``"not_applied"`` means that a retry cannot duplicate
    it. ``reason`` is for people; ``leader`` the address of the broker that can accept the message, if known; ``handle``
    names a timed message until it is due. ``"stored"`` without a place: an earlier request stored the message, and its
    place is no longer remembered.
    """

    status: PutMessageStatus
    stored: StoredPlace | None = None
    outcome: Outcome = "stored"
    reason: str = ""
    leader: str = ""
    handle: str = ""

    @property
    def ok(self) -> bool:
        """Whether the producer may treat the message as sent (as in RocketMQ: the four stored statuses)."""
        return self.status in _SENT


class RecordHead(NamedTuple):
    """The data of a stored record for consume queue, index and long polling (RocketMQ's ``DispatchRequest``).

    ``offset`` and ``size`` are the record's own, not those of a surrounding entry. ``queue_offset`` is -1 for prepared
    and rolled-back transactional messages, which have no place in a queue. ``properties`` is the encoded string.
    """

    topic: str
    queue_id: int
    offset: int
    size: int
    tags_code: int
    store_timestamp: int
    queue_offset: int
    sys_flag: int
    prepared_offset: int
    properties: bytes


class ScannedRecords(NamedTuple):
    """Records in log order, and the start of the next scan (equal to this one's if nothing more is readable)."""

    heads: Sequence[RecordHead]
    next_offset: int


class QueueUnit(NamedTuple):
    """One place in a consume queue."""

    offset: int
    size: int
    tags_code: int


QUEUE_UNIT: Final = RecordLayout((("offset", "i8"), ("size", "i4"), ("tags_code", "i8")))
"""A stored unit."""


@record(frozen=True, slots=True)
class GetResult:
    """The result of a get. ``records`` are whole stored records; ``next_offset`` is where to continue."""

    status: GetMessageStatus
    next_offset: int
    min_offset: int
    max_offset: int
    records: tuple[bytes, ...] = ()
    suggest_slave: bool = False
