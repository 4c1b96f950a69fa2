"""Java's string hash of many texts at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocketstore.broker.reading import java_hashes
from rocketstore.message.properties import java_hash
from tests.unit.rocketstore.message.test_tags import slow_hash


@given(st.lists(st.text(st.characters(exclude_categories=[])), max_size=40))
def test_many_at_once_hash_as_one_by_one(texts: list[str]) -> None:
    """Whatever the texts: empty ones, long ones, surrogates."""
    expected = [slow_hash(text) for text in texts]

    assert [java_hash(text) for text in texts] == expected
    assert java_hashes(texts) == expected
    assert java_hashes(tuple(texts) * 8) == expected * 8


def test_texts_longer_than_a_step_are_hashed_too() -> None:
    """The vectorised hash works in steps of 65,536 code units."""
    texts = [
        "a" * 40_000,
        "b" * 70_000,
        "",
        "c",
        "x" * 9,
        "\U0001f600" * 40_000,
        "y",
        "d" * 65_536,
        "e" * 3,
        "f" * 65_535,
        "g",
    ] * 2

    assert java_hashes(texts) == [slow_hash(text) for text in texts]
