"""How people write values: sizes, durations, switches and addresses, wherever they stand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import click
import numpy as np
import pytest

from dledger.command_line.flag_values import Number, Seconds, Size
from dledger.values import (
    FieldLimits,
    Range,
    Unit,
    out_of_range,
    parse_address,
    parse_addresses,
    parse_boolean,
    parse_duration_ms,
    parse_integer,
    parse_millis,
    parse_number,
    parse_percentage,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("17", 17),
        ("4k", 4096),
        ("4ki", 4096),
        ("64KiB", 64 << 10),
        ("1 MiB", 1 << 20),
        ("2G", 2 << 30),
        ("1t", 1 << 40),
        ("-1", -1),
    ],
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    """In conf files, flags and Spark's options alike; whether one may be negative is the field's business."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4x", "k", "1.5g", "1e3", "٣k", "9" * 5000])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    """Not taken for another one."""
    with pytest.raises(ValueError):  # noqa: PT011  # of 5,000 digits Python itself says so
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("500", 500),
        ("500ms", 500),
        ("30s", 30_000),
        ("1.5h", 5_400_000),
        ("2 M", 120_000),
        ("7d", 604_800_000),
        ("10_000", 10_000),
    ],
)
def test_durations_have_units_and_bare_ones_are_milliseconds(text: str, ms: int) -> None:
    """As RocketMQ's numbers are."""
    assert parse_millis(text) == ms


@pytest.mark.parametrize(("text", "ms"), [("1.001s", 1001), ("0.07h", 252_000), ("4.35s", 4350)])
def test_durations_are_exact(text: str, ms: int) -> None:
    """Though as binary fractions their products are not whole."""
    assert parse_millis(text) == ms


@pytest.mark.parametrize("text", ["", "soon", "1w", "0.5ms", "0.5", "s", "٣s", "٣", f"1{'0' * 30}s", f"1{'0' * 400}.5"])
def test_what_is_not_a_whole_number_of_milliseconds_is_refused(text: str) -> None:
    """Nothing is rounded unseen."""
    with pytest.raises(ValueError, match=f"invalid duration '{text}'"):
        parse_millis(text)


def test_a_bare_number_counts_what_the_flag_says() -> None:
    """Seconds, or nothing at all."""
    assert parse_duration_ms("5", unit="s") == 5000
    with pytest.raises(ValueError, match="invalid duration '5'"):
        parse_duration_ms("5", unit="")


def test_a_number_is_finite() -> None:
    """More digits than a float takes are not infinitely many."""
    assert parse_number("0.5") == 0.5
    with pytest.raises(ValueError, match="invalid number"):
        parse_number("9" * 400)


def test_switches_and_numbers_are_written_in_many_ways() -> None:
    """Those of conf files and those of Spark's options."""
    assert [parse_boolean(one) for one in ("true", "Yes", "ON", "1")] == [True] * 4
    assert [parse_boolean(one) for one in ("FALSE", "no", "off", "0")] == [False] * 4
    assert (parse_integer("+5"), parse_integer("10_000"), parse_integer("-1")) == (5, 10_000, -1)
    assert (parse_number("-.5"), parse_percentage("7.5")) == (-0.5, 0.075)


@pytest.mark.parametrize("text", ["", "1e3", "nan", "inf", "٣", "1_000.5", "0x10"])
def test_what_is_not_a_decimal_number_is_refused(text: str) -> None:
    """Though Python reads most of it."""
    with pytest.raises(ValueError, match="invalid number"):
        parse_number(text)


@pytest.mark.parametrize("text", ["٣", "1__0", "_1", "1_", "1.0", ""])
def test_what_is_not_a_whole_number_is_refused(text: str) -> None:
    """The same everywhere."""
    with pytest.raises(ValueError, match="invalid whole number"):
        parse_integer(text)


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("h:1", ("h:1",)),
        ("a:1, b:2;c:3,", ("a:1", "b:2", "c:3")),
        ("[::1]:1", ("[::1]:1",)),
        ("::1:30911", ("[::1]:30911",)),
    ],
)
def test_addresses_are_separated_by_commas_or_semicolons(text: str, addresses: tuple[str, ...]) -> None:
    """An IPv6 host gets its brackets, for gRPC needs them."""
    assert parse_addresses(text) == addresses


