"""Finds the end of the content of a sparse file.

It reads with ``pread``: a bad sector in a mapping raises SIGBUS, which ends the process.
"""

from __future__ import annotations

import os
from typing import Final

_CHUNK: Final = bytes(512 * 1024)


def non_zero_end(fd: int, offset: int, size: int) -> int:
    """The end of the last byte other than 0 in ``[offset, size)``; ``offset`` if there is none. Raises ``OSError``.

    Skips holes and blocks never written, and searches from the end, so it costs only the zeros written there.
    """
    for start, end in reversed(extents(fd, offset, size)):
        found = _last_non_zero(fd, start, end)
        if found:
            return found
    return offset


def extents(fd: int, offset: int, size: int) -> list[tuple[int, int]]:
    """The written ranges from ``offset`` on, in order."""
    found = []
    while offset < size:
        try:
            start = max(offset, os.lseek(fd, offset, os.SEEK_DATA))
        except OSError:  # ENXIO: no data from here on
            break
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, min(offset, size)))
    return found


def _last_non_zero(fd: int, start: int, end: int) -> int:
    while end > start:
        low = max(start, end - len(_CHUNK))
        chunk = os.pread(fd, end - low, low)
        if chunk != _CHUNK[: end - low]:
            return low + len(chunk.rstrip(b"\0"))
        end = low
    return 0
