"""Copies many slices of one buffer into an Arrow array: once, and into a buffer of exactly their size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from dledger_spark.decode.layout import Ints, Mask, gather

_INLINE: Final = np.dtype("V12")
"""The longest slice stored in the view itself; other views hold the position and a 4-byte prefix."""
_LENGTH_BYTES: Final = 4
_PLACE_BITS: Final = 32
"""In the second half of a view, the position is above the buffer's number."""


def slices(buffer: pa.Buffer, begins: Ints, ends: Ints) -> pa.Array:
    """The binary array of ``buffer[begin:end]``. The slices ascend and do not overlap.

    They are described as an array of views, which is then cast. Unlike Arrow's ``take``, which guesses the total size,
    the cast adds up the lengths first. Nothing else sees the views, so the prefixes of long ones stay empty.
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
    """The slices between consecutive bounds (first of all bounds, second of all …), which never descend.

    ``first`` is the first bound: offsets are relative to it and must fit into 32 bits.
    """
    width, count = len(bounds), len(bounds[0])
    offsets = np.empty(width * count, np.int32)
    for number, bound in enumerate(bounds):
        offsets[number::width] = bound - first
    return pa.Array.from_buffers(pa.binary(), width * count - 1, [None, pa.py_buffer(offsets), buffer.slice(first)])


def as_text(array: pa.Array) -> pa.Array:
    """Binary as string. Invalid UTF-8 is replaced by U+FFFD, as elsewhere here."""
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        texts = (None if one is None else one.decode(errors="replace") for one in array.to_pylist())
        return pa.array(list(texts), pa.string())


def with_nulls(array: pa.Array, present: Mask) -> pa.Array:
    """The array's values where ``present``, nulls elsewhere."""
    indices = np.cumsum(present, dtype=np.int64) - 1
    return array.take(pa.array(indices, mask=~present))
