"""The thread that applies the log: committed entries in order, each once, and the results to those who wait (S1 to S4).

Only this thread calls the state machine's ``apply``, ``save`` and ``load``, and only it touches the producers' table.
The lock of the machine is for queries, which other threads make.

Snapshots are written on a thread of their own and at a limited rate, while the state machine goes on (S6).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from itertools import repeat
from time import monotonic
from typing import Final

from dledger.clock import Clock
from dledger.config import ServerConfig, SnapshotConfig
from dledger.core.membership import decode_configuration
from dledger.core.noop_payload import ProducerSnapshot, decode_time
from dledger.errors import (
    CorruptLogError,
    DiskError,
    DLedgerError,
    IndexBeforeBeginError,
    PendingFullError,
    QuorumAckTimeoutError,
    ShutdownError,
    SnapshotBusyError,
    SnapshotFormatError,
    StateMachineError,
)
from dledger.monitoring import ConditionKind, Conditions
from dledger.records import record
from dledger.runtime.threads import Supervisor, Worker
from dledger.statemachine.commands import CommandBatch, Duplicates, DuplicatesView, Waiters
from dledger.statemachine.ports import Applied, Snapshot, StateMachine
from dledger.statemachine.snapshots import PRODUCERS_FILE, STATE_FILE, SnapshotBuilder, SnapshotMeta, SnapshotStore
from dledger.store.file_store import FileStore
from dledger.types import GENESIS, NOOP_CHANNEL, Boundary, Configuration, EntryColumns, LogIndex, Term
from dledger.values import MIB

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
        self.append(STATE_FILE, data)

    def append(self, file: str, data: bytes) -> None:
        """Write to any of the snapshot's files, and wait as long as the rate asks for."""
        self._builder.write(file, data)
        self._bytes += len(data)
        due_s = self._began_s + self._bytes / self._rate if self._rate else 0
        self._creation.pause(due_s - monotonic())


RANGE_BYTES: Final = MIB
"""Of entries applied at a time."""
RESULT_BYTES_MAX: Final = MIB
_SAVE_MS_MAX: Final = 20
"""``save`` holds up results for as long as it takes; a slower one is told."""
_RETRY_MS: Final = 1000
_GATHER_MS: Final = 10
_log = logging.getLogger("dledger")


@record(frozen=True, slots=True)
class _Wait:
    """``then`` is called when ``index`` is applied; ``late`` at ``due_ms``."""

    index: LogIndex
    due_ms: int
    then: Callable[[], None]
    late: Callable[[DLedgerError | None], None]


