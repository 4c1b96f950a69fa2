"""The property string is written as RocketMQ 4.9 writes it and read as every version's readers must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import InvalidRequestError
from rocketstore.message.properties import decode_properties, encode_properties, find_property

TEXT = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1)


def test_properties_are_written_without_a_final_separator() -> None:
    """RocketMQ drops the last 0x02 since 4.9.1."""
    assert encode_properties({"KEYS": "k1 k2", "TAGS": "TagA"}) == b"KEYS\x01k1 k2\x02TAGS\x01TagA"
    assert encode_properties({}) == b""


@pytest.mark.parametrize("encoded", [b"KEYS\x01k1 k2\x02TAGS\x01TagA", b"KEYS\x01k1 k2\x02TAGS\x01TagA\x02"])
def test_properties_are_read_with_and_without_a_final_separator(encoded: bytes) -> None:
    """RocketMQ 4.6 keeps the last 0x02."""
    assert decode_properties(encoded) == {"KEYS": "k1 k2", "TAGS": "TagA"}
    assert find_property(encoded, "KEYS") == "k1 k2"
    assert find_property(encoded, "TAGS") == "TagA"


@pytest.mark.parametrize(
    ("encoded", "properties"),
    [
        (b"", {}),
        (b"\x02\x02", {}),
        (b"a", {}),
        (b"a\x01", {}),
        (b"\x01b", {}),
        (b"abc", {}),
        (b"abc\x01", {}),
        (b"\x01abc", {}),
        (b"a\x01b", {"a": "b"}),
        (b"a\x01b\x01c", {"a": "b\x01c"}),
        (b"a\x01\x01", {"a": "\x01"}),
        (b"a\x01b\x02a\x01c", {"a": "c"}),
        (b"a\x01b\x02a\x01", {"a": "b"}),
        (b"a\x01b\xff", {"a": "b\ufffd"}),
    ],
)
def test_segments_that_are_no_property_are_skipped(encoded: bytes, properties: dict[str, str]) -> None:
    """As RocketMQ reads them: no empty names or values, further 0x01 belong to the value, the last of two counts."""
    assert decode_properties(encoded) == properties
    assert find_property(encoded, "a") == properties.get("a")


def test_empty_values_are_not_written() -> None:
    """No reader would see them."""
    assert encode_properties({"a": "", "b": "c", "d": ""}) == b"b\x01c"
    assert encode_properties({"a": ""}) == b""


@pytest.mark.parametrize(
    "properties",
    [
        {"a": "b\x02REAL_TOPIC\x01other"},
        {"a\x02b": "c"},
        {"a": "b", "c": "\x02"},
        {"": "a"},
        {"a\x01b": "c"},
        {"a": "\ud800"},
        {"\udfff": "a"},
    ],
)
def test_what_would_be_read_back_as_something_else_is_refused(properties: dict[str, str]) -> None:
    """A producer must not smuggle in properties of the broker's, nor text that has no UTF-8."""
    with pytest.raises(InvalidRequestError):
        encode_properties(properties)


@given(st.dictionaries(TEXT, TEXT | st.just("a\x01b"), max_size=6))
def test_what_is_written_is_read_back(properties: dict[str, str]) -> None:
    """Any text, also beyond ASCII."""
    encoded = encode_properties(properties)

    assert decode_properties(encoded) == properties
    assert decode_properties(encoded + b"\x02") == properties


@given(
    st.lists(st.sampled_from([b"\x01", b"\x02", b"a", b"TAGS", b"TAGS\x01", b"x", b"\xff"]), max_size=12).map(b"".join)
)
def test_finding_one_property_agrees_with_reading_all(encoded: bytes) -> None:
    """For any bytes, whether they are a property string or not."""
    assert find_property(encoded, "TAGS") == decode_properties(encoded).get("TAGS")
    assert find_property(encoded, "a") == decode_properties(encoded).get("a")
