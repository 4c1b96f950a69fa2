"""Recovery's decision table, case by case, without a file.

What a power cut leaves of unflushed writes is told from damage: no more doubt than must be, and no less.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from crc32c import crc32c

from dledger.store.durable_state import LastLife, LogCheckpoint, Mark
from dledger.store.format import HEADER, Follow, ScanWindow, StopKind, encode_record, scan_records
from dledger.store.recovery import (
    SECTOR_BYTES,
    Cut,
    Damage,
    Keep,
    Plan,
    Refuse,
    ScanFindings,
    _is_one_bit,
    doubt,
    is_torn,
    plan,
)
from dledger.types import LogIndex
from tests.support.sweeps import thinned

_END = Mark(9, 1000, 5)
_STOP = Damage(Path("data/0"), 1000, 1000, "no record starts here")
_BEFORE = Damage(Path("data/short"), 10, 512, "the segment has 10 bytes instead of 512")
_AFTER = Damage(Path("data/short"), 10, 1024, "the segment has 10 bytes instead of 512")
_WHOLE = ScanFindings(
    checkpoint=LogCheckpoint(flushed=_END, committed=LogIndex(5)),
    end=_END,
    stop=_STOP,
    stopped_at_bad=False,
    rest_in_use=False,
    mark_agrees=True,
)
_UNFLUSHED = replace(_WHOLE, checkpoint=LogCheckpoint(flushed=Mark(7, 800, 4)))
_ABOVE = replace(_WHOLE, checkpoint=LogCheckpoint(flushed=Mark(10, 1100, 6)))
BASE = 1 << 20
SEGMENT_BYTES = 64 * SECTOR_BYTES


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        pytest.param(_WHOLE, Keep(), id="whole"),
        pytest.param(_UNFLUSHED, Keep(), id="whole entries above the mark are kept"),
        pytest.param(replace(_WHOLE, misshapen_middle=_AFTER), Refuse(_AFTER), id="short file in the middle"),
        pytest.param(replace(_WHOLE, bad_files=(_BEFORE,)), Refuse(_BEFORE), id="bad file below the mark"),
        pytest.param(replace(_ABOVE, bad_files=(_BEFORE, _AFTER)), Refuse(_BEFORE), id="the oldest bad file is named"),
        pytest.param(
            replace(_WHOLE, bad_files=(_AFTER,)),
            Cut(_END, "unflushed remains after the last whole entry"),
            id="short last file above the mark",
        ),
        pytest.param(replace(_UNFLUSHED, stopped_at_bad=True), Cut(_END, _STOP.reason), id="bad record above the mark"),
        pytest.param(
            replace(_UNFLUSHED, rest_in_use=True),
            Cut(_END, "unflushed remains after the last whole entry"),
            id="zeros, then remains",
        ),
        pytest.param(
            replace(_UNFLUSHED, checkpoint=replace(_UNFLUSHED.checkpoint, clean_stop=True)),
            Cut(Mark(7, 800, 4), "2 entries after the end of a cleanly stopped log"),
            id="entries behind a clean stop",
        ),
    ],
)
def test_plan(findings: ScanFindings, expected: Plan) -> None:
    """The table in the module's docstring."""
    assert plan(findings) == expected


@pytest.mark.parametrize(
    ("findings", "reason"),
    [
        pytest.param(_ABOVE, "entries up to 10 were flushed, but the log ends at 9", id="shorter than the mark"),
        pytest.param(replace(_ABOVE, stopped_at_bad=True), "were flushed", id="bad record below the mark"),
        pytest.param(replace(_WHOLE, mark_agrees=False), "entry 9 is not the one that was flushed", id="other entry"),
        pytest.param(
            replace(_WHOLE, checkpoint=LogCheckpoint(flushed=_END, committed=LogIndex(10))),
            "entries up to 10 were committed",
            id="shorter than the commit index",
        ),
    ],
)
def test_plan_refuses_where_the_scan_stopped(findings: ScanFindings, reason: str) -> None:
    """Damage of flushed bytes is never cut away; the place and the reason are told."""
    decision = plan(findings)

    assert isinstance(decision, Refuse)
    assert (decision.damage.path, decision.damage.offset) == (_STOP.path, _STOP.offset)
    assert reason in decision.damage.reason
    assert _STOP.reason in decision.damage.reason


_ANY = None
# replaced, clean stop, flushed late, same boot, cut, bad record, torn; and whether that is a reason for doubt
_DOUBTS: tuple[tuple[tuple[bool | None, ...], bool], ...] = (
    ((True, _ANY, _ANY, _ANY, _ANY, _ANY, _ANY), True),
    ((False, True, _ANY, _ANY, True, _ANY, _ANY), True),
    ((False, True, _ANY, _ANY, False, _ANY, _ANY), False),
    ((False, False, True, False, _ANY, _ANY, _ANY), True),
    ((False, False, True, True, True, _ANY, _ANY), True),
    ((False, False, True, True, False, _ANY, _ANY), False),
    ((False, False, False, _ANY, True, _ANY, False), True),
    ((False, False, False, _ANY, True, _ANY, True), False),
    ((False, False, False, _ANY, False, _ANY, _ANY), False),
)


@pytest.mark.parametrize(
    "case", list(itertools.product((False, True), repeat=7)), ids=lambda case: "".join(map("-x".__getitem__, case))
)
def test_doubt(case: tuple[bool, ...]) -> None:
    """The second table in the module's docstring: every combination is one case of it, and no other."""
    replaced, clean, late, same_boot, cut, bad, torn = case
    findings = replace(_WHOLE, checkpoint=replace(_WHOLE.checkpoint, clean_stop=clean), stopped_at_bad=bad, torn=torn)
    life = LastLife(same_boot, late, "copied" if replaced else "")
    decision = Cut(_END, "because") if cut else Keep()

    expected = [
        doubtful
        for pattern, doubtful in _DOUBTS
        if all(wanted in (_ANY, found) for wanted, found in zip(pattern, case, strict=True))
    ]

    assert len(expected) == 1
    assert bool(doubt(findings, decision, life)) is expected[0]


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
