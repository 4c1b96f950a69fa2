"""Formats figures for people; in JSON they stay plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from typing import Final

Value = str | int | float | bool | None

_BYTES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class CountUnit(Enum):
    """The units of a number."""

    TEXT = "text"
    COUNT = "count"
    BYTES = "bytes"
    SECONDS = "seconds"
    PER_SECOND = "per second"
    BYTES_PER_SECOND = "bytes per second"
    SHARE = "share"
    """0 to 1, shown as a percentage."""
    RATIO = "ratio"
    """A factor."""
    TIME_MS = "time"
    """Milliseconds since 1970, shown as UTC."""

    @property
    def is_number(self) -> bool:
        """Whether it is right-aligned."""
        return self not in (CountUnit.TEXT, CountUnit.TIME_MS)


def shown(value: Value, unit: CountUnit) -> str:
    """``value`` formatted for people; a dash if there is none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else _SHOWN[unit](value)


def time_text(at_ms: int) -> str:
    """UTC, to the second."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _bytes(value: float) -> str:
    size, unit = float(value), 0
    while abs(size) >= 1024 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{_figures(size)} {_BYTES[unit]}"


def _figures(value: float) -> str:
    """About three significant digits; digits before the point are always kept."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{_figures(seconds)} s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    return f"{days:.1f} d" if days >= 2 else f"{hours:.1f} h" if hours >= 2 else f"{minutes:.1f} min"


_SHOWN: Final[dict[CountUnit, Callable[[float], str]]] = {
    CountUnit.TEXT: str,
    CountUnit.COUNT: lambda value: f"{value:,.0f}",
    CountUnit.BYTES: _bytes,
    CountUnit.SECONDS: _duration,
    CountUnit.PER_SECOND: lambda value: f"{_figures(value)}/s",
    CountUnit.BYTES_PER_SECOND: lambda value: f"{_bytes(value)}/s",
    CountUnit.SHARE: lambda value: f"{value:.1%}",
    CountUnit.RATIO: lambda value: f"{value:.2f}x",
    CountUnit.TIME_MS: lambda value: time_text(int(value)),
}
