"""SQL conditions on properties: the same verdicts as RocketMQ's filter, and errors that give the place."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from dledger.errors import InvalidRequestError
from rocketstore.message.sql import CHARS_MAX, DEPTH_MAX, HEIGHT_MAX, TERMS_MAX, NoResultError, SqlCondition
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
        ("a > 1e400", 5, "too large"),
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


def test_long_conditions_are_evaluated() -> None:
    """As long as they may be: there is no recursion from term to term."""
    for words, value in (("OR", False), ("AND", True)):
        condition = SqlCondition(f" {words} ".join(["a = 'x'"] * (TERMS_MAX // 2)))
        assert condition.matches({"a": "y"}) is False
        assert condition.matches({"a": "x"}) is True
        assert condition.result({}) is None
        assert SqlCondition(f"a = 'x' {words} {'NOT ' * value}FALSE").matches({"a": "x"})


@pytest.mark.parametrize("comparison", ["IS NULL", "IS NOT NULL", "= b", "CONTAINS 'x'"])
def test_comparisons_of_comparisons_are_limited(comparison: str) -> None:
    """They are evaluated by recursion, and many have few terms: the deepest condition can still be evaluated."""
    longest = "a" + f" {comparison}" * (HEIGHT_MAX - 1)
    assert SqlCondition(longest).result({"a": "1", "b": "1"}) in (True, False, None)
    with pytest.raises(InvalidRequestError, match="too many comparisons of comparisons"):
        SqlCondition(f"({longest}) {comparison}")


def test_what_may_be_nested_can_be_evaluated() -> None:
    levels = DEPTH_MAX // 2
    deepest = "(NOT " * levels + "a" + " = TRUE OR b AND c)" * levels
    assert SqlCondition(deepest).result({"a": "1", "b": "1", "c": "1"}) in (True, False)


def test_which_properties_are_looked_at_is_known() -> None:
    assert SqlCondition("a > 1 AND (b IS NULL OR c IN ('x') AND $d = A)").names == {"a", "b", "c", "$d", "A"}


def test_where_a_value_cannot_be_compared_there_is_no_result() -> None:
    condition = SqlCondition("a > 1")
    assert condition.delivers({"a": "2"})
    assert not condition.delivers({})
    with pytest.raises(NoResultError):
        condition.delivers({"a": "many"})
    assert not condition.matches({"a": "many"})


def test_digits_of_other_scripts_are_java_s() -> None:
    """``Integer.parseInt`` takes them if they are one ``char``."""
    condition = SqlCondition("a = 1")
    assert condition.matches({"a": "\N{ARABIC-INDIC DIGIT ONE}"})
    assert not condition.matches({"a": "\N{MATHEMATICAL BOLD DIGIT ONE}"})


def test_the_least_int_is_a_long_in_an_expression() -> None:
    """Its digits are read before its sign: beside it, properties are read as ``Long``."""
    assert SqlCondition("a > -2147483648").matches({"a": "3000000000"})
    assert SqlCondition("a > -2147483647").result({"a": "3000000000"}) is None


def test_zero_has_a_sign_beside_another_property() -> None:
    """Both are compared as ``Double``, in which -0.0 is less than 0.0."""
    assert SqlCondition("a < b").matches({"a": "-0", "b": "0"})
    assert not SqlCondition("a < b").matches({"a": "0", "b": "-0"})


def _seconds(work: Callable[[], object]) -> float:
    """Of the processor, the fewest of three times."""

    def once() -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    return min(once() for _ in range(3))


@pytest.mark.parametrize(
    "expression",
    [
        " OR ".join(["a = 1"] * (TERMS_MAX // 2)),
        " OR ".join(["a IS NULL"] * TERMS_MAX),
        " AND ".join(["a BETWEEN 1 AND 2"] * (TERMS_MAX // 3)),
        "a IN (" + ", ".join(["'xxxxxxxxxxx'"] * (TERMS_MAX - 1)) + ")",
        "a = '" + "''" * (CHARS_MAX // 2 - 4) + "'",
        "-- x\n" * (CHARS_MAX // 5 - 1) + "a",
        "/**/" * (CHARS_MAX // 4 - 1) + "a",
    ],
    ids=["or", "is null", "between", "in", "quotes", "lines", "comments"],
)
def test_the_longest_expressions_are_parsed_quickly(expression: str) -> None:
    """In less than 50 ms; slow machines have some more."""
    assert len(expression) <= CHARS_MAX
    assert _seconds(lambda: SqlCondition(expression)) < 0.25


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("a > 1", "9" * 32_000),
        ("a > 1.5", "9" * 32_000 + "x"),
        ("a > 1.5", "." + "9" * 32_000 + "x"),
        ("a > 1.5", "9" * 16_000 + "." + "9" * 16_000 + "x"),
        ("a > 1.5", "1e" + "9" * 32_000 + "x"),
        ("a > 1.5", "0x" + "9" * 32_000 + "x"),
        ("a > 1.5", "0x1p" + "9" * 32_000),
        ("a > 1.5", "9" * 32_000),
        ("a > 1.5", " " * 32_000 + "x"),
    ],
)
def test_no_property_takes_long_to_read_as_a_number(expression: str, value: str) -> None:
    """Its time grows with its length, not with the square of it."""
    condition = SqlCondition(expression)
    assert _seconds(lambda: condition.matches({"a": value})) < 0.05
