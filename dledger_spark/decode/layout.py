"""Where the fields of entries and messages are, for numpy; and how headers are gathered out of a stretch of log.

A *record* here is what one row is made of: an entry (with the message in it, if it holds one), or, in a plain commit
log, a message. Its fixed part is gathered with one copy per record into an array of opaque bytes, which is then viewed
as a structure: gathering into the structured type directly takes 5 to 9 times as long.

Messages with IPv6 hosts have their later fields 12 or 24 bytes further back: there is a layout for each combination.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dledger.errors import invariant
from dledger.layout import ENTRY_HEADER_BYTES, INDEX_UNIT_BYTES
from rocketstore.message.record import HOST_V6_FLAGS, OVERHEAD, SYS_FLAG_AT, body_at

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_ENTRY_FIELDS: Final = [
    ("magic", ">i4"),
    ("size", ">i4"),
    ("index", ">i8"),
    ("term", ">i8"),
    ("position", ">i8"),
    ("channel", ">i4"),
    ("chainCrc", ">u4"),
    ("bodyCrc", ">u4"),
    ("entryBodyLength", ">i4"),
]


def _message_fields(flags: int) -> list[tuple[str, str]]:
    born, store = ("V16" if flags & bit else "V4" for bit in (0x10, 0x20))
    return [
        ("messageSize", ">i4"),
        ("messageMagic", ">i4"),
        ("messageCrc", ">u4"),
        ("queueId", ">i4"),
        ("flag", ">i4"),
        ("queueOffset", ">i8"),
        ("physicalOffset", ">i8"),
        ("sysFlag", ">i4"),
        ("bornTimestamp", ">i8"),
        ("bornIp", born),
        ("bornPort", ">i4"),
        ("storeTimestamp", ">i8"),
        ("storeIp", store),
        ("storePort", ">i4"),
        ("reconsumeTimes", ">i4"),
        ("preparedTransactionOffset", ">i8"),
        ("bodyLength", ">i4"),
    ]


ENTRY: Final = np.dtype(_ENTRY_FIELDS)
MESSAGE: Final = {flags: np.dtype(_message_fields(flags)) for flags in (0, 0x10, 0x20, 0x30)}
"""By the bits of the system flag that say which hosts are IPv6."""
ENTRY_MESSAGE: Final = {flags: np.dtype(_ENTRY_FIELDS + _message_fields(flags)) for flags in MESSAGE}
UNIT: Final = np.dtype([("magic", ">i4"), ("position", ">i8"), ("size", ">i4"), ("index", ">i8"), ("term", ">i8")])
"""An index unit."""

invariant(ENTRY.itemsize == ENTRY_HEADER_BYTES, "entry header", size=ENTRY.itemsize)
invariant(UNIT.itemsize == INDEX_UNIT_BYTES, "index unit", size=UNIT.itemsize)
invariant(all(MESSAGE[one].itemsize == body_at(one) for one in MESSAGE), "message head")
invariant(MESSAGE[0].itemsize == OVERHEAD - 3, "message head between IPv4 hosts")
invariant(MESSAGE[0x30].fields["sysFlag"][1] == SYS_FLAG_AT, "system flag")  # type: ignore[index]  # it has fields
invariant(set(MESSAGE) == {one for one in range(0x40) if one & ~HOST_V6_FLAGS == 0}, "kinds of hosts")


def gather(window: Bytes, starts: Ints, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """The structures at ``starts``, which ascend. Those that the window cuts off are filled up with zeros."""
    width = dtype.itemsize
    last = len(window) - width
    if len(starts) == 0:
        return np.empty(0, dtype)
    if int(starts[-1]) <= last:
        return _gather(window, starts, width).view(dtype)
    inside = int(np.searchsorted(starts, last, side="right")) if last >= 0 else 0
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
