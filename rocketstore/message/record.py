"""The bytes of a stored message, as RocketMQ lays them out. All integers are big-endian and signed.

     0 total size i32   20 queue offset i64      48 born host 8 (IPv6: 20)    76 prepared transaction offset i64
     4 magic i32        28 physical offset i64   56 store timestamp i64       84 body length i32, body
     8 body CRC i32     36 system flag i32       64 store host 8 (IPv6: 20)      topic length i8 (V2: i16), topic
    12 queue id i32     40 born timestamp i64    72 reconsume times i32          properties length i16, properties
    16 flag i32

Fields behind an IPv6 host stand 12 bytes later. Bits 0x10 and 0x20 of the system flag say which host is one. The CRC is
zlib's over the body as stored, without its top bit, and 0 for an empty body; nothing else of a record is protected.

A blank, ``[what remains of the file i32][magic]``, ends a file.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, error
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from dledger.errors import InvalidRequestError
from dledger.records import RecordLayout
from rocketstore.message.message import SYS_FLAG_BORN_HOST_V6, SYS_FLAG_STORE_HOST_V6, HostAddress, Message
from rocketstore.message.properties import PROPERTIES_BYTES_MAX, decode_properties, encode_properties
from rocketstore.types import StoredPlace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

MESSAGE_MAGIC: Final = -626_843_481
"""0xDAA320A7."""
MESSAGE_MAGIC_V2: Final = -626_843_477
"""0xDAA320AB: RocketMQ 5, topics longer than 127 bytes. Read, never written."""
MESSAGE_MAGICS: Final = frozenset((MESSAGE_MAGIC, MESSAGE_MAGIC_V2))
BLANK_MAGIC: Final = -875_286_124
"""0xCBD43194."""

IPV4_BYTES: Final = 4
IPV6_BYTES: Final = 16
_SIZE: Final = Struct(">i")
_LENGTH: Final = Struct(">H")


def _layout(flags: int) -> RecordLayout:
    born = f"V{IPV6_BYTES if flags & SYS_FLAG_BORN_HOST_V6 else IPV4_BYTES}"
    store = f"V{IPV6_BYTES if flags & SYS_FLAG_STORE_HOST_V6 else IPV4_BYTES}"
    return RecordLayout(
        (
            ("size", "i4"),
            ("magic", "i4"),
            ("crc", "i4"),
            ("queue_id", "i4"),  # RocketMQ's format; int32 in broker.proto and Spark's schema, too
            ("flag", "i4"),
            ("queue_offset", "i8"),
            ("physical_offset", "i8"),
            ("sys_flag", "i4"),
            ("born_timestamp", "i8"),
            ("born_ip", born),
            ("born_port", "i4"),
            ("store_timestamp", "i8"),
            ("store_ip", store),
            ("store_port", "i4"),
            ("reconsume_times", "i4"),
            ("prepared_offset", "i8"),
            ("body_length", "i4"),
        )
    )


HEAD: Final = {flags: _layout(flags) for flags in (0, 0x10, 0x20, 0x30)}
"""The part before the body, by the bits of the system flag for IPv6 hosts."""
HEAD_V4: Final = HEAD[0]
BLANK_HEAD: Final = RecordLayout((("size", "i4"), ("magic", "i4")))
"""The start of a blank, and likewise of a record."""
CRC_AT: Final = HEAD_V4.at("crc")
QUEUE_OFFSET_AT: Final = HEAD_V4.at("queue_offset")
PHYSICAL_OFFSET_AT: Final = HEAD_V4.at("physical_offset")
SYS_FLAG_AT: Final = HEAD_V4.at("sys_flag")
STORE_TIMESTAMP_AT: Final = HEAD_V4.at("store_timestamp")
STORE_TIMESTAMP_AT_V6: Final = HEAD[SYS_FLAG_BORN_HOST_V6].at("store_timestamp")
"""The store timestamp's position if the born host is an IPv6 address."""
HEAD_V4_BYTES: Final = HEAD_V4.size
_TOPIC_LENGTH_BYTES: Final = {MESSAGE_MAGIC: 1, MESSAGE_MAGIC_V2: 2}
_PROPERTIES_LENGTH_BYTES: Final = 2
LENGTHS_BYTES: Final = _TOPIC_LENGTH_BYTES[MESSAGE_MAGIC] + _PROPERTIES_LENGTH_BYTES
"""The length fields of topic and properties, in a record of version 1."""
OVERHEAD: Final = HEAD_V4_BYTES + LENGTHS_BYTES
"""A record's length without body, topic and properties, with IPv4 hosts."""
TOPIC_BYTES_MAX: Final = 127
_LONG_TOPIC_BYTES_MAX: Final = 0x7FFF
CRC_MASK: Final = 0x7FFF_FFFF
HOST_V6_FLAGS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6

