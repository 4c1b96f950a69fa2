"""What a power cut leaves of unflushed writes is told from damage: no more doubt than must be, and no less."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from crc32c import crc32c

from dledger.store.format import HEADER, Follow, ScanWindow, StopKind, encode_record, scan_records
from dledger.store.torn import SECTOR_BYTES, _is_one_bit, is_torn
from tests.support.sweeps import thinned

BASE = 1 << 20
SEGMENT_BYTES = 64 * SECTOR_BYTES


@dataclass(frozen=True)
class Written:
    """A segment, as writes of a record or more each made it; ``starts`` are where the records begin."""

    writes: list[tuple[int, bytes]]
    starts: list[int]

    def after(self, count: int) -> bytearray:
        """What is there after so many writes."""
        segment = bytearray(SEGMENT_BYTES)
        for offset, data in self.writes[:count]:
            segment[offset : offset + len(data)] = data
        return segment


def written(bodies: list[bytes], batch: Callable[[], int] = lambda: 1) -> Written:
    writes: list[tuple[int, bytes]] = []
    starts, end, chain = [], 0, 7
    left_in_batch = 0
    for number, body in enumerate(bodies):
        data, chain = encode_record(3, 100 + number, BASE + end, body, chain)
        starts.append(end)
        if left_in_batch == 0:
            writes.append((end, b""))
            left_in_batch = batch()
        writes[-1] = (writes[-1][0], writes[-1][1] + data)
        end, left_in_batch = end + len(data), left_in_batch - 1
    return Written(writes, starts)


def stop_of(segment: bytearray) -> tuple[StopKind, int, Follow]:
    """Where a start's scan stops."""
    with memoryview(segment) as view:
        scan = scan_records(ScanWindow(view, BASE, 0, SEGMENT_BYTES - 8), Follow(99, 2, 7))
    return scan.stop, scan.end_offset, scan.follow


def is_explained(segment: bytearray) -> bool:
    """Whether what is cut from there on is explained by a power cut, as a start asks."""
    _, offset, follow = stop_of(segment)
    return not any(segment[offset:]) or is_torn(memoryview(segment), BASE, offset, follow)


def _body(dice: random.Random) -> bytes:
    size = dice.choice((0, 20, 460, 463, 464, 470, 700, 1500, 4000))
    body = bytearray(dice.randbytes(size))
    if dice.random() < 0.3:
        start = dice.randrange(size + 1)
        body[start : start + 1200] = bytes(len(body[start : start + 1200]))
    return bytes(body)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", thinned(range(40)))
def test_sectors_of_unflushed_writes_lost_in_any_order_are_no_reason_for_doubt(seed: int) -> None:
    """Each is as some write since the last flush left it: that of a group that is cut off is no damage."""
    dice = random.Random(seed)
    log = written([_body(dice) for _ in range(dice.randrange(1, 9))], lambda: dice.randrange(1, 4))
    flushed = dice.randrange(len(log.writes))
    versions = [log.after(count) for count in range(flushed, len(log.writes) + 1)]
    for _ in range(100):
        segment = bytearray()
        for at in range(0, SEGMENT_BYTES, SECTOR_BYTES):
            segment += dice.choice(versions)[at : at + SECTOR_BYTES]
        assert is_explained(segment)


ZEROS = bytes(range(1, 200)) + bytes(3 * SECTOR_BYTES) + bytes(range(1, 200))
"""A body that holds sectors of zeros."""
FULL = bytes(range(1, 191)) * 10


@pytest.mark.parametrize("at", [HEADER.size, HEADER.size + 100, HEADER.size + len(ZEROS) - 1])
@pytest.mark.parametrize("bit", [1, 128])
@pytest.mark.parametrize("more", [0, 2])
def test_a_turned_bit_of_a_body_that_holds_zeros_is_damage(at: int, bit: int, more: int) -> None:
    """Its checksum tells which one bit is wrong, so nothing of it was lost."""
    log = written([FULL, ZEROS] + [FULL] * more)
    segment = log.after(99)
    segment[log.starts[1] + at] ^= bit

    assert not is_explained(segment)


@pytest.mark.parametrize("at", range(HEADER.size))
def test_a_header_that_is_whole_and_wrong_is_damage_whatever_its_body_lacks(at: int) -> None:
    """Every field of it is in the chain."""
    log = written([FULL, FULL, FULL])
    segment = log.after(99)
    start = log.starts[1]
    assert start % SECTOR_BYTES < SECTOR_BYTES - HEADER.size
    sector = start - start % SECTOR_BYTES + SECTOR_BYTES
    segment[sector : sector + SECTOR_BYTES] = bytes(SECTOR_BYTES)
    assert is_explained(segment)

    segment[start + at] ^= 16
    assert not is_explained(segment)


@pytest.mark.parametrize("length", [HEADER.size, HEADER.size + 20])
def test_zeros_that_end_within_a_sector_are_damage(length: int) -> None:
    """What follows them in the sector was written later, so it did not reach the disk without them."""
    log = written([FULL, FULL])
    segment = log.after(99)
    start = log.starts[1]
    segment[start : start + length] = bytes(length)

    assert not is_explained(segment)


@pytest.mark.parametrize("part", ["before", "behind"])
@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_left_of_a_header_across_two_sectors_must_be_right(part: str, *, wrong: bool) -> None:
    """One half is lost; the other one names index and position, which are known."""
    first = bytes(range(1, 250)) * 2
    log = written([first[: SECTOR_BYTES - HEADER.size - 30], FULL])
    start = log.starts[1]
    assert start == SECTOR_BYTES - 30
    segment = log.after(99)
    if part == "before":
        segment[start:SECTOR_BYTES] = bytes(30)
        segment[start + 31] ^= 1 if wrong else 0
    else:
        segment[SECTOR_BYTES : 2 * SECTOR_BYTES] = bytes(SECTOR_BYTES)
        segment[start + 15] ^= 1 if wrong else 0

    assert is_explained(segment) is not wrong


def test_a_hole_with_whole_records_behind_it_is_what_a_power_cut_may_leave() -> None:
    """They may all be of the same unflushed time; every second power cut under load would put a member into doubt."""
    log = written([FULL, FULL, FULL])
    segment = log.after(99)
    sector = log.starts[1] - log.starts[1] % SECTOR_BYTES + SECTOR_BYTES
    segment[sector : sector + SECTOR_BYTES] = bytes(SECTOR_BYTES)

    assert stop_of(segment)[:2] == (StopKind.BAD, log.starts[1])
    assert is_explained(segment)


@pytest.mark.parametrize("length", [1, 2, 255, 70_000, 600_001])
def test_one_turned_bit_is_known_by_the_checksums_wherever_it_is(length: int) -> None:
    """And nothing else is taken for it: two of them, or none."""
    dice = random.Random(length)
    body = bytearray(dice.randbytes(length))
    sound = crc32c(body)
    for at in (0, length // 2, length - 1):
        body[at] ^= 1 << dice.randrange(8)
        assert _is_one_bit(crc32c(body) ^ sound, length)
        body[at] ^= 0xFF
        assert not _is_one_bit(crc32c(body) ^ sound, length)
        body[at] = random.Random(length).randbytes(length)[at]

    assert not _is_one_bit(0, length)
