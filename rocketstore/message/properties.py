"""The property string, ``name 0x01 value 0x02 name 0x01 value`` in UTF-8, and what properties say about a message.

Written without a final 0x02, as in RocketMQ since 4.9.1; read with or without one. Reading never fails: malformed
segments are skipped, as in RocketMQ, and invalid UTF-8 is read as U+FFFD.

Tags are Java's string hash in consume queues, and so are keys in the index.

Some properties say what the broker has done with a message, and only brokers set them. A broker that believed a
client's would lose messages: one that is named as the origin of a copy (``POP_ORIGIN``) counts as settled for the next
leader. They are taken out of what clients send instead of refused, since clients send on what they got with all its
properties, as RocketMQ's do with messages to be retried.

Of which type a message is, its properties decide as in RocketMQ 5: a topic may be for one type only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from struct import unpack
from typing import Final

from dledger.access.rules import DEAD_PREFIX, RETRY_PREFIX
from dledger.errors import InvalidRequestError
from rocketstore.message.message import (
    PROPERTY_CHECK_TIMES,
    PROPERTY_DELAY,
    PROPERTY_PRIORITY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_S,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION,
    SYS_FLAG_TRANSACTION,
    Message,
)
from rocketstore.types import MessageType

PROPERTIES_BYTES_MAX: Final = 32_767
"""The maximum of the record's length field, an i16."""


def join_properties(properties: Mapping[str, str]) -> str:
    """The property string; empty values, which no reader would see, are left out.

    Raises ``InvalidRequestError`` for names and values that would be read back differently: an empty name, a 0x01 in a
    name, or a 0x02 anywhere, with which a producer could inject properties that only the broker may set.
    """
    segments = [f"{name}\x01{value}" for name, value in properties.items() if value]
    text = "\x02".join(segments)
    if segments and text.count("\x02") != len(segments) - 1:
        raise InvalidRequestError("a property contains 0x02, which separates properties")
    if "" in properties:
        raise InvalidRequestError("a property has an empty name")
    if text.count("\x01") != len(segments):
        for name in properties:
            if "\x01" in name:
                raise InvalidRequestError(f"the property name {name!r} contains 0x01, which ends a name")
    return text


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """The bytes of the property string. Raises ``InvalidRequestError``, see ``join_properties``."""
    if not properties:
        return b""
    try:
        return join_properties(properties).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"a property cannot be encoded as UTF-8: {error.reason}") from error


def decode_properties(encoded: bytes) -> dict[str, str]:
    """The properties; of duplicates, the later one counts."""
    properties: dict[str, str] = {}
    if not encoded:
        return properties
    for segment in encoded.decode(errors="replace").split("\x02"):
        name, _, value = segment.partition("\x01")
        if name and value:
            properties[name] = value
    return properties


def find_property(encoded: bytes, name: str) -> str | None:
    """The value of one property, without decoding the others; None if it is absent or empty."""
    value = find_property_bytes(encoded, name.encode(errors="replace") + b"\x01")
    return None if value is None else value.decode(errors="replace")


def find_property_bytes(encoded: bytes, name_and_separator: bytes) -> bytes | None:
    """Like ``find_property``, for the hot path: ``name_and_separator`` ends with 0x01."""
    at = encoded.rfind(name_and_separator)
    while at >= 0:
        start = at + len(name_and_separator)
        if at == 0 or encoded[at - 1] == 2:
            stop = encoded.find(b"\x02", start)
            value = encoded[start:] if stop < 0 else encoded[start:stop]
            if value:
                return value
        at = encoded.rfind(name_and_separator, 0, start - 1)
    return None


_MASK: Final = 0xFFFF_FFFF
_SIGN: Final = 0x8000_0000
_CACHED_TAGS_MAX: Final = 8192
_CACHED_TAG_BYTES_MAX: Final = 256
"""Longer tags are not cached, so that the cache stays below 2 MiB."""

_tags_codes: dict[bytes, int] = {}


def java_hash(text: str, before: int = 0) -> int:
    """``String.hashCode``: ``h = 31 * h + c`` over UTF-16 code units, wrapping as an i32.

    ``before``: the hash of what precedes the text.
    """
    value = before
    for unit in _utf16(text):
        value = (31 * value + unit) & _MASK
    return value - ((value & _SIGN) << 1)


def tags_code(text: str) -> int:
    """A tag's code in consume queues: its Java hash, 0 without a tag."""
    return java_hash(text)


def tags_code_of(encoded: bytes) -> int:
    """Like ``tags_code``, for the tag's UTF-8 bytes; cached, because producers repeat their tags."""
    code = _tags_codes.get(encoded)
    if code is None:
        code = java_hash(encoded.decode(errors="replace"))
        if len(_tags_codes) >= _CACHED_TAGS_MAX:
            _tags_codes.clear()
        if len(encoded) <= _CACHED_TAG_BYTES_MAX:
            _tags_codes[encoded] = code
    return code


def _utf16(text: str) -> Sequence[int]:
    """The text's UTF-16 code units."""
    if text.isascii():
        return text.encode()
    encoded = text.encode("utf-16-le", "surrogatepass")
    return unpack(f"<{len(encoded) // 2}H", encoded)


