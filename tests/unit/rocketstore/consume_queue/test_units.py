"""The bytes of units."""

from __future__ import annotations

from rocketstore.consume_queue.files import FILLER, FILLER_BYTES, pack_unit, pack_units, parse_units, unit_columns
from rocketstore.types import QueueUnit
from tests.unit.rocketstore.heads import head

RECORDS = [head(1, 1 << 40, size=125, tags_code=-(1 << 31)), head(2, 2 << 40, size=1, tags_code=1_700_000_000_000)]
BYTES = bytes.fromhex("00000100 00000000 0000007d ffffffff80000000 00000200 00000000 00000001 0000018bcfe56800")


def test_units_are_big_endian_offset_size_and_tags_code() -> None:
    assert pack_units(RECORDS) == BYTES
    assert parse_units(BYTES) == [
        QueueUnit(1 << 40, 125, -(1 << 31)),
        QueueUnit(2 << 40, 1, 1_700_000_000_000),
    ]


def test_parsing_ends_at_what_was_never_written() -> None:
    assert parse_units(FILLER_BYTES + bytes(20) + BYTES) == [FILLER]
    assert parse_units(BYTES[:39]) == [QueueUnit(1 << 40, 125, -(1 << 31))]
    assert parse_units(b"\xff" * 20) == parse_units(b"") == []


def test_columns_tell_fillers_from_units() -> None:
    offsets, sizes, fillers = unit_columns(BYTES + FILLER_BYTES + b"rest")
    assert offsets.tolist() == [1 << 40, 2 << 40, 0]
    assert sizes.tolist() == [125, 1, 0x7FFFFFFF]
    assert fillers.tolist() == [False, False, True]


def test_a_unit_that_only_resembles_a_filler_is_none() -> None:
    """Damage of one field: as a filler it would pass for a place that never had a message."""
    others = (FILLER._replace(offset=1 << 40), FILLER._replace(size=125), FILLER._replace(tags_code=1))

    _, _, fillers = unit_columns(b"".join(map(pack_unit, (FILLER, *others))))

    assert fillers.tolist() == [True, False, False, False]
