"""Java's string hash, used for tags in consume queues and for keys in the index."""

from __future__ import annotations

from collections.abc import Sequence
from struct import unpack
from typing import Final

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
