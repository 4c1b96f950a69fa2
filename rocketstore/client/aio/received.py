"""A message as received by a consumer: the stored record, decoded on demand. A simple consumer acknowledges
each of its own (``PoppedMessage``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar, overload

from dledger.errors import DLedgerError
from dledger.remoting.codes import RequestError
from rocketstore.client.aio.errors import BadAnswerError, UnreadableBodyError
from rocketstore.message import message
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import PROPERTY_RETRY_TOPIC, PROPERTY_UNIQUE_KEY, SYS_FLAG_COMPRESSED, Message
from rocketstore.message.properties import PROPERTY_CHECK_POINT, find_property
from rocketstore.message.record import (
    CRC_MASK,
    HEAD_V4,
    HEAD_V4_BYTES,
    HOST_V6_FLAGS,
    LENGTHS_BYTES,
    MESSAGE_MAGICS,
    OVERHEAD,
    body_behind_v6,
    decode_record,
    properties_of,
    queue_place_of,
)
from rocketstore.remoting.headers import read_header
from rocketstore.remoting.pop import CheckPoint, PopAnswer
from rocketstore.remoting.topics import MessageQueue

_HEAD: Final = HEAD_V4.struct("size", "magic", "crc", "queue_id", "queue_offset", "sys_flag", "body_length")
DECOMPRESSED_BYTES_MAX: Final = 64 << 20
_M = TypeVar("_M", bound="ReceivedMessage")


class ReceivedMessage:
    """One message of a queue; read-only. ``record`` is the stored record, ``decode`` decodes it completely."""

    __slots__ = ("_body_at", "_body_end", "_message", "_sys_flag", "queue_id", "queue_offset", "record")

    def __init__(self, record: bytes, head: tuple[int, ...], start: int, end: int) -> None:
        self.record = record
        self.queue_id = head[3]
        self.queue_offset = head[4]
        self._sys_flag = head[5]
        self._body_at = start
        self._body_end = end
        self._message: Message | None = None

    def __repr__(self) -> str:
        return f"<message {self.queue_offset} of queue {self.queue_id} of {self.topic!r}, {len(self.record)} bytes>"

    @property
    def raw_body(self) -> bytes:
        """The body as stored, possibly compressed by the producer."""
        return self.record[self._body_at : self._body_end]

    @property
    def body(self) -> bytes:
        """The decompressed body. LZ4 and Zstandard need the extra ``compression``; else ``UnreadableBodyError``."""
        body = self.record[self._body_at : self._body_end]
        return decompress(body, self._sys_flag) if self._sys_flag & SYS_FLAG_COMPRESSED else body

    @property
    def properties(self) -> dict[str, str]:
        return self.decode().properties

    @property
    def topic(self) -> str:
        return self.decode().topic

    @property
    def tags(self) -> str:
        """The tag, or the empty string."""
        return self.property("TAGS")

    @property
    def keys(self) -> list[str]:
        """The business keys."""
        return [one for one in self.property("KEYS").split(" ") if one]

    @property
    def message_id(self) -> str:
        """The id that its producer gave it, as in the result of its send; of a message without one, ``offset_id``."""
        return self.property(PROPERTY_UNIQUE_KEY) or self.offset_id

    @property
    def offset_id(self) -> str:
        """The offset message id: the host that stored it, and its position in the log."""
        message = self.decode()
        return offset_message_id(message.store_host, message.offset)

    @property
    def store_timestamp(self) -> int:
        """When the broker stored it, in milliseconds since 1970."""
        return self.decode().store_timestamp

    @property
    def born_timestamp(self) -> int:
        """When the producer created it, in milliseconds since 1970."""
        return self.decode().born_timestamp

    def property(self, name: str) -> str:
        """One property, or the empty string; cheaper than decoding all. Raises ``CorruptRecordError`` as ``decode``."""
        if self._message is not None:
            return self._message.properties.get(name, "")
        return find_property(properties_of(self.record), name) or ""

    def decode(self) -> Message:
        """The whole message, its body as stored. Raises ``CorruptRecordError`` for an invalid record."""
        if self._message is None:
            self._message = decode_record(self.record, check_crc=False)  # checked when it was received
        return self._message


@overload
def split_records(records: bytes, *, check_crc: bool = True) -> list[ReceivedMessage]: ...


@overload
def split_records(records: bytes, *, check_crc: bool = True, kind: type[_M]) -> list[_M]: ...


def split_records(
    records: bytes, *, check_crc: bool = True, kind: type[ReceivedMessage] = ReceivedMessage
) -> Sequence[ReceivedMessage]:
    """The messages in a pull response, as objects of ``kind``.

    Raises ``BadAnswerError`` for anything but whole, undamaged records.
    """
    found: list[ReceivedMessage] = []
    add, unpack, crc32 = found.append, _HEAD.unpack_from, zlib.crc32
    at, end = 0, len(records)
    while at < end:
        if end - at < OVERHEAD:
            raise BadAnswerError(f"the answer to a pull ends with {end - at} bytes that are not a record")
        head = unpack(records, at)
        size = head[0]
        if size < OVERHEAD or size > end - at or head[1] not in MESSAGE_MAGICS:
            raise BadAnswerError(f"the answer to a pull has no record at byte {at} of {end}")
        record = records[at : at + size]
        start, body_bytes = HEAD_V4_BYTES, head[6]
        if head[5] & HOST_V6_FLAGS:
            start, body_bytes = body_behind_v6(record, head[5])
        stop = start + body_bytes
        if body_bytes < 0 or stop + LENGTHS_BYTES > size:
            raise BadAnswerError(f"the record at byte {at} of the answer to a pull has an impossible body length")
        if check_crc and crc32(record[start:stop]) & CRC_MASK != head[2]:
            raise BadAnswerError(f"the body of the message at queue offset {head[4]} does not match its CRC")
        add(kind(record, head, start, stop))
        at += size
    return found


def plain_body(message: Message, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> tuple[bytes, str]:
    """The decompressed body of a stored message; or the stored one, and why it cannot be decompressed."""
    if not message.sys_flag & SYS_FLAG_COMPRESSED:
        return message.body, ""
    try:
        return decompress(message.body, message.sys_flag, bytes_max), ""
    except BadAnswerError as error:
        return message.body, str(error)


def decompress(body: bytes, sys_flag: int, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> bytes:
    """A compressed body. Raises ``BadAnswerError`` for a damaged one, and beyond ``bytes_max``.

    ``UnreadableBodyError`` without the module that its compression needs.
    """
    try:
        return message.decompress(body, sys_flag, bytes_max)
    except message.UnknownCompressionError as error:
        raise UnreadableBodyError(f"{error}, or use raw_body") from error
    except message.WrongBodyError as error:
        raise BadAnswerError(str(error)) from None


class ConsumedMessage(ReceivedMessage):
    """Messages as consumers get them: the stored record, decoded on demand, and the queue that it came from.

    One message of a queue; read-only.
    """

    __slots__ = ("queue", "tries_here")

    queue: MessageQueue
    """Where it came from: topic, broker, number. For a message that comes again, that is the retry topic's."""
    tries_here: int
    """How often this consumer has tried it before and kept it."""

    @property
    def topic(self) -> str:
        """The topic that it was sent to, also if it comes again."""
        return self.property(PROPERTY_RETRY_TOPIC) or self.queue.topic

    @property
    def attempts(self) -> int:
        """How often it was delivered before, and sent back or failed."""
        return self.decode().reconsume_times + self.tries_here


