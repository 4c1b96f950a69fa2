"""The end of a log in one number."""

from __future__ import annotations

from typing import cast
from zlib import crc32

import pytest

from rocketstore.ha.ports import HaLog
from rocketstore.ha.tail import tail_of


class Bytes:
    """A log in memory, of files of 16 bytes."""

    segment_bytes = 16
    min_offset = 0

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stretch(self, offset: int, bytes_max: int) -> bytes:
        """At most to the end of the file."""
        return self._data[offset : min(offset + bytes_max, offset - offset % 16 + 16)]


@pytest.mark.parametrize("end", [1, 16, 17, 31, 32])
def test_all_of_the_last_file_is_compared_also_if_it_is_full(end: int) -> None:
    """Otherwise a slave whose log ends with a file may have any other messages."""
    data = bytes(range(end))
    begin = (end - 1) // 16 * 16
    assert tail_of(cast(HaLog, Bytes(data)), end) == (end - begin, crc32(data[begin:]))
