"""Throughput over time: converts totals by hour, or by minute, to rates per column of a chart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

HOUR_MS: Final = 3_600_000
MINUTE_MS: Final = 60_000
COLUMNS_MAX: Final = 180
"""A week of hours, or three hours of minutes, fits side by side; beyond that, they are combined."""


@dataclass(frozen=True, slots=True)
class Span:
    """``width_ms`` of the log from ``begin_ms`` on, ``seconds`` of it between its first and last message."""

    begin_ms: int
    width_ms: int
    messages: int
    size_bytes: int
    seconds: float

    @property
    def messages_per_s(self) -> float:
        """The rate over the part covered by the log."""
        return self.messages / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """The rate over the part covered by the log."""
        return self.size_bytes / self.seconds

    @property
    def label(self) -> str:
        """Its start, in UTC."""
        form = "%m-%d %H:%M" if self.width_ms >= HOUR_MS else "%H:%M"
        return datetime.fromtimestamp(self.begin_ms / 1000, UTC).strftime(form)

    @property
    def width(self) -> str:
        """In words that follow "each"."""
        unit_ms, unit = (HOUR_MS, "hour") if self.width_ms >= HOUR_MS else (MINUTE_MS, "minute")
        count = self.width_ms // unit_ms
        return unit if count == 1 else f"{count} {unit}s"


def spans(
    totals: Mapping[int, tuple[int, int]],
    first_ms: int,
    last_ms: int,
    columns: int = COLUMNS_MAX,
    unit_ms: int = HOUR_MS,
) -> list[Span]:
    """``totals``: (messages, bytes) by start of the hour (``unit_ms``). Empty ones count; at most ``columns``."""
    if not totals:
        return []
    begin, end = min(totals), max(totals) + unit_ms
    width_ms = max(1, -(-(end - begin) // unit_ms // columns)) * unit_ms
    found = []
    for at in range(begin, end, width_ms):
        parts = [totals[one] for one in range(at, at + width_ms, unit_ms) if one in totals]
        covered_ms = min(at + width_ms, last_ms) - max(at, first_ms)
        messages, size = (sum(column) for column in zip(*parts, strict=True)) if parts else (0, 0)
        found.append(Span(at, width_ms, messages, size, max(1.0, covered_ms / 1000)))
    return found


def silent_hours(by_hour: Mapping[int, tuple[int, int]]) -> int:
    """Hours without messages between the first and the last one."""
    return (max(by_hour) - min(by_hour)) // HOUR_MS + 1 - len(by_hour) if by_hour else 0
