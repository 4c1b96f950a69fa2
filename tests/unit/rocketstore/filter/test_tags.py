"""Tag expressions: what they mean, and how long they may be."""

from __future__ import annotations

import pytest

from dledger.errors import InvalidRequestError
from rocketstore.filter.tags import EXPRESSION_CHARS_MAX, TAGS_MAX, TagFilter
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