BLANK: Final = BLANK_HEAD.struct()
OFFSETS: Final = HEAD_V4.part("queue_offset", "physical_offset")
"""At ``QUEUE_OFFSET_AT``."""
CRC: Final = HEAD_V4.part("crc")
QUEUE_OFFSET: Final = HEAD_V4.part("queue_offset")
PHYSICAL_OFFSET: Final = HEAD_V4.part("physical_offset")
TIMESTAMP: Final = HEAD_V4.part("store_timestamp")
_BODY_LENGTH: Final = HEAD_V4.part("body_length")
"""Directly before the body."""
_BODY_HEAD: Final = HEAD_V4.struct("magic", "sys_flag", "body_length")
_PLACE: Final = HEAD_V4.struct("size", "magic", "queue_id", "queue_offset", "physical_offset")
_FLAGS_BY_LENGTHS: Final = {(4, 4): 0, (16, 4): 0x10, (4, 16): 0x20, (16, 16): 0x30}
_CACHED_TOPICS_MAX: Final = 4096

_topics: dict[str, bytes] = {}


class CorruptRecordError(InvalidRequestError):
    """Raised for bytes that are not a complete, undamaged record."""


_STRUCTS: Final = {flags: head.struct() for flags, head in HEAD.items()}
_PACKS: Final[dict[int, Callable[..., bytes]]] = {flags: head.pack for flags, head in _STRUCTS.items()}
_LENGTHS: Final = tuple(length.to_bytes(2, "big") for length in range(256))


def is_same_message(one: bytes, other: bytes) -> bool:
    """Whether two records are of one message in one queue; a log that was exported has it at another position."""
    behind = PHYSICAL_OFFSET_AT + PHYSICAL_OFFSET.size
    return one[:PHYSICAL_OFFSET_AT] == other[:PHYSICAL_OFFSET_AT] and one[behind:] == other[behind:]


def body_crc(body: bytes) -> int:
    """The CRC of a body as stored in a record."""
    return crc32(body) & CRC_MASK


def store_timestamp_at(sys_flag: int) -> int:
    """The position of the store timestamp in a record with this system flag."""
    return STORE_TIMESTAMP_AT_V6 if sys_flag & SYS_FLAG_BORN_HOST_V6 else STORE_TIMESTAMP_AT


def stored_at(head: bytes) -> int | None:
    """A record's store timestamp (ms since 1970), from its first 76 bytes or more; None if it is not a record."""
    if len(head) < STORE_TIMESTAMP_AT_V6 + TIMESTAMP.size or BLANK.unpack_from(head)[1] not in MESSAGE_MAGICS:
        return None
    return store_timestamp(head)


def store_timestamp(head: bytes) -> int:
    """The same, for bytes known to be a record."""
    found: int = TIMESTAMP.unpack_from(head, store_timestamp_at(head[SYS_FLAG_AT + 3]))[0]
    return found


def body_at(sys_flag: int) -> int:
    """The position of the body in a record with this system flag."""
    return _STRUCTS[sys_flag & HOST_V6_FLAGS].size


def place_of(head: bytes, offset: int) -> StoredPlace | None:
    """The place of a record's message, from its first ``OVERHEAD`` bytes; None if no record starts at ``offset``."""
    size, magic, queue_id, queue_offset, physical_offset = _PLACE.unpack_from(head)
    if magic not in MESSAGE_MAGICS or physical_offset != offset:
        return None
    return StoredPlace(offset, size, queue_id, queue_offset, store_timestamp(head))


