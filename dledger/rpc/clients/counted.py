"""How many elements a request has, before protobuf makes an object of each: four million empty ones fit into 8 MiB.

To make them takes a second, in which the process does nothing else. The fields of a large request are counted first, as
far as they may go; nearly always counting one byte, at memory speed, shows that there cannot be too many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from dledger.errors import InvalidRequestError

_OVERLONG: Final = 0x80
"""A field's first byte, if its number is written longer than need be."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of fields
_VARINT_BYTES_MAX: Final = 10
_OTHER_FIELDS_MAX: Final = 64


class Counted(NamedTuple):
    """A repeated field of bytes, texts or messages (of a number below 16), and how many of them a request may have."""

    field: int
    count_max: int
    what: str


def check_count(data: bytes, counted: Counted) -> None:
    """Raise ``InvalidRequestError`` if a request has too many; one that is malformed may pass."""
    if may_exceed(data, counted.field, counted.count_max) and _exceeds(data, counted.field, counted.count_max):
        raise InvalidRequestError(f"more than {counted.count_max} {counted.what} in one request")


def may_exceed(data: bytes, field: int, count_max: int) -> bool:
    """False if there cannot be more than ``count_max`` of a field, at any depth."""
    tag = field << 3 | _BYTES
    return len(data) > 2 * count_max and data.count(tag) + data.count(tag | _OVERLONG) > count_max


def _exceeds(data: bytes, field: int, count_max: int) -> bool:
    found = 0
    for number, (its_field, _, _) in enumerate(elements(data)):
        found += its_field == field
        if found > count_max or number > 2 * count_max + _OTHER_FIELDS_MAX:
            return True
    return False


def elements(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each field at the top, up to the first that is malformed."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _BYTES:
            size, at = _varint(data, at)
            begin, at = at, at + size
        elif kind == _VARINT:
            begin, (_, at) = at, _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            begin, at = at, at + (4 if kind == _FIXED32 else 8)
        else:  # a group: nobody has used these for twenty years, and what is inside could be anything
            raise InvalidRequestError("a group in a request")
        yield key >> 3, begin, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends; past the end if it has none."""
    value = 0
    for number, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * number
        if byte < _OVERLONG:
            return value, at + number + 1
    return value, len(data) + 1
