"""Messages of a ``SendRequest``, encoded by hand: what ``pb.Message`` would give takes three times as long to build.

Every field is its tag, for text and bytes their length, and its value. Most values come again and again (topics, queue
numbers, the millisecond, lengths), so that encoding them is a look-up.
"""

from __future__ import annotations

from functools import lru_cache

from dledger.errors import InvalidRequestError

_CACHED = 4096
_FIELD_OF_REQUEST = b"\x0a"
"""``SendRequest.messages``."""
_TOPIC, _BODY, _QUEUE_ID, _FLAG = b"\x0a", b"\x12", b"\x20", b"\x28"
_SYS_FLAG, _BORN_TIMESTAMP, _RECONSUME_TIMES, _PROPERTY_STRING = b"\x30", b"\x38", b"\x40", b"\x4a"
"""The tags of ``Message``'s fields: number * 8, plus 2 where a length follows."""
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

    Raises ``InvalidRequestError`` for numbers that do not fit their fields, ``UnicodeEncodeError`` for a topic that is
    no text.
    """
    parts: tuple[bytes, ...] = (
        _text(_TOPIC, topic),
        _number(_BODY, len(body)),
        body,
        _number(_PROPERTY_STRING, len(properties)),
        properties,
        _number(_QUEUE_ID, queue_id),
        _number(_BORN_TIMESTAMP, born_timestamp_ms, 64),
    )
    if flag or sys_flag or reconsume_times:
        parts += _number(_FLAG, flag), _number(_SYS_FLAG, sys_flag), _number(_RECONSUME_TIMES, reconsume_times)
    return b"".join((_number(_FIELD_OF_REQUEST, sum(map(len, parts))), *parts))


@lru_cache(_CACHED)
def _text(tag: bytes, text: str) -> bytes:
    encoded = text.encode()
    return _number(tag, len(encoded)) + encoded


@lru_cache(_CACHED)
def _number(tag: bytes, value: int, bits: int = 32) -> bytes:
    """A tag and a variable-length integer, seven bits per byte, the lowest first; a negative one takes ten bytes."""
    if not -1 << bits - 1 <= value < 1 << bits - 1:
        raise InvalidRequestError(f"{value} does not fit into {bits} bits")
    value &= _U64
    encoded = bytearray(tag)
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