def body_behind_v6(record: bytes, sys_flag: int) -> tuple[int, int]:
    """Where the body begins in a record with this system flag, and its length, -1 if the record is too short."""
    at = body_at(sys_flag)
    return at, _BODY_LENGTH.unpack_from(record, at - _BODY_LENGTH.size)[0] if at <= len(record) else -1


def tail_of(data: bytes, magic: int, body: int, body_bytes: int, end: int) -> tuple[int, int, int, int]:
    """The end of the body, the bounds of the topic and the start of the properties, in a record that ends at ``end``.

    Raises ``CorruptRecordError`` unless the stored lengths of body, topic and properties fill the record exactly.
    """
    at = body + body_bytes
    if body_bytes < 0 or at + LENGTHS_BYTES > end:
        raise CorruptRecordError(f"the body's length, {body_bytes}, does not fit")
    if magic == MESSAGE_MAGIC:
        topic, length, longest = at + 1, data[at], TOPIC_BYTES_MAX
    elif magic == MESSAGE_MAGIC_V2:
        topic, length, longest = at + 2, data[at] << 8 | data[at + 1], _LONG_TOPIC_BYTES_MAX
    else:
        raise CorruptRecordError(f"magic {magic & 0xFFFFFFFF:#x} is not that of a message")
    topic_end = topic + length
    properties = topic_end + _PROPERTIES_LENGTH_BYTES
    if not 0 < length <= longest or properties > end:
        raise CorruptRecordError(f"the topic's length, {_signed(length, longest)}, does not fit")
    length = data[topic_end] << 8 | data[topic_end + 1]
    if length != end - properties or length > PROPERTIES_BYTES_MAX:
        raise CorruptRecordError(f"the properties' length, {_signed(length, PROPERTIES_BYTES_MAX)}, does not fit")
    return at, topic, topic_end, properties


def _signed(length: int, longest: int) -> int:
    """The value of a length field that was read without its sign."""
    return length if length <= longest else length - 2 * (longest + 1)


def properties_of(record: bytes) -> bytes:
    """A whole record's encoded properties, without decoding anything else. Raises ``CorruptRecordError``."""
    magic, sys_flag, body_bytes = _BODY_HEAD.unpack_from(record)
    body = HEAD_V4_BYTES
    if sys_flag & HOST_V6_FLAGS:
        body, body_bytes = body_behind_v6(record, sys_flag)
    return record[tail_of(record, magic, body, body_bytes, len(record))[3] :]


_RECONSUME_TIMES: Final = HEAD_V4.part("reconsume_times")
_RECONSUME_TIMES_AT: Final = {flags: head.at("reconsume_times") for flags, head in HEAD.items()}


def queue_offset_of(record: bytes) -> int:
    """The queue offset in the head of a record."""
    found: int = QUEUE_OFFSET.unpack_from(record, QUEUE_OFFSET_AT)[0]
    return found


def reconsume_times_of(record: bytes) -> int:
    """How often a message was delivered before, from the head of its record."""
    at = _RECONSUME_TIMES_AT[record[SYS_FLAG_AT + 3] & HOST_V6_FLAGS]
    found: int = _RECONSUME_TIMES.unpack_from(record, at)[0]
    return found


class QueuePlace(NamedTuple):
    """Where a record is in its queue."""

    topic: str
    queue_id: int
    queue_offset: int


def queue_place_of(record: bytes) -> QueuePlace:
    """The place of a whole record, without decoding anything else. Raises ``CorruptRecordError``."""
    magic, sys_flag, body_bytes = _BODY_HEAD.unpack_from(record)
    body = HEAD_V4_BYTES
    if sys_flag & HOST_V6_FLAGS:
        body, body_bytes = body_behind_v6(record, sys_flag)
    _, topic, topic_end, _ = tail_of(record, magic, body, body_bytes, len(record))
    _, _, queue_id, queue_offset, _ = _PLACE.unpack_from(record)
    return QueuePlace(record[topic:topic_end].decode(errors="replace"), queue_id, queue_offset)


