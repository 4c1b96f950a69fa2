"""Filters on stored records, and how they are kept.

Tag expressions: what they mean, and how long they may be.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dledger.errors import InvalidRequestError
from dledger.log_output import LINES_MAX, BoundedLog
from rocketstore.broker import reading as filters_module
from rocketstore.broker.reading import (
    EXPRESSION_CHARS_MAX,
    FILTERS_CHARS_MAX,
    FILTERS_MAX,
    SQL92,
    SQL_CHARS,
    TAG,
    TAGS_MAX,
    Filters,
    MessageFilter,
    SqlFilter,
    TagFilter,
)
from rocketstore.message.message import Message
from rocketstore.message.properties import decode_properties, tags_code
from rocketstore.message.record import encode_record, properties_of
from rocketstore.message.sql import SqlCondition

USUAL = {"amount": "12", "region": "EU", "UNIQ_KEY": "AC110001" * 4, "WAIT": "true", "TAGS": "new", "KEYS": "order-17"}


def stored(properties: dict[str, str]) -> bytes:
    return encode_record(Message("T", b"body" * 100, properties=properties))


def test_a_condition_is_on_the_properties_that_a_record_has() -> None:
    """Also on those that the store knows: tags, keys. The body is no property."""
    record = stored(USUAL)
    for expression, expected in (
        ("amount > 10 AND region = 'EU'", True),
        ("amount > 12", False),
        ("TAGS = 'new' AND KEYS CONTAINS '17'", True),
        ("body IS NULL", True),
        ("mount IS NULL AND amoun IS NULL", True),
    ):
        assert SqlFilter(expression).matches_record(record) is expected, expression


@pytest.mark.parametrize("count", [1, 8, 9, 30])
def test_few_and_many_properties_are_found_as_they_are_decoded(count: int) -> None:
    """Of duplicates the later one counts, empty ones are absent, and what is no UTF-8 is replaced."""
    names = [f"p{number}" for number in range(count)]
    encoded = b"p0\x011\x02xp0\x019\x02p0\x013\x02p0\x01\x02p1\x01\xff\xe4\x02\x02p2\x01a\x01b\x02p3\x02p29\x01z"
    record = stored({"x": "y" * (len(encoded) - 2)})
    at = len(record) - len(properties_of(record))
    record = record[:at] + encoded
    properties = decode_properties(properties_of(record))
    assert properties["p0"] == "3"
    for name in names:
        for value in ("3", "1", "\ufffd\ufffd", "a\x01b", "z"):
            expression = f"{name} = '{value}' OR " + " AND ".join(f"{one} IS NOT NULL" for one in names)
            assert SqlFilter(expression).matches_record(record) is SqlCondition(expression).matches(properties)


def test_records_without_a_result_are_counted_and_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not delivered; the log does not grow with them."""
    monkeypatch.setattr(filters_module, "_log", BoundedLog(logging.getLogger("test"), lambda: 0.0))
    filters = Filters()
    wanted = filters.of(SQL92, "amount > 1")
    assert wanted is not None
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert not wanted.matches_record(stored({"amount": "many"}))
        assert not wanted.matches_record(stored({}))
        assert wanted.matches_record(stored({"amount": "2"}))
    assert filters.errors == 5
    assert [one.message.partition(":")[0] for one in caplog.records] == ["SQL filter 'amount > 1'"]


def test_the_log_does_not_grow_with_expressions(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may send another one with each pull."""
    monkeypatch.setattr(filters_module, "_log", BoundedLog(logging.getLogger("test"), lambda: 0.0))
    filters, record = Filters(), stored({"amount": "many"})
    for number in range(10 * LINES_MAX):
        wanted = filters.of(SQL92, f"amount > {number}")
        assert wanted is not None
        assert not wanted.matches_record(record)
    assert (len(caplog.records), filters.errors) == (LINES_MAX, 10 * LINES_MAX)


def test_a_record_is_judged_in_microseconds() -> None:
    """Three terms in about 5 on a quiet machine; ten times as much here."""
    wanted, record = SqlFilter("amount > 10 AND region = 'EU' OR vip IS NOT NULL"), stored(USUAL)

    def once() -> float:
        began = time.thread_time()
        for _ in range(1000):
            wanted.matches_record(record)
        return (time.thread_time() - began) / 1000

    assert min(once() for _ in range(5)) < 50e-6


def test_an_expression_means_what_its_kind_says() -> None:
    filters = Filters()
    tags, condition = filters.of(TAG, "a"), filters.of(SQL92, "a")
    assert tags is filters.of(TAG, "a")
    assert condition is filters.of(SQL92, "a")
    assert tags is not None
    assert condition is not None
    assert (tags.codes, condition.codes) == (frozenset({97}), None)
    assert filters.of("", "*") is None
    with pytest.raises(InvalidRequestError, match="at character 1: "):
        filters.of(SQL92, "*")
    with pytest.raises(InvalidRequestError, match="type XML are not supported"):
        filters.of("XML", "a")


def test_what_is_wrong_is_not_kept() -> None:
    filters = Filters()
    with pytest.raises(InvalidRequestError):
        filters.of(SQL92, "a >")
    assert len(filters) == 0
    assert not filters.is_known(SQL92, "a >")


def test_filters_are_remembered_as_long_as_they_are_used() -> None:
    """A consumer sends its expression with every pull; those of others that come once do not push it out."""
    filters = Filters()
    used = filters.of(TAG, "a || b")
    for number in range(2 * FILTERS_MAX):
        filters.of(TAG, f"tag{number}")
        assert filters.of(TAG, "a || b") is used


def test_what_is_remembered_is_bounded_in_number_and_in_characters() -> None:
    """By the sizes of the expressions, not only by how many there are; compiled ones are larger."""
    filters = Filters()
    for number in range(2 * FILTERS_MAX):
        filters.of(TAG, f"tag{number}")
    assert len(filters) == FILTERS_MAX
    for number in range(100):
        filters.of(TAG, f"{number:03d}" + "x" * (EXPRESSION_CHARS_MAX - 3))
    assert len(filters) == FILTERS_CHARS_MAX // EXPRESSION_CHARS_MAX
    for number in range(100):  # of those who do not say which kind it is
        filters.of("", f"{number:03d}" + "x" * (EXPRESSION_CHARS_MAX - 3))
    assert len(filters) == FILTERS_CHARS_MAX // EXPRESSION_CHARS_MAX
    for number in range(10):
        filters.of(SQL92, f"a = {number}".ljust(EXPRESSION_CHARS_MAX))
    assert len(filters) == FILTERS_CHARS_MAX // EXPRESSION_CHARS_MAX // SQL_CHARS


def test_threads_share_filters() -> None:
    """What one thread pushes out while another parses is counted once."""
    filters = Filters()

    def work(first: int) -> list[MessageFilter | None]:
        return [filters.of(SQL92, f"a = {number % 50} OR b = {number}") for number in range(first, first + 3000)]

    with ThreadPoolExecutor(4) as pool:
        assert all(map(all, pool.map(work, [0, 0, 1000, 2000])))
    weights = sum(len(expression) * SQL_CHARS for _, expression in filters._filters)
    assert (len(filters) <= FILTERS_MAX, filters._chars) == (True, weights)


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
