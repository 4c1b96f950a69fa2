"""What a retention setting would delete: the rule of the logs' cleaners, as arithmetic.

Logs are deleted by whole segments, the oldest first, and the newest segment stays whatever its age. A segment has
expired when it was written last longer ago than the setting says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MS_PER_HOUR = 3_600_000


@dataclass(frozen=True, slots=True)
class RetentionSegment:
    """One file of the log. ``disk_bytes``: its size, reserved space included; ``live_bytes``: what its records take."""

    name: str
    messages: int
    live_bytes: int
    disk_bytes: int
    oldest_ms: int | None
    """None: nothing in it has a time."""
    newest_ms: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """How much to keep; None: does not matter. With both, what either deletes is deleted."""

    hours: float | None = None
    disk_bytes: int | None = None

    @property
    def words(self) -> str:
        """For titles and tables."""
        parts = [] if self.hours is None else [f"{self.hours:g} h"]
        return " and ".join([*parts, *([] if self.disk_bytes is None else [f"{self.disk_bytes:,} bytes"])]) or "all"


@dataclass(frozen=True, slots=True)
class RetentionOutcome:
    """What a setting would do: the first ``segments`` would go."""

    segments: int
    messages: int
    live_bytes: int
    disk_bytes: int
    kept_disk_bytes: int
    kept_from_ms: int | None
    """The oldest time that would still be there."""


def outcome(segments: Sequence[RetentionSegment], setting: Setting, now_ms: int) -> RetentionOutcome:
    """What ``setting`` would delete of ``segments`` (the oldest first) at ``now_ms``."""
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