PROPERTY_ORIGIN: Final = "POP_ORIGIN"
PROPERTY_CHECK_POINT: Final = "POP_CK"
PROPERTY_ORIGIN_ID: Final = "ORIGIN_MESSAGE_ID"
PROPERTY_DEAD_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
PROPERTY_DEAD_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
PROPERTY_DEAD_QUEUE: Final = "DLQ_ORIGIN_QUEUE_ID"
PROPERTY_DEAD_OFFSET: Final = "DLQ_ORIGIN_OFFSET"
PROPERTY_DEAD_REASON: Final = "DLQ_REASON"
PROPERTY_TIMER_ORIGIN: Final = "TIMER_ORIGIN"
PROPERTY_TIMER_RECALL: Final = "TIMER_RECALL"
OF_ONE_DELIVERY: Final = frozenset(
    {
        PROPERTY_ORIGIN,
        PROPERTY_CHECK_POINT,
        PROPERTY_DEAD_TOPIC,
        PROPERTY_DEAD_ID,
        PROPERTY_DEAD_QUEUE,
        PROPERTY_DEAD_OFFSET,
        PROPERTY_DEAD_REASON,
    }
)
"""Properties that say how a message came to its place; copies that go elsewhere do not have them."""
BROKER_ONLY: Final = OF_ONE_DELIVERY | {
    PROPERTY_REAL_TOPIC,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_TIMER_ORIGIN,
    PROPERTY_TIMER_RECALL,
    PROPERTY_CHECK_TIMES,
    "TRAN_PREPARED_QUEUE_OFFSET",
    "TIMER_ENQUEUE_MS",
    "TIMER_DEQUEUE_MS",
    "TIMER_ROLL_TIMES",
    "TIMER_DEL_UNIQKEY",
    "MSG_REGION",
    "TRACE_ON",
}
"""Nothing that a client sends has one of these. ``TIMER_OUT_MS`` is none of them, as in RocketMQ: copies keep it."""
_OF_RETRIES: Final = frozenset({PROPERTY_RETRY_TOPIC, PROPERTY_ORIGIN_ID})
"""A client that cannot send a message back sends it to the group's retry topic itself, and says where it was."""
_HEAD: Final = rb"(?:POP_|ORIGIN_|DLQ_|RETRY_|REAL_|TIMER_|TRA|MSG_)"
"""The begin of each of those names, and of a few others. One search is ten times as fast as one for each name."""
_BEGINS: Final = re.compile(_HEAD).match
_HAS: Final = re.compile(rb"\x02" + _HEAD).search


def is_broker_only(name: str, topic: str) -> bool:
    """Whether no client may give this property to a message for ``topic``."""
    return name in BROKER_ONLY or (name in _OF_RETRIES and not topic.startswith((RETRY_PREFIX, DEAD_PREFIX)))


def take_out(message: Message) -> None:
    """Take them out of a client's message, whichever form its properties have."""
    text = message.property_string
    if text:
        if _BEGINS(text) or _HAS(text):
            kept = [one for one in text.split(b"\x02") if not is_broker_only(_name(one), message.topic)]
            message.property_string = b"\x02".join(kept)
        return
    forbidden = [name for name in message.properties if is_broker_only(name, message.topic)]
    for name in forbidden:
        del message.properties[name]


def _name(segment: bytes) -> str:
    return segment.partition(b"\x01")[0].decode(errors="replace")


_DELAYS: Final = (PROPERTY_DELAY, PROPERTY_TIMER_DELIVER_MS, PROPERTY_TIMER_DELAY_S, PROPERTY_TIMER_DELAY_MS)
_KINDS: Final = (
    *((name, MessageType.DELAY) for name in _DELAYS),
    (PROPERTY_SHARDING_KEY, MessageType.FIFO),
    (PROPERTY_PRIORITY, MessageType.PRIORITY),
)
"""The first that a message has counts."""
_ENCODED: Final = tuple((name.encode() + b"\x01", kind) for name, kind in _KINDS)
_PRIORITY_DIGITS_MAX: Final = 9
ANY_TYPE: Final = frozenset({MessageType.UNSPECIFIED, MessageType.MIXED})


def type_of(message: Message) -> MessageType:
    """Normal, FIFO, delay, transaction or priority."""
    if message.sys_flag & SYS_FLAG_TRANSACTION:
        return MessageType.TRANSACTION
    text = message.property_string
    if text:
        if find_property_bytes(text, _TRANSACTION) in _TRUE:
            return MessageType.TRANSACTION
        return next((kind for name, kind in _ENCODED if find_property_bytes(text, name)), MessageType.NORMAL)
    properties = message.properties
    if properties.get(PROPERTY_TRANSACTION, "").lower() == "true":
        return MessageType.TRANSACTION
    return next((kind for name, kind in _KINDS if properties.get(name)), MessageType.NORMAL)


def priority_of(message: Message) -> int:
    """A message's priority, the higher the sooner; -1 if it has none that is a whole number, 0 or more."""
    text = message.property_string
    found = find_property(text, PROPERTY_PRIORITY) if text else message.properties.get(PROPERTY_PRIORITY)
    is_number = found is not None and found.isascii() and found.isdigit() and len(found) <= _PRIORITY_DIGITS_MAX
    return int(found) if found is not None and is_number else -1


def type_problem(expected: MessageType, message: Message) -> str:
    """Why a topic for messages of type ``expected`` does not take this one, in RocketMQ's words; empty if it does."""
    if expected in ANY_TYPE or (found := type_of(message)) is expected:
        return ""
    return f"TopicMessageType validate failed, the expected type is {expected}, but actual type is {found}"


_TRANSACTION: Final = PROPERTY_TRANSACTION.encode() + b"\x01"
_TRUE: Final = frozenset({b"true", b"TRUE", b"True"})
