"""The work on a store by time: flushing queues and index, retention, verification, samples; and when puts are refused.

Threads: *flush* (queues and index, then the checkpoint), *clean* (retention), *scrub* (``rocketstore.store.scrub``),
and *stats* (a sample per second).

Retention removes log files, makes queues and index follow, and detects a full disk. Log files are removed when they
expire: at the hours of ``delete_when``, when a disk is fuller than ``disk_max_used_space_ratio``, or for a while after
a request; above ``disk_space_clean_forcibly_ratio``, the oldest are removed at any age, but only if
``clean_file_forcibly_enable`` was switched on. The log never removes its last file. Above
``disk_space_warning_level_ratio``, the store accepts no messages, and resumes by itself once there is room.

``PutGate`` says why a store currently refuses messages: one result, prepared when a reason changes and read by every
put.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from dledger.clock import Clock
from dledger.errors import DiskError
from dledger.monitoring import REMOVED_EARLY_TOLD_MS, ConditionKind
from dledger.runtime.threads import Supervisor, Worker
from dledger.store.fs import FileSystem
from dledger.values import split
from rocketstore.commit_log.port import CommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.consume_queue.queue_check import QueueCheck
from rocketstore.mapped.queue import ForcedFileRemoval
from rocketstore.queue_numbers import NumberWriter
from rocketstore.store.derived import Derived, Durability
from rocketstore.store.dispatch import DispatchService
from rocketstore.store.scrub import DerivedScrub
from rocketstore.store.stats import StoreStats
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult


class Obstacle(StrEnum):
    """Reasons besides the role that close a store to puts; RocketMQ's running flags, in words."""

    NOT_RUNNING = "the store is not running"
    MAINTENANCE = "writing is disabled"
    QUEUE_ERROR = "the consume queues cannot follow the log"
    INDEX_ERROR = "the index cannot follow the log"
    DISK_FULL = "the disk is full"
    SUPERSEDED = "this broker is not the master any more"
    TOO_FEW_REPLICAS = "too few brokers have a copy"


_ORDER: Final = tuple(Obstacle)


class PutGate:
    """Open while there is no obstacle and the role is a master's.

    ``refusal`` is the result of every put while the gate is closed, None while it is open. The priority of reasons is
    RocketMQ's: not running, slave, not writable.
    """

    def __init__(self, role: BrokerRole) -> None:
        self._lock = threading.Lock()  # guards role, _obstacles and refusal together
        self._obstacles: dict[Obstacle, str] = {Obstacle.NOT_RUNNING: ""}
        self.role = role
        self.refusal: PutResult | None = None
        self._renew()

    def close(self, obstacle: Obstacle, detail: str = "") -> bool:
        """Add a reason; False if it already existed."""
        with self._lock:
            new = obstacle not in self._obstacles
            if new:
                self._obstacles[obstacle] = detail
                self._renew()
            return new

    def open(self, obstacle: Obstacle) -> bool:
        """Remove a reason; False if it did not exist."""
        with self._lock:
            found = self._obstacles.pop(obstacle, None) is not None
            if found:
                self._renew()
            return found

    def become(self, role: BrokerRole) -> None:
        with self._lock:
            self.role = role
            self._renew()

    def has(self, obstacle: Obstacle) -> bool:
        """Whether this reason exists."""
        return obstacle in self._obstacles

    def _renew(self) -> None:
        reasons = [_text(one, self._obstacles[one]) for one in _ORDER if one in self._obstacles]
        if self.role is BrokerRole.SLAVE:
            reasons.insert(1 if Obstacle.NOT_RUNNING in self._obstacles else 0, "this node is a slave")
        self.refusal = (
            PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason=reasons[0])
            if reasons
            else None
        )


def _text(obstacle: Obstacle, detail: str) -> str:
    return f"{obstacle.value}: {detail}" if detail else obstacle.value


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


STOP_TIMEOUT_S: Final = 10.0
"""How long ``stop`` waits for one of the threads."""
_SAMPLE_INTERVAL_MS: Final = 1000
_DISK_OF_STORE: Final = "store"
"""Not the log's disk, which the node reports."""

LogKeeper = Callable[[int], int]
"""Returns the offset from which it needs the log, at most the given one, before which all derived data are durable."""

_log = logging.getLogger("rocketstore")