class Applier:
    """Applies one node's log to its state machine; ``load`` it first. Thread-safe from ``start`` on.

    ``applied`` is called on its thread after each range, and when it was woken; it returns when (monotonic ms) to call
    it again at the latest, or None. ``lacks``: called when the log begins after the next entry, with its begin.
    ``fenced``: why nothing may be applied or told.
    """

    def __init__(  # noqa: PLR0913  # one parameter per neighbour
        self,
        config: ServerConfig,
        machine: StateMachine,
        log: FileStore,
        snapshots: SnapshotStore,
        clock: Clock,
        supervisor: Supervisor,
        conditions: Conditions,
        *,
        applied: Callable[[], int | None],
        lacks: Callable[[LogIndex], None],
        fenced: Callable[[], DLedgerError | None],
    ) -> None:
        self._config = config
        self.machine: Final = machine
        self._log = log
        self._snapshots = snapshots
        self._clock = clock
        self._conditions = conditions
        self._after = applied
        self._lacks = lacks
        self._fenced = fenced
        self._worker = Worker(f"dledger-apply-{config.node_id}", self._step, clock, supervisor)
        self.waiters: Final = Waiters(config.replication)
        self._duplicates = Duplicates(config.replication)
        self._collecting: CommandBatch | None = None
        self._lock = threading.Lock()  # guards _waits, _next_due_ms and _installs; a leaf
        self._waits: list[_Wait] = []
        self._next_due_ms: int | None = None
        self._installs: deque[tuple[SnapshotMeta, Callable[[], None]]] = deque()
        self._machine_lock = threading.Lock()  # the machine's; while it is held, only the machine is called
        self._at: Boundary = GENESIS
        self._time_ms = 0
        self._configuration: Configuration | None = None
        self._stopping = False
        self._gathers = False
        """Whether the thread looks again soon by itself."""
        self.apply_s = 0.0
        """The time spent in ``apply`` since the start."""

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._worker.start()

    def wake(self) -> None:
        """Look at once for what is to be done."""
        self._worker.wake()

    def committed(self) -> None:
        """More entries are committed. While nobody waits for them, they are gathered for ``_GATHER_MS``: a wake-up for
        each commit would take the interpreter from the appends.
        """
        if not self._gathers or self.waiters or self._collecting is not None or self._waits:
            self._worker.wake()

    def stop(self, timeout_s: float) -> bool:
        """End the thread, and fail what waits: commands may still be committed and applied by others.

        False if the thread did not end in time.
        """
        self._stopping = True
        ended = self._worker.stop(timeout_s)
        self._fail_all(ShutdownError("this node has stopped: the command may still be applied by the others"))
        return ended

    @property
    def applied_index(self) -> LogIndex:
        """The last entry that the state includes."""
        return self._at.index

    @property
    def at(self) -> Boundary:
        """The same with its term, its end and its chain CRC; replaced as a whole."""
        return self._at

    def load(self, meta: SnapshotMeta) -> ProducerSnapshot:
        """Replace state and producers by a verified snapshot's; returns the producers. Before ``start``.

        Raises ``SnapshotFormatError``, ``DamagedSnapshotError``, ``StateMachineError``.
        """
        machine = self.machine
        if meta.format > machine.format:
            raise SnapshotFormatError(
                f"the snapshot of entry {meta.index} has the state machine's format {meta.format}, and this program "
                f"reads up to {machine.format}: run the version that wrote it, or a later one"
            )
        with self._snapshots.reader(meta) as reader, self._machine_lock:
            try:
                machine.load(reader)
            except DLedgerError:
                raise
            except Exception as error:
                raise StateMachineError(f"cannot load the snapshot of entry {meta.index}: {error!r}") from error
        with self._snapshots.reader(meta, PRODUCERS_FILE) as file:
            producers = self._duplicates.load(file.read_all(), meta.time_ms)
        self._at, self._time_ms, self._configuration = meta.boundary, meta.time_ms, meta.configuration
        return producers

    def producers(self) -> ProducerSnapshot:
        """The producers as of the last applied entry. On the applier's thread."""
        return self._duplicates.view(self._time_ms).producers

    def install(self, meta: SnapshotMeta, installed: Callable[[], None]) -> None:
        """Take over a fetched snapshot, which is durable and verified (S8), on the applier's thread.

        It is loaded if it is newer than what is applied here; then ``installed`` is called, which lets the log go on
        from there. Errors are the node's end.
        """
        with self._lock:
            self._installs.append((meta, installed))
        self._worker.wake()

    # -- waiting -------------------------------------------------------------------------------------------------

    def when_applied(
        self,
        index: LogIndex,
        due_ms: int,
        then: Callable[[], None],
        late: Callable[[DLedgerError | None], None],
    ) -> None:
        """Call ``then`` on the applier's thread once ``index`` is applied; ``late`` when it is not by ``due_ms``
        (monotonic), with None, or if that cannot be any more, with the error. Raises ``PendingFullError``, and
        ``ShutdownError`` after a stop.
        """
        with self._lock:
            if self._stopping:
                raise ShutdownError("this node has stopped: ask another one")
            if len(self._waits) >= self._config.replication.pending_entries_max:
                raise PendingFullError(f"{len(self._waits)} queries already wait: retry shortly (pending_entries_max)")
            self._waits.append(_Wait(index, due_ms, then, late))
            if self._next_due_ms is None or due_ms < self._next_due_ms:
                self._next_due_ms = due_ms
        self._worker.wake()

    def collect(self, batch: CommandBatch, index: LogIndex) -> None:
        """All commands of a batch were stored earlier, up to ``index``: give it their results once that is applied."""
        due_ms = self._clock.monotonic_ms() + self._config.replication.ack_timeout_ms

        def late(error: DLedgerError | None) -> None:
            why = f"the commands are committed up to entry {index}, and not applied here in time: retry"
            batch.failed(error or QuorumAckTimeoutError(why))

        try:
            self.when_applied(index, due_ms, lambda: batch.applied(self._duplicates), late)
        except (PendingFullError, ShutdownError) as error:
            batch.failed(error)

    def query(self, request: bytes) -> tuple[bytes, LogIndex]:
        """Ask the state machine, on any thread; also the last entry that was applied before. Raises what it raises."""
        with self._queries():
            index = self._at.index
            return self.machine.query(request), index

    def _queries(self) -> AbstractContextManager[object]:
        return nullcontext() if self.machine.queries_are_concurrent else self._machine_lock

    def _fail_all(self, error: DLedgerError) -> None:
        of_commands = copy(error)  # which are written: whatever it is, the others may apply them
        of_commands.outcome = "unknown"
        self._fail_commands(of_commands)
        with self._lock:
            waits, self._waits, self._next_due_ms = self._waits, [], None
        for wait in waits:
            wait.late(error)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _step(self) -> int | None:
        if self._is_fenced():
            return None
        self._gathers = False  # before the commit index is read: a later commit wakes this thread
        self._install()
        began = self._at.index
        while self._log.committed_index > self._at.index and not self._stopping:
            try:
                entries = self._log.read_columns(LogIndex(self._at.index + 1), self._log.committed_index, RANGE_BYTES)
            except (CorruptLogError, IndexBeforeBeginError) as error:
                told = f"the state machine waits at entry {self._at.index + 1}: {error}"
                self._conditions.set(ConditionKind.APPLIER_WAITING, told)
                if isinstance(error, IndexBeforeBeginError):
                    self._lacks(self._log.begin.index)
                self._settle()
                return self._clock.monotonic_ms() + _RETRY_MS
            except ShutdownError:
                return None
            self._conditions.clear(ConditionKind.APPLIER_WAITING)
            self._apply(entries)
            self._settle()
            self._after()
            if self._is_fenced():
                return None
        self._settle()
        dues = [one for one in (self._after(), self._next_due_ms) if one is not None]
        if self._at.index != began:
            self._gathers = True
            dues.append(self._clock.monotonic_ms() + _GATHER_MS)
        return min(dues, default=None)

    def _is_fenced(self) -> bool:
        """Whether nothing may be applied or reported (S11); waiting callers are told so."""
        if (refusal := self._fenced()) is None:
            return False
        self._fail_all(refusal)
        self._after()
        return True

    def _install(self) -> None:
        while self._installs and not self._stopping:
            with self._lock:
                meta, installed = self._installs.popleft()
            if meta.index > self._at.index:
                self._fail_all_below(meta.index)
                self.load(meta)
                self._conditions.clear(ConditionKind.APPLIER_WAITING)
            installed()

    def _fail_all_below(self, index: LogIndex) -> None:
        """Results of entries that a snapshot replaces will never be known here."""
        told = f"the command's result is not known here: a snapshot of entry {index} replaced it"
        self._fail_commands(StateMachineError(told))

    def _fail_commands(self, error: DLedgerError) -> None:
        if (collecting := self._collecting) is not None:
            self._collecting = None
            collecting.failed(error)
        for batch in self.waiters.take_all():
            batch.failed(error)

    def _apply(self, entries: EntryColumns) -> None:
        """Apply a range. Any error is the node's end (S2): without this entry, the members would differ.

        Ranges end anywhere, so what a no-op does must not depend on them: the results of the entries before it are
        stored first, or they would become those of the producer to which it gives the slot.
        """
        at = 0
        commands: list[tuple[int, int]] = []
        for channel, first, count in entries.channel_runs:
            start = first - entries.first_index
            if channel != NOOP_CHANNEL:
                commands.append((channel, count))
                continue
            self._apply_commands(entries, at, commands)
            commands = []
            at = start + count
            for number in range(start, at):
                self._note_noop(entries.bodies[number], LogIndex(entries.first_index + number), entries.terms[number])
        self._apply_commands(entries, at, commands)
        self._at = entries.end

    def _apply_commands(self, entries: EntryColumns, at: int, runs: Sequence[tuple[int, int]]) -> None:
        """Apply the commands from the one at ``at`` on. ``runs``: (channel, count) of those with equal channels."""
        if not runs:
            return
        first = LogIndex(entries.first_index + at)
        index, producers, sequences = first, list[str](), list[int]()
        slots: list[tuple[int, int, int]] = []  # with the number of its first command, and their count
        for slot, count in runs:
            producer, sequence = self._duplicates.note(slot, index, count, self._time_ms) if slot else ("", -1)
            producers += [producer] * count
            sequences += range(sequence, sequence + count) if producer else [-1] * count
            slots.append((slot if producer else 0, sequence, count))
            index = LogIndex(index + count)
        past = at + len(producers)
        terms = entries.terms[at:past]
        columns = zip(range(first, index), terms, repeat(self._time_ms), entries.bodies[at:past], producers, sequences)
        applied = list(map(tuple.__new__, repeat(Applied), columns))
        results = self._results(applied)
        done = 0
        for slot, sequence, count in slots:
            if slot:
                self._duplicates.store(slot, sequence, results[done : done + count])
            done += count
        if self.waiters or self._collecting is not None:
            self._give(first, terms, results)

    def _results(self, applied: list[Applied]) -> Sequence[bytes]:
        began_s = monotonic()
        try:
            with self._machine_lock:
                results = self.machine.apply(applied)
        except Exception as error:
            place = f"entries {applied[0].index} to {applied[-1].index}"
            raise StateMachineError(f"the state machine failed in {place}: {error!r}") from error
        finally:
            self.apply_s += monotonic() - began_s
        if len(results) != len(applied) or (results and max(map(len, results)) > RESULT_BYTES_MAX):
            raise StateMachineError(
                f"the state machine gave {len(results)} results of up to {max(map(len, results), default=0)} bytes for "
                f"the {len(applied)} entries from {applied[0].index} on: one for each, of at most {RESULT_BYTES_MAX}"
            )
        return results

    def _note_noop(self, body: bytes, index: LogIndex, term: Term) -> None:
        time_ms = decode_time(body)
        if time_ms is not None:
            self._time_ms = max(self._time_ms, time_ms)
        elif (configuration := decode_configuration(body)) is not None:
            self._configuration = replace(configuration, index=index, term=term)
        else:
            self._duplicates.note_noop(body, index, self._time_ms)

    def _give(self, first: LogIndex, terms: Sequence[Term], results: Sequence[bytes]) -> None:
        """Give the results of the entries from ``first`` on to those who wait."""
        batch = self._collecting
        at = 0
        while at < len(results):
            place = LogIndex(first + at), terms[at]
            if batch is not None and batch.awaits != place:
                batch = None  # a later leader replaced the rest of it: its append has failed
            if batch is None and (batch := self.waiters.take(place)) is None:
                at += 1
                continue
            past = min(at + batch.wanted - len(batch.results), len(results))
            while terms[past - 1] != terms[at]:
                past -= 1
            batch.results += results[at:past]
            at = past
            if len(batch.results) == batch.wanted:
                batch.applied(self._duplicates)
                batch = None
        self._collecting = batch

    def _settle(self) -> None:
        """Call what waits for entries that are applied by now, and what waits no longer."""
        if not self._waits:
            return
        applied, now_ms = self._at.index, self._clock.monotonic_ms()
        with self._lock:
            ready = [one for one in self._waits if one.index <= applied]
            late = [one for one in self._waits if one.index > applied and one.due_ms <= now_ms]
            if ready or late:
                self._waits = [one for one in self._waits if one.index > applied and one.due_ms > now_ms]
            self._next_due_ms = min((one.due_ms for one in self._waits), default=None)
        for one in ready:
            one.then()
        for one in late:
            one.late(None)

    def save(self) -> SnapshotJob:
        """A view of everything at the last applied entry, to be written. On the applier's thread.

        Raises ``StateMachineError``.
        """
        began_s = monotonic()
        try:
            with self._machine_lock:
                state = self.machine.save()
        except Exception as error:
            raise StateMachineError(f"no view for the snapshot of entry {self._at.index}: {error!r}") from error
        producers = self._duplicates.view(self._time_ms)
        if (took_ms := (monotonic() - began_s) * 1000) > _SAVE_MS_MAX:
            _log.warning(
                "the view of the state at entry %d took %.0f ms: appends wait for results meanwhile (S6: %d ms)",
                self._at.index,
                took_ms,
                _SAVE_MS_MAX,
            )
        meta = SnapshotMeta(self._at, self._configuration, self._time_ms, self.machine.format, {})
        return SnapshotJob(state, producers, meta)
