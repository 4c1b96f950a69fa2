"""Encodes the messages of a ``SendRequest`` by hand, because building ``pb.Message`` takes three times as long.

Every field is its tag, for text and bytes the length, and its value. Most values recur (topics, queue numbers, the
millisecond, lengths), so encoding everything before, between and after body and properties takes one lookup each.
"""

from __future__ import annotations

from functools import lru_cache

from dledger.errors import InvalidRequestError

_CACHED = 4096
_FIELD_OF_REQUEST = b"\x0a"
"""``SendRequest.messages``."""
_TOPIC, _BODY, _QUEUE_ID, _FLAG = b"\x0a", b"\x12", b"\x20", b"\x28"
_SYS_FLAG, _BORN_TIMESTAMP, _RECONSUME_TIMES, _PROPERTY_STRING = b"\x30", b"\x38", b"\x40", b"\x4a"
"""The tags of ``Message``'s fields: number * 8, plus 2 for fields with a length."""
_U64 = (1 << 64) - 1


def encode_message(  # noqa: PLR0913  # the fields of the message
    topic: str,
    body: bytes,
    properties: bytes,
    queue_id: int,
    born_timestamp_ms: int,
    *,
    flag: int = 0,
    sys_flag: int = 0,
    reconsume_times: int = 0,
) -> bytes:
    """One message as a field of a ``SendRequest``; ``properties`` is a property string.

    Raises ``InvalidRequestError`` for numbers that do not fit into their fields, ``UnicodeEncodeError`` for an invalid
    topic.
    """
    last = _last(queue_id, born_timestamp_ms)
    if flag or sys_flag or reconsume_times:
        last += _number(_FLAG, flag) + _number(_SYS_FLAG, sys_flag) + _number(_RECONSUME_TIMES, reconsume_times)
    first, between = _before(topic, len(body), len(properties), len(last))
    return b"".join((first, body, between, properties, last))


@lru_cache(_CACHED)
def _before(topic: str, body: int, properties: int, last: int) -> tuple[bytes, bytes]:
    """The bytes before body and properties of these lengths, in a message with ``last`` more bytes after them."""
    encoded = topic.encode()
    first = _number(_TOPIC, len(encoded)) + encoded + _number(_BODY, body)
    between = _number(_PROPERTY_STRING, properties)
    return _number(_FIELD_OF_REQUEST, len(first) + body + len(between) + properties + last) + first, between


@lru_cache(_CACHED)
def _last(queue_id: int, born_timestamp_ms: int) -> bytes:
    return _number(_QUEUE_ID, queue_id) + _number(_BORN_TIMESTAMP, born_timestamp_ms, 64)


@lru_cache(_CACHED)
def _number(tag: bytes, value: int, bits: int = 32) -> bytes:
    """A tag and a variable-length integer, seven bits per byte, lowest first; a negative one takes ten bytes."""
    if not -1 << bits - 1 <= value < 1 << bits - 1:
        raise InvalidRequestError(f"{value} does not fit into {bits} bits")
    value &= _U64
    encoded = bytearray(tag)
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
