"""What a consumer wants, as it is written and as brokers are told."""

from __future__ import annotations

import pytest

from dledger.errors import ConfigError
from rocketstore.client import Sql
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.consumer_options import SQL92, Expression, tags_of_expression
from rocketstore.message.properties import tags_code


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("", None),
        (" * ", None),
        ("a", {"a"}),
        ("a || b", {"a", "b"}),
        ("a||", {"a"}),
        ("||a", {"a"}),
        ("a || || b", {"a", "b"}),
        ("a || *", {"a", "*"}),
    ],
)
def test_tag_expressions(expression: str, expected: set[str] | None) -> None:
    """As Java's clients read them: tags between double bars, empty parts left out; brokers are told the same."""
    assert tags_of_expression(expression) == expected
    assert tags_of_expression(Expression.of(expression).text) == expected


@pytest.mark.parametrize("expression", ["||", " || || "])
def test_an_expression_without_a_tag_is_refused_at_once(expression: str) -> None:
    """By whatever is made with it."""
    with pytest.raises(ConfigError, match="names no tag"):
        tags_of_expression(expression)
    with pytest.raises(ConfigError, match="names no tag"):
        Consumer("localhost:1", group="g", topics={"T": expression})


def test_a_subscription_tells_tags_with_javas_hashes() -> None:
    told = Expression.of("b||a").subscription("T", 7)
    assert (told.topic, told.sub_string, told.expression_type, told.sub_version) == ("T", "a || b", "TAG", 7)
    assert (told.tags_set, told.code_set) == (("a", "b"), (tags_code("a"), tags_code("b")))


def test_a_condition_is_told_as_it_is() -> None:
    """And every message that a broker gives is taken, whatever its tags."""
    wanted = Expression.of(Sql(" a > 1 "))
    told = wanted.subscription("T")
    assert (told.sub_string, told.expression_type, told.tags_set) == (" a > 1 ", SQL92, ())
    assert wanted.takes("any")


def test_a_wrong_condition_is_refused_at_once_with_the_place() -> None:
    """With all else that is wrong, before anything is dialled."""
    with pytest.raises(ConfigError) as refused:
        Consumer("localhost:1", group="g", topics={"T": Sql("a >"), "U": "||", "V": Sql("")})
    problems = refused.value.problems
    assert len(problems) == 3
    assert "wrong at character 4: found the end" in problems[0]
