"""The delay levels: how long a message of each level waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from dledger.errors import ConfigError

UNKNOWN_LEVEL_DELAY_MS: Final = 1000
_UNITS_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL_DIGITS_MAX: Final = 9


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """Delays in milliseconds; level 1 is the first. The queue of a level in ``SCHEDULE_TOPIC`` is the level less 1."""

    delays_ms: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"1s 5s 10m 1h 1d"``. Raises ``ConfigError`` with every word that is no delay."""
        words = text.split()
        problems = [
            f"messageDelayLevel: invalid delay {word!r}: use a form such as 10s, 5m, 1h or 1d"
            for word in words
            if not _is_delay(word)
        ]
        if not words:
            problems = ["messageDelayLevel: name at least one delay, such as 1s"]
        if problems:
            raise ConfigError(problems)
        return cls(tuple(int(word[:-1]) * _UNITS_MS[word[-1]] for word in words))

    @property
    def level_max(self) -> int:
        """The highest level."""
        return len(self.delays_ms)

    def cap(self, level: int) -> int:
        """``level``, or the highest level if there is none so high; 0 for a message without delay."""
        return max(0, min(level, len(self.delays_ms)))

    def delay_ms(self, level: int) -> int:
        """The level's delay; a second for a level that does not exist (RocketMQ)."""
        return self.delays_ms[level - 1] if 1 <= level <= len(self.delays_ms) else UNKNOWN_LEVEL_DELAY_MS

    def due_ms(self, level: int, store_timestamp: int) -> int:
        """When a message of ``level`` (capped) stored at ``store_timestamp`` is due."""
        return store_timestamp + self.delay_ms(self.cap(level))


def parse_level(text: str) -> int:
    """The level that a DELAY property names; 0, no delay, for anything that is no positive number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LEVEL_DIGITS_MAX else 0


def _is_delay(word: str) -> bool:
    digits = word[:-1]
    return word[-1] in _UNITS_MS and digits.isascii() and digits.isdigit() and len(digits) <= _LEVEL_DIGITS_MAX