def split_pulled(records: bytes, queue: MessageQueue) -> list[ConsumedMessage]:
    """The messages in the answer to a pull. Raises ``BadAnswerError`` for anything but whole, undamaged records."""
    try:
        messages = split_records(records, kind=ConsumedMessage)
    except DLedgerError as error:
        raise BadAnswerError(str(error)) from error
    for one in messages:
        one.queue = queue
        one.tries_here = 0
    return messages


_RETRY: Final = "%RETRY%"


class PoppedMessage(ReceivedMessage):
    """One message of a topic, for one consumer and a time; read-only."""

    __slots__ = ("point", "queue", "received_at")

    queue: MessageQueue
    """Where it came from: topic, broker, number. For a message that comes again, that is a topic of the group's own."""
    point: CheckPoint
    """The broker's name for this delivery."""
    received_at: float
    """In the loop's time."""

    @property
    def topic(self) -> str:
        """The topic that it was sent to, also if it comes again."""
        return self.property(PROPERTY_RETRY_TOPIC) or self.queue.topic

    @property
    def attempts(self) -> int:
        """How often it was delivered before."""
        return self.decode().reconsume_times

    @property
    def expires_at(self) -> float:
        """When it becomes visible to others, in the loop's time, unless it was acknowledged or its time was changed."""
        return self.received_at + self.point.invisible_time / 1000


def read_popped(
    fields: Mapping[str, str], body: bytes, topic: str, broker: str, received_at: float
) -> list[PoppedMessage]:
    """The messages of an answer to POP_MESSAGE. Raises ``BadAnswerError``."""
    try:
        answer = read_header(PopAnswer, fields)
        starts = _starts(answer.start_offset_info)
        messages = split_records(body, kind=PoppedMessage)
        for one in messages:
            text = one.property(PROPERTY_CHECK_POINT)
            stored = queue_place_of(one.record).topic  # who wants no more of it need not decode it
            one.point = CheckPoint.parse(text) if text else _point(one, stored, answer, starts, broker)
            one.queue = MessageQueue(stored, broker, one.queue_id)
            one.received_at = received_at
    except (DLedgerError, RequestError) as error:
        raise BadAnswerError(f"the answer to a pop for {topic}: {error}") from error
    return messages


def _starts(info: str) -> dict[tuple[bool, int], int]:
    found: dict[tuple[bool, int], int] = {}
    for one in info.split(";") if info else ():
        try:
            retry, queue_id, start = one.split(" ")
            found[retry != "0", int(queue_id)] = int(start)
        except ValueError:
            raise BadAnswerError(f"startOffsetInfo {info[:64]!r} cannot be understood") from None
    return found


def _point(
    message: PoppedMessage, stored: str, answer: PopAnswer, starts: Mapping[tuple[bool, int], int], broker: str
) -> CheckPoint:
    """Apache's brokers leave it to clients."""
    is_retry = stored.startswith(_RETRY)
    start = starts.get((is_retry, message.queue_id), message.queue_offset)
    times = answer.pop_time, answer.invisible_time, answer.revive_qid
    return CheckPoint(start, *times, is_retry, broker, message.queue_id, message.queue_offset)


def by_broker(messages: Iterable[PoppedMessage]) -> dict[str, list[PoppedMessage]]:
    """Messages by the name of the brokers that must hear of them."""
    found: dict[str, list[PoppedMessage]] = {}
    for one in messages:
        found.setdefault(one.queue.broker_name, []).append(one)
    return found
