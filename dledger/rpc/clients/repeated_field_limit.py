"""Counts a request's elements before protobuf makes an object of each: four million empty ones fit into 8 MiB.

Creating them takes a second, during which the process does nothing else. So the fields of a large request are counted
first, up to their limit; nearly always, counting one byte value at memory speed proves that there cannot be too many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from dledger.errors import InvalidRequestError

_OVERLONG: Final = 0x80
"""The first byte of a field whose number is encoded longer than necessary."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of fields
_VARINT_BYTES_MAX: Final = 10
_OTHER_FIELDS_MAX: Final = 64


class RepeatedFieldLimit(NamedTuple):
    """A repeated field of bytes, texts or messages (numbered below 16), and its limit per request."""

    field: int
    count_max: int
    what: str


def check_count(data: bytes, limit: RepeatedFieldLimit) -> None:
    """Raise ``InvalidRequestError`` if a request has too many; a malformed one may pass."""
    if may_exceed(data, limit.field, limit.count_max) and _exceeds(data, limit.field, limit.count_max):
        raise InvalidRequestError(f"more than {limit.count_max} {limit.what} in one request")


def may_exceed(data: bytes, field: int, count_max: int) -> bool:
    """False if a field cannot occur more than ``count_max`` times, at any depth."""
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
    """Number, begin and end of each top-level field, up to the first malformed one."""
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
        else:  # a group: obsolete for twenty years, with unbounded contents
            raise InvalidRequestError("a group in a request")
        yield key >> 3, begin, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and its end; an end past the data if there is none."""
    value = 0
    for number, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * number
        if byte < _OVERLONG:
            return value, at + number + 1
    return value, len(data) + 1
