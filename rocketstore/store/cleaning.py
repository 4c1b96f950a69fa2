"""Retention: removes log files, makes queues and index follow, and detects a full disk.

Log files are removed when they expire: at the hours of ``delete_when``, when a disk is fuller than
``disk_max_used_space_ratio``, or for a while after a request; above ``disk_space_clean_forcibly_ratio``, the oldest are
removed at any age, but only if ``clean_file_forcibly_enable`` was switched on. The log never removes its last file.
Above ``disk_space_warning_level_ratio``, the store accepts no messages, and resumes by itself once there is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from dledger.clock import Clock
from dledger.errors import DiskError
from dledger.store.fs import FileSystem
from dledger.values import split
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.mapped.queue import ForcedFileRemoval

MANUAL_ROUNDS: Final = 20
"""How many rounds delete expired files after a request."""
_RATIO_UNKNOWN: Final = -1


class CleanableFiles(Protocol):
    """The consume queues or the index."""

    def delete_expired(self, min_physical_offset: int, /) -> int:
        """Drop everything that refers to positions before the log's begin; returns how many files were removed."""


@dataclass(frozen=True, slots=True)
class CleanDecision:
    """The actions of one round."""

    delete: bool
    immediately: bool
    disk_full: bool


def decide(ratio_percent: int, local_hour: int, config: MessageStoreConfig, *, manual: bool) -> CleanDecision:
    """Apply the rules above. ``ratio_percent`` is that of the fuller of log and queues, -1 if unknown."""
    full = ratio_percent > config.disk_space_warning_level_ratio
    tight = ratio_percent > config.disk_space_clean_forcibly_ratio
    limit = min(95, max(10, config.disk_max_used_space_ratio))
    due = manual or local_hour in delete_hours(config.delete_when) or not 0 <= ratio_percent <= limit
    immediately = config.clean_file_forcibly_enable and tight
    return CleanDecision(due or immediately, immediately, full)


def delete_hours(text: str) -> frozenset[int]:
    """Parse RocketMQ's hours of the day, ``04;16``, or ``04,16`` as conf files have them, too."""
    return frozenset(int(part) for part in split(text, ";,") if part.isdigit())


def used_percent(fs: FileSystem, path: Path) -> int:
    """The usage of a path's file system, rounded up; -1 if there is no such path."""
    try:
        usage = fs.usage(path)
    except OSError:
        return _RATIO_UNKNOWN
    whole = usage.used_bytes + usage.available_bytes
    return -(-usage.used_bytes * 100 // whole) if whole else 100


@dataclass(frozen=True, slots=True)
class DiskRatios:
    """The usage of the disks (percent, -1 if unknown). Of several log directories, the least full one counts."""

    log: int
    queues: int

    @property
    def worst(self) -> int:
        """The higher one; unknown if either is."""
        return _RATIO_UNKNOWN if min(self.log, self.queues) < 0 else max(self.log, self.queues)


class Cleaner:
    """Carries out the decisions. Used by one thread."""

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        log: CommitLog,
        followers: Sequence[CleanableFiles],
        config: MessageStoreConfig,
        fs: FileSystem,
        clock: Clock,
        *,
        may_delete: Callable[[], bool] = lambda: True,
        on_disk_full: Callable[[bool], None] = lambda _full: None,
        on_held_back: Callable[[], None] = lambda: None,
        on_forced: Callable[[ForcedFileRemoval, int], None] = lambda _removed, _percent: None,
    ) -> None:
        """``may_delete``: whether all but the newest log file is dispatched. ``on_disk_full`` is called every round.

        ``on_held_back`` copies what must survive to the end of the log, so that the file containing it may be removed.
        ``on_forced`` gets every log file that was removed before it had expired, and how full the disk was.
        """
        self._log = log
        self._followers = tuple(followers)
        self._config = config
        self._fs = fs
        self._clock = clock
        self._may_delete = may_delete
        self._on_disk_full = on_disk_full
        self._on_held_back = on_held_back
        self._on_forced = on_forced
        self._manual_rounds = 0
        self._followed_to = -1

    def request(self) -> None:
        """Delete expired files in the next rounds, regardless of the hour."""
        self._manual_rounds = MANUAL_ROUNDS

    def ratios(self) -> DiskRatios:
        """The current usage of the disks."""
        logs = [used_percent(self._fs, Path(path)) for path in self._log.directories()]
        known = [ratio for ratio in logs if ratio >= 0]
        return DiskRatios(min(known, default=_RATIO_UNKNOWN), used_percent(self._fs, self._config.store_path_root_dir))

    def clean(self) -> int:
        """Run one round; returns how many log files were removed. Raises ``DiskError`` after all steps were tried."""
        manual = self._manual_rounds > 0
        self._manual_rounds -= manual
        used = self.ratios().worst
        decision = decide(used, self._local_hour(), self._config, manual=manual)
        self._on_disk_full(decision.disk_full)
        removed = 0
        if decision.delete and self._may_delete():
            now_ms = self._clock.wall_ms()
            if self._log.is_held_back(now_ms=now_ms, immediately=decision.immediately):
                self._on_held_back()
            removed = self._log.delete_expired(
                now_ms=now_ms,
                immediately=decision.immediately,
                on_forced=lambda forced: self._on_forced(forced, used),
            )
        self.follow()
        return removed

    def follow(self) -> None:
        """Make queues and index drop what the log no longer contains. Raises ``DiskError``."""
        begin = self._log.min_offset
        if begin <= self._followed_to:
            return
        failures: list[DiskError] = []
        for follower in self._followers:
            try:
                follower.delete_expired(begin)
            except DiskError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        self._followed_to = begin

    def _local_hour(self) -> int:
        return time.localtime(self._clock.wall_ms() / 1000).tm_hour
