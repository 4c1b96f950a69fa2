"""The work on a store by time: flushing queues and index, retention, verification, samples.

Threads: *flush* (queues and index, then the checkpoint), *clean* (retention), *scrub* (``rocketstore.store.scrub``),
and *stats* (a sample per second).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from dledger.clock import Clock
from dledger.conditions import REMOVED_EARLY_TOLD_MS, ConditionKind
from dledger.errors import DiskError
from dledger.runtime.threads import Supervisor, Worker
from rocketstore.consume_queue.queue_check import QueueCheck
from rocketstore.mapped.queue import ForcedFileRemoval
from rocketstore.queue_numbers import NumberWriter
from rocketstore.store.cleaning import Cleaner
from rocketstore.store.derived import Derived
from rocketstore.store.dispatch import DispatchService
from rocketstore.store.durability import Durability
from rocketstore.store.flags import Obstacle, PutGate
from rocketstore.store.scrub import DerivedScrub
from rocketstore.store.stats import StoreStats
from rocketstore.types import BrokerRole

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
        """Start the threads."""
        for worker in (self._flusher, self._sampler, self._cleaning, self._scrubbing):
            worker.start()

    def stop(self) -> None:
        """End the threads."""
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
        """Start the thread."""
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
