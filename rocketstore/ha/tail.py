"""The end of a log in one number, to notice that two logs of the same length are not the same."""

from __future__ import annotations

from typing import Final
from zlib import crc32

from rocketstore.ha.ports import HaLog
from rocketstore.ha.wire import TAIL_BYTES

_PIECE_BYTES: Final = TAIL_BYTES


def tail_of(log: HaLog, end: int, length: int = TAIL_BYTES) -> tuple[int, int]:
    """How many bytes before ``end``, at most ``length``, are compared, and their CRC-32.

    Not more than one file has: a file's begin may have been removed at one side. Raises ``CorruptLogError``,
    ``DiskError``.
    """
    if end <= log.min_offset:
        return 0, 0
    begin = max(end - length, (end - 1) - (end - 1) % log.segment_bytes)
    crc, at = 0, begin
    while at < end:
        data = log.stretch(at, end - at)
        if not data:
            return 0, 0
        crc = crc32(data, crc)
        at += len(data)
    return end - begin, crc
