"""The message store: a commit log, the consume queues and the index built from it, and their coordination.

Life cycle: ``load`` (open, recover, build what is missing), ``start``, ``shutdown``. In between, a master accepts puts.

Threads, all named ``rocketstore-…``: *dispatch* (see ``rocketstore.store.dispatch``), *flush* (queues and index, then
the checkpoint), *clean* (retention), *upkeep* (see ``rocketstore.store.upkeep``), *stats* (a sample per second), and
the log's own. None of them ends silently: an error that stops one closes the store to puts, and appears in ``failure``
and in the reason for refusing puts.

**What is durable when.** The log decides when a put is answered (after its flush, after a quorum's, or at once). Queues
and index on disk may lag behind the log, because they are rebuilt from the checkpoint's ``replay_from`` on. The
checkpoint is written only after queues and index were flushed beyond it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Final, NamedTuple

from dledger.clock import Clock
from dledger.conditions import REMOVED_EARLY_TOLD_MS, ConditionKind, Conditions
from dledger.errors import CorruptLogError, DiskError, ShutdownError
from dledger.runtime.supervisor import Supervisor
from dledger.runtime.worker import Worker
from dledger.store.fs import FileSystem
from dledger.types import ProducerBatch
from rocketstore.commit_log.port import CommitLog, PutDone, SequenceDone
from rocketstore.commit_log.put_waiter import PutWaiter
from rocketstore.config import MessageStoreConfig
from rocketstore.consume_queue.ends import QUEUE_ENDS_FILE, read_ends, write_ends
from rocketstore.consume_queue.queue import Surroundings
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.index.service import IndexService
from rocketstore.mapped.queue import ForcedFileRemoval
from rocketstore.message.checks import check_message
from rocketstore.message.message import Message
from rocketstore.queue_numbers.numbering import LoggedNumbering, NumberWriter, RepeatAlarm
from rocketstore.store.checkpoint import CHECKPOINT_FILE, UNKNOWN, StoreCheckpointFile
from rocketstore.store.cleaning import Cleaner
from rocketstore.store.deleted import DELETED_FILE, DeletedQueues
from rocketstore.store.directory import StoreDirectory
from rocketstore.store.dispatch import CALM_NAP_S, SLAVE_NAP_S, ArrivalListener, DispatchService
from rocketstore.store.durability import Attempts, Durability
from rocketstore.store.flags import Obstacle, PutGate
from rocketstore.store.periodic import Periodic
from rocketstore.store.reads import RecordFilter, StoreReader, TagFilter
from rocketstore.store.recovery import RecoveryPlan, queue_units, recover
from rocketstore.store.stats import StoreStats, bytes_text
from rocketstore.store.upkeep import Upkeep
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
STOP_TIMEOUT_S: Final = 10.0
"""How long ``shutdown`` waits for one of its threads."""
_PUT_SLACK_S: Final = 5.0
_BUSY_MS_MAX: Final = 10_000_000
_SAMPLE_INTERVAL_MS: Final = 1000
_PUT_OK: Final = PutMessageStatus.PUT_OK

LogKeeper = Callable[[int], int]
"""Returns the offset from which it needs the log, at most the given one, before which all derived data are durable."""

_log = logging.getLogger("rocketstore")


class IndexEnd(NamedTuple):
    """The newest message with a key: when it was stored, and its physical offset; 0 if there is none."""

    store_ms: int
    offset: int


def _new_incarnation() -> int:
    return secrets.randbits(63) | 1


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
        self._clock = clock or Clock()
        self._fs = fs or FileSystem()
        self._conditions = conditions or Conditions("store", self._clock)
        self.stats: Final = StoreStats(self._clock)
        self._gate = PutGate(BrokerRole.SLAVE if log.is_replicated else config.broker_role)
        self._busy_ms = config.os_page_cache_busy_timeout_mills
        self._behind_max = config.dispatch_behind_bytes_max
        self._alarm = RepeatAlarm(self._conditions)
        self._queues = ConsumeQueueTable(
            config.consume_queue_dir,
            config.consume_queue_file_bytes,
            self._fs,
            Surroundings(
                lambda: log.min_offset,
                self._alarm.repeated,
                lambda: self._durability.position,
                believe=lambda queue, offset, unit: self._reader.truth.believed_unit(queue, offset, unit),
                firsts=lambda physical: self._reader.truth.first_messages(physical),
            ),
        )
        self._deleted = DeletedQueues(self._fs, config.config_dir / DELETED_FILE)
        self._numbering = LoggedNumbering(log, self._queues, deleted=lambda: self._deleted.ends)
        self._keepers: tuple[LogKeeper, ...] = ()
        self._is_awaited: Callable[[], bool] = lambda: True
        self._log_goes_first: Callable[[], bool] = lambda: False
        log.keep_from(self._keep_from, self._held_back)
        self._index = (
            IndexService(
                config.index_dir,
                config.max_hash_slot_num,
                config.max_index_num,
                self._fs,
                self._clock,
                on_damage=self._index_is_damaged,
            )
            if config.message_index_enable
            else None
        )
        derived: list[ConsumeQueueTable | IndexService] = (
            [self._queues] if self._index is None else [self._queues, self._index]
        )
        self._dispatch = DispatchService(
            log,
            [*derived, self._numbering],
            on_batch=self._dispatched,
            on_failure=self._failed,
            on_jump=self._numbering.jumped,
            nap_s_min=self._nap_s_min,
            log_goes_first=lambda: self._log_goes_first(),
        )
        self._numbers = NumberWriter(log, self._numbering, self._dispatch, lambda: self.role is not BrokerRole.SLAVE)
        self._reader = StoreReader(log, self._queues.find, self._index, config, since_ms=self._clock.wall_ms())
        self._cleaner = Cleaner(
            log,
            derived,
            config,
            self._fs,
            self._clock,
            may_delete=self._may_delete,
            on_disk_full=self._disk_full,
            on_held_back=self._let_go,
            on_forced=self._removed_early,
        )
        threads = Supervisor(self._failed)
        every = partial(Periodic, clock=self._clock, supervisor=threads)
        self._flusher = every("rocketstore-flush-queues", config.flush_interval_consume_queue, self._flush_round)
        self._sampler = every("rocketstore-stats", _SAMPLE_INTERVAL_MS, self.stats.sample)
        self._clean_worker = every("rocketstore-clean", config.clean_resource_interval, self._clean_round)
        self._upkeep = Upkeep(
            log,
            self._queues.all,
            self._index,
            self._reader.truth,
            self._conditions,
            self._clock,
            config.derived_scrub_bytes_per_s,
        )
        self._upkeep_worker = Worker("rocketstore-upkeep", self._upkeep.step, self._clock, threads)
        self._checkpoint = StoreCheckpointFile(self._fs, config.store_path_root_dir / CHECKPOINT_FILE)
        self._durability = Durability(log, self._queues, self._index, self._dispatch, (self._checkpoint, self._deleted))
        self._last_thorough_ms = self._clock.monotonic_ms()
        self._checkpoint_wanted = False
        self._ends_path = config.config_dir / QUEUE_ENDS_FILE
        self._directory: StoreDirectory | None = None
        self._touched = False
        """Whether a start may have changed queues or index."""
        self._loaded = False
        self._running = False
        self.forced_files = 0
        """How many log files were removed before they had expired; not those of a replicated log."""
        self.failure: BaseException | None = None
        """The error that stopped a part of the store, if any."""
        log.listen(self._dispatch.wake)

    # -- life ----------------------------------------------------------------------------------------------------

    def load(self) -> RecoveryPlan:
        """Open the directory, recover, and dispatch what queues and index lack; returns what had to be done.

        After ``DirectoryLockedError``, ``CorruptLogError``, ``DiskError``, ``DiskFullError`` or ``ConfigError``,
        ``shutdown`` releases the directory.
        """
        self._directory = directory = StoreDirectory(self.config.store_path_root_dir, self._fs)
        clean_stop = directory.stopped_cleanly
        self.log.check_files()
        directory.mark_running()
        checkpoint = self._checkpoint.read()
        self._durability.position = max(0, checkpoint.replay_from)
        self._deleted.load()
        known = checkpoint.replay_from != UNKNOWN
        self.log.load(
            clean_stop=clean_stop,
            from_timestamp_ms=checkpoint.replay_time(with_index=False) if known else None,
            durable_offset=checkpoint.replay_from if known else None,
        )
        self._touched = True
        place = (checkpoint.replay_from, checkpoint.queue_units)
        self._queues.load(read_ends(self._ends_path, place) if clean_stop and UNKNOWN not in place else None)
        decided = recover(
            self.log,
            self._queues,
            self._index,
            checkpoint,
            clean_stop=clean_stop,
            index_safe=self.config.message_index_safe,
        )
        self._dispatch.begin_at(decided.replay_from)
        self._dispatch.last_store_ms = checkpoint.logics_ms
        self._numbering.begin(continuous=decided.queues_are_whole)
        end = self.log.end_offset
        caught_up = self._or_later(self._dispatch.catch_up)
        self._cleaner.follow()
        if not (caught_up and self._or_later(self._numbering.restore)):
            self._numbering.restore_behind(end)
        if not self.log.is_replicated:
            self.rebuild_queue_offsets()
        self._loaded = True
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
        for worker in (self._flusher, self._sampler, self._clean_worker, self._upkeep_worker):
            worker.start()
        self._gate.open(Obstacle.NOT_RUNNING)
        self._clean_worker.request()  # the disk may already be full

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
        self._upkeep.stop()
        for worker in (self._upkeep_worker, self._clean_worker, self._sampler, self._flusher):
            if not worker.stop(STOP_TIMEOUT_S):
                _log.error("a store thread did not end within %d s", STOP_TIMEOUT_S)
        if self._loaded:
            attempts.run(self.log.flush)
        drained = self._dispatch.stop(DRAIN_TIMEOUT_S)
        self._running = False  # not earlier: listeners notified of a message read it
        if self._loaded:
            self._durability.flush_all(attempts)
        attempts.run(self.log.shutdown)
        attempts.run(lambda: self._settle(directory, drained=drained, failed=attempts.first is not None))
        attempts.run(self._queues.close)
        directory.release()
        attempts.conclude()

    def _settle(self, directory: StoreDirectory, *, drained: bool, failed: bool) -> None:
        if not self._touched:  # the log refused the start: everything derived from it is as it was
            if directory.stopped_cleanly:
                directory.mark_clean()
            return
        complete = self._loaded and drained and (self.log.is_replicated or self._dispatch.behind_bytes() == 0)
        if complete and not failed and self.failure is None:
            try:
                place = (self._durability.position, queue_units(self._queues))
                write_ends(self._fs, self._ends_path, place, self._queues.at_rest())
            except (OSError, DiskError) as error:
                _log.warning("the next start will read all consume queues: %s", error)
            directory.mark_clean()
        elif not self._loaded:
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
        self._numbers.look()

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
        self._queues.correct_min_offsets(begin)
        self._numbering.require()
        self.log.set_queue_offsets(self._deleted.over(self._queues.next_offsets()))

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
        log = self.log
        refusal = self._gate.refusal
        if refusal is None:
            held_ms = log.put_lock_ms
            behind = log.max_offset - self._dispatch.position
            if self._busy_ms < held_ms < _BUSY_MS_MAX:
                refusal = _busy(f"the previous put has been writing for {held_ms} ms")
            elif behind > 2 * self._behind_max:
                refusal = self._crowded(behind)
            else:
                config = self.config
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
        return self._crowded(behind) if behind > self._behind_max else None

    def _crowded(self, behind: int) -> PutResult:
        refusal = _busy(
            f"consume queues and index are {behind} bytes behind the log: slow down (dispatch_behind_bytes_max)"
        )
        self._conditions.limit(refusal.reason)
        return refusal

    def submit_producer(self, name: str, done: SequenceDone) -> None:
        """The next sequence number of a producer; see the port."""
        refusal = self._gate.refusal
        if refusal is not None:
            done(ShutdownError(refusal.reason))
        else:
            self.log.submit_producer(name, done)

    def _answered(self, results: Sequence[PutResult], took_s: float, done: PutDone) -> None:
        """Count and pass on results other than that of a single stored message."""
        failed = self.stats.put_done(results, took_s)
        if failed and any(result.status is PutMessageStatus.CREATE_MAPEDFILE_FAILED for result in results):
            self._clean_worker.request()  # perhaps there is something to delete
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
        index = self._index
        return IndexEnd(0, 0) if index is None else IndexEnd(index.end_timestamp, max(index.indexed_to, 0))

    def min_offset(self, topic: str, queue_id: int) -> int:
        """First offset of a queue; -1 if it is unknown."""
        queue = self._queues.find(topic, queue_id)
        return queue.min_offset if queue is not None else -1

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Next offset of a queue; 0 if it is unknown."""
        queue = self._queues.find(topic, queue_id)
        return queue.max_offset if queue is not None else 0

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The offset of the first message stored at a time or later, or the queue's end; 0 if the queue is unknown."""
        return self._reader.offset_by_time(topic, queue_id, timestamp_ms)

    def offset_by_position(self, topic: str, queue_id: int, position: int) -> int:
        """The offset of the first message whose record starts at or after physical ``position``; the queue's end if
        there is none, 0 if the queue is unknown. Raises ``DiskError``.
        """
        queue = self._queues.find(topic, queue_id)
        return queue.offset_by_position(position) if queue is not None else 0

    def store_time(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """When a message was stored; -1 if it does not exist."""
        return self._reader.store_time(topic, queue_id, queue_offset)

    def disk_used_ratio(self) -> float:
        """The usage of the fuller of log and queues, from 0 to 1; -1 if unknown. Queries the file system."""
        worst = self._cleaner.ratios().worst
        return worst / 100 if worst >= 0 else -1.0

    def earliest_message_time(self) -> int:
        """When the first kept message was stored; -1 if there is none."""
        return self.log.earliest_message_time()

    def queues(self) -> list[tuple[str, int]]:
        """All queues: topic and id."""
        return [(queue.topic, queue.queue_id) for queue in self._queues.all()]

    @property
    def numbers_known(self) -> bool:
        """Whether the dispatched log determines every queue's next offset; not yet true on a member with a new disk."""
        return self._numbering.is_known

    # -- dispatch, upkeep ----------------------------------------------------------------------------------------

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

    def let_messages_gather(self, *, unless: Callable[[], bool]) -> None:
        """Messages may become readable up to ``CALM_NAP_S`` later (on a slave ``SLAVE_NAP_S``), and many together,
        unless somebody waits for them.

        ``unless`` is called on the dispatch thread, after the listeners.
        """
        self._is_awaited = unless

    def let_log_go_first(self, *, while_: Callable[[], bool]) -> None:
        """Dispatch less than could be, while the log grows so fast that this would hold it up.

        ``while_`` is called on the dispatch thread.
        """
        self._log_goes_first = while_

    def delete_topic(self, topic: str) -> None:
        """Remove a topic's queues; its messages stay in the log until they expire. Raises ``DiskError``.

        If it is created again, its queues' numbering continues where it was (see ``rocketstore.store.deleted``).
        """
        self._durability.delete_topic(topic)

    def keep_for(self, keeper: LogKeeper) -> None:
        """Keep the log from where ``keeper`` still needs it; called when files are removed, so it must be fast."""
        self._keepers = (*self._keepers, keeper)

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
        self._cleaner.request()
        self._clean_worker.request()

    def flush(self) -> None:
        """Make everything durable and write the checkpoint. Raises ``DiskError``."""
        self._durability.flush()

    def runtime_info(self) -> dict[str, str]:
        """RocketMQ's runtime keys and values."""
        ratios = self._cleaner.ratios()
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
            "indexFilesRebuilt": str(self._upkeep.repaired),
            "queueOffsetsRepeated": str(self._alarm.count),
            "storeFailure": "" if self.failure is None else str(self.failure),
        }

    # -- inside --------------------------------------------------------------------------------------------------

    def _flush_round(self) -> None:
        """Some pages periodically, everything once a minute or when retention waits for that.

        A failed flush is final: the store accepts no more puts.
        """
        now_ms = self._clock.monotonic_ms()
        due_ms = self._last_thorough_ms + self.config.flush_consume_queue_thorough_interval
        if self._checkpoint_wanted or now_ms >= due_ms:
            self._checkpoint_wanted = False
            self._last_thorough_ms = now_ms
            self._durability.flush_if_room()
        else:
            self._durability.flush_pages(self.config.flush_consume_queue_least_pages)

    def _dispatched(self, heads: Sequence[RecordHead], took_ms: int) -> None:
        self.stats.dispatched(heads, took_ms)
        self._numbers.look()

    def _nap_s_min(self) -> float:
        if self._is_awaited():
            return 0.0
        return SLAVE_NAP_S if self.role is BrokerRole.SLAVE else CALM_NAP_S

    def _clean_round(self) -> None:
        self._numbers.look()
        try:
            self._cleaner.clean()
        except DiskError as error:
            _log.warning("cleaning failed, retrying later: %s", error)

    def _keep_from(self) -> int:
        """The offset from which nothing may be removed: data derived from it are not durable elsewhere yet."""
        durable = self._durability.position
        wanted = [durable, *(keeper(durable) for keeper in self._keepers)]
        writable = self.role is not BrokerRole.SLAVE and not self._gate.has(Obstacle.DISK_FULL)
        numbered = self._numbering.keep_from(self._dispatch.position, writable=writable)
        return min(wanted if numbered is None else [*wanted, numbered])

    def _held_back(self, end: int) -> None:
        """A replicated log would remove more. Called on its own thread, which must not wait for thousands of queues."""
        if self._durability.position < min(end, self._dispatch.position):
            self._checkpoint_wanted = True
            self._flusher.request()

    def _let_go(self) -> None:
        """A plain log would remove more."""
        self._numbers.write_and_wait()
        self._durability.flush_if_room()

    def _may_delete(self) -> bool:
        return self._dispatch.failure is None and self.dispatch_behind_bytes < self.config.mapped_file_size_commit_log

    def _disk_full(self, full: bool) -> None:
        if full and self._gate.close(Obstacle.DISK_FULL):
            self._conditions.set(
                ConditionKind.DISK_FULL, "no messages are accepted: the disk is full", subject=_DISK_OF_STORE
            )
        elif not full and self._gate.open(Obstacle.DISK_FULL):
            self._conditions.clear(ConditionKind.DISK_FULL, _DISK_OF_STORE)

    def _removed_early(self, removed: ForcedFileRemoval, used_percent: int) -> None:
        """Those messages were acknowledged: say which they were, and that the settings ask for it."""
        self.forced_files += 1
        config, age_s = self.config, removed.age_ms // 1000
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
        self._conditions.set(
            ConditionKind.REMOVED_EARLY,
            f"{self.forced_files} log files were removed before they had expired, the last one with offsets "
            f"{removed.base} to {removed.end - 1}, {age_s} s after its last write: {why}",
            subject=_DISK_OF_STORE,
            for_ms=REMOVED_EARLY_TOLD_MS,
        )

    def _index_is_damaged(self, error: CorruptLogError) -> None:
        """Callable from any thread."""
        self._conditions.set(ConditionKind.DAMAGED, str(error), subject=str(error.path))
        self._upkeep_worker.wake()

    def _failed(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._gate.close(Obstacle.QUEUE_ERROR, str(error))

    def _check_running(self) -> None:
        if not self._running:
            raise ShutdownError("the store is not running")


_DISK_OF_STORE: Final = "store"
"""Not the log's disk, which the node reports."""
_NO_ANSWER: Final = PutResult(PutMessageStatus.UNKNOWN_ERROR, outcome="unknown", reason="no answer in time")


def _busy(reason: str) -> PutResult:
    return PutResult(PutMessageStatus.OS_PAGECACHE_BUSY, outcome="not_applied", reason=reason)
