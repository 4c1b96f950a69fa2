"""What a slave makes of the bytes that arrive: whole, sound records, whatever the frames were."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketstore.ha.slave import DamagedStreamError, ReceivedLog, ReceivedStretch
from rocketstore.message.message import DelayLevels, HostAddress, Message
from rocketstore.message.record import BLANK, BLANK_MAGIC, encode_record
from tests.unit.rocketstore.commit_log.support import FILE_BYTES

LEVELS = DelayLevels.parse("1s 5s")


def records(begin: int, count: int, *, file_bytes: int = FILE_BYTES, v6: bool = False) -> bytes:
    """The log from ``begin`` on, with ``count`` records and the blanks between files."""
    log = b""
    for number in range(count):
        message = Message("topic", b"body %d" % number, 1, store_timestamp=1000 + number, queue_offset=number)
        if v6:
            message.born_host = HostAddress(bytes(15) + b"\1", 5)
        record = encode_record(message, queue_offset=number, physical_offset=begin + len(log))
        left = file_bytes - (begin + len(log)) % file_bytes
        if len(record) + BLANK.size > left:
            log += BLANK.pack(left, BLANK_MAGIC) + bytes(left - BLANK.size)
            record = encode_record(message, queue_offset=number, physical_offset=begin + len(log))
        log += record
    return log


def fed(log: bytes, cuts: list[int], begin: int = 0, file_bytes: int = FILE_BYTES) -> list[ReceivedStretch]:
    """What is given out if the log arrives in these pieces."""
    received, at = ReceivedLog(begin, file_bytes, LEVELS), 0
    found: list[ReceivedStretch] = []
    for cut in [*sorted(min(one, len(log)) for one in cuts), len(log)]:
        found += received.feed(begin + at, log[at:cut])
        at = cut
        assert received.received == begin + cut
    return found


@given(st.lists(st.integers(0, 4000), max_size=12), st.integers(1, 30), st.booleans())
def test_all_of_it_comes_out_in_order_and_within_files(cuts: list[int], count: int, v6: bool) -> None:
    """Every byte once, in order, no stretch across files, and outside blanks only whole records."""
    log = records(0, count, v6=v6)
    found = fed(log, cuts)

    assert b"".join(one.data for one in found) == log
    at = 0
    for one in found:
        assert one.offset == at
        at += len(one.data)
        assert one.offset // FILE_BYTES == (at - 1) // FILE_BYTES
    assert max(one.store_timestamp for one in found) == 1000 + count - 1


def test_half_a_record_waits_for_the_rest() -> None:
    """It is neither given out nor lost."""
    log = records(0, 2)
    received = ReceivedLog(0, FILE_BYTES, LEVELS)
    first = list(received.feed(0, log[: len(log) - 1]))
    assert [one.offset for one in first] == [0]
    assert received.end == len(log) // 2
    assert next(received.feed(len(log) - 1, log[-1:])).data == log[len(log) // 2 :]


def test_many_records_are_verified_as_few_are() -> None:
    """The fast way for hundreds of records finds a flipped bit of a body, too."""
    log = records(0, 400, file_bytes=1 << 20)
    assert [one.data for one in fed(log, [], file_bytes=1 << 20)] == [log]
    place = log.index(b"body 377")
    damaged = log[:place] + b"Body 377" + log[place + 8 :]
    with pytest.raises(DamagedStreamError, match="CRC"):
        fed(damaged, [], file_bytes=1 << 20)


@pytest.mark.parametrize("place", [0, 4, 30, 88])
def test_a_flipped_bit_is_found(place: int) -> None:
    """In the length, the magic number, the position, the body. (RocketMQ has no check of the topic.)"""
    log = bytearray(records(0, 3))
    log[place] ^= 1
    with pytest.raises(DamagedStreamError):
        fed(bytes(log), [])


def test_a_gap_is_refused() -> None:
    """As is a repetition: the log has exactly one continuation."""
    log = records(0, 3)
    for offset in (1, len(log)):
        with pytest.raises(DamagedStreamError, match="0 comes next"):
            list(ReceivedLog(0, FILE_BYTES, LEVELS).feed(offset, log))


def test_zeros_are_no_records() -> None:
    """A master that sends what it has never written is not believed."""
    with pytest.raises(DamagedStreamError, match="zeros"):
        fed(bytes(200), [])


@pytest.mark.parametrize("blank", [FILE_BYTES - 1, 8, FILE_BYTES + 1, 2**31 - 1])
def test_a_blank_ends_where_the_file_ends(blank: int) -> None:
    """Otherwise the files of master and slave have other sizes, or it is damage."""
    with pytest.raises(DamagedStreamError):
        fed(BLANK.pack(blank, BLANK_MAGIC) + bytes(64), [])


def test_a_record_that_would_cross_the_file_is_refused() -> None:
    """At once, and not when it has arrived."""
    log = records(0, 1, file_bytes=1 << 20)
    size = len(log)
    with pytest.raises(DamagedStreamError, match=f"a record of {size} bytes"):
        fed(log[:40], [], file_bytes=size + 7)


def test_a_huge_record_is_refused_at_its_head(tmp_path: Path) -> None:
    """What a slave must keep in memory is bounded, also with files of a gigabyte."""
    del tmp_path
    head = (100 * 1024 * 1024).to_bytes(4, "big") + records(0, 1)[4:40]
    with pytest.raises(DamagedStreamError, match="104857600"):
        fed(head, [], file_bytes=1 << 30)


def test_a_log_may_begin_anywhere_in_a_file() -> None:
    """A slave continues where it has stopped."""
    log = records(0, 20)
    begin = len(records(0, 3))
    found = fed(log[begin:], [7, 300], begin)
    assert b"".join(one.data for one in found) == log[begin:]
