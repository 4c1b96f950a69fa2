"""The property string: ``name 0x01 value 0x02 name 0x01 value``, in UTF-8.

Written without a final 0x02, as in RocketMQ since 4.9.1; read with or without one. Reading never fails: malformed
segments are skipped, as in RocketMQ, and invalid UTF-8 is read as U+FFFD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dledger.errors import InvalidRequestError

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