class StoreRounds:
    """The rounds of one store; each has a thread from ``start`` to ``stop``."""

    def __init__(
        self,
        derived: Derived,
        dispatch: DispatchService,
        durability: Durability,
        gate: PutGate,
        stats: StoreStats,
        queue_check: QueueCheck,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        config, log, clock = derived.config, derived.log, derived.clock
        self._derived = derived
        self._dispatch = dispatch
        self._durability = durability
        self._gate = gate
        self.numbers: Final = NumberWriter(log, derived.numbering, dispatch, lambda: gate.role is not BrokerRole.SLAVE)
        self.cleaner: Final = Cleaner(
            log,
            derived.files,
            config,
            derived.fs,
            clock,
            may_delete=self._may_delete,
            on_disk_full=self._disk_full,
            on_held_back=self._let_go,
            on_forced=self._removed_early,
        )
        self.scrub: Final = DerivedScrub(derived, queue_check)
        threads = Supervisor(on_failure)
        every = partial(Periodic, clock=clock, supervisor=threads)
        self._flusher = every("rocketstore-flush-queues", config.flush_interval_consume_queue, self.flush)
        self._sampler = every("rocketstore-stats", _SAMPLE_INTERVAL_MS, stats.sample)
        self._cleaning = every("rocketstore-clean", config.clean_resource_interval, self.clean)
        self._scrubbing = Worker("rocketstore-scrub", self.scrub.step, clock, threads)
        self._thorough_ms = clock.monotonic_ms()
        """When everything was flushed."""
        self._checkpoint_wanted = False
        self._keepers: tuple[LogKeeper, ...] = ()
        self.forced_files = 0
        """How many log files were removed before they had expired; not those of a replicated log."""
        log.keep_from(self._keep_from, self._held_back)

    def start(self) -> None:
        for worker in (self._flusher, self._sampler, self._cleaning, self._scrubbing):
            worker.start()

    def stop(self) -> None:
        self.scrub.stop()
        for worker in (self._scrubbing, self._cleaning, self._sampler, self._flusher):
            if not worker.stop(STOP_TIMEOUT_S):
                _log.error("a store thread did not end within %d s", STOP_TIMEOUT_S)

    def clean_soon(self) -> None:
        """Look soon whether there is something to delete."""
        self._cleaning.request()

    def scrub_soon(self) -> None:
        """Look soon for damage that was found; callable from any thread."""
        self._scrubbing.wake()

    def flush(self) -> None:
        """Some pages periodically, everything once a minute or when retention waits for that.

        A failed flush is final: the store accepts no more puts.
        """
        config, now_ms = self._derived.config, self._derived.clock.monotonic_ms()
        due_ms = self._thorough_ms + config.flush_consume_queue_thorough_interval
        if self._checkpoint_wanted or now_ms >= due_ms:
            self._checkpoint_wanted = False
            self._thorough_ms = now_ms
            self._durability.flush_if_room()
        else:
            self._durability.flush_pages(config.flush_consume_queue_least_pages)

    # -- retention -----------------------------------------------------------------------------------------------

    def keep_for(self, keeper: LogKeeper) -> None:
        """See ``MessageStore.keep_for``."""
        self._keepers = (*self._keepers, keeper)

    def clean(self) -> None:
        """Remove what has expired."""
        self.numbers.look()
        try:
            self.cleaner.clean()
        except DiskError as error:
            _log.warning("cleaning failed, retrying later: %s", error)

    def _keep_from(self) -> int:
        """The offset from which nothing may be removed: data derived from it are not durable elsewhere yet."""
        durable = self._derived.durable
        wanted = [self._derived.timers.needed_from(durable), *(keeper(durable) for keeper in self._keepers)]
        writable = self._gate.role is not BrokerRole.SLAVE and not self._gate.has(Obstacle.DISK_FULL)
        numbered = self._derived.numbering.keep_from(self._dispatch.position, writable=writable)
        return min(wanted if numbered is None else [*wanted, numbered])

    def _held_back(self, end: int) -> None:
        """A replicated log would remove more. Called on its own thread, which must not wait for thousands of queues."""
        if self._derived.durable < min(end, self._dispatch.position):
            self._checkpoint_wanted = True
            self._flusher.request()

    def _let_go(self) -> None:
        """A plain log would remove more."""
        self.numbers.write_and_wait()
        self._durability.flush_if_room()

    def _may_delete(self) -> bool:
        dispatch = self._dispatch
        return dispatch.failure is None and dispatch.behind_bytes() < self._derived.config.mapped_file_size_commit_log

    def _disk_full(self, full: bool) -> None:
        conditions = self._derived.conditions
        if full and self._gate.close(Obstacle.DISK_FULL):
            conditions.set(
                ConditionKind.DISK_FULL, "no messages are accepted: the disk is full", subject=_DISK_OF_STORE
            )
        elif not full and self._gate.open(Obstacle.DISK_FULL):
            conditions.clear(ConditionKind.DISK_FULL, _DISK_OF_STORE)

    def _removed_early(self, removed: ForcedFileRemoval, used_percent: int) -> None:
        """Those messages were acknowledged: say which they were, and that the settings ask for it."""
        self.forced_files += 1
        config, age_s = self._derived.config, removed.age_ms // 1000
        why = (
            f"the disk is {used_percent}% full, and cleanFileForciblyEnable=true removes the oldest files above "
            f"{config.disk_space_clean_forcibly_ratio}%"
        )
        _log.warning(
            "removed the messages at offsets %d to %d of the log (%s), the last written %d s ago and not expired "
            "(fileReservedTime=%d): %s",
            removed.base,
            removed.end - 1,
            removed.path,
            age_s,
            config.file_reserved_time,
            why,
            extra={"event": "forced_removal", "first_offset": removed.base, "last_offset": removed.end - 1},
        )
        self._derived.conditions.set(
            ConditionKind.REMOVED_EARLY,
            f"{self.forced_files} log files were removed before they had expired, the last one with offsets "
            f"{removed.base} to {removed.end - 1}, {age_s} s after its last write: {why}",
            subject=_DISK_OF_STORE,
            for_ms=REMOVED_EARLY_TOLD_MS,
        )


class Periodic:
    """Calls ``action`` every ``interval_ms``, first one interval after ``start``."""

    def __init__(
        self, name: str, interval_ms: int, action: Callable[[], None], *, clock: Clock, supervisor: Supervisor
    ) -> None:
        self._interval_ms = interval_ms
        self._action = action
        self._clock = clock
        self._due_ms: int | None = None
        self._requested = False
        self._worker = Worker(name, self._step, clock, supervisor)

    def start(self) -> None:
        self._worker.start()

    def request(self) -> None:
        """Run the action as soon as possible."""
        self._requested = True
        self._worker.wake()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False if it did not end in time."""
        return self._worker.stop(timeout_s)

    def _step(self) -> int:
        now_ms = self._clock.monotonic_ms()
        if self._requested or (self._due_ms is not None and now_ms >= self._due_ms):
            self._requested = False
            self._action()
            now_ms = self._clock.monotonic_ms()
            self._due_ms = now_ms + self._interval_ms
        elif self._due_ms is None:
            self._due_ms = now_ms + self._interval_ms
        return self._due_ms
