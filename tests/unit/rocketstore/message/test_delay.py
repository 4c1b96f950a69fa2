"""The table of delay levels."""

from __future__ import annotations

import pytest

from dledger.errors import ConfigError
from rocketstore.config import DEFAULT_DELAY_LEVELS
from rocketstore.message.message import DelayLevels, parse_level


def test_rocketmqs_default_levels_are_read() -> None:
    """Eighteen levels from a second to two hours."""
    levels = DelayLevels.parse(DEFAULT_DELAY_LEVELS)

    assert levels.level_max == 18
    assert [levels.delay_ms(level) for level in (1, 2, 4, 5, 17, 18)] == [
        1000,
        5000,
        30_000,
        60_000,
        3_600_000,
        7_200_000,
    ]


def test_days_are_a_unit() -> None:
    """RocketMQ knows s, m, h and d."""
    assert DelayLevels.parse(" 1d  2s ").delays_ms == (86_400_000, 2000)


def test_levels_beyond_the_highest_count_as_the_highest() -> None:
    """The level is capped before the delay is looked up; 0 and less mean no delay."""
    levels = DelayLevels.parse("1s 5s")

    assert [levels.cap(level) for level in (-1, 0, 1, 2, 3)] == [0, 0, 1, 2, 2]
    assert levels.due_ms(3, 10) == 5010
    assert levels.delay_ms(3) == levels.delay_ms(0) == 1000


@pytest.mark.parametrize("text", ["", "1", "s", "1w", "1s x", "-1s", "1.0005s", "\u0661s", "9999999999d", "1s,2s"])
def test_words_that_are_no_delay_are_named(text: str) -> None:
    """All of them at once."""
    with pytest.raises(ConfigError, match="message_delay_level"):
        DelayLevels.parse(text)


@pytest.mark.parametrize(
    ("text", "level"),
    [("3", 3), ("18", 18), ("0", 0), ("", 0), ("-1", 0), ("x", 0), ("\u0663", 0), ("\xb2", 0), ("9" * 5000, 0)],
)
def test_a_delay_property_that_is_no_number_means_no_delay(text: str, level: int) -> None:
    """Where Java would refuse the whole record."""
    assert parse_level(text) == level
