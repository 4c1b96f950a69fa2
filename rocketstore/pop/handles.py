"""Handles: what a client sends back to name one delivery of a message (P5).

They say themselves what they are for, so that a new leader understands those of earlier ones. To clients they are
opaque: base64url, without padding, of

    version 1 byte | flags 1 byte | queue u16 | offset u64 | attempt u16 | number u64 | generation u64 |
    length of the group u8, group | length of the topic u8, topic | CRC-32C of all of it u32

Flag 1: the message is in the group's retry topic of ``topic``. The checksum finds damage, and texts that are no
handles; it is no signature: a client's permissions on the group decide whether it may settle a message.
"""

from __future__ import annotations

import base64
import binascii
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from dledger.errors import InvalidRequestError

HANDLE_CHARS_MAX: Final = 512
_VERSION: Final = 1
_RETRY: Final = 1
_HEAD: Final = Struct(">BBHQHQQ")
_SUM: Final = Struct(">I")
_ATTEMPT_MAX: Final = 0xFFFF
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_NAMES_MAX: Final = 1024
"""Groups with topics whose names are remembered in either form."""


class Handle(NamedTuple):
    """The fields of a handle."""

    group: str
    topic: str
    """As the consumer knows it, of a message in the retry topic, too."""
    is_retry: bool
    queue_id: int
    offset: int
    attempt: int
    """1 for the first delivery; at most 65,535 is written."""
    number: int
    """Each delivery of a queue's messages, and each change of a lease, has a higher one."""
    generation: int
    """Of the window."""


class InvalidHandleError(InvalidRequestError):
    """Raised when a text is no handle."""


def encode_handle(handle: Handle) -> str:
    """The text."""
    head = _HEAD.pack(
        _VERSION,
        _RETRY * handle.is_retry,
        handle.queue_id,
        handle.offset,
        min(handle.attempt, _ATTEMPT_MAX),
        handle.number,
        handle.generation,
    )
    data = head + _encoded_names(handle.group, handle.topic)
    return base64.urlsafe_b64encode(data + _SUM.pack(crc32c(data))).rstrip(b"=").decode()


def decode_handle(text: str) -> Handle:
    """Raises ``InvalidHandleError``."""
    if len(text) > HANDLE_CHARS_MAX:
        raise InvalidHandleError(f"a handle has at most {HANDLE_CHARS_MAX} characters, this one {len(text)}")
    try:
        padded = text.encode("ascii").translate(_STANDARD) + b"=" * (-len(text) % 4)
        whole = binascii.a2b_base64(padded, strict_mode=True)
    except ValueError as error:  # binascii's is one, too
        raise InvalidHandleError("a handle is base64url: send it back as it was received") from error
    data, checksum = whole[: -_SUM.size], whole[-_SUM.size :]
    if len(data) < _HEAD.size + 2 or data[0] != _VERSION or _SUM.pack(crc32c(data)) != checksum:
        raise InvalidHandleError("invalid or damaged handle: send it back as it was received")
    _, flags, queue_id, offset, attempt, number, generation = _HEAD.unpack_from(data)
    group, topic = _names(data[_HEAD.size :])
    return Handle(group, topic, bool(flags & _RETRY), queue_id, offset, attempt, number, generation)


@lru_cache(_NAMES_MAX)
def _encoded_names(group: str, topic: str) -> bytes:
    names = group.encode(), topic.encode()
    return b"".join(b"%c%b" % (len(one), one) for one in names)


@lru_cache(_NAMES_MAX)
def _names(data: bytes) -> tuple[str, str]:
    group, rest = _text(data)
    topic, rest = _text(rest)
    if rest:
        raise InvalidHandleError("invalid handle: it is too long")
    return group, topic


def _text(data: bytes) -> tuple[str, bytes]:
    if not data or len(data) <= data[0]:
        raise InvalidHandleError("invalid handle: it is too short")
    end = 1 + data[0]
    try:
        return data[1:end].decode(), data[end:]
    except UnicodeDecodeError as error:
        raise InvalidHandleError("invalid handle: its names are damaged") from error
