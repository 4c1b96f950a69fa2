"""Retention: which segments to remove, and whether the disk is full. A pure plan; the store carries it out.

Oldest first, stopping at the first one that must stay; never the last one; never a segment unless all its entries and
the next one are committed and flushed, nor one that a live follower still lacks, unless that follower is
``follower_keep_bytes`` behind.

- At a ``delete_hour``, or above ``disk_check_ratio``: all segments older than ``retention_hours``.
- Above ``disk_clean_ratio``, only if ``force_clean`` was switched on: also the oldest one whatever its age, one per
  pass, because the ratio must be measured again before the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dledger.config import StoreConfig
from dledger.store.fs import DiskUsage, FileSystem
from dledger.types import LogIndex
from dledger.values import MIB

_MS_PER_HOUR = 3_600_000
_log = logging.getLogger("dledger")


@dataclass(frozen=True, slots=True)
class ClosedSegment:
    """A segment other than the last one."""

    path: Path
    base: int
    end: int
    last_index: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class CleaningInput:
    """The input of the decision."""

    segments: Iterable[ClosedSegment]
    """Oldest first, without the last one; lazily, because each one looked at costs reads."""
    end: int
    safe_index: int
    """Entries up to here are committed and flushed."""
    protected_index: int
    """All live followers have the entries up to here."""
    now_ms: int
    local_hour: int
    usage_ratio: float
    available_bytes: int
    ran_out_of_space: bool
    """Whether an append found no room since the disk was last seen to have some."""
    bytes_wanted: int
    """The room that the next segments need."""


@dataclass(frozen=True, slots=True)
class CleanPlan:
    """The segments to remove, and why no more."""

    remove: tuple[ClosedSegment, ...]
    disk_full: bool
    forced: ClosedSegment | None = None
    """Which of them has not expired."""


@dataclass(frozen=True, slots=True)
class ForcedRemoval:
    """A segment that was removed although it had not expired, because ``force_clean`` is on."""

    path: Path
    first_index: int
    last_index: int
    age_ms: int
    """Since its last write."""
    usage_ratio: float

    def tell(self, config: StoreConfig) -> None:
        """Log it: these entries were acknowledged."""
        text = (
            "removed entries %d to %d (%s), the last written %d s ago and not expired (retention_hours=%g): the disk "
            "is %.0f%% full, and force_clean=true removes the oldest segments above disk_clean_ratio=%.0f%%"
        )
        age_s, hours = self.age_ms // 1000, config.retention_hours
        ratios = (self.usage_ratio * 100, config.disk_clean_ratio * 100)
        extra = {"event": "forced_removal", "first_index": self.first_index, "last_index": self.last_index}
        _log.warning(text, self.first_index, self.last_index, self.path, age_s, hours, *ratios, extra=extra)


def plan(given: CleaningInput, config: StoreConfig) -> CleanPlan:
    """Decide which segments to remove."""
    remove: list[ClosedSegment] = []
    forced: ClosedSegment | None = None
    due = given.local_hour in config.delete_hour or given.usage_ratio > config.disk_check_ratio
    force = config.force_clean and given.usage_ratio > config.disk_clean_ratio
    for segment in given.segments:
        expired = due and given.now_ms - segment.modified_ms > config.retention_hours * _MS_PER_HOUR
        if not (expired or (force and not remove)) or _needed(segment, given, config):
            break
        remove.append(segment)
        if not expired:
            forced = segment
    no_room = given.ran_out_of_space and given.available_bytes < given.bytes_wanted
    return CleanPlan(tuple(remove), given.usage_ratio > config.disk_full_ratio or no_room, forced)


def _needed(segment: ClosedSegment, given: CleaningInput, config: StoreConfig) -> bool:
    # The first entry that stays must be safe too: a log truncated back to its begin would continue at the segment's
    # start, where the others still have the end of the segment before.
    if segment.last_index >= given.safe_index:
        return True
    far_behind = given.end - segment.end > config.follower_keep_bytes
    return segment.last_index > given.protected_index and not far_behind


@dataclass(frozen=True, slots=True)
class Room:
    """The free space that counts for the next segments."""

    ratio: float
    available_bytes: int

    def refusal(self, config: StoreConfig) -> str:
        """Why appends are refused: the disk is full, or a segment, which is reserved in full length, does not fit."""
        if self.ratio > config.disk_full_ratio:
            return f"appends are refused: the disk is full ({self.ratio:.0%} used)"
        free, wanted = (max(0, one) // MIB for one in (self.available_bytes, segment_room(config)))
        return (
            f"appends are refused: the next segment needs {wanted:,} MiB and the disk has {free:,} MiB left "
            f"({max(0.0, self.ratio):.0%} used): free space, or enlarge the disk"
        )


def segment_room(config: StoreConfig) -> int:
    """The bytes that the next segment and its index file reserve."""
    return config.segment_bytes + config.index_segment_bytes


def measure(fs: FileSystem, data: Iterable[Path], directory: Path) -> Room:
    """Measure the emptiest data directory, because new segments go there, and the node's own directory."""
    usages: list[DiskUsage] = [fs.usage(path) for path in data]
    own = fs.usage(directory)
    return Room(
        ratio=max(min(usage.ratio for usage in usages), own.ratio),
        available_bytes=min(max(usage.available_bytes for usage in usages), own.available_bytes),
    )


def local_hour(now_ms: int) -> int:
    """The current hour in this machine's time zone."""
    return time.localtime(now_ms / 1000).tm_hour


def protected(committed: LogIndex, followers: Iterable[LogIndex]) -> LogIndex:
    """The ``protected_index`` of a leader: the lowest match index of its live followers, at most the commit index."""
    return min((committed, *followers))
