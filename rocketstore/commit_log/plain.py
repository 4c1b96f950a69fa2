"""The commit log of a plain broker: consecutive records in files of equal size.

A record never crosses files: if the next record (and 8 bytes) does not fit, a blank fills the rest. This module covers
the log's life cycle and reading; ``appender`` writes, ``flush`` makes durable, ``recovery`` finds the end at startup.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dledger.clock import Clock
from dledger.errors import ConfigError, CorruptLogError, DiskError
from dledger.monitoring import SILENT, Instruments
from dledger.runtime.threads import Supervisor
from dledger.store.format import segment_name
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably
from dledger.store.mmap_file import Placement, UnreadableError
from dledger.types import ProducerBatch
from rocketstore.commit_log.appender import RecordAppender, StoredStretch
from rocketstore.commit_log.flush import CommitLogFlusher, FlushDone
from rocketstore.commit_log.port import NUMBERING_BYTES_MAX, NumberingEncoder, PutDone, SequenceDone, numbering_messages
from rocketstore.commit_log.recovery import (
    CLEAN_FILES,
    LOG_END_FILE,
    HeadsSink,
    PlainRecoveryReport,
    Recovery,
    read_log_end,
    write_log_end,
)
from rocketstore.config import MessageStoreConfig
from rocketstore.mapped.allocation import AllocationService, TransientStorePool, check_sizes
from rocketstore.mapped.queue import MappedFileQueue, OnForced, untold
from rocketstore.message.columns import read_records
from rocketstore.message.message import DelayLevels, Message
from rocketstore.message.record import BLANK, BLANK_MAGIC, MESSAGE_MAGICS, OFFSETS, OVERHEAD, QUEUE_OFFSET_AT, place_of
from rocketstore.types import BrokerRole, FlushDiskType, PutMessageStatus, PutResult, ScannedRecords

_MS_PER_HOUR: Final = 3_600_000
_PUT_OK: Final = PutMessageStatus.PUT_OK
_RESTORE: Final = "Mount its disk, or restore it from a copy or from another member"
_AT_ONCE_BYTES_MAX: Final = 1 << 20
"""Records that lie further apart are not read at once: too much would be read between them."""


class PlainCommitLog:
    """Implements ``rocketstore.commit_log.port.CommitLog``, whose docstrings define each method."""

    is_replicated = False
    is_repaired = False

    def __init__(
        self,
        config: MessageStoreConfig,
        *,
        clock: Clock,
        fs: FileSystem | None = None,
        instruments: Instruments = SILENT,
    ) -> None:
        self._config = config
        self._clock = clock
        self._fs = fs or FileSystem()
        self._delay_levels = DelayLevels.parse(config.message_delay_level)
        self._supervisor = Supervisor(self._thread_died)
        self._pool = self._make_pool(config)
        self._allocation = AllocationService(
            self._fs,
            supervisor=self._supervisor,
            pool=self._pool,
            fail_fast=config.fast_fail_if_no_buffer_in_store_pool,
        )
        placement = Placement(config.commit_log_dirs, config.read_only_commit_log_dirs, self._is_full)
        self._queue = MappedFileQueue(
            self._fs,
            placement,
            config.mapped_file_size_commit_log,
            allocation=self._allocation,
            instruments=instruments,
        )
        self._flusher = CommitLogFlusher(
            config,
            self._queue,
            clock,
            self._supervisor,
            on_readable=self._on_readable,
            pooled=self._pool is not None,
        )
        self._appender = RecordAppender(self._queue, self._delay_levels, clock)
        self._started = False
        self._hot_bytes = _memory_bytes() * config.access_message_in_memory_max_ratio // 100
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._keep_from: Callable[[], int | None] = lambda: None
        self._wait_for_slaves: Callable[[int, FlushDone], None] | None = None
        self._sealed_end: int | None = None
        """The end, of a log that nothing is appended to any more."""
        self._end_path = config.config_dir / LOG_END_FILE
        self.recovery_report: PlainRecoveryReport | None = None
        """The result of ``load``."""

    @staticmethod
    def _make_pool(config: MessageStoreConfig) -> TransientStorePool | None:
        if (
            not config.transient_store_pool_enable
            or config.flush_disk_type != FlushDiskType.ASYNC_FLUSH
            or config.broker_role == BrokerRole.SLAVE
        ):
            return None
        return TransientStorePool(config.transient_store_pool_size, config.mapped_file_size_commit_log)

    def _is_full(self, path: Path) -> bool:
        return self._fs.usage(path).ratio * 100 > self._config.disk_space_warning_level_ratio

    def _thread_died(self, error: BaseException) -> None:
        self._queue.poison = self._queue.poison or f"a thread of the commit log failed: {error}"

    # State

    @property
    def min_offset(self) -> int:
        if self._sealed_end is not None and not self._queue.files():
            return self._sealed_end
        return max(0, self._queue.min_offset)

    @property
    def max_offset(self) -> int:
        if self._sealed_end is not None:
            return self._sealed_end
        # A consumer must not see what a crash may undo: another message would get its offset.
        return self._queue.max_offset if self._flusher.group is None else self._queue.flushed_where

    @property
    def end_offset(self) -> int:
        return self._queue.max_offset

    def listen(self, advanced: Callable[[], None]) -> None:
        self._listeners = (*self._listeners, advanced)

    def _on_readable(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def queue_offsets(self) -> dict[tuple[str, int], int]:
        return self._appender.offsets.table

    def set_queue_offsets(self, offsets: dict[tuple[str, int], int]) -> None:
        with self._appender.lock:
            self._appender.offsets.replace(offsets)

    @property
    def poison(self) -> str:
        """Why the log accepts no more messages until a restart; empty if it does."""
        return self._queue.poison

    @property
    def flushed_offset(self) -> int:
        return self._queue.flushed_where

    @property
    def put_lock_ms(self) -> int:
        taken_ms = self._appender.lock_taken_ms
        return max(0, self._clock.monotonic_ms() - taken_ms) if taken_ms else 0

    def remaining_to_flush(self) -> int:
        return max(0, self._queue.max_wrote - self._queue.flushed_where)

    def directories(self) -> Sequence[str]:
        return [str(path) for path in self._config.commit_log_dirs]

    # Life cycle

    def check_files(self) -> None:
        config = self._config
        directories = (*config.commit_log_dirs, *config.read_only_commit_log_dirs)
        check_sizes(directories, config.mapped_file_size_commit_log, "mappedFileSizeCommitLog")

    def load(
        self,
        *,
        clean_stop: bool,
        from_timestamp_ms: int | None = None,
        durable_offset: int | None = None,
        on_heads: HeadsSink | None = None,
    ) -> None:
        """Open the files and recover the log.

        After a clean stop, nothing is read if the log is as that stop left it, otherwise the last three files. After a
        crash, reading starts at the newest file whose first message was stored at or before ``from_timestamp_ms``;
        without it, all files are read. ``on_heads`` receives every record read, in order. Everything before
        ``durable_offset`` is known to have been durable, which distinguishes a torn end from damage. Raises
        ``CorruptLogError``, ``DiskError``, ``ConfigError``.
        """
        writable = set(self._config.commit_log_dirs) - set(self._config.read_only_commit_log_dirs)
        missing = [path for path in self._config.read_only_commit_log_dirs if not path.is_dir()]
        if not writable or missing:
            raise ConfigError(
                [f"readOnlyCommitLogStorePaths: {path} does not exist" for path in missing]
                or ["storePathCommitLog: every directory is read-only: name at least one writable one"]
            )
        try:
            for path in sorted(writable):
                make_dirs_durably(self._fs, path)
                keep_private(path)
            self._queue.load()
            report = self._as_left(durable_offset or 0) if clean_stop and on_heads is None else None
            if report is None:
                recovery = Recovery(
                    self._queue, check_crc=self._config.check_crc_on_recover, delay_levels=self._delay_levels
                )
                if clean_stop:
                    start = recovery.clean_start()
                elif from_timestamp_ms is not None:
                    start = recovery.start_by_timestamp(from_timestamp_ms)
                else:
                    start = self.min_offset
                report = recovery.run(start, durable_offset, on_heads)
            self.recovery_report = report
            self._appender.last_timestamp = self._queue.store_timestamp = report.last_timestamp
            last = self._queue.last_file(create=False)
            if last is not None and not last.is_full and not last.writable:
                raise ConfigError([f"readOnlyCommitLogStorePaths: {last.path} is the last file and is not full yet"])
        except OSError as error:
            raise DiskError(f"opening the commit log in {', '.join(self.directories())} failed: {error}") from error

    def _as_left(self, durable_offset: int) -> PlainRecoveryReport | None:
        """Take over the log as the last stop left it; None if it may have changed, or says less than the checkpoint."""
        left = read_log_end(self._end_path)
        if left is None or left.end < durable_offset or not left.is_of(self._queue.files()):
            return None
        self._queue.set_end(left.end)
        return PlainRecoveryReport(left.end, left.end, 0, left.last_timestamp)

    def seal(self) -> int:
        """Fill the last file with a blank, durably, so that another log can continue at its end; returns that end.

        Between ``load`` and ``shutdown``, without ``start``. Raises ``DiskError``.
        """
        file = self._queue.last_file(create=False)
        if file is not None and 0 < file.wrote < file.size:
            self._queue.append_to(file, BLANK.pack(file.size - file.wrote, BLANK_MAGIC), fill=True)
        self._flusher.flush()
        return self._queue.max_offset

    def paths(self) -> dict[int, Path]:
        """The files, by where they start."""
        return {file.base: file.path for file in self._queue.files()}

    def load_sealed(
        self, end: int, kept_from: int | None = None, before_delete: Callable[[int], None] = lambda _end: None
    ) -> None:
        """Instead of ``load``: open for reading what was sealed and ends at ``end``, whose files all may expire.

        Those from ``kept_from`` on have not yet. ``before_delete`` is called with the end of each file that does.
        Raises ``CorruptLogError`` if a file is missing, ``DiskError``.
        """
        self._queue.load(below=end)
        self._queue.may_empty, self._queue.before_delete = True, before_delete
        files = self._queue.files()
        begin = files[0].base if files else end
        missing = None if kept_from is None or begin <= kept_from else kept_from
        if missing is None and files and files[-1].end != end:
            missing = files[-1].end
        if missing is not None:
            directory = files[-1].path.parent if files else self._config.commit_log_dirs[0]
            raise CorruptLogError(directory / segment_name(missing), 0, "the file is missing", _RESTORE)
        self._queue.set_end(end)
        self._sealed_end = end

    def start(self) -> None:
        if self._started:
            return
        self._started = True
        self._allocation.start()
        self._flusher.start()
        with self._appender.lock:
            self._appender.is_open = True

    def shutdown(self) -> None:
        """Flush and close. Idempotent. Raises ``DiskError`` if not everything became durable."""
        with self._appender.lock:
            self._appender.is_open = False
        stopped = True
        if self._started:
            self._started = False
            stopped = self._flusher.stop()
            self._allocation.stop()
        try:
            if not stopped:
                raise DiskError("the disk hangs: the last messages may not be durable")
            if not self._queue.poison:
                self._flusher.flush()
                self._record_end()
        finally:
            if stopped:
                self._queue.close()

    def _record_end(self) -> None:
        newest, end = self._queue.files()[-CLEAN_FILES:], self._queue.max_offset
        if newest and self.recovery_report is not None and self._queue.flushed_where == end:
            write_log_end(self._fs, self._end_path, newest, end, self._appender.last_timestamp)

    # Writing

    def submit(
        self,
        messages: Sequence[Message],
        done: PutDone,
        *,
        wait: bool = True,
        producer: ProducerBatch | None = None,
    ) -> None:
        if producer is not None:
            results, end = self._submit_numbered(messages, producer)
            ends = [end] if end else []
        else:
            results = self._appender.store_one(messages) if len(messages) == 1 else self._appender.store_many(messages)
            ends = [one.stored.offset + one.stored.size for one in results if one.stored is not None]
        if not ends:
            done(results)
            return
        flusher = self._flusher
        if flusher.group is None or not wait:
            flusher.first.noted()
            if flusher.readable_at_once:
                self._on_readable()
        if wait and (flusher.group is not None or self._wait_for_slaves is not None):
            self._when_safe(ends[-1], lambda status, reason: done(_flushed(results, status, reason)))
        else:
            done(results)

    def replicate_with(self, wait_for_slaves: Callable[[int, FlushDone], None]) -> None:
        """Answer puts that wait only once slaves have them, too, as ``wait_for_slaves`` says. Before ``start``."""
        self._wait_for_slaves = wait_for_slaves

    def _when_safe(self, end: int, done: FlushDone) -> None:
        """Call ``done`` once everything before ``end`` is as safe as the settings want it; slaves get only what is
        durable here.
        """
        slaves = self._wait_for_slaves
        if slaves is None:
            self.when_flushed(end, done)
        else:
            self.when_flushed(end, lambda status, why: slaves(end, done) if status is _PUT_OK else done(status, why))

    def _submit_numbered(self, messages: Sequence[Message], producer: ProducerBatch) -> tuple[list[PutResult], int]:
        """Store a producer's new messages; returns the results, and the offset up to which to wait for the flush (0:
        none).
        """
        before, results = self._appender.store_numbered(messages, producer)
        if before:
            end = self.end_offset  # after all of them, including those at unknown positions
            return [*(place for stretch in before for place in self._places(stretch)), *results], end
        last = next((one.stored for one in reversed(results) if one.stored is not None), None)
        return results, 0 if last is None else last.offset + last.size

    def _places(self, stretch: StoredStretch) -> list[PutResult]:
        """The results of messages stored before: their positions, according to their records."""
        found: list[PutResult] = []
        offset = stretch.offset
        while offset is not None and len(found) < stretch.skipped + stretch.count:
            head = self.read(offset, BLANK.size)
            if head is None:
                break
            size, magic = BLANK.unpack(head)
            if magic == BLANK_MAGIC:
                offset = self.next_file_offset(offset)
                continue
            record = self.read(offset, OVERHEAD)
            place = None if record is None else place_of(record, offset)
            if place is None:
                break
            found.append(PutResult(PutMessageStatus.PUT_OK, place))
            offset += size
        known = found[stretch.skipped :]
        return known + [PutResult(PutMessageStatus.PUT_OK)] * (stretch.count - len(known))

    def submit_producer(self, name: str, done: SequenceDone) -> None:
        with self._appender.lock:
            sequence = self._appender.numbered.ask(name, self._clock.monotonic_ms())
        if not sequence:  # nothing is counted that could be lost
            done(0)
            return
        # what it counts may still be lost
        self._when_safe(self.end_offset, lambda status, reason: done(_flushed_sequence(sequence, status, reason)))

    def submit_numbering(self, encode: NumberingEncoder, done: PutDone) -> None:
        with self._appender.lock:
            end, offsets = self._queue.max_wrote, dict(self._appender.offsets.table)
        bodies = encode(end, offsets, min(NUMBERING_BYTES_MAX, self._queue.file_bytes // 2))
        self.submit(numbering_messages(bodies, self._clock.wall_ms()), done)

    def append_received(self, offset: int, data: bytes, store_timestamp: int) -> None:
        """Append verified bytes of the master's log, all in one file, to a slave's; its first file may begin anywhere.

        ``store_timestamp``: of the last record in them, 0 if there is none. Raises ``InvalidRequestError`` for a gap,
        ``DiskFullError`` without having changed anything, ``DiskError``.
        """
        self._appender.append_received(offset, data, store_timestamp)
        self._flusher.first.noted()
        if self._flusher.readable_at_once:
            self._on_readable()

    def when_flushed(self, end: int, done: FlushDone) -> None:
        """Call ``done`` once everything before ``end`` is as durable as the settings want it to be acknowledged."""
        if self._flusher.group is None:
            done(_PUT_OK, "")
        else:
            self._flusher.group.wait_for(end, done)

    def stretch(self, offset: int, bytes_max: int) -> bytes:
        """The bytes from ``offset`` on, blanks included, at most to the end of its file or of what may be read.

        Empty if there are none. Raises ``CorruptLogError``, ``DiskError``.
        """
        file = self._queue.find(offset)
        if file is None:
            return b""
        end = min(file.base + file.readable, self.max_offset)
        return self.read(offset, min(bytes_max, end - offset)) or b"" if offset < end else b""

    @property
    def segment_bytes(self) -> int:
        """The size of each file."""
        return self._queue.file_bytes

    def flush(self) -> int:
        return self._flusher.flush()

    def keep_from(self, wanted: Callable[[], int | None], held_back: Callable[[int], None] = lambda _end: None) -> None:  # noqa: ARG002  # as the port has it
        self._keep_from = wanted

    def delete_expired(self, *, now_ms: int, immediately: bool, on_forced: OnForced = untold) -> int:
        deleted = 1 if self._queue.retry_delete_first() else 0
        keep_from = self._keep_from()
        if self._expired_end(now_ms, immediately):
            self.flush()  # the reason for removing it must be durable first
        return deleted + self._queue.delete_expired_by_time(
            self._config.file_reserved_time * _MS_PER_HOUR,
            now_ms=now_ms,
            gap_ms=self._config.delete_commit_log_files_interval,
            immediately=immediately,
            keep_from=keep_from,
            on_forced=on_forced,
        )

    def is_held_back(self, *, now_ms: int, immediately: bool) -> bool:
        kept = self._keep_from()
        return kept is not None and self._expired_end(now_ms, immediately) > kept

    def _expired_end(self, now_ms: int, immediately: bool) -> int:
        age_ms_max = self._config.file_reserved_time * _MS_PER_HOUR
        return self._queue.expired_end(age_ms_max, now_ms=now_ms, immediately=immediately)

    # Reading

    def read(self, offset: int, size: int) -> bytes | None:
        queue = self._queue
        try:
            return queue.read(offset, size, cold=queue.max_offset - offset > self._hot_bytes)
        except UnreadableError as error:  # damage at this place: the caller decides, and the broker stays up
            raise error.as_damage() from error

    def read_together(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """See ``CommitLog.read_together``: records in memory."""
        queue = self._queue
        hot_from = queue.max_offset - self._hot_bytes
        found: list[bytes | None] = []
        file, begin, end = None, 0, 0
        for offset, size in places:
            if not begin <= offset < end:
                file = queue.find(offset)
                begin, end = (file.base, file.base + file.size) if file is not None else (0, 0)
            found.append(file.read(offset - begin, size) if file is not None and offset >= hot_from else None)
        return found

    def read_at_once(self, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """See ``CommitLog.read_at_once``: records that are not far from each other, in one file."""
        begin, end = places[0][0], sum(places[-1])
        file, data = self._queue.find(begin), None
        if file is not None and end - begin <= _AT_ONCE_BYTES_MAX:
            data = file.read_at_once(begin - file.base, end - begin)
        if data is None:
            return [None] * len(places)
        return [data[offset - begin : offset - begin + size] if offset >= begin else None for offset, size in places]

    def read_record(self, offset: int) -> bytes | None:
        head = self.read(offset, OVERHEAD)
        if head is None:
            return None
        size, magic = BLANK.unpack_from(head)
        if magic not in MESSAGE_MAGICS or size < OVERHEAD or OFFSETS.unpack_from(head, QUEUE_OFFSET_AT)[1] != offset:
            return None
        return self.read(offset, size)

    def scan(self, offset: int, bytes_max: int) -> ScannedRecords:
        queue = self._queue
        offset, bytes_max = max(offset, self.min_offset), max(bytes_max, OVERHEAD)
        while True:
            file = queue.find(offset)
            readable_end = 0 if file is None else min(file.base + file.readable, self.max_offset)
            if file is None or offset >= readable_end:
                return ScannedRecords([], offset)
            data = self.read(offset, min(bytes_max, readable_end - offset)) or b""
            outcome = read_records(data, offset, delay_levels=self._delay_levels)
            if not outcome.consumed and len(data) < outcome.needed <= readable_end - offset and outcome.end == "more":
                bytes_max = outcome.needed
                continue
            if outcome.end == "blank":
                if outcome.heads:
                    return ScannedRecords(outcome.heads, file.base + file.size)
                offset = file.base + file.size
                continue
            if outcome.end == "damaged" and not outcome.consumed:
                raise CorruptLogError(
                    file.path, offset - file.base, outcome.reason, "Restart the broker to have it checked"
                )
            return ScannedRecords(outcome.heads, offset + outcome.consumed)

    def next_file_offset(self, offset: int) -> int:
        return self._queue.base_of(offset) + self._queue.file_bytes

    def earliest_message_time(self) -> int:
        heads = self.scan(self.min_offset, OVERHEAD).heads
        return heads[0].store_timestamp if heads else -1


def _flushed_sequence(sequence: int, status: PutMessageStatus, reason: str) -> int | DiskError:
    return sequence if status == PutMessageStatus.PUT_OK else DiskError(f"the flush failed: {reason}")


def _flushed(results: list[PutResult], status: PutMessageStatus, reason: str) -> list[PutResult]:
    """The results once the flush has ended with ``status``."""
    if status == PutMessageStatus.PUT_OK:
        return results
    return [
        one._replace(status=status, outcome="unknown", reason=reason) if one.stored is not None else one
        for one in results
    ]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
