"""Headers of entries and messages as structures, gathered from a stretch of log.

A *record* here becomes one row: an entry (with its message, if any), or in a plain commit log a message. Its fixed part
is gathered with one copy per record into an array of opaque bytes, which is then viewed as a structure: gathering into
the structured type directly takes 5 to 9 times as long.

In messages with IPv6 hosts, later fields are shifted by 12 or 24 bytes: there is a layout for each combination.

Many slices of one buffer are copied into an Arrow array: once, and into a buffer of exactly their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dledger import records as entries
from dledger.records import ENTRY_HEADER_BYTES
from rocketstore.message.record import HEAD

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_ENTRY_HEAD: Final = entries.ENTRY.prefixed("entry_")
ENTRY: Final = _ENTRY_HEAD.dtype()
MESSAGE: Final = {flags: head.dtype() for flags, head in HEAD.items()}
"""Layouts by the bits of the system flag for IPv6 hosts."""
ENTRY_MESSAGE: Final = {flags: _ENTRY_HEAD.followed_by(head).dtype() for flags, head in HEAD.items()}


def gather(window: Bytes, starts: Ints, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """The structures at ``starts``, which ascend. Those truncated by the window's end are padded with zeros."""
    width = dtype.itemsize
    last = len(window) - width
    if len(starts) == 0:
        return np.empty(0, dtype)
    if int(starts[-1]) <= last:
        return _gather(window, starts, width).view(dtype)
    inside = int(np.searchsorted(starts, last, side="right"))
    first = int(starts[inside])
    padded = np.zeros(int(starts[-1]) - first + width, np.uint8)
    padded[: len(window) - first] = window[first:]
    tail = _gather(padded, starts[inside:] - first, width)
    if not inside:
        return tail.view(dtype)
    return np.concatenate((_gather(window, starts[:inside], width), tail)).view(dtype)


def _gather(window: Bytes, starts: Ints, width: int) -> NDArray[np.void]:
    everywhere = np.ndarray((len(window) - width + 1,), f"V{width}", window.data, strides=(1,))
    gathered: NDArray[np.void] = everywhere[starts]
    return gathered


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


def positions_of(units: NDArray[np.void], first_index: int, position: int) -> Ints | None:
    """The starts of the entries in these index units, and the end of the last one.

    None unless they start with entry ``first_index`` at ``position`` and are contiguous.
    """
    count = len(units)
    positions = np.empty(count + 1, np.int64)
    positions[:-1] = units["position"]
    sizes = units["size"].astype(np.int64)
    if not count or int(positions[0]) != position or int(sizes.min()) < ENTRY_HEADER_BYTES:
        return None
    positions[-1] = positions[-2] + sizes[-1]
    indexes = units["index"].astype(np.int64)
    if not np.array_equal(np.diff(positions), sizes) or not np.array_equal(
        indexes, np.arange(first_index, first_index + count)
    ):
        return None
    return positions
