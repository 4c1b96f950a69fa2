"""The message store: a commit log, the consume queues and the index built from it, and their coordination.

Life cycle: ``load`` (open, recover, build what is missing), ``start``, ``shutdown``. In between, a master accepts puts.

Threads, all named ``rocketstore-…``: *dispatch* (see ``rocketstore.store.dispatch``), those of
``rocketstore.store.rounds``, and the log's own. None of them ends silently: an error that stops one closes the store to
puts, and appears in ``failure`` and in the reason for refusing puts.

**What is durable when.** The log decides when a put is answered (after its flush, after a quorum's, or at once). Queues
and index on disk may lag behind the log, because they are rebuilt from the checkpoint's ``replay_from`` on. The
checkpoint is written only after queues and index were flushed beyond it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from enum import Enum, auto
from time import monotonic
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.errors import CorruptLogError, DiskError, DLedgerError, ShutdownError
from dledger.monitoring import Conditions
from dledger.store.fs import FileSystem
from dledger.types import ProducerBatch
from rocketstore.commit_log.port import CommitLog, PutDone, PutWaiter, SequenceDone
from rocketstore.config import MessageStoreConfig
from rocketstore.message.checks import check_message
from rocketstore.message.message import Message
from rocketstore.store.derived import Attempts, Derived, Durability, RecoveryPlan
from rocketstore.store.directory import UNKNOWN, StoreDirectory
from rocketstore.store.dispatch import ArrivalListener, DispatchService, Pace
from rocketstore.store.reads import RecordFilter, StoreReader, TagFilter
from rocketstore.store.rounds import LogKeeper, Obstacle, PutGate, StoreRounds
from rocketstore.store.stats import StoreStats, bytes_text
from rocketstore.timer.files import TimerFiles
from rocketstore.timer.hours import TimedProgress
from rocketstore.types import (
    BrokerRole,
    GetMessageStatus,
    GetResult,
    PutMessageStatus,
    PutResult,
    QueueUnit,
    RecordHead,
)

DRAIN_TIMEOUT_S: Final = 5.0
"""How long ``shutdown`` lets dispatch catch up."""
_PUT_SLACK_S: Final = 5.0
_BUSY_MS_MAX: Final = 10_000_000
_PUT_OK: Final = PutMessageStatus.PUT_OK

_log = logging.getLogger("rocketstore")


class IndexEnd(NamedTuple):
    """The newest message with a key: when it was stored, and its physical offset; 0 if there is none."""

    store_ms: int
    offset: int


def _new_incarnation() -> int:
    return secrets.randbits(63) | 1


class _Opened(Enum):
    """How much of a directory has been opened, and so may have been changed."""

    NOTHING = auto()
    LOG = auto()
    """Queues and index are being recovered."""
    ALL = auto()


class MessageStore:
    """One store for one log. Thread-safe; ``load``, ``start`` and ``shutdown`` belong to one owner."""

    incarnation: int = _new_incarnation()
    """Another number at every start and whenever it becomes master: messages may have been replaced in between."""

    def __init__(
        self,
        config: MessageStoreConfig,
        log: CommitLog,
        *,
        clock: Clock | None = None,
        fs: FileSystem | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        """The store loads, starts and shuts down ``log``. A store with a replicated log starts as a slave."""
        self.config: Final = config
        self.log: Final = log
        self.incarnation = _new_incarnation()
        clock, fs = clock or Clock(), fs or FileSystem()
        self.stats: Final = StoreStats(clock)
        self._gate = PutGate(BrokerRole.SLAVE if log.is_replicated else config.broker_role)
        self.pace: Final = Pace(lambda: self.role)
        """Whether dispatch may take its time."""
        self._derived = derived = Derived(
            config,
            log,
            clock,
            fs,
            conditions or Conditions("store", clock),
            lambda: self._reader.queue_check,
            lambda: self._rounds.scrub_soon(),
        )
        self._dispatch = DispatchService(
            log,
            [*derived.files, derived.timers, derived.numbering],
            on_batch=self._dispatched,
            on_failure=self._failed,
            on_jump=derived.numbering.jumped,
            nap_s_min=self.pace.nap_s_min,
            log_goes_first=lambda: self.pace.log_goes_first(),
        )
        self._reader = StoreReader(log, derived.queues.find, derived.index, config, since_ms=clock.wall_ms())
        self._durability = Durability(derived, self._dispatch)
        self._rounds = StoreRounds(
            derived, self._dispatch, self._durability, self._gate, self.stats, self._reader.queue_check, self._failed
        )
        self._directory: StoreDirectory | None = None
        self._opened = _Opened.NOTHING
        self._running = False
        self.failure: BaseException | None = None
        """The error that stopped a part of the store, if any."""
        log.listen(self._dispatch.wake)

    # -- life ----------------------------------------------------------------------------------------------------

    def share_descriptors(self, stores: int) -> None:
        """Leave room for the open files of as many stores of one process; before ``load``."""
        self._derived.queues.descriptors.capacity //= stores

    def load(self) -> RecoveryPlan:
        """Open the directory, recover, and dispatch what queues and index lack; returns what had to be done.

        After ``DirectoryLockedError``, ``CorruptLogError``, ``DiskError``, ``DiskFullError`` or ``ConfigError``,
        ``shutdown`` releases the directory.
        """
        self._directory = directory = StoreDirectory(self.config.store_path_root_dir, self._derived.fs)
        clean_stop = directory.stopped_cleanly
        self.log.check_files()
        directory.mark_running()
        derived = self._derived
        checkpoint = derived.checkpoint.read()
        derived.durable = max(0, checkpoint.replay_from)
        derived.deleted.load()
        known = checkpoint.replay_from != UNKNOWN
        self.log.load(
            clean_stop=clean_stop,
            from_timestamp_ms=checkpoint.replay_time(with_index=False) if known else None,
            durable_offset=checkpoint.replay_from if known else None,
        )
        self._opened = _Opened.LOG
        decided = derived.recover(checkpoint, clean_stop=clean_stop)
        self._dispatch.begin_at(decided.replay_from)
        self._dispatch.last_store_ms = checkpoint.logics_ms
        derived.numbering.begin(continuous=decided.queues_are_whole)
        end = self.log.end_offset
        caught_up = self._or_later(self._dispatch.catch_up)
        self._rounds.cleaner.follow()
        if not (caught_up and self._or_later(derived.numbering.restore)):
            derived.numbering.restore_behind(end)
        if not self.log.is_replicated:
            self.rebuild_queue_offsets()
        self._opened = _Opened.ALL
        # From now on there is a checkpoint, so the log can distinguish what a crash may have torn from damage.
        self._durability.flush_if_room()
        return decided

    def _or_later(self, step: Callable[[], object]) -> bool:
        """Do it now or, if the log is damaged, once the running node has repaired it; returns whether it is done.

        Until then dispatch waits there, so nothing after it is served, and this member does not become master.
        """
        try:
            return step() is not False
        except CorruptLogError as damage:
            if damage.index is None or not self.log.is_repaired:  # only entries are repaired
                raise
            _log.error("building queues and index will continue once the log is repaired: %s", damage)
            return False

    def start(self) -> None:
        """Start the log and the threads; from now on a master accepts messages. Raises errors of the log's start."""
        self._running = True  # a group of one may elect itself at once, and its new master reads
        try:
            self.log.start()
        except BaseException:
            self._running = False
            raise
        self._dispatch.start()
        self._rounds.start()
        self._gate.open(Obstacle.NOT_RUNNING)
        self._rounds.clean_soon()  # the disk may already be full

    def shutdown(self) -> None:
        """Refuse puts, dispatch the rest, flush everything, close. Idempotent.

        Every part is flushed and closed whatever happens to the others. Only if nothing failed and dispatch finished in
        time does the next start treat this as a clean stop. Raises the first error at the end.
        """
        self._gate.close(Obstacle.NOT_RUNNING)
        directory, self._directory = self._directory, None
        if directory is None:
            return
        attempts = Attempts()
        self._rounds.stop()
        if self._opened is _Opened.ALL:
            attempts.run(self.log.flush)
        drained = self._dispatch.stop(DRAIN_TIMEOUT_S)
        self._running = False  # not earlier: listeners notified of a message read it
        if self._opened is _Opened.ALL:
            self._durability.flush_all(attempts)
        attempts.run(self.log.shutdown)
        attempts.run(lambda: self._settle(directory, drained=drained, failed=attempts.first is not None))
        attempts.run(self._derived.queues.close)
        directory.release()
        attempts.conclude()

    def _settle(self, directory: StoreDirectory, *, drained: bool, failed: bool) -> None:
        if self._opened is _Opened.NOTHING:  # the log refused the start: everything derived from it is as it was
            if directory.stopped_cleanly:
                directory.mark_clean()
            return
        is_whole = self._opened is _Opened.ALL
        complete = is_whole and drained and (self.log.is_replicated or self._dispatch.behind_bytes() == 0)
        if complete and not failed and self.failure is None:
            self._derived.note_ends()
            directory.mark_clean()
        elif not is_whole:
            _log.warning("the store could not be opened; the next start will recover it as after a crash")
        else:
            _log.warning(
                "the store did not stop cleanly; the next start will rebuild queues and index from the checkpoint"
            )

    # -- role ----------------------------------------------------------------------------------------------------

    @property
    def role(self) -> BrokerRole:
        """Masters accept puts."""
        return self._gate.role

    def become_master(self, role: BrokerRole) -> None:
        """Accept puts from now on. In a replicated log only after ``wait_dispatched`` and ``rebuild_queue_offsets``."""
        self.incarnation = _new_incarnation()
        self._gate.become(role)
        self._rounds.numbers.look()

    def become_slave(self) -> None:
        """Refuse puts from now on."""
        self._gate.become(BrokerRole.SLAVE)

    def allow_writing(self, *, allowed: bool) -> None:
        """Close the store to puts for maintenance, or open it again."""
        if allowed:
            self._gate.open(Obstacle.MAINTENANCE)
        else:
            self._gate.close(Obstacle.MAINTENANCE)

    def require_replicas(self, missing: str) -> None:
        """Refuse puts because of what is ``missing``; accept them if that is nothing."""
        if missing:
            self._gate.close(Obstacle.TOO_FEW_REPLICAS, missing)
        else:
            self._gate.open(Obstacle.TOO_FEW_REPLICAS)

    def supersede(self, why: str) -> None:
        """Refuse puts for good: another broker is master now."""
        self._gate.close(Obstacle.SUPERSEDED, why)

    @property
    def refusal(self) -> PutResult | None:
        """The result of puts while they are refused; None if they are accepted."""
        return self._gate.refusal

    def rebuild_queue_offsets(self) -> None:
        """Set the log's next offset of every queue. Only while no puts are accepted and dispatch has caught up.

        Raises ``CorruptLogError`` if the log's own record of them is unreadable here.
        """
        begin = self.log.min_offset
        derived = self._derived
        derived.queues.correct_min_offsets(begin)
        derived.numbering.require()
        self.log.set_queue_offsets(derived.deleted.over(derived.queues.next_offsets()))

    # -- puts ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        messages: Sequence[Message],
        done: PutDone,
        *,
        wait: bool = True,
        producer: ProducerBatch | None = None,
    ) -> None:
        """Store messages; ``done`` gets one result for each (see ``PutDone``).

        All are refused if the store accepts none now, if queues and index are much too far behind (see ``crowded``), or
        if one of them is invalid. ``wait``, ``producer``: see the port.
        """
        log, config = self.log, self.config
        refusal = self._gate.refusal
        if refusal is None:
            held_ms = log.put_lock_ms
            behind = log.max_offset - self._dispatch.position
            if config.os_page_cache_busy_timeout_mills < held_ms < _BUSY_MS_MAX:
                refusal = _busy(f"the previous put has been writing for {held_ms} ms")
            elif behind > 2 * config.dispatch_behind_bytes_max:
                refusal = self._crowded(behind)
            else:
                for message in messages:
                    refusal = check_message(message, config)
                    if refusal is not None:
                        break
        if refusal is not None:
            self._answered([refusal] * len(messages), 0.0, done)
            return
        began_s = monotonic()

        def answered(results: Sequence[PutResult]) -> None:
            if len(results) == 1 and results[0].status is _PUT_OK:
                note_put(monotonic() - began_s)
                done(results)
            else:
                finish(results, monotonic() - began_s, done)

        note_put, finish = self.stats.note_put, self._answered
        log.submit(messages, answered, wait=wait, producer=producer)

    @property
    def crowded(self) -> PutResult | None:
        """The result of messages from clients while queues and index are too far behind the log; None if they are not.

        The broker's own are taken until they are twice as far behind, so that clients do not shut them out.
        """
        behind = self.log.max_offset - self._dispatch.position
        return self._crowded(behind) if behind > self.config.dispatch_behind_bytes_max else None

    def _crowded(self, behind: int) -> PutResult:
        refusal = _busy(
            f"consume queues and index are {behind} bytes behind the log: slow down (dispatch_behind_bytes_max)"
        )
        self._derived.conditions.limit(refusal.reason)
        return refusal

    def submit_producer(self, name: str, done: SequenceDone) -> None:
        """The next sequence number of a producer; see the port. An error's outcome is ``not_applied``."""

        def answered(found: int | DLedgerError) -> None:
            if isinstance(found, DLedgerError):  # whatever it is, a question changes nothing
                found.outcome = "not_applied"
            done(found)

        refusal = self._gate.refusal
        if refusal is not None:
            answered(ShutdownError(refusal.reason))
        else:
            self.log.submit_producer(name, answered)

    def _answered(self, results: Sequence[PutResult], took_s: float, done: PutDone) -> None:
        """Count and pass on results other than that of a single stored message."""
        failed = self.stats.put_done(results, took_s)
        if failed and any(result.status is PutMessageStatus.CREATE_MAPEDFILE_FAILED for result in results):
            self._rounds.clean_soon()  # perhaps there is something to delete
        done(results)

    def put(self, message: Message) -> PutResult:
        """Store a message and wait for the result; ``UNKNOWN_ERROR`` with unknown outcome on timeout."""
        return self.put_many((message,))[0]

    def put_many(self, messages: Sequence[Message]) -> list[PutResult]:
        """Store messages and wait, like ``put``; one result for each."""
        waiter = PutWaiter()
        self.submit(messages, waiter.done)
        config = self.config
        results = waiter.wait(max(config.sync_flush_timeout, config.slave_timeout) / 1000 + _PUT_SLACK_S)
        return list(results) if results is not None else [_NO_ANSWER] * len(messages)

    # -- reads ---------------------------------------------------------------------------------------------------

    def get(  # noqa: PLR0913  # RocketMQ's getMessage
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_count: int,
        max_bytes: int = 0,
        matches_tags: TagFilter | None = None,
        matches_record: RecordFilter | None = None,
        group: str = "",
    ) -> GetResult:
        """Messages of a queue from ``offset`` on, at least one, at most ``max_count`` and the configured limits.

        Filters: the tags code first, then the record. On a slave, an offset outside the queue is not corrected (unless
        ``offset_check_in_slave``). Raises ``ShutdownError``, ``CorruptLogError``.
        """
        self._check_running()
        began_s = monotonic()
        result = self._reader.get(
            topic,
            queue_id,
            offset,
            max_count=max_count,
            max_bytes=max_bytes,
            matches_tags=matches_tags,
            matches_record=matches_record,
            correct_offset=self._gate.role is not BrokerRole.SLAVE or self.config.offset_check_in_slave,
        )
        self._count_get(result, began_s, topic, group)
        return result

    def get_at_once(
        self, topic: str, queue_id: int, offset: int, *, max_count: int, max_bytes: int, group: str = ""
    ) -> GetResult | None:
        """Like ``get`` without filters if that needs no disk, and finds messages or the queue's end; otherwise None."""
        self._check_running()
        began_s = monotonic()
        result = self._reader.get_at_once(topic, queue_id, offset, max_count=max_count, max_bytes=max_bytes)
        if result is not None:
            self._count_get(result, began_s, topic, group)
        return result

    def _count_get(self, result: GetResult, began_s: float, topic: str, group: str) -> None:
        found = len(result.records) if result.status is GetMessageStatus.FOUND else 0
        took_ms = int((monotonic() - began_s) * 1000)
        size = sum(map(len, result.records)) if found else 0
        self.stats.got(found, took_ms, size_bytes=size, group=group, topic=topic)

    def read_record(self, offset: int) -> bytes | None:
        """The record that starts at physical ``offset``; None if there is none. Raises ``ShutdownError``."""
        self._check_running()
        return self._reader.read_record(offset)

    def query(
        self,
        topic: str,
        key: str,
        max_num: int,
        begin_ms: int,
        end_ms: int,
        *,
        unique: bool = False,
        max_bytes: int = 0,
    ) -> list[bytes]:
        """The newest messages of ``topic`` with ``key`` stored within the given time, in log order; see ``reads``."""
        self._check_running()
        return self._reader.query(topic, key, max_num, begin_ms, end_ms, unique=unique, max_bytes=max_bytes)

    def index_end(self) -> IndexEnd:
        """Where the index of keys ends."""
        index = self._derived.index
        return IndexEnd(0, 0) if index is None else IndexEnd(index.end_timestamp, max(index.indexed_to, 0))

    def min_offset(self, topic: str, queue_id: int) -> int:
        """First offset of a queue; -1 if it is unknown."""
        queue = self._derived.queues.find(topic, queue_id)
        return queue.min_offset if queue is not None else -1

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Next offset of a queue; 0 if it is unknown."""
        queue = self._derived.queues.find(topic, queue_id)
        return queue.max_offset if queue is not None else 0

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The offset of the first message stored at a time or later, or the queue's end; 0 if the queue is unknown."""
        return self._reader.offset_by_time(topic, queue_id, timestamp_ms)

    def offset_by_position(self, topic: str, queue_id: int, position: int) -> int:
        """The offset of the first message whose record starts at or after physical ``position``; the queue's end if
        there is none, 0 if the queue is unknown. Raises ``DiskError``.
        """
        queue = self._derived.queues.find(topic, queue_id)
        return queue.offset_by_position(position) if queue is not None else 0

    def store_time(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """When a message was stored; -1 if it does not exist."""
        return self._reader.store_time(topic, queue_id, queue_offset)

    def disk_used_ratio(self) -> float:
        """The usage of the fuller of log and queues, from 0 to 1; -1 if unknown. Queries the file system."""
        worst = self._rounds.cleaner.ratios().worst
        return worst / 100 if worst >= 0 else -1.0

    def earliest_message_time(self) -> int:
        """When the first kept message was stored; -1 if there is none."""
        return self.log.earliest_message_time()

    def queues(self) -> list[tuple[str, int]]:
        """All queues: topic and id."""
        return [(queue.topic, queue.queue_id) for queue in self._derived.queues.all()]

    @property
    def forced_files(self) -> int:
        """How many log files were removed before they had expired; not those of a replicated log."""
        return self._rounds.forced_files

    @property
    def numbers_known(self) -> bool:
        """Whether the dispatched log determines every queue's next offset; not yet true on a member with a new disk."""
        return self._derived.numbering.is_known

    # -- dispatch, scrubbing -------------------------------------------------------------------------------------

    @property
    def dispatch_behind_bytes(self) -> int:
        """How much of the log is not yet in queues and index."""
        return self._dispatch.behind_bytes()

    @property
    def dispatch_damage(self) -> CorruptLogError | None:
        """The damage to be repaired before dispatch continues."""
        return self._dispatch.damage

    @property
    def dispatch_position(self) -> int:
        """The position up to which the log is in queues and index."""
        return self._dispatch.position

    def wait_dispatched(self, timeout: float) -> bool:
        """Wait until everything now in the log is in queues and index; False on timeout (``timeout`` seconds)."""
        return self._dispatch.wait_dispatched(timeout)

    def add_arrival_listener(self, listener: ArrivalListener) -> None:
        """Call ``listener``, on the dispatch thread, with messages that have become readable; it must be fast."""
        self._dispatch.add_listener(listener)

    def delete_topic(self, topic: str) -> None:
        """Remove a topic's queues; its messages stay in the log until they expire. Raises ``DiskError``.

        If it is created again, its queues' numbering continues where it was (see ``rocketstore.store.directory``).
        """
        self._durability.delete_topic(topic)

    def keep_for(self, keeper: LogKeeper) -> None:
        """Keep the log from where ``keeper`` still needs it; called when files are removed, so it must be fast."""
        self._rounds.keep_for(keeper)

    @property
    def timers(self) -> TimerFiles:
        """When timed messages are due."""
        return self._derived.timers

    def forget_timed(self, progress: TimedProgress) -> None:
        """Remove what is only needed for timed messages before a progress that is durable."""
        try:
            self._derived.timers.delete_settled(progress)
        except DiskError as error:
            _log.warning("files of timed messages are removed later: %s", error)

    @property
    def memory_bytes_max(self) -> int:
        """Messages less than this far from the end of the log are assumed to be in memory."""
        return self._reader.memory_bytes_max

    def position_of(self, topic: str, queue_id: int, offset: int) -> int:
        """A message's position in the log; -1 if it does not exist. Raises ``CorruptLogError``, ``DiskError``."""
        unit = self._reader.unit(topic, queue_id, offset)
        return -1 if unit is None else unit.offset

    def unit(self, topic: str, queue_id: int, offset: int) -> QueueUnit | None:
        """A message's unit in its queue; None if it is not there. Raises ``CorruptLogError``, ``DiskError``."""
        return self._reader.unit(topic, queue_id, offset)

    def request_clean(self) -> None:
        """Delete expired files now and in the next rounds, regardless of the hour."""
        self._rounds.cleaner.request()
        self._rounds.clean_soon()

    def flush(self) -> None:
        """Make everything durable and write the checkpoint. Raises ``DiskError``."""
        self._durability.flush()

    def runtime_info(self) -> dict[str, str]:
        """RocketMQ's runtime keys and values."""
        ratios = self._rounds.cleaner.ratios()
        return self.stats.runtime_info() | {
            "commitLogDiskRatio": str(ratios.log / 100),
            "consumeQueueDiskRatio": str(ratios.queues / 100),
            "commitLogMinOffset": str(self.log.min_offset),
            "commitLogMaxOffset": str(self.log.max_offset),
            "dispatchBehindBytes": str(self.dispatch_behind_bytes),
            "remainHowManyDataToFlush": bytes_text(self.log.remaining_to_flush()),
            "pageCacheLockTimeMills": str(self.log.put_lock_ms),
            "earliestMessageTimeStamp": str(self.earliest_message_time()),
            "brokerRole": str(self.role),
            "putRefusedBecause": refusal.reason if (refusal := self._gate.refusal) is not None else "",
            "indexFilesRebuilt": str(self._rounds.scrub.repaired),
            "queueOffsetsRepeated": str(self._derived.alarm.count),
            "storeFailure": "" if self.failure is None else str(self.failure),
        }

    # -- inside --------------------------------------------------------------------------------------------------

    def _dispatched(self, heads: Sequence[RecordHead], took_ms: int) -> None:
        self.stats.dispatched(heads, took_ms)
        self._rounds.numbers.look()

    def _failed(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._gate.close(Obstacle.QUEUE_ERROR, str(error))

    def _check_running(self) -> None:
        if not self._running:
            raise ShutdownError("the store is not running")


_NO_ANSWER: Final = PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome="unknown", reason="no answer in time")


def _busy(reason: str) -> PutResult:
    return PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied", reason=reason)
