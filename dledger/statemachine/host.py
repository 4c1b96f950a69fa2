"""A node's state machine with everything around it: the applier, its snapshots, commands and queries.

Only a node with a machine has one. It is made after the log is opened and before the core, since a snapshot may reset
the log; what it tells the core is ``core.ports.MachineState``.

``SnapshotOffers`` gives snapshots to other members, whose logs cannot be continued any more (S8).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from traceback import format_exception
from typing import Final

from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.core.ports import PreparedAppend, ProducersAt
from dledger.errors import (
    CorruptLogError,
    DamagedSnapshotError,
    DLedgerError,
    InvalidRequestError,
    LeaderNotReadyError,
    PendingFullError,
    RequestTimeoutError,
    ShutdownError,
    SnapshotBusyError,
    StateMachineError,
)
from dledger.log_output import BoundedLog
from dledger.monitoring import ConditionKind, Conditions
from dledger.rpc.clients.group_codec import check_commands
from dledger.runtime.threads import JOIN_TIMEOUT_S, Supervisor
from dledger.statemachine.applier import Applier, SnapshotCreation, SnapshotJob
from dledger.statemachine.commands import CommandBatch, CommandDone
from dledger.statemachine.ports import StateMachine
from dledger.statemachine.snapshots import SnapshotMeta, SnapshotStore, encode_meta
from dledger.store.file_store import FileStore
from dledger.types import NO_INDEX, AppendedBatch, Body, Boundary, Configuration, LogIndex, ProducerBatch, QueryAnswer


class SnapshotOffers:
    """A ``PeerSnapshots``. ``fenced``: why nothing may be given; ``write``: asks for a newer snapshot."""

    def __init__(
        self,
        snapshots: SnapshotStore,
        fenced: Callable[[], DLedgerError | None],
        write: Callable[[], None],
    ) -> None:
        self._snapshots = snapshots
        self._fenced = fenced
        self._write = write

    @contextmanager
    def offered(self, at_least: LogIndex, index: LogIndex) -> Iterator[SnapshotOffer]:
        if (refusal := self._fenced()) is not None:
            raise refusal
        known = any(one.index == index for one in self._snapshots.snapshots)
        with self._snapshots.pinned(index if known and index >= at_least else None) as meta:
            if meta.index < at_least:
                self._write()
                raise SnapshotBusyError(f"the newest snapshot here is of entry {meta.index}: retry later")
            yield SnapshotOffer(self._snapshots, meta)

    def doubt(self, index: LogIndex) -> None:
        meta = next((one for one in self._snapshots.snapshots if one.index == index), None)
        if meta is None:
            return
        try:
            self._snapshots.verify(meta)
        except DamagedSnapshotError as damage:
            with suppress(OSError):  # it does not count any more, wherever it is
                self._snapshots.set_aside(meta, str(damage))
            self._write()


class SnapshotOffer:
    def __init__(self, snapshots: SnapshotStore, meta: SnapshotMeta) -> None:
        self._snapshots = snapshots
        self._meta = meta

    @property
    def description(self) -> bytes:
        return encode_meta(self._meta)

    def piece(self, file: str, offset: int, bytes_max: int) -> bytes:
        return self._snapshots.piece(self._meta, file, offset, bytes_max)


QUERIES_MAX: Final = 1024
"""At the same time, those that wait included."""
SNAPSHOT_REQUESTS_MAX: Final = 64
"""That wait for a snapshot at the same time."""
STOP_TIMEOUT_S: Final = 10.0
"""How long a node that stops writes a snapshot."""
_QUERY_THREADS: Final = 2
_SAVED_BEFORE_STOP: Final = 100
"""A node that stops writes a snapshot if at least one in so many of the entries or bytes for one were applied."""
_OVERDUE_MS: Final = 60_000
_log = logging.getLogger("dledger")
_bounded = BoundedLog(_log)

Submit = Callable[[PreparedAppend, Callable[[AppendedBatch | DLedgerError], None], ProducerBatch | None], None]
"""``DLedgerServer.submit_prepared``."""
QueryDone = Callable[[QueryAnswer | DLedgerError], None]
SnapshotDone = Callable[[SnapshotMeta | DLedgerError], None]


class MachineHost:
    """See the module. The constructor loads the newest good snapshot, and may reset the log to it.

    Raises ``SnapshotFormatError``, ``StateMachineError``, ``OSError``. ``fenced``: why nothing is served, if so.
    """

    def __init__(  # one parameter per neighbour
        self,
        config: ServerConfig,
        machine: StateMachine,
        log: FileStore,
        clock: Clock,
        supervisor: Supervisor,
        conditions: Conditions,
        fenced: Callable[[], DLedgerError | None],
    ) -> None:
        self._config = config
        self._log = log
        self._clock = clock
        self._supervisor = supervisor
        self._conditions = conditions
        self._fenced = fenced
        self.snapshots: Final = SnapshotStore(log.file_system, log.directory)
        self.applier: Final = Applier(
            config,
            machine,
            log,
            self.snapshots,
            clock,
            supervisor,
            conditions,
            applied=self._save_if_due,
            lacks=lambda begin: self.lacks(begin),
            fenced=fenced,
        )
        self._creation = SnapshotCreation(
            config.node_id, self.snapshots, config.snapshots, clock, supervisor, conditions, self._ended
        )
        self.offers: Final = SnapshotOffers(self.snapshots, fenced, self.request_snapshot)
        """For other members."""
        self.lacks: Callable[[LogIndex], None] = lambda _begin: None
        """Called when the log begins, as it is, after the state machine's next entry."""
        self.reset_log: Callable[[Boundary, Configuration | None], bool] = lambda _at, _configuration: False
        """Lets the log go on from a loaded snapshot's last entry: ``EntryHandler.adopt_snapshot``."""
        self._producers: ProducersAt | None = None
        self._load_newest()
        self._saved_at = self.applier.at
        self._wanted = False
        self._lock = threading.Lock()  # guards _stopped, _wanted_by and _running; a leaf
        self._stopped = False
        self._wanted_by: list[tuple[LogIndex, SnapshotDone]] = []
        self._blocked: tuple[LogIndex, int] | None = None
        """Up to where retention may remove entries, and since when (monotonic ms) it wants to remove more."""
        self._queries = threading.BoundedSemaphore(QUERIES_MAX)
        self._running: set[Future[None]] = set()
        self._readers = ThreadPoolExecutor(_QUERY_THREADS, thread_name_prefix=f"dledger-query-{config.node_id}")

    # -- start and stop ------------------------------------------------------------------------------------------

    def _load_newest(self) -> None:
        for meta in self.snapshots.snapshots:
            try:
                self.snapshots.verify(meta)
            except DamagedSnapshotError as damage:
                self.snapshots.set_aside(meta, str(damage))
                continue
            self._producers = ProducersAt(meta.index, self.applier.load(meta))
            self._continue_log_from(meta)
            return

    def _continue_log_from(self, meta: SnapshotMeta) -> None:
        """The log must hold the snapshot's last entry, or begin right after it (S8: a crash came between)."""
        log, at = self._log, meta.boundary
        if at.index < log.begin.index:
            return  # the applier waits for a newer one
        try:
            is_held = at.index <= log.last.index and log.term_at(at.index) == at.term
            is_same = is_held and log.chain_crc_at(at.index) == at.chain_crc
        except CorruptLogError as damage:  # a later read or scrub finds it again, and repairs it from a member
            _log.warning(
                "%s: the log cannot be compared with the snapshot of entry %d, and goes on without that: %s",
                self._config.node_id,
                at.index,
                damage,
            )
            return
        if is_held or at.index <= log.committed_index:
            if not is_same:
                raise DamagedSnapshotError(
                    f"entry {at.index} of the log in {log.directory} is not the one in its snapshot: find out what "
                    "wrote to this directory, keep it, and start the node with --repair"
                )
            log.set_committed(at.index)
            return
        _log.warning(
            "%s: the log ends at entry %d, before the snapshot of entry %d: it goes on from there",
            self._config.node_id,
            log.last.index,
            at.index,
        )
        log.reset(at, meta.configuration)

    def start(self) -> None:
        self._creation.start()
        self.applier.start()
        self.applier.wake()

    def stop(self, *, graceful: bool) -> None:
        """End the threads; ``graceful``: first write a snapshot of what is applied, within ``STOP_TIMEOUT_S``.

        A query that does not end fails the node, for the process cannot end by itself while it runs.
        """
        self._end_queries()
        ended = self.applier.stop(JOIN_TIMEOUT_S)
        if graceful and ended and self._supervisor.fatal is None and self._fenced() is None:
            self._save_last()
        self._creation.stop(JOIN_TIMEOUT_S)
        with self._lock:
            self._stopped = True
        self._tell_wanted(RequestTimeoutError("the node has stopped before the snapshot was written"))

    def _end_queries(self) -> None:
        """Before all else: one that runs may hold the lock of the machine."""
        self._readers.shutdown(wait=False)
        with self._lock:
            running = tuple(self._running)
        if wait(running, JOIN_TIMEOUT_S).not_done:
            told = f"a query of the state machine has not ended {JOIN_TIMEOUT_S:.0f} s after the stop began: bound it"
            self._supervisor.report(StateMachineError(told))

    def _save_last(self) -> None:
        """The applier has stopped, so this thread may act for it."""
        self._creation.hurry()
        self._creation.wait(STOP_TIMEOUT_S)
        if self._is_due(_SAVED_BEFORE_STOP) and not self._creation.is_busy:
            self._creation.begin(self.applier.save())
            self._creation.wait(STOP_TIMEOUT_S)

    # -- MachineState --------------------------------------------------------------------------------------------

    @property
    def applied_index(self) -> LogIndex:
        return self.applier.applied_index

    @property
    def snapshot_index(self) -> LogIndex:
        return self.snapshots.newest_index

    @property
    def producers(self) -> ProducersAt | None:
        return self._producers

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    # -- snapshots -----------------------------------------------------------------------------------------------

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of the newest snapshot."""
        newest = self.snapshots.newest
        return 0 if newest is None else newest.size

    @property
    def snapshot_s(self) -> float:
        """How long the last snapshot took to write."""
        return self._creation.last_s

    def request_snapshot(self, done: SnapshotDone | None = None) -> None:
        """Write a snapshot that includes what is applied by now; ``done`` gets it, or one that is there and does."""
        if done is not None:
            refusal: DLedgerError | None = None
            with self._lock:
                if self._stopped:
                    refusal = ShutdownError("this node has stopped: ask another one")
                elif len(self._wanted_by) >= SNAPSHOT_REQUESTS_MAX:
                    told = f"{SNAPSHOT_REQUESTS_MAX} requests wait for a snapshot: retry when it is written"
                    refusal = PendingFullError(told)
                else:
                    self._wanted_by.append((self.applied_index, done))
            if refusal is not None:
                done(refusal)
                return
        self._wanted = True
        self.applier.wake()

    def _is_due(self, divisor: int = 1) -> bool:
        config, at, saved = self._config.snapshots, self.applier.at, self._saved_at
        newest = self.snapshots.newest
        size = max(config.snapshot_bytes, 0 if newest is None else newest.size)
        entries, log_bytes = at.index - saved.index, at.position - saved.position
        return entries > 0 and (entries * divisor >= config.snapshot_entries or log_bytes * divisor >= size)

    def _save_if_due(self) -> int | None:
        """On the applier's thread, after each range; returns when to come again, if one is due and too early."""
        if (refusal := self._fenced()) is not None:
            self._tell_wanted(refusal)
            return None
        if not (self._wanted or self._is_due()) or self._creation.is_busy:
            return None
        not_before_ms = self._creation.not_before_ms
        if not self._wanted_by and self._clock.monotonic_ms() < not_before_ms:
            return not_before_ms
        self._wanted = False
        at = self.applier.at
        if at.index <= self.snapshots.newest_index or at.index == NO_INDEX:
            newest = self.snapshots.newest
            self._tell_wanted(newest or InvalidRequestError("no entry is applied yet: there is nothing to save"))
            return None
        self._creation.begin(self.applier.save())
        return None

    def _ended(self, job: SnapshotJob, error: DLedgerError | None) -> None:
        """On the thread that writes snapshots. A failed one stays wanted, and is tried again after a while."""
        if error is None:
            self._saved_at = job.meta.boundary
            self._producers = ProducersAt(job.meta.index, job.producers.producers)
            self._tell_wanted(self.snapshots.newest or DamagedSnapshotError("the snapshot is gone"))
        else:
            self._wanted = True
            self._tell_wanted(error)
        if self._wanted:
            self.applier.wake()

    def _tell_wanted(self, result: SnapshotMeta | DLedgerError) -> None:
        """Answer who asked for this snapshot; one that began too early is not what the others asked for."""
        with self._lock:
            wanted = self._wanted_by
            self._wanted_by = (
                [] if isinstance(result, DLedgerError) else [one for one in wanted if one[0] > result.index]
            )
            told = [done for index, done in wanted if isinstance(result, DLedgerError) or index <= result.index]
        for done in told:
            done(result)

    @property
    def format(self) -> int:
        """The newest format of snapshots that the state machine reads."""
        return self.applier.machine.format

    def adopt(self, meta: SnapshotMeta, ended: Callable[[bool], None]) -> None:
        """A fetched snapshot is durable and verified: load it, then reset the log to it (S8).

        ``ended`` gets whether that was done; if not, adopt it again later.
        """

        def installed() -> None:
            if self.applier.at.index == meta.index:
                self._saved_at = self.applier.at
                self._producers = ProducersAt(meta.index, self.applier.producers())
            try:
                ended(self.reset_log(meta.boundary, meta.configuration))
            except ShutdownError:  # the next start does it
                return
            self._prune()

        self.applier.install(meta, installed)

    def _prune(self) -> None:
        try:
            self.snapshots.prune()
        except OSError as error:
            _log.warning("%s: old snapshots cannot be removed: %s", self._config.node_id, error)

    def last_removable(self, wanted: LogIndex) -> LogIndex:
        """The last entry that retention may remove (S7), of those up to ``wanted``; asks for a snapshot if need be."""
        limit = self.snapshots.needed_from
        now_ms = self._clock.monotonic_ms()
        if limit >= wanted:
            self._blocked = None
            self._conditions.clear(ConditionKind.SNAPSHOT_OVERDUE)
            return wanted
        if self._blocked is None or self._blocked[0] != limit:  # also after a snapshot that does not reach far enough
            self._blocked = limit, now_ms
            self._wanted = True
            self.applier.wake()
        elif now_ms - self._blocked[1] >= _OVERDUE_MS:
            told = f"entries up to {wanted} have expired and stay, because the newest snapshot is of entry {limit}"
            self._conditions.set(ConditionKind.SNAPSHOT_OVERDUE, told)
        return limit

    # -- commands and queries ------------------------------------------------------------------------------------

    def submit_commands(
        self, commands: Sequence[Body], done: CommandDone, producer: ProducerBatch | None, submit: Submit
    ) -> None:
        """Append commands as one batch; ``done`` gets their results, once they are applied here."""
        try:
            check_commands(commands, producer)
        except InvalidRequestError as error:
            done(error)
            return
        if (refusal := self._fenced()) is not None:
            done(refusal)
            return
        try:
            self.applier.waiters.reserve(len(commands))
        except PendingFullError as error:
            done(error)
            return
        batch = CommandBatch(self.applier.waiters, commands, producer, done)

        def appended(result: AppendedBatch | DLedgerError) -> None:
            if isinstance(result, DLedgerError):
                batch.failed(result)
            elif result.last_index < result.first_index:  # all of them were there
                self.applier.collect(batch, self._log.committed_index)

        submit(batch, appended, producer)

    def query(self, request: bytes, index: LogIndex, wait_ms: int, done: QueryDone, *, even_if_late: bool) -> None:
        """Ask the state machine once entry ``index`` is applied, for which it waits up to ``wait_ms``.

        ``even_if_late``: ask it then, too; otherwise ``LeaderNotReadyError``.
        """
        if (refusal := self._fenced()) is not None:
            done(refusal)
            return
        if not self._queries.acquire(blocking=False):
            done(PendingFullError(f"{QUERIES_MAX} queries already wait or run: retry shortly"))
            return

        def finish(result: QueryAnswer | DLedgerError) -> None:
            self._queries.release()
            done(result)

        def ask() -> None:
            try:
                running = self._readers.submit(self._supervisor.run, partial(self._ask, request, finish))
            except RuntimeError:  # shut down
                finish(RequestTimeoutError("this node is stopping: ask another one"))
                return
            with self._lock:
                self._running.add(running)
            running.add_done_callback(self._has_run)

        def late(error: DLedgerError | None) -> None:
            if error is not None:
                finish(error)
            elif even_if_late:
                ask()
            else:
                finish(
                    LeaderNotReadyError(
                        f"entry {index} is not applied after {wait_ms} ms, only {self.applied_index}: retry shortly"
                    )
                )

        if self.applied_index >= index:
            ask()
            return
        try:
            self.applier.when_applied(index, self._clock.monotonic_ms() + wait_ms, ask, late)
        except (PendingFullError, ShutdownError) as error:
            finish(error)

    def _has_run(self, query: Future[None]) -> None:
        with self._lock:
            self._running.discard(query)

    def _ask(self, request: bytes, finish: QueryDone) -> None:
        answer: QueryAnswer | DLedgerError
        try:
            answer = QueryAnswer(*self.applier.query(request))
        except DLedgerError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - a query changes nothing, and is its caller's
            _bounded.warning("a query of %d bytes failed: %s", len(request), "".join(format_exception(error)))
            answer = StateMachineError(f"the state machine failed to answer the query: {error!r}")
            answer.outcome = "not_applied"
        finish(answer)