class Tails(NamedTuple):
    """The results of ``tail_of`` for many records at once."""

    topic_begins: Ints
    topic_ends: Ints
    property_begins: Ints
    property_lengths: Ints

    def fill(self, magics: Ints, ends: Ints) -> NDArray[np.bool_]:
        """Which of these records ``tail_of`` accepts, provided that their bodies fit."""
        lengths = self.topic_ends - self.topic_begins
        whole: NDArray[np.bool_] = self.property_begins + self.property_lengths == ends
        whole &= (lengths > 0) & (lengths <= _LONG_TOPIC_BYTES_MAX)
        whole &= (lengths <= TOPIC_BYTES_MAX) | (magics != MESSAGE_MAGIC)
        whole &= self.property_lengths <= PROPERTIES_BYTES_MAX
        return whole


def tails_of(window: NDArray[np.uint8], magics: Ints, body_ends: Ints) -> Tails:
    """The tails behind these bodies. Places outside the window are clamped to it."""

    def bytes_at(places: Ints) -> Ints:
        return window.take(places, mode="clip").astype("i8")

    lengths, begins = bytes_at(body_ends), body_ends + 1
    is_long = magics == MESSAGE_MAGIC_V2
    if is_long.any():
        lengths[is_long] = lengths[is_long] << 8 | bytes_at(begins[is_long])
        begins[is_long] += 1
    ends = begins + lengths
    return Tails(begins, ends, ends + _PROPERTIES_LENGTH_BYTES, bytes_at(ends) << 8 | bytes_at(ends + 1))


def encode_record(message: Message, *, queue_offset: int = 0, physical_offset: int = 0) -> bytes:
    """The message's record; sets the message's ``size``, ``body_crc`` and the host bits of its ``sys_flag``.

    Raises ``InvalidRequestError`` for anything that does not fit into a record: a topic or property string too long,
    hosts that are not IP addresses, numbers out of range. ``checks`` applies the configured size limits.
    """
    return b"".join(_encode(message, queue_offset, physical_offset))


def encode_record_buffer(message: Message) -> bytearray:
    """Like ``encode_record`` with both offsets 0, to be set by ``place_record``."""
    return bytearray().join(_encode(message, 0, 0))


def place_record(record: bytearray, message: Message, queue_offset: int, physical_offset: int) -> None:
    """Set the fields known only under the put lock in an encoded record: its offsets and its store timestamp."""
    OFFSETS.pack_into(record, QUEUE_OFFSET_AT, queue_offset, physical_offset)
    TIMESTAMP.pack_into(record, store_timestamp_at(message.sys_flag), message.store_timestamp)


def _encode(message: Message, queue_offset: int, physical_offset: int) -> tuple[bytes, ...]:
    body = message.body
    topic = _topics.get(message.topic) or _topic_field(message.topic)
    properties, message.checked_properties = message.checked_properties, None
    if properties is None:
        properties = encode_properties(message.properties) if message.properties else message.property_string
    properties_bytes = len(properties)
    born_ip, born_port = message.born_host
    store_ip, store_port = message.store_host
    flags = _FLAGS_BY_LENGTHS.get((len(born_ip), len(store_ip)), -1)
    if flags < 0:
        raise InvalidRequestError("the born host or the store host is not an IP address of 4 or 16 bytes")
    if properties_bytes > PROPERTIES_BYTES_MAX:
        raise InvalidRequestError(f"the properties take {properties_bytes} bytes; at most {PROPERTIES_BYTES_MAX} fit")
    sys_flag = message.sys_flag & ~HOST_V6_FLAGS | flags
    crc = crc32(body) & CRC_MASK
    body_bytes = len(body)
    size = OVERHEAD - 1 + body_bytes + len(topic) + properties_bytes
    if flags:
        size += _STRUCTS[flags].size - HEAD_V4_BYTES
    try:
        head = _PACKS[flags](
            size,
            MESSAGE_MAGIC,
            crc,
            message.queue_id,
            message.flag,
            queue_offset,
            physical_offset,
            sys_flag,
            message.born_timestamp,
            born_ip,
            born_port,
            message.store_timestamp,
            store_ip,
            store_port,
            message.reconsume_times,
            message.prepared_offset,
            body_bytes,
        )
    except error as problem:
        raise InvalidRequestError(f"a number of the message does not fit its field: {problem}") from problem
    message.size = size
    message.body_crc = crc
    message.sys_flag = sys_flag
    length = _LENGTHS[properties_bytes] if properties_bytes < 256 else properties_bytes.to_bytes(2, "big")
    return head, body, topic, length, properties


