"""Property strings of any shape, in columns: as the message codec takes them apart, one by one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_spark.decode.properties import parse_properties
from rocketstore.message.properties import decode_properties


def taken_apart(*encoded: bytes) -> list[dict[str, str]]:
    """By rows."""
    return [dict(row) for row in parse_properties(pa.array(encoded, pa.binary())).as_maps().to_pylist()]


@pytest.mark.parametrize(
    "odd",
    [b"A\1\2", b"A\1", b"\1x\2", b"abc\2k\1v\1w", b"k\1v\1w\2abc", b"\2\2", b"\1", b"A\1b\1c", b"abc", b""],
)
def test_whatever_a_record_holds_its_neighbours_have_their_own(odd: bytes) -> None:
    """Also where there are as many names' ends as properties, but not one in each."""
    rows = taken_apart(b"TAGS\1t\2", odd, b"KEYS\1k\2")

    assert rows == [{"TAGS": "t"}, decode_properties(odd), {"KEYS": "k"}]


@pytest.mark.parametrize("odd", [b"\1x", b"k\1", b"\1"])
def test_a_property_without_a_name_or_a_value_is_none_where_all_others_are_plain(odd: bytes) -> None:
    """Exactly one name's end in each: the short cut for what RocketMQ writes must not take it."""
    assert taken_apart(b"TAGS\1t", odd, b"KEYS\1k") == [{"TAGS": "t"}, {}, {"KEYS": "k"}]


def test_a_part_of_an_array_is_taken_apart_like_the_whole() -> None:
    """Arrow's slices share their bytes and offsets with what is before and behind them."""
    encoded = [b"A\1a\2", b"TAGS\1t\2KEYS\1k", b"", b"TAGS\1u", b"B\1b"]

    properties = parse_properties(pa.array(encoded, pa.binary()).slice(1, 3))

    assert [dict(row) for row in properties.as_maps().to_pylist()] == [{"TAGS": "t", "KEYS": "k"}, {}, {"TAGS": "u"}]
    assert properties.named(b"TAGS").to_pylist() == [b"t", None, b"u"]


@pytest.mark.parametrize("kinds", [2, 64, 65, 200])
def test_the_later_of_two_properties_counts_however_many_names_there_are(kinds: int) -> None:
    """In a batch of a few names, and in one where every record has its own."""
    encoded = [*(b"k%d\1v" % number for number in range(kinds - 1)), b"TAGS\1first\2TAGS\1last"]

    maps = parse_properties(pa.array(encoded, pa.binary())).as_maps().to_pylist()

    assert maps[-1] == [("TAGS", "last")]
    assert maps[0] == [("k0", "v")]


def test_a_property_whose_name_only_begins_alike_is_another_one() -> None:
    """Looked for by its first four bytes."""
    properties = parse_properties(pa.array([b"TAGS2\1wrong", b"TAG\1wrong", b"TAGS\1t"], pa.binary()))

    assert properties.named(b"TAGS").to_pylist() == [None, None, b"t"]


@given(st.lists(st.text("ab\1\2", max_size=12), min_size=1, max_size=4))
def test_columns_hold_what_the_codec_reads(texts: list[str]) -> None:
    """For any mixture of separators."""
    encoded = [text.encode() for text in texts]

    assert taken_apart(*encoded) == [decode_properties(one) for one in encoded]
