"""Headers of entries and messages as structures, gathered from a stretch of log.

A *record* here becomes one row: an entry (with its message, if any), or in a plain commit log a message. Its fixed part
is gathered with one copy per record into an array of opaque bytes, which is then viewed as a structure: gathering into
the structured type directly takes 5 to 9 times as long.

In messages with IPv6 hosts, later fields are shifted by 12 or 24 bytes: there is a layout for each combination.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dledger import layout as entries
from dledger.layout import ENTRY_HEADER_BYTES
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
