"""Many slices of one buffer as an Arrow array, copied together by Arrow's own gather."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipeline.decode.layout import Ints, Mask


def slices(buffer: pa.Buffer, begins: Ints, ends: Ints, absent: Mask | None = None) -> pa.Array:
    """The binary array of ``buffer[begin:end]``. The slices ascend and do not overlap; ``absent`` ones are null.

    The buffer is seen as an array of twice as many slices, those wanted and those between; every second one is taken.
    """
    first, count = (int(begins[0]), len(begins)) if len(begins) else (0, 0)
    if not count:
        return pa.array([], pa.binary())
    return interleaved(buffer, first, (begins, ends)).take(even_numbers(count, absent))


def interleaved(buffer: pa.Buffer, first: int, bounds: Sequence[Ints]) -> pa.Array:
    """The slices between all the bounds in a row (first of all bounds, second of all …), which never descend.

    ``first`` is the first bound: offsets are counted from there and must fit 32 bits.
    """
    width, count = len(bounds), len(bounds[0])
    offsets = np.empty(width * count, np.int32)
    for number, bound in enumerate(bounds):
        offsets[number::width] = bound - first
    return pa.Array.from_buffers(pa.binary(), width * count - 1, [None, pa.py_buffer(offsets), buffer.slice(first)])


def even_numbers(count: int, absent: Mask | None = None) -> pa.Array:
    """0, 2, 4 …; null where ``absent``."""
    return pa.array(np.arange(0, 2 * count, 2, dtype=np.int64), mask=absent)


def as_text(array: pa.Array) -> pa.Array:
    """Binary as string. What is no UTF-8 gets U+FFFD in the place of the bytes that are none, as elsewhere here."""
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        texts = (None if one is None else one.decode(errors="replace") for one in array.to_pylist())
        return pa.array(list(texts), pa.string())


def with_nulls(array: pa.Array, present: Mask) -> pa.Array:
    """The array's values in the places that are ``present``, null in the others."""
    indices = np.cumsum(present, dtype=np.int64) - 1
    return array.take(pa.array(indices, mask=~present))
