"""Java's string hash of a text."""

from __future__ import annotations

import pytest

from rocketstore.message.properties import java_hash, tags_code, tags_code_of


def slow_hash(text: str) -> int:
    """The definition, step by step: h = 31 * h + c over UTF-16 code units, in an i32."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for at in range(0, len(units), 2):
        value = (31 * value + int.from_bytes(units[at : at + 2], "big")) % 2**32
    return value - 2**32 if value >= 2**31 else value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("TagA", 2598919),
        ("TAG1", 2567159),
        ("polygenelubricants", -2147483648),
        ("\u4e2d\u6587", 646394),
        ("TopicTest#k1", 2746024),
        ("\U0001f600", 1772899),
    ],
)
def test_hashes_are_javas(text: str, expected: int) -> None:
    """Vectors made by Java; a character beyond the basic plane counts as two."""
    assert java_hash(text) == expected
    assert tags_code(text) == tags_code_of(text.encode()) == expected


def test_long_tags_hash_right_each_time() -> None:
    """They are not remembered: a producer could fill the memory with them."""
    tag = "t" * 30_000

    assert tags_code_of(tag.encode()) == tags_code_of(tag.encode()) == slow_hash(tag)


def test_more_tags_than_are_remembered_still_hash_right() -> None:
    """The memory of tags is bounded."""
    for number in range(20_000):
        text = f"tag{number}"
        assert tags_code_of(text.encode()) == java_hash(text)
