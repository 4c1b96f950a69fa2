"""Where a walk over records ends, and why."""

from __future__ import annotations

from struct import pack

import pytest

from dledger.records import ENTRY_HEADER_BYTES
from rocketstore.message.record import BLANK_HEAD, OVERHEAD
from rocketstore.message.scan import Framing, WalkEnd, walk
from tests.support.log_bytes import Stretch
from tests.unit.rocketstore.message.samples import RECORD, changed, field

LEAST = {"entry": ENTRY_HEADER_BYTES, "plain": OVERHEAD}
"""How long a record is at least."""


def record(framing: Framing) -> bytes:
    """A whole one."""
    if framing == "plain":
        return RECORD
    stretch = Stretch()
    stretch.add(b"body")
    return bytes(stretch.data)


def head(framing: Framing, size: int) -> bytes:
    """How a record of this size begins."""
    begin = changed(RECORD, field("size", size)) if framing == "plain" else pack(">ii", 1, size)
    return begin[: BLANK_HEAD.size]


both = pytest.mark.parametrize("framing", ["entry", "plain"])


@both
def test_zeros_as_long_as_the_least_record_are_what_was_never_written(framing: Framing) -> None:
    """Also where the data ends before: what is behind them is not looked at."""
    whole = record(framing)
    for zeros in range(8, LEAST[framing] + 1):
        stop = len(whole) + zeros

        found = walk(whole + bytes(zeros) + b"\xff" * 100, framing, stop=stop)

        assert (found.kind, found.end) == (WalkEnd.ZERO, len(whole))


@both
def test_a_zeroed_head_before_other_bytes_is_damage(framing: Framing) -> None:
    """As the end of what was written it would hide every record behind it."""
    for at in range(8, LEAST[framing]):
        data = record(framing) + bytes(at) + b"\x01" + bytes(100)

        assert walk(data, framing).kind is WalkEnd.BAD


@both
@pytest.mark.parametrize("size", [-1, 0, 1, 8])
def test_a_record_is_not_shorter_than_what_every_record_has(framing: Framing, size: int) -> None:
    """Its fields would be read from its successors."""
    for wrong in (size, LEAST[framing] - 1):
        found = walk(record(framing) + head(framing, wrong) + bytes(200), framing)

        assert (found.starts.tolist(), found.kind) == ([0], WalkEnd.BAD)
        assert f"size {wrong}" in found.reason
