"""Single fields of protobuf messages, strictly decoded, for the codecs of members and of clients."""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from dledger.errors import InvalidRequestError
from dledger.types import LogIndex

NUMBER_LIMIT: Final = 1 << 62
"""Terms, indexes and positions at or above this are forged or damaged: no log gets that far."""
NAME_BYTES_MAX: Final = 1024
"""The longest cluster id, group, node id or address accepted."""

_ProtoT = TypeVar("_ProtoT", bound=ProtoMessage)


def parse(kind: type[_ProtoT], data: bytes | memoryview) -> _ProtoT:
    """Parse protobuf bytes. Raises ``InvalidRequestError`` if they are not a ``kind``."""
    try:
        return kind.FromString(data)  # type: ignore[arg-type]  # a memoryview is accepted, too, whatever the stubs say
    except DecodeError as error:
        raise InvalidRequestError(f"{len(data)} bytes are not a valid {kind.DESCRIPTOR.name}") from error


def index(value: int, field: str) -> LogIndex:
    """An entry index or -1."""
    if not -1 <= value < NUMBER_LIMIT:
        raise InvalidRequestError(f"{field}={value} is not a valid index")
    return LogIndex(value)


def name(value: str, field: str) -> str:
    """An identifier or address of acceptable length."""
    if len(value) > NAME_BYTES_MAX:
        raise InvalidRequestError(f"{field} has {len(value)} characters; at most {NAME_BYTES_MAX} are allowed")
    return value


def varint(value: int) -> bytes:
    """The bytes of a base-128 number, such as a field's length."""
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
