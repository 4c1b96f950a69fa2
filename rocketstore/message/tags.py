"""Java's string hash, used for tags in consume queues and for keys in the index."""

from __future__ import annotations

from collections.abc import Sequence
from struct import unpack
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MASK: Final = 0xFFFF_FFFF
_SIGN: Final = 0x8000_0000
_MULTIPLIER: Final = 31
_INVERSE: Final = pow(_MULTIPLIER, -1, 1 << 32)
_UNITS_PER_STEP: Final = 1 << 16
"""How many code units one vectorised step hashes; two tables of this length are kept."""
_CACHED_TAGS_MAX: Final = 8192
_CACHED_TAG_BYTES_MAX: Final = 256
"""Longer tags are not cached, so that the cache stays below 2 MiB."""
_FEWEST_FOR_VECTORS: Final = 8

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


def java_hashes(texts: Sequence[str]) -> list[int]:
    """``java_hash`` of each text; for many texts much faster than one by one."""
    if len(texts) < _FEWEST_FOR_VECTORS:
        return [java_hash(text) for text in texts]
    hashes: list[int] = []
    start = units = 0
    for number, text in enumerate(texts):
        # A character outside the basic plane is two code units; counting every character as two is safe and cheap.
        size = 2 * len(text)
        if units + size > _UNITS_PER_STEP:
            hashes += _hash_step(texts[start:number])
            start, units = number, 0
        units += size
    return hashes + _hash_step(texts[start:])


def _utf16(text: str) -> Sequence[int]:
    """The text's UTF-16 code units."""
    if text.isascii():
        return text.encode()
    encoded = text.encode("utf-16-le", "surrogatepass")
    return unpack(f"<{len(encoded) // 2}H", encoded)


def _powers(base: int) -> NDArray[np.uint32]:
    powers = np.full(_UNITS_PER_STEP + 1, base, dtype=np.uint32)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint32)


_POWERS: Final = _powers(_MULTIPLIER)
_INVERSE_POWERS: Final = _powers(_INVERSE)


def _hash_step(texts: Sequence[str]) -> list[int]:
    """Hash texts of together at most ``_UNITS_PER_STEP`` units, unless it is a single text.

    31 is odd and so has an inverse modulo 2**32. With ``s[n]`` the sum of ``c[i] / 31**i`` over the first n units of
    all concatenated texts, the text from unit a to b hashes to ``31**(b-1) * (s[b] - s[a])``.
    """
    if len(texts) == 1:
        return [java_hash(texts[0])]
    joined = "".join(texts)
    units = np.frombuffer(joined.encode("utf-16-le", "surrogatepass"), dtype="<u2").astype(np.uint32)
    lengths = list(map(len, texts))
    if len(units) != len(joined):
        lengths = [len(text.encode("utf-16-le", "surrogatepass")) // 2 for text in texts]
    sums = np.zeros(len(units) + 1, dtype=np.uint32)
    np.cumsum(units * _INVERSE_POWERS[: len(units)], dtype=np.uint32, out=sums[1:])
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    spans = sums[ends]
    spans[1:] -= sums[ends[:-1]]
    # An empty text at the very start has no unit before its end; its span is 0, so any power will do.
    hashes: list[int] = (_POWERS[np.maximum(ends - 1, 0)] * spans).view(np.int32).tolist()
    return hashes
