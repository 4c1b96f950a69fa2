"""Throughput over time: converts hourly totals to rates per column of a chart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

HOUR_MS: Final = 3_600_000
COLUMNS_MAX: Final = 168
"""A week of hours fits side by side; beyond that, hours are combined."""


@dataclass(frozen=True, slots=True)
class Span:
    """``hours`` hours of the log from ``begin_ms`` on, ``seconds`` of them between its first and last message."""

    begin_ms: int
    hours: int
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
        return f"{datetime.fromtimestamp(self.begin_ms / 1000, UTC):%m-%d %H:%M}"


def spans(
    by_hour: Mapping[int, tuple[int, int]], first_ms: int, last_ms: int, columns: int = COLUMNS_MAX
) -> list[Span]:
    """``by_hour``: (messages, bytes) by start of the hour. Empty hours are included; at most ``columns`` spans."""
    if not by_hour:
        return []
    begin, end = min(by_hour), max(by_hour) + HOUR_MS
    hours = -(-(end - begin) // HOUR_MS // columns) if (end - begin) // HOUR_MS > columns else 1
    found = []
    for at in range(begin, end, hours * HOUR_MS):
        parts = [by_hour[one] for one in range(at, at + hours * HOUR_MS, HOUR_MS) if one in by_hour]
        covered_ms = min(at + hours * HOUR_MS, last_ms) - max(at, first_ms)
        messages, size = (sum(column) for column in zip(*parts, strict=True)) if parts else (0, 0)
        found.append(Span(at, hours, messages, size, max(1.0, covered_ms / 1000)))
    return found


def silent_hours(by_hour: Mapping[int, tuple[int, int]]) -> int:
    """Hours without messages between the first and the last one."""
    return (max(by_hour) - min(by_hour)) // HOUR_MS + 1 - len(by_hour) if by_hour else 0
