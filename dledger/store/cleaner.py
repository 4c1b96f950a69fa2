"""Retention: which segments to remove, and whether the disk is full. A pure plan; the store carries it out.

Oldest first, stopping at the first one that must stay; never the last one; never a segment unless all its entries and
the next one are committed and flushed, nor one that a live follower still lacks, unless that follower is
``follower_keep_bytes`` behind.

- At a ``delete_hour``, or above ``disk_check_ratio``: all segments older than ``retention_hours``.
- Above ``disk_clean_ratio`` with ``force_clean``: also the oldest one whatever its age, one per pass, because the ratio
  must be measured again before the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dledger.config import StoreConfig
from dledger.store.fs import DiskUsage, FileSystem
from dledger.types import LogIndex

_MS_PER_HOUR = 3_600_000


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """A segment other than the last one."""

    path: Path
    base: int
    end: int
    last_index: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class CleanFacts:
    """The input of the decision."""

    segments: Iterable[SegmentFacts]
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
    """What to do."""

    remove: tuple[SegmentFacts, ...]
    disk_full: bool


def plan(facts: CleanFacts, config: StoreConfig) -> CleanPlan:
    """Decide which segments to remove."""
    remove: list[SegmentFacts] = []
    due = facts.local_hour in config.delete_hour or facts.usage_ratio > config.disk_check_ratio
    force = config.force_clean and facts.usage_ratio > config.disk_clean_ratio
    for segment in facts.segments:
        expired = due and facts.now_ms - segment.modified_ms > config.retention_hours * _MS_PER_HOUR
        if not (expired or (force and not remove)) or _needed(segment, facts, config):
            break
        remove.append(segment)
    no_room = facts.ran_out_of_space and facts.available_bytes < facts.bytes_wanted
    return CleanPlan(tuple(remove), disk_full=facts.usage_ratio > config.disk_full_ratio or no_room)


def _needed(segment: SegmentFacts, facts: CleanFacts, config: StoreConfig) -> bool:
    # The first entry that stays must be safe too: a log truncated back to its begin would continue at the segment's
    # start, where the others still have the end of the segment before.
    if segment.last_index >= facts.safe_index:
        return True
    far_behind = facts.end - segment.end > config.follower_keep_bytes
    return segment.last_index > facts.protected_index and not far_behind


@dataclass(frozen=True, slots=True)
class Room:
    """The free space that counts for the next segments."""

    ratio: float
    available_bytes: int


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
