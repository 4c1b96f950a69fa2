"""The end of a log in one number."""

from __future__ import annotations

from typing import cast
from zlib import crc32

import pytest

from rocketstore.ha.protocol import ZEROS_BYTES_MAX, HaLog, tail_of


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


def test_blanks_do_not_hide_what_is_before_them() -> None:
    """Two logs that end with a file, whose blanks are longer than what is compared, are told apart by their records."""
    blank = bytes(12)
    assert tail_of(cast(HaLog, Bytes(b"abcd" + blank)), 16, 4) == (4, crc32(b"abcd"))
    assert tail_of(cast(HaLog, Bytes(b"abce" + blank)), 16, 4) == (4, crc32(b"abce"))
    assert tail_of(cast(HaLog, Bytes(b"abcde" + blank)), 16, 4) == (4, crc32(b"bcde"))


def test_only_so_many_zeros_are_passed_over() -> None:
    """A file may be a gigabyte of them, and the slaves' event loop waits."""

    class Zeros(Bytes):
        segment_bytes = 1 << 30
        read = 0

        def stretch(self, offset: int, bytes_max: int) -> bytes:
            self.read += bytes_max
            return bytes(bytes_max)

    zeros = Zeros(b"")
    assert tail_of(cast(HaLog, zeros), 1 << 30, 4) == (4, crc32(bytes(4)))
    assert zeros.read <= ZEROS_BYTES_MAX + 4
