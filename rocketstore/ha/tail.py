"""The end of a log in one number, to notice that two logs of the same length are not the same."""

from __future__ import annotations

from typing import Final
from zlib import crc32

from rocketstore.ha.ports import HaLog
from rocketstore.ha.wire import TAIL_BYTES

ZEROS_BYTES_MAX: Final = 16 * 1024 * 1024
"""How much of the blank at a file's end is passed over, to compare records instead of zeros."""


def tail_of(log: HaLog, end: int, length: int = TAIL_BYTES) -> tuple[int, int]:
    """How many bytes before ``end``, at most ``length``, are compared, and their CRC-32; (0, 0) if there are none.

    Zeros at the end do not count: all blanks look alike. Not more than one file has: the file before may have been
    removed at one side. Raises ``CorruptLogError``, ``DiskError``.
    """
    if end <= log.min_offset:
        return 0, 0
    file_begin = (end - 1) - (end - 1) % log.segment_bytes
    end = _without_zeros(log, file_begin, end)
    begin = max(end - length, file_begin)
    crc, at = 0, begin
    while at < end:
        data = log.stretch(at, end - at)
        if not data:
            return 0, 0
        crc = crc32(data, crc)
        at += len(data)
    return end - begin, crc


def _without_zeros(log: HaLog, begin: int, end: int) -> int:
    """Where the zeros before ``end`` begin; ``end`` if there are too many."""
    at = end
    while at > begin and end - at < ZEROS_BYTES_MAX:
        first = max(begin, at - TAIL_BYTES)
        left = log.stretch(first, at - first).rstrip(b"\0")
        if left:
            return first + len(left)
        at = first
    return end
