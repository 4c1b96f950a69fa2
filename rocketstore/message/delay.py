"""The delay levels: how long messages of each level are delayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from dledger.errors import ConfigError
from dledger.values import parse_duration_ms

UNKNOWN_LEVEL_DELAY_MS: Final = 1000
_DELAY_MS_MAX: Final = 10**9 * 86_400_000
_LEVEL_DIGITS_MAX: Final = 9


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """Delays in milliseconds; level 1 is the first. A level's queue in ``SCHEDULE_TOPIC`` is the level less 1."""

    delays_ms: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``"1s 5s 10m 1h 1d"``. Raises ``ConfigError`` with every invalid delay."""
        delays, problems = [], []
        for word in text.split():
            try:
                delays.append(_delay_ms(word))
            except ValueError as error:
                problems.append(f"message_delay_level: {error}")
        if not delays and not problems:
            problems = ["message_delay_level: name at least one delay, such as 1s"]
        if problems:
            raise ConfigError(problems)
        return cls(tuple(delays))

    @property
    def level_max(self) -> int:
        """The highest level."""
        return len(self.delays_ms)

    def cap(self, level: int) -> int:
        """``level``, limited to the highest one; 0 for a message without delay."""
        return max(0, min(level, len(self.delays_ms)))

    def delay_ms(self, level: int) -> int:
        """The level's delay; a second for an unknown level (as in RocketMQ)."""
        return self.delays_ms[level - 1] if 1 <= level <= len(self.delays_ms) else UNKNOWN_LEVEL_DELAY_MS

    def due_ms(self, level: int, store_timestamp: int) -> int:
        """When a message of ``level`` (capped) stored at ``store_timestamp`` is due."""
        return store_timestamp + self.delay_ms(self.cap(level))


def parse_level(text: str) -> int:
    """The level in a DELAY property; 0 (no delay) for anything that is not a positive number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LEVEL_DIGITS_MAX else 0


def _delay_ms(word: str) -> int:
    delay = parse_duration_ms(word, unit="")
    if not 0 <= delay <= _DELAY_MS_MAX or delay != int(delay):
        raise ValueError(f"invalid delay {word!r}: use whole milliseconds, at most {_DELAY_MS_MAX}")
    return int(delay)
