"""SQL conditions on properties: the same verdicts as RocketMQ's filter, and errors that give the place."""

from __future__ import annotations

import pytest

from dledger.errors import InvalidRequestError
from rocketstore.filter.sql import DEPTH_MAX, TERMS_MAX, SqlCondition
from tests.interop.sql_cases import golden_cases


def _verdict(expression: str, properties: dict[str, str]) -> str:
    try:
        result = SqlCondition(expression).result(properties)
    except InvalidRequestError:
        return "R"
    return {True: "T", False: "F", None: "N"}[result]


def test_verdicts_are_those_that_rocketmq_gave() -> None:
    cases = golden_cases()
    assert len(cases) >= 5000
    wrong = [
        (expression, properties, told)
        for told, expression, properties in cases
        if _verdict(expression, properties) != told
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("expression", "place", "told"),
    [
        ("", 1, "found the end"),
        ("a =", 4, "found the end"),
        ("a = 1 b", 7, "found b, expected AND, OR or the end"),
        ("a = 1)", 6, "found )"),
        ("(a = 1", 7, "expected )"),
        ("a LIKE 'x'", 3, "found LIKE"),
        ("a IN ()", 7, "a string in single quotes"),
        ("a IN (1)", 7, "a string in single quotes"),
        ("a = NULL", 5, "IS NULL"),
        ("a > 'b'", 5, "only numbers"),
        ("a BETWEEN 3 AND 1", 11, "greater"),
        ('a = "x"', 5, "has no meaning"),
        ("a = 'x", 5, "has no meaning"),
        ("a = 9223372036854775808", 5, "too large"),
        ("1", 1, "a condition is expected"),
    ],
)
def test_wrong_expression_is_refused_with_the_place(expression: str, place: int, told: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SqlCondition(expression)
    assert f"at character {place}:" in str(refused.value)
    assert told in str(refused.value)


def test_only_true_delivers() -> None:
    condition = SqlCondition("a > 1 OR NOT (b = 'x')")
    assert condition.matches({"a": "2", "b": "x"})
    assert not condition.matches({"a": "1", "b": "x"})
    assert not condition.matches({})  # unknown
    assert not condition.matches({"a": "many", "b": "y"})  # no number: no result


def test_not_binds_more_tightly_than_comparisons() -> None:
    assert not SqlCondition("NOT a = 1").matches({"a": "2"})
    assert SqlCondition("NOT (a = 1)").matches({"a": "2"})


def test_comments_may_stand_between_and_at_the_end() -> None:
    assert SqlCondition("a /* the\nfirst */ = -- one\n 1 -- done").matches({"a": "1"})


@pytest.mark.parametrize("opening", ["(", "NOT ", "- "])
def test_nesting_is_limited(opening: str) -> None:
    closing = ")" if opening == "(" else ""
    inner = "a" if opening != "- " else "1"
    SqlCondition(f"{opening * DEPTH_MAX}{inner}{closing * DEPTH_MAX} = 1")
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        SqlCondition(f"{opening * (DEPTH_MAX + 1)}{inner}{closing * (DEPTH_MAX + 1)} = 1")


def test_terms_and_length_are_limited() -> None:
    def chain(terms: int) -> str:
        return " OR ".join(["a"] * terms)

    SqlCondition(chain(TERMS_MAX))
    with pytest.raises(InvalidRequestError, match="too many terms"):
        SqlCondition(chain(TERMS_MAX + 1))
    with pytest.raises(InvalidRequestError, match="characters; at most"):
        SqlCondition("a = 1" + " " * 16 * 1024)
    values = ", ".join(["'x'"] * (TERMS_MAX + 1))
    wide = f"a IN ({values})"
    with pytest.raises(InvalidRequestError, match="too many terms"):
        SqlCondition(wide)


def test_endless_digits_of_a_property_are_no_number() -> None:
    assert not SqlCondition("a > 1").matches({"a": "9" * 100_000})
