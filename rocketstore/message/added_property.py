"""Adds a property to a stored record for a reader, without decoding it: the CRC covers the body only."""

from __future__ import annotations

from struct import Struct
from typing import Final

from rocketstore.message.properties import PROPERTIES_BYTES_MAX
from rocketstore.message.record import CorruptRecordError, properties_of

_SIZE: Final = Struct(">i")
_LENGTH: Final = Struct(">H")


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
