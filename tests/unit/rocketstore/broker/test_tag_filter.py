"""Tag expressions: what they mean, and how long they may be."""

from __future__ import annotations

import pytest

from dledger.errors import InvalidRequestError
from rocketstore.broker.tag_filter import (
    EXPRESSION_CHARS_MAX,
    FILTERS_CHARS_MAX,
    FILTERS_MAX,
    TAGS_MAX,
    TagFilter,
    TagFilters,
)
from rocketstore.message.tags import tags_code


@pytest.mark.parametrize("expression", ["", "*", " * "])
def test_nothing_and_a_star_are_all_messages(expression: str) -> None:
    assert TagFilter.parse(expression) is None


def test_tags_stand_between_double_bars() -> None:
    """With or without blanks around them; few and many alike."""
    for words in (["a", "b"], [f"tag{number}" for number in range(20)]):
        found = TagFilter.parse(" || ".join(words))
        assert found is not None
        assert found.tags == {word.encode() for word in words}
        assert found.codes == set(map(tags_code, words))


@pytest.mark.parametrize(
    ("expression", "tags"),
    [("a||", b"a"), ("||a", b"a"), ("a || || b", b"a b"), ("a || *", b"a *"), (" a | | b ", None), ("|| * ||", b"*")],
)
def test_expressions_are_read_as_rocketmqs_clients_read_them(expression: str, tags: bytes | None) -> None:
    """They send what their users wrote. Empty parts are left out, and a star among tags is a tag."""
    found = TagFilter.parse(expression)
    assert found is not None
    assert found.tags == (frozenset({expression.strip().encode()}) if tags is None else frozenset(tags.split()))


@pytest.mark.parametrize("expression", ["||", "|| ||", " || "])
def test_an_expression_without_a_tag_is_refused(expression: str) -> None:
    with pytest.raises(InvalidRequestError, match="names no tag"):
        TagFilter.parse(expression)


def test_an_expression_has_a_limited_length_and_number_of_tags() -> None:
    """It is read on the event loop; the refusal does not repeat it."""
    longest = "x" * EXPRESSION_CHARS_MAX
    assert TagFilter.parse(longest) is not None
    with pytest.raises(InvalidRequestError, match="16385 characters; at most 16384"):
        TagFilter.parse(longest + "x")
    with pytest.raises(InvalidRequestError, match="1025 tags; at most 1024"):
        TagFilter.parse("||".join("a" * (TAGS_MAX + 1)))
    with pytest.raises(InvalidRequestError) as refused:
        TagFilter.parse("||" * 8000)
    assert len(str(refused.value)) < 200


def test_filters_are_remembered_as_long_as_they_are_used() -> None:
    """A consumer sends its expression with every pull; those of others that come once do not push it out."""
    filters = TagFilters()
    used = filters.of("a || b")
    for number in range(2 * FILTERS_MAX):
        filters.of(f"tag{number}")
        assert filters.of("a || b") is used


def test_what_is_remembered_is_bounded_in_number_and_in_characters() -> None:
    """By the sizes of the expressions, not only by how many there are."""
    filters = TagFilters()
    for number in range(2 * FILTERS_MAX):
        filters.of(f"tag{number}")
    assert len(filters) == FILTERS_MAX
    for number in range(100):
        filters.of(f"{number:03d}" + "x" * (EXPRESSION_CHARS_MAX - 3))
    assert len(filters) == FILTERS_CHARS_MAX // EXPRESSION_CHARS_MAX
