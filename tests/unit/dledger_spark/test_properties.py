"""Property strings of any shape, in columns: as the message codec takes them apart, one by one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_spark.decode.columns import TAGS, as_maps, named
from rocketstore.message.columns import PropertyTexts
from rocketstore.message.properties import decode_properties, find_property_bytes


def taken_apart(*encoded: bytes) -> list[dict[str, str]]:
    """By rows."""
    return [dict(row) for row in as_maps(PropertyTexts.of(encoded)).to_pylist()]


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


@pytest.mark.parametrize("kinds", [2, 64, 65, 200])
def test_the_later_of_two_properties_counts_however_many_names_there_are(kinds: int) -> None:
    """In a batch of a few names, and in one where every record has its own."""
    encoded = [*(b"k%d\1v" % number for number in range(kinds - 1)), b"TAGS\1first\2TAGS\1last"]

    maps = as_maps(PropertyTexts.of(encoded)).to_pylist()

    assert maps[-1] == [("TAGS", "last")]
    assert maps[0] == [("k0", "v")]


def test_a_property_whose_name_only_begins_alike_is_another_one() -> None:
    """Names are compared as numbers."""
    texts = PropertyTexts.of([b"TAGS2\1wrong", b"TAG\1wrong", b"TAGS\1t"])

    assert named(texts, TAGS).to_pylist() == [None, None, b"t"]


@given(st.lists(st.text("ab\1\2", max_size=12), min_size=1, max_size=4))
def test_columns_hold_what_the_codec_reads(texts: list[str]) -> None:
    """For any mixture of separators."""
    encoded = [text.encode() for text in texts]

    assert taken_apart(*encoded) == [decode_properties(one) for one in encoded]


@given(
    st.lists(st.sampled_from([b"", b"TAGS", b"TAGS\1a", b"x\1y\2TAGS\1b", b"TAGS\1", b"TAGS\1c\2TAGS\1d"]), max_size=6)
)
def test_a_column_of_one_property_is_null_where_it_is_absent(encoded: list[bytes]) -> None:
    """Everywhere, nowhere, or among others."""
    column = named(PropertyTexts.of(encoded), TAGS)

    column.validate(full=True)
    assert column.type == pa.binary()
    assert column.to_pylist() == [find_property_bytes(one, TAGS) for one in encoded]