@pytest.mark.parametrize(
    "text", ["", "h", "h:", ":1", "h:0", "h:65536", "h:x", "a:1,h", "::1", "h:1:2", "h:٣", "h:000001"]
)
def test_what_is_not_an_address_is_refused(text: str) -> None:
    """Before anything is dialled."""
    with pytest.raises(ValueError, match="address"):
        parse_addresses(text)


def test_a_port_that_cannot_be_is_told_the_highest() -> None:
    """The rest of such an address looks right."""
    with pytest.raises(ValueError, match="a port up to 65535"):
        parse_address("h:99999")


def test_a_server_may_listen_on_any_port() -> None:
    """Port 0."""
    assert parse_address("[::1]:0", port_min=0) == ("::1", 0)


def test_flags_read_the_same_and_tell_their_limits() -> None:
    """Sizes and durations."""
    assert Size(min=1).convert("4g", None, None) == 4 << 30
    assert (Number().convert("5", None, None), Seconds().convert("1e-3", None, None)) == (5.0, 0.001)
    assert (Seconds().convert("0.5", None, None), Seconds().convert("2m", None, None)) == (0.5, 120.0)
    for flag, text, words in (
        (Size(min=1), "0", "use 1 or more"),
        (Size(min=1), "big", "invalid size"),
        (Seconds(min=0, min_open=True), "0s", "use more than 0"),
        (Seconds(), "soon", "invalid duration"),
        (Seconds(), "9" * 400, "invalid duration"),
        (Seconds(), "nan", "invalid duration"),
        (Seconds(), "inf", "invalid duration"),
        (Number(min=0, min_open=True), "0", "use more than 0"),
        (Number(min=0), "nan", "finite"),
        (Number(min=0), "1e999", "finite"),
    ):
        with pytest.raises(click.BadParameter, match=words):
            flag.convert(text, None, None)


def test_a_range_says_what_it_allows() -> None:
    """And NaN is never allowed."""
    assert Range(1, 5).text() == "between 1 and 5"
    assert Range(above=0, high=1).text() == "above 0 and at most 1"
    assert Range(1 << 20, or_zero=True).text(Unit.BYTES) == "0 or at least 1 MiB"
    assert Range(0.2).text() == "at least 0.2"
    assert [Range(above=0).allows(one) for one in (0, 0.1, math.nan)] == [False, True, False]
    assert [Range(1, 5).allows(one) for one in (0, 1, 5, 6)] == [False, True, True, False]
    assert [Range(3, or_zero=True).allows(one) for one in (-1, 0, 2, 3)] == [False, True, False, True]
    assert [Range(8, multiple_of=8).allows(one) for one in (0, 8, 12)] == [False, True, False]


@dataclass(frozen=True)
class _Limited:
    least: Annotated[int, Range(1, 5)] = 1
    hours: Annotated[tuple[int, ...], Range(0, 23)] = ()
    port: Annotated[int | None, Range(0, 65535)] = None


def test_everything_out_of_range_is_told() -> None:
    """Each item of a list counts; what is not given is not wrong."""
    assert out_of_range(_Limited()) == []
    assert out_of_range(_Limited(0, (4, 24), 65536)) == [
        "least=0 must be between 1 and 5",
        "hours=4;24 must be between 0 and 23",
        "port=65536 must be between 0 and 65535",
    ]


@pytest.mark.parametrize("number", [np.int64(8), np.float32(8), Fraction(8)])
def test_a_number_of_any_kind_may_be_in_range(number: float) -> None:
    """Options of clients are computed, with numpy too."""
    limits = FieldLimits(Range(1, 16))

    assert limits.complaint(number) == ""
    assert limits.complaint(number * 3).endswith(" must be between 1 and 16")
    assert limits.complaint("8") == "8 must be between 1 and 16"
