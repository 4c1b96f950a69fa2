"""Writes snapshots, on a thread of its own and at a limited rate, while the state machine goes on (S6)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final

from dledger.clock import Clock
from dledger.conditions import ConditionKind, Conditions
from dledger.config import SnapshotConfig
from dledger.errors import DiskError, DLedgerError, ShutdownError, SnapshotBusyError, StateMachineError
from dledger.records import record
from dledger.runtime.supervisor import Supervisor
from dledger.runtime.worker import Worker
from dledger.statemachine.duplicates import DuplicatesView
from dledger.statemachine.ports import Snapshot
from dledger.statemachine.snapshots import PRODUCERS_FILE, STATE_FILE, SnapshotBuilder, SnapshotMeta, SnapshotStore

RETRY_MS: Final = 60_000
"""After a failure, which was most likely a full disk."""


@record(frozen=True, slots=True)
class SnapshotJob:
    """A snapshot to write: a view of state and producers, both of ``meta.index``; ``meta`` lacks its files."""

    state: Snapshot
    producers: DuplicatesView
    meta: SnapshotMeta


class SnapshotCreation:
    """The thread. ``ended`` is called on it after every attempt, with an error or without."""

    def __init__(  # one parameter per neighbour
        self,
        name: str,
        store: SnapshotStore,
        config: SnapshotConfig,
        clock: Clock,
        supervisor: Supervisor,
        conditions: Conditions,
        ended: Callable[[SnapshotJob, DLedgerError | None], None],
    ) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._conditions = conditions
        self._ended = ended
        self._worker = Worker(f"dledger-snapshot-{name}", self._step, clock, supervisor)
        self._job: SnapshotJob | None = None
        self._not_before_ms = 0
        self._hurry = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._stopping = False
        self.last_s = 0.0
        """How long the last one took to write."""

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def stop(self, timeout_s: float) -> None:
        """End it; a snapshot being written is given up."""
        self._stopping = True
        self._hurry.set()
        self._worker.stop(timeout_s)

    @property
    def is_busy(self) -> bool:
        """Whether one is being written."""
        return self._job is not None

    @property
    def not_before_ms(self) -> int:
        """When (monotonic) to write the next one, unless somebody asks for it: the last one may have failed."""
        return self._not_before_ms

    def wait(self, timeout_s: float) -> None:
        """Return when none is being written, or after that time."""
        self._idle.wait(timeout_s)

    def begin(self, job: SnapshotJob) -> None:
        """Write one; not while ``is_busy``."""
        self._idle.clear()
        self._job = job
        self._worker.wake()

    def hurry(self) -> None:
        """Write what is being written, and all later ones, without the limit of the rate."""
        self._hurry.set()

    def _step(self) -> None:
        job = self._job
        if job is None or self._stopping:
            return
        error: DLedgerError | None = None
        try:
            self._write(job)
            self._conditions.clear(ConditionKind.SNAPSHOT_FAILED)
        except (ShutdownError, SnapshotBusyError) as refusal:  # one is being fetched, or a newer one is there
            error = refusal
        except OSError as failure:
            error = DiskError(f"the snapshot of entry {job.meta.index} was not written: {failure}")
            self._conditions.set(ConditionKind.SNAPSHOT_FAILED, f"{error}; it will be tried again")
        self._not_before_ms = 0 if error is None else self._clock.monotonic_ms() + RETRY_MS
        self._job = None
        self._ended(job, error)
        self._idle.set()

    def _write(self, job: SnapshotJob) -> None:
        began_s = monotonic()
        with self._store.build(job.meta.index) as builder:
            builder.write(STATE_FILE, b"")
            writer = _PacedWriter(self, builder, self._config.snapshot_rate_bytes_max)
            try:
                job.state.write(writer)
            except (DLedgerError, OSError):  # the writer's
                raise
            except Exception as error:
                told = f"the state machine cannot write its snapshot of entry {job.meta.index}: {error!r}"
                raise StateMachineError(told) from error
            for part in job.producers.encode():
                writer.append(PRODUCERS_FILE, part)
            builder.commit(replace(job.meta, files=builder.files()))
        self._store.prune()
        self.last_s = monotonic() - began_s

    def pause(self, seconds: float) -> None:
        """Wait, unless there is a hurry. Raises ``ShutdownError``."""
        if seconds > 0:
            self._hurry.wait(seconds)
        if self._stopping:
            raise ShutdownError("the node is stopping")


class _PacedWriter:
    """A ``SnapshotWriter``; ``rate``: the bytes per second of all its files together, 0: no limit."""

    def __init__(self, creation: SnapshotCreation, builder: SnapshotBuilder, rate: int) -> None:
        self._creation = creation
        self._builder = builder
        self._rate = rate
        self._began_s = monotonic()
        self._bytes = 0

    def write(self, data: bytes) -> None:
        """See ``SnapshotWriter``."""
        self.append(STATE_FILE, data)

    def append(self, file: str, data: bytes) -> None:
        """Write to any of the snapshot's files, and wait as long as the rate asks for."""
        self._builder.write(file, data)
        self._bytes += len(data)
        due_s = self._began_s + self._bytes / self._rate if self._rate else 0
        self._creation.pause(due_s - monotonic())
