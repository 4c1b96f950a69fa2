"""Java's string hash of many texts at once, with NumPy, which clients do without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rocketstore.message.tags import java_hash

_MULTIPLIER: Final = 31
_INVERSE: Final = pow(_MULTIPLIER, -1, 1 << 32)
_UNITS_PER_STEP: Final = 1 << 16
"""How many code units one vectorised step hashes; two tables of this length are kept."""
_FEWEST_FOR_VECTORS: Final = 8


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
