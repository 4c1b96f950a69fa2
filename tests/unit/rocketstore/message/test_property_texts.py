"""Values found and hashed in arrays, against the functions that do it for one record."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rocketstore.message.columns import PropertyTexts, Values
from rocketstore.message.properties import decode_properties, find_property_bytes, java_hash

NAMES = [b"T\x01", b"TAGS\x01", b"UNIQ_KEY\x01", b"NINE_BYTES\x01"]
PIECES = [*NAMES, *(name[:-1] for name in NAMES), b"\x01", b"\x02", b" ", b"a", "\u00e9\U0001f600".encode(), b"\xff"]
STRINGS = st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join), max_size=8)


def found(strings: list[bytes], values: Values) -> list[tuple[int, bytes]]:
    """The values' owners and bytes."""
    joined = b"\x02".join((b"", *strings, b""))
    bounds = zip(values.owners.tolist(), values.begins.tolist(), values.ends.tolist(), strict=True)
    return [(owner, joined[begin:end]) for owner, begin, end in bounds]


@given(STRINGS, st.sampled_from(NAMES))
def test_values_are_found_as_in_each_record_alone(strings: list[bytes], name: bytes) -> None:
    """Repeated, empty, half and overlapping names and values, at the ends of records, too."""
    texts = PropertyTexts.of(strings)

    alone = ((number, find_property_bytes(one, name)) for number, one in enumerate(strings))
    assert found(strings, texts.named(name)) == [(number, value) for number, value in alone if value]
    assert [texts.string(number) for number in range(len(texts))] == strings


@given(STRINGS)
@example([b"a\x01"])
@example([b"a\x02b\x01c\x01d", b"e\x01f"])
def test_properties_are_taken_apart_as_in_each_record_alone(strings: list[bytes]) -> None:
    """What is no property is left out, also where there are as many ends of names as pieces."""
    joined = b"\x02".join((b"", *strings, b""))
    taken: list[dict[str, str]] = [{} for _ in strings]
    for name, name_end, end, owner in zip(*PropertyTexts.of(strings).bounds, strict=True):
        taken[owner] |= decode_properties(joined[name:end])
        assert name < name_end < end - 1
        assert joined[name_end] == 1 not in joined[name:name_end]

    assert taken == [decode_properties(one) for one in strings]


@given(STRINGS, st.sampled_from(NAMES))
def test_words_are_what_lies_between_spaces(strings: list[bytes], name: bytes) -> None:
    texts = PropertyTexts.of(strings)
    values = texts.named(name)

    split = [(owner, word) for owner, value in found(strings, values) for word in value.split(b" ") if word]
    assert found(strings, texts.words(values)) == split


def hashed(text: bytes, prefix: int) -> int:
    decoded = text.decode(errors="replace")
    units = len(decoded.encode("utf-16-le")) // 2
    return (prefix * pow(31, units, 1 << 32) + java_hash(decoded)) % (1 << 32)


@given(STRINGS, st.lists(st.integers(0, (1 << 32) - 1), min_size=8, max_size=8))
def test_any_value_hashes_as_in_java(strings: list[bytes], prefixes: list[int]) -> None:
    """Alone and behind a prefix; what is no UTF-8 and what takes two code units, too."""
    texts = PropertyTexts.of(strings)
    both = texts.in_order(texts.named(b"UNIQ_KEY\x01"), texts.words(texts.named(b"T\x01")))
    values = found(strings, both)

    assert texts.hashes(both).tolist() == [hashed(text, 0) for _, text in values]
    behind = texts.hashes(both, np.array(prefixes[: len(strings)], np.uint32))
    assert behind.tolist() == [hashed(text, prefixes[owner]) for owner, text in values]


@pytest.mark.parametrize("size", [1, 9, 65_529, 65_530, 65_531, 65_536, 200_000])
def test_values_of_any_length_are_hashed_between_many_others(size: int) -> None:
    """Around the length of a step, and where a step ends within a record."""
    strings = [b"A\x01" + b"b" * (number % 90) + b"\x02T\x01t%d" % number for number in range(3000)]
    strings[1500] = b"T\x01" + bytes(97 + number % 26 for number in range(size))
    strings[1501] = "T\x01\u00e9".encode()
    texts = PropertyTexts.of(strings)
    values = texts.named(b"T\x01")

    assert texts.hashes(values).tolist() == [hashed(text, 0) for _, text in found(strings, values)]
