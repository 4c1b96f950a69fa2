"""Layouts: what is made from a list of fields."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from dledger.records import ENTRY, INDEX_UNIT, RecordLayout

PAIR = RecordLayout((("first", "i2"), ("host", "V4"), ("last", "u4")))


def test_a_layout_says_where_its_fields_are() -> None:
    assert PAIR.size == 10
    assert [PAIR.at(name) for name in ("first", "host", "last")] == [0, 2, 6]
    assert (PAIR.behind("host"), PAIR.behind("last")) == (6, 10)


def test_a_struct_of_some_fields_steps_over_the_others() -> None:
    data = PAIR.struct().pack(-2, b"host", 0xFFFF_FFFF)

    assert data == b"\xff\xfehost\xff\xff\xff\xff"
    assert PAIR.struct("first", "last").unpack(data) == (-2, 0xFFFF_FFFF)
    assert PAIR.part("host").unpack_from(data, PAIR.at("host")) == (b"host",)


def test_a_struct_has_its_fields_in_stored_order() -> None:
    with pytest.raises(ValueError, match="stored"):
        PAIR.struct("last", "first")
    with pytest.raises(ValueError, match="stored"):
        PAIR.struct("first", "middle")
    with pytest.raises(ValueError, match="next to each other"):
        PAIR.part("first", "last")


@pytest.mark.parametrize("layout", [PAIR, ENTRY, INDEX_UNIT, ENTRY.without("chain_crc")])
def test_a_table_reads_what_a_struct_packs(layout: RecordLayout) -> None:
    values = [number if kind[0] != "V" else b"host" for number, (_, kind) in enumerate(layout.fields)]

    row = np.frombuffer(layout.struct().pack(*values), layout.dtype())[0]

    assert [one.tobytes() if isinstance(one, np.void) else int(one) for one in row] == values


def test_layouts_are_put_together() -> None:
    both = PAIR.prefixed("a_").followed_by(PAIR.without("host"))

    assert [name for name, _ in both.fields] == ["a_first", "a_host", "a_last", "first", "last"]
    assert both.at("first") == PAIR.size


def test_sizes_are_known_without_numpy() -> None:
    code = "import sys; from dledger.config import StoreConfig; sys.exit('numpy' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
