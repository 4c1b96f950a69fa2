"""Calculates what a retention setting would delete, by the rules of the logs' cleaners.

Logs are deleted by whole segments, oldest first, and the newest segment always stays. A segment expires when its last
write is older than the setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MS_PER_HOUR = 3_600_000


@dataclass(frozen=True, slots=True)
class RetentionSegment:
    """One file of the log. ``disk_bytes``: its size with reserved space; ``live_bytes``: the size of its records."""

    name: str
    messages: int
    live_bytes: int
    disk_bytes: int
    oldest_ms: int | None
    """None if nothing in it has a timestamp."""
    newest_ms: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """How much to keep; None: no limit. With both, whatever exceeds either is deleted."""

    hours: float | None = None
    disk_bytes: int | None = None

    @property
    def words(self) -> str:
        """The setting in words, for titles and tables."""
        parts = [] if self.hours is None else [f"{self.hours:g} h"]
        return " and ".join([*parts, *([] if self.disk_bytes is None else [f"{self.disk_bytes:,} bytes"])]) or "all"


@dataclass(frozen=True, slots=True)
class RetentionOutcome:
    """The effect of a setting: the first ``segments`` would be deleted."""

    segments: int
    messages: int
    live_bytes: int
    disk_bytes: int
    kept_disk_bytes: int
    kept_from_ms: int | None
    """The oldest time that would be kept."""


def outcome(segments: Sequence[RetentionSegment], setting: Setting, now_ms: int) -> RetentionOutcome:
    """The part of ``segments`` (the oldest first) that ``setting`` would delete at ``now_ms``."""
    count = _deleted(segments, setting, now_ms)
    gone, kept = segments[:count], segments[count:]
    return RetentionOutcome(
        count,
        sum(one.messages for one in gone),
        sum(one.live_bytes for one in gone),
        sum(one.disk_bytes for one in gone),
        sum(one.disk_bytes for one in kept),
        next((one.oldest_ms for one in kept if one.oldest_ms is not None), None),
    )


def _deleted(segments: Sequence[RetentionSegment], setting: Setting, now_ms: int) -> int:
    left = sum(one.disk_bytes for one in segments)
    for count, one in enumerate(segments[:-1]):
        old = (
            setting.hours is not None
            and one.newest_ms is not None
            and now_ms - one.newest_ms > setting.hours * _MS_PER_HOUR
        )
        if not old and (setting.disk_bytes is None or left <= setting.disk_bytes):
            return count
        left -= one.disk_bytes
    return max(0, len(segments) - 1)