def _topic_field(topic: str) -> bytes:
    """The topic preceded by its length; cached, because topics are few."""
    try:
        encoded = topic.encode()
    except UnicodeEncodeError as problem:
        raise InvalidRequestError(f"the topic cannot be encoded as UTF-8: {problem.reason}") from problem
    if not 0 < len(encoded) <= TOPIC_BYTES_MAX:
        raise InvalidRequestError(f"a topic must have 1 to {TOPIC_BYTES_MAX} bytes, this one has {len(encoded)}")
    if len(_topics) >= _CACHED_TOPICS_MAX:
        _topics.clear()
    field = _topics[topic] = bytes((len(encoded),)) + encoded
    return field


def decode_record(record: bytes, *, check_crc: bool = True) -> Message:
    """Decode one whole record. Raises ``CorruptRecordError`` for anything that is not exactly one."""
    if len(record) < OVERHEAD:
        raise CorruptRecordError(f"{len(record)} bytes are too few for a record")
    head = _STRUCTS[record[SYS_FLAG_AT + 3] & HOST_V6_FLAGS]
    at = head.size
    if len(record) < at:
        raise CorruptRecordError(f"{len(record)} bytes are too few for a record with IPv6 hosts")
    (
        size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp, born_ip, born_port,
        store_timestamp, store_ip, store_port, reconsume_times, prepared_offset, body_bytes,
    ) = head.unpack_from(record)  # fmt: skip
    if size != len(record):
        raise CorruptRecordError(f"the record claims {size} bytes, but there are {len(record)}")
    body_end, topic_begin, topic_end, properties_begin = tail_of(record, magic, at, body_bytes, size)
    try:
        topic = str(record[topic_begin:topic_end], "utf-8")
    except UnicodeDecodeError as problem:
        raise CorruptRecordError(f"the topic is not valid UTF-8: {problem.reason}") from problem
    body = bytes(record[at:body_end])
    if check_crc and crc != crc32(body) & CRC_MASK:
        raise CorruptRecordError(f"the body of {body_bytes} bytes does not match its CRC")
    return Message(
        topic,
        body,
        queue_id,
        decode_properties(bytes(record[properties_begin:])),
        flag,
        sys_flag,
        born_timestamp,
        HostAddress(born_ip, born_port),
        HostAddress(store_ip, store_port),
        reconsume_times,
        prepared_offset,
        store_timestamp,
        queue_offset,
        physical_offset,
        size,
        crc,
    )


def with_property(record: bytes, name: str, value: str) -> bytes:
    """The record with one more property, behind the others; the record itself if it would have too many bytes of them.

    Decoders take the last of several properties of one name. Raises ``CorruptRecordError``.
    """
    before = len(properties_of(record))
    end = len(record)
    separator = b"\x02" if before and record[end - 1] != 0x02 else b""
    added = b"%b%b\x01%b\x02" % (separator, name.encode(), value.encode())
    if before + len(added) > PROPERTIES_BYTES_MAX:
        return record
    (size,) = _SIZE.unpack_from(record)
    if size != end:
        raise CorruptRecordError(f"a record of {end} bytes says that it has {size}")
    at = end - before - _LENGTH.size
    return b"".join(
        (_SIZE.pack(end + len(added)), record[4:at], _LENGTH.pack(before + len(added)), record[end - before :], added)
    )
