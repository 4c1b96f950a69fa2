"""Many slices of one buffer as an Arrow array, copied together by Arrow: once, and into a buffer of just their size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from dledger_spark.decode.layout import Ints, Mask, gather

_INLINE: Final = np.dtype("V12")
"""What a view holds itself of a slice that is no longer; of others it holds the place, and 4 bytes of prefix."""
_LENGTH_BYTES: Final = 4
_PLACE_BITS: Final = 32
"""In the second half of a view the place is above the number of its buffer."""


def slices(buffer: pa.Buffer, begins: Ints, ends: Ints) -> pa.Array:
    """The binary array of ``buffer[begin:end]``. The slices ascend and do not overlap.

    They are described as an array of views, and this is cast. Unlike Arrow's ``take``, which guesses the size of what
    it gathers, the cast adds lengths up first. Nothing else sees the views, so the prefixes of long ones stay empty.
    """
    if not len(begins):
        return pa.array([], pa.binary())
    first, lengths = int(begins[0]), ends - begins
    views = np.empty((len(lengths), 2), "<i8")
    views[:, 0] = lengths
    views[:, 1] = (begins - first) << _PLACE_BITS
    if int(lengths.min()) <= _INLINE.itemsize:
        short = np.flatnonzero(lengths <= _INLINE.itemsize)
        inline = gather(np.frombuffer(buffer, np.uint8), begins[short], _INLINE)
        views.view(np.uint8)[short, _LENGTH_BYTES:] = inline.view(np.uint8).reshape(len(short), -1)
    parts = [None, pa.py_buffer(views), buffer.slice(first, int(ends[-1]) - first)]
    return pa.Array.from_buffers(pa.binary_view(), len(lengths), parts).cast(pa.binary())


def interleaved(buffer: pa.Buffer, first: int, bounds: Sequence[Ints]) -> pa.Array:
    """The slices between all the bounds in a row (first of all bounds, second of all …), which never descend.

    ``first`` is the first bound: offsets are counted from there and must fit 32 bits.
    """
    width, count = len(bounds), len(bounds[0])
    offsets = np.empty(width * count, np.int32)
    for number, bound in enumerate(bounds):
        offsets[number::width] = bound - first
    return pa.Array.from_buffers(pa.binary(), width * count - 1, [None, pa.py_buffer(offsets), buffer.slice(first)])


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
