"""``Log`` on disk: writing, durability and the life of an open directory.

Locks, outermost first:
- the node's lock (not ours): all writers.
- ``_remove_lock``: removing the files of retired segments; taken without the node's lock.
- ``LogState.shape_lock``: truncation, reset, retirement, which take entries out of the log; repairs of its index.
- ``_flush_lock``: one flush at a time; held during ``fdatasync``.
- the checkpoint file's locks.
- ``LogState.lock``: never held during I/O.

Every failed write or sync but ENOSPC poisons the store for good. Two operations wait for syncs although they run under
the node's lock: truncation and ``reset``. Both must lower the durable mark before they touch the bytes it covers, or a
power cut would look like damage. The same would happen if truncated sectors reappeared among those written in their
place (``recovery.is_torn``), so the zeros are made durable first.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.core.ports import BatchHook
from dledger.errors import (
    CorruptLogError,
    DiskError,
    DiskFullError,
    IndexBeforeBeginError,
    MisplacedRunError,
    invariant,
)
from dledger.monitoring import SILENT, Instruments
from dledger.records import INDEX_UNIT_BYTES, MIN_BLANK_BYTES
from dledger.store import cleaner
from dledger.store import format as records
from dledger.store.bulk_reader import BulkReader, StoreTime
from dledger.store.durable_state import FileHardState, Mark
from dledger.store.fs import FileSystem
from dledger.store.identity import MembersFile, StoreIdentity
from dledger.store.log_files import LogState, Write, warm_step
from dledger.store.mmap_file import MappedFile
from dledger.store.opening import Opened, RecoveryReport, open_directory
from dledger.store.reader import LogReader
from dledger.store.repair import Scrub, SegmentRepair
from dledger.types import (
    AppendedBatch,
    Body,
    Boundary,
    CheckedRun,
    Configuration,
    Entry,
    EntryId,
    EntryRun,
    FlushMark,
    LogIndex,
    Magic,
    Position,
    Term,
)


class FileStore(LogReader):
    """A log in a directory, including reads. ``dledger.core.ports.Log`` documents most of its methods."""

    def __init__(
        self, config: StoreConfig, opened: Opened, clock: Clock, fs: FileSystem, instruments: Instruments
    ) -> None:
        """``instruments`` observe every batch written and every flush."""
        state = LogState(opened.checkpoint, opened.last)
        super().__init__(opened.files, state, unchecked=opened.unchecked)
        self._config = config
        self._opened = opened
        self._clock = clock
        self._fs = fs
        self._checkpoint_file = opened.checkpoint_file
        self._batch_hooks: tuple[BatchHook, ...] = ()
        self._remove_lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._warmed_at = self._state.end
        self._disk_full = False
        self._unwiped: list[Write] = []
        """The bytes written behind the end when the disk ran full: they are zeroed before any other write."""
        self._ran_out_of_space = False
        self._instruments = instruments
        self.disk_used_ratio = -1.0
        """The used share of the fuller disk at the last ``measure_room``; -1 before."""
        self.forced_segments = 0
        """How many segments were removed before they had expired."""
        self.last_forced: cleaner.ForcedRemoval | None = None
        """The last one of them."""
        self._forced_untold: list[cleaner.ForcedRemoval] = []

    @classmethod
    def open(  # noqa: PLR0913  # one parameter per neighbour
        cls,
        config: StoreConfig,
        *,
        cluster_id: str,
        group: str,
        node_id: str,
        clock: Clock,
        fs: FileSystem | None = None,
        mend: bool = False,
        instruments: Instruments = SILENT,
        first_position: int = 0,
    ) -> FileStore:
        """Open or create ``<base_dir>/dledger-<node_id>``, recovering its log.

        With ``mend`` a member that others can complete opens although its log is damaged (``DamagedStart``).
        ``first_position``: where the first entry of an empty log goes, if the log continues an older one.

        Raises ``DirectoryLockedError``, ``IdentityError``, ``CorruptLogError``, ``ConfigError``, ``DiskError``,
        ``DiskFullError``.
        """
        fs = fs or FileSystem()
        identity = StoreIdentity(cluster_id, group, node_id, config.segment_bytes, config.index_segment_bytes)
        opened = open_directory(config, identity, clock, fs, mend=mend, first_position=first_position)
        return cls(config, opened, clock, fs, instruments)

    @property
    def hard_state(self) -> FileHardState:
        """The durable term and vote."""
        return self._opened.hard_state

    @property
    def members(self) -> MembersFile:
        """Whose memory this is, and the group's members as far as they are committed."""
        return self._opened.members

    @property
    def recovery_report(self) -> RecoveryReport:
        """The findings and changes of opening."""
        return self._opened.report

    @property
    def damage_at_start(self) -> tuple[CorruptLogError, ...]:
        """Segments that were damaged or missing, and are empty until they are fetched from peers."""
        return self._opened.damage

    @property
    def foreign_files(self) -> tuple[Path, ...]:
        """Unknown files in the data and index directories; left alone."""
        return self._opened.foreign_files

    @property
    def directory(self) -> Path:
        """The node's own directory."""
        return self._opened.layout.directory

    @property
    def file_system(self) -> FileSystem:
        """The disk, for what others keep beside the log."""
        return self._fs

    @property
    def data_directories(self) -> tuple[Path, ...]:
        """The directories of segments."""
        return tuple(self._opened.layout.data)

    @property
    def segment_directories(self) -> tuple[Path, ...]:
        """The directories of segments, including those that are never written to."""
        layout = self._opened.layout
        return (*layout.data, *layout.read_only)

    @property
    def begin(self) -> Boundary:
        return self._state.begin

    @property
    def last(self) -> EntryId:
        return self._state.last

    @property
    def last_chain_crc(self) -> int:
        return self._state.tip.chain_crc

    @property
    def end_position(self) -> Position:
        return Position(self._state.end)

    @property
    def flushed(self) -> FlushMark:
        return self._state.flush_mark

    @property
    def flushed_position(self) -> Position:
        """The end of the last durable entry."""
        return Position(self._state.flushed.position)

    @property
    def write_sequence(self) -> int:
        return self._state.sequence

    @property
    def committed_index(self) -> LogIndex:
        return self._state.committed

    @property
    def disk_full(self) -> bool:
        return self._disk_full

    def on_damage(self, listener: Callable[[CorruptLogError], None]) -> None:
        """Call ``listener`` for every damage in data found by a lookup or a read, on the thread that finds it.

        It must only record it: locks are held. ``CorruptLogError.index`` is the entry.
        """
        self._state.on_damage = listener

    def bulk_reader(self, check: Callable[[], None] = lambda: None, store_time: StoreTime | None = None) -> BulkReader:
        """The committed log, for large reads."""
        return BulkReader(self._files, self._state, check, store_time, unchecked=self._unchecked)

    def scrub(self) -> Scrub:
        """A walk that verifies the log again and again, for a background thread."""

        def mend(index: int) -> None:
            with suppress(CorruptLogError, IndexBeforeBeginError):
                self.term_at(LogIndex(index))  # a lookup rewrites a wrong unit

        return Scrub(self._files, self._state, mend, unchecked=self._unchecked)

    def segment_repair(self) -> SegmentRepair:
        """Repairs of this log with what peers have, for a background thread."""
        return SegmentRepair(
            self._files, self._state, self._fs, self.directory, self.mark_at, unchecked=self._unchecked
        )

    def add_batch_hook(self, hook: BatchHook) -> None:
        """Have ``hook`` called for what is appended as leader with magic 1, in order of registration."""
        self._batch_hooks = (*self._batch_hooks, hook)

    def append_as_leader(
        self, term: Term, bodies: Sequence[Body], magic: Magic = Magic.NORMAL, *, channel: int = 0
    ) -> AppendedBatch:
        state = self._state
        self.check_append(bodies)
        invariant(term >= state.last.term, "terms never decrease", term=term, last=state.last)
        pieces = records.split_batch(bodies, state.end, self._config.segment_bytes, channel)
        last, begin, end, chain = state.last, state.end, state.end, state.tip.chain_crc
        first = LogIndex(last.index + 1)
        writes: list[Write] = []
        units: list[bytes] = []
        positions: list[int] = []
        for piece in pieces:
            if self._batch_hooks and magic is Magic.NORMAL:
                piece = records.apply_batch_hooks(self._batch_hooks, piece)
            index = LogIndex(last.index + 1)
            encoded = records.encode_piece(int(magic), term, index, piece, chain)
            if piece.position != end:
                writes.append(self._files.tail_blank(end))
            writes.append((piece.position, encoded.records))
            units.append(encoded.units)
            positions += encoded.positions
            previous, last = last, EntryId(term, LogIndex(last.index + len(piece.bodies)))
            run = EntryRun(previous, chain, index, last.index, Position(piece.position), encoded.records)
            end, chain = piece.position + len(encoded.records), encoded.chain_crc
        self._write(writes, b"".join(units), last, Mark(last.index, end, chain))
        self._latest_written = (state.generation, run)  # which the followers are sent next
        self._instruments.wrote(last.index + 1 - first, end - begin, as_leader=True)
        return AppendedBatch(term, first, last.index, tuple(positions))

    def check_append(self, bodies: Sequence[Body]) -> None:
        records.check_batch(bodies, self._config.entry_bytes_limit)
        self._check_writable()

    def append_run(self, checked: CheckedRun, from_index: LogIndex) -> EntryId:
        state, run = self._state, checked.run
        self._check_writable(even_if_full=True)
        problem = records.run_problem(checked, from_index, state.last, state.tip.chain_crc)
        if problem:
            raise MisplacedRunError(f"the run does not follow the end of the log: {problem}")
        offset = checked.offset_of(from_index)
        data = run.data[offset:] if offset else run.data
        position = run.position + offset
        problem = records.run_place_problem(position, len(data), state.end, self._config.segment_bytes)
        if problem:
            raise MisplacedRunError(f"the run does not follow the end of the log: {problem}")
        units = checked.index_units[(from_index - run.first_index) * INDEX_UNIT_BYTES :]
        writes = [(position, data)] if position == state.end else [self._files.tail_blank(state.end), (position, data)]
        if self._disk_full and not self._files.hold(writes, checked.last.index):
            raise self._full()
        self._write(writes, units, checked.last, Mark(checked.last.index, position + len(data), checked.last_chain_crc))
        self._instruments.wrote(checked.last.index - from_index + 1, len(data), as_leader=False)
        return checked.last

    def _check_writable(self, *, even_if_full: bool = False) -> None:
        self._state.check_usable()
        if self._unwiped and not self._disk_full:
            self._wipe()
        if self._disk_full and (self._unwiped or not even_if_full):
            raise self._full()

    def _full(self) -> DiskFullError:
        return DiskFullError(f"the disk of {self.directory} is full: appends resume once there is room")

    def _write(self, writes: list[Write], units: bytes, last: EntryId, end: Mark) -> None:
        """Write a change completely or without effect, then publish it."""
        state, files = self._state, self._files
        first_index = state.last.index + 1
        try:  # all of them before the first byte is written
            data, index = files.segments_for(writes), files.index_segments_for(first_index, len(units))
        except OSError as error:
            raise self._failed("creating a segment", error) from error
        try:
            for file, (position, record) in zip(data, writes, strict=True):
                file.write(position - file.base, record)
            files.put_units(index, first_index, units)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                self._unwiped = writes
                self._ran_out_of_space = self._disk_full = True
                try:
                    self._wipe()
                except (DiskError, DiskFullError) as left:
                    left.outcome = "unknown"  # a start after a crash would take what is left there for appended
                    raise
            raise self._failed("writing entries", error) from error
        state.publish(last, end, data, index)

    def _failed(self, what: str, error: OSError, so: str = "nothing was appended") -> DiskError | DiskFullError:
        if error.errno != errno.ENOSPC:
            return self._state.poisoned(what, error)
        self._ran_out_of_space = self._disk_full = True
        return DiskFullError(f"{what} in {self.directory} failed: no space left on the device; {so}")

    def _wipe(self) -> None:
        """Restore the zeros behind the end after a partly written change, or (raising) later, before the next one.

        Durably: a power cut must not bring back what was refused. Even zeros may need space on file systems that do not
        write in place: thin, copy-on-write volumes.
        """
        try:
            while self._unwiped:
                position, data = self._unwiped[-1]
                file = self._files.data.find(position)
                if file is not None:  # otherwise a truncation has dropped it
                    file.zero(position - file.base, position - file.base + len(data))
                    file.sync()
                self._unwiped = self._unwiped[:-1]
        except OSError as error:
            what = "zeroing a partly written batch"
            raise self._failed(what, error, "it may reappear after a crash") from error

    def truncate(self, from_index: LogIndex) -> None:
        state = self._state
        if from_index > state.last.index:
            return
        state.check_usable()
        with self._state.shape_lock:
            invariant(
                from_index > state.committed, "truncation of committed entries", at=from_index, by=state.committed
            )
            invariant(from_index > state.begin.index, "truncation below begin", at=from_index, begin=state.begin)
            last = EntryId(self.term_at(LogIndex(from_index - 1)), LogIndex(from_index - 1))
            end = self.mark_at(last.index)
            used, old_last = self._used_end(end.position, from_index), state.last.index
            was_flushed = state.lower(last, end)
            try:
                if was_flushed:
                    self._checkpoint_file.write_durably(state.checkpoint)
                data = self._files.cut_data(end.position, lambda file, _: used - file.base)
                index = self._files.cut_index(
                    from_index, lambda file, _: min(file.size, (old_last + 1) * INDEX_UNIT_BYTES - file.base)
                )
                for file in data:
                    file.sync()
            except OSError as error:
                raise state.poisoned("truncating the log", error) from error
            state.changed(data, index)

    def _used_end(self, position: int, from_index: LogIndex) -> int:
        """The end of the written part of ``position``'s segment, including its tail blank's head."""
        state, files = self._state, self._files
        next_base = files.data.base_of(position) + files.segment_bytes
        if state.end < next_base:
            return state.end
        before = self.last_index_before(next_base)
        return (self.mark_at(before).position if before >= from_index else position) + MIN_BLANK_BYTES

    def reset(self, begin: Boundary, configuration: Configuration | None = None) -> None:
        state = self._state
        state.check_usable()
        if configuration is not None:
            try:
                self.members.save_committed(configuration, max(begin.index, configuration.index))
            except OSError as error:
                raise self._failed("recording the members", error, "the log is as it was") from error
        with self._state.shape_lock:
            invariant(begin.index >= state.committed, "reset below the commit index", begin=begin, by=state.committed)
            state.restart_at(begin)
            self._committed_end = (begin.index, begin.position)
            try:
                self._checkpoint_file.write_durably(state.checkpoint)
                self._files.data.drop_from(0)
                self._files.index.drop_from(0)
                self._unwiped = []  # it is gone with its file
                touched = self._write_head_blank(begin.position)
            except OSError as error:
                raise state.poisoned("resetting the log", error) from error
            state.changed(touched, ())

    def _write_head_blank(self, position: int) -> list[MappedFile]:
        """Write a blank before a log that begins inside a segment, for tools that read from the segment's start."""
        offset = position % self._config.segment_bytes
        if offset < MIN_BLANK_BYTES:
            return []
        file = self._files.data.ensure(position)
        file.write(0, records.blank_head(offset))
        return [file]

    def set_committed(self, index: LogIndex) -> None:
        state = self._state
        if index <= state.committed:
            return
        invariant(index <= state.last.index, "commit beyond the log's end", index=index, last=state.last)
        state.committed = index

    def check_run(self, run: EntryRun) -> CheckedRun:
        return records.check_run(run, unchecked=self._unchecked)

    def read(self, index: LogIndex) -> Entry:
        return self.read_range(index, index, 0)[0]

    def flush(self) -> FlushMark:
        with self._flush_lock:
            self._state.check_usable()
            return self._flush()

    def _flush(self) -> FlushMark:
        state = self._state
        begun = state.begin_flush()
        if begun is None:
            return self.flushed
        dirty, sequence = begun
        began_s, flushed_to = monotonic(), state.flushed.position
        try:
            for file in sorted(dirty, key=lambda one: one.base):
                file.sync()
            self._files.sync_dirs()
            state.synced()
            self._checkpoint_file.write(state.checkpoint)  # unsynced: it survives the process
            mark = state.end_flush(sequence)
        except OSError as error:
            raise state.poisoned("flushing the log", error) from error
        self._instruments.flushed(max(0, state.flushed.position - flushed_to), monotonic() - began_s)
        return mark

    def sync_checkpoint(self) -> None:
        """Make the marks durable: data, then index, then the checkpoint. For a background thread. ``DiskError``."""
        self.flush()
        self._sync_index_and_checkpoint(clean_stop=False)

    def _sync_index_and_checkpoint(self, *, clean_stop: bool) -> None:
        state = self._state
        try:
            for file in sorted(state.begin_index_sync(), key=lambda one: one.base):
                file.sync()
            state.end_index_sync()
            self._checkpoint_file.write_durably(lambda: state.checkpoint(clean_stop=clean_stop))
        except OSError as error:
            raise state.poisoned("recording the checkpoint", error) from error

    def warm(self) -> bool:
        """Prepare disk space ahead of the end, one bounded step; returns whether there is more to do. ``DiskError``."""
        if self._disk_full or self._state.poison or self._state.closed:
            return False
        try:
            end = self._state.end
            appended, self._warmed_at = end - self._warmed_at, end
            return warm_step(self._files, self._state, self._config.warm_bytes, appended)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # appends need not be refused before they need that room themselves
                return False
            raise self._state.poisoned("preparing disk space", error) from error

    def clean(self, protected_index: LogIndex) -> tuple[Path, ...]:
        """A complete clean-up, without concurrent writers; returns the removed files. Raises ``DiskError``."""
        retired = self.retire(protected_index, self.measure_room())
        self.remove_retired()
        return retired

    def measure_room(self) -> cleaner.Room:
        """Measure the disks. For a background thread, without the node's lock. Raises ``DiskError``."""
        layout = self._opened.layout
        try:
            room = cleaner.measure(self._fs, set(layout.data) - set(layout.read_only), layout.directory)
        except OSError as error:
            raise self._state.poisoned("cleaning up", error) from error
        self.disk_used_ratio = room.ratio
        return room

    def retire(
        self,
        protected_index: LogIndex,
        room: cleaner.Room,
        may_go: Callable[[LogIndex], LogIndex] = lambda last_index: last_index,
        keep_from: int | None = None,
        held_back: Callable[[int], None] = lambda _end: None,
    ) -> tuple[Path, ...]:
        """Apply retention in memory and record whether the disk is full; returns what ``remove_retired`` will remove.

        Under the node's lock: the log's begin must not move between two reads of it by the core. ``protected_index``:
        what all live followers have (``cleaner.protected``). ``may_go`` is called only if something is to be removed:
        from the last entry that would go, it returns the last one that may. Nothing from position ``keep_from`` on is
        removed; if something would be, ``held_back`` gets its end. Raises ``DiskError``.
        """
        with self._state.shape_lock:
            self._state.check_usable()
            try:
                decision = cleaner.plan(self._clean_facts(protected_index, room), self._config)
            except OSError as error:
                raise self._state.poisoned("cleaning up", error) from error
            self._ran_out_of_space = self._ran_out_of_space and decision.disk_full
            self._disk_full = decision.disk_full
            expired = [one for one in decision.remove if keep_from is None or one.end <= keep_from]
            if len(expired) < len(decision.remove):
                held_back(decision.remove[-1].end)
            if not expired:
                return ()
            last_index = may_go(LogIndex(expired[-1].last_index))
            remove = [segment for segment in expired if segment.last_index <= last_index]
            if not remove:
                return ()
            newest = remove[-1]
            index = LogIndex(newest.last_index)
            if (forced := decision.forced) in remove:
                self._forced(forced, room)
            begin = Boundary(index, self.term_at(index), Position(newest.end), self.chain_crc_at(index))
            self._state.raise_begin(begin)
            return tuple(self._files.retire_below(begin.position, LogIndex(begin.index + 1)))

    def remove_retired(self) -> None:
        """Remove the files of retired segments. For a background thread, without the node's lock: an unlink takes long.

        The raised begin is durable first, so that nothing removed is looked for after a crash. A crash before that
        brings the segments back, one after it leaves files below the begin, which the next opening removes.
        ``DiskError``.
        """
        with self._remove_lock:
            self._state.check_usable()
            try:
                self._checkpoint_file.write_durably(self._state.checkpoint)
                self._files.remove_retired()
            except OSError as error:
                raise self._state.poisoned("cleaning up", error) from error
            while self._forced_untold:
                self._forced_untold.pop(0).tell(self._config)

    def _forced(self, segment: cleaner.ClosedSegment, room: cleaner.Room) -> None:
        """Note that it will be removed before it has expired."""
        age_ms = max(0, self._clock.wall_ms() - segment.modified_ms)
        first = self._state.begin.index + 1
        self.last_forced = cleaner.ForcedRemoval(segment.path, first, segment.last_index, age_ms, room.ratio)
        self.forced_segments += 1
        self._forced_untold.append(self.last_forced)

    def _clean_facts(self, protected_index: LogIndex, room: cleaner.Room) -> cleaner.CleaningInput:
        state, now_ms = self._state, self._clock.wall_ms()
        return cleaner.CleaningInput(
            segments=self._removable(),
            end=state.end,
            safe_index=min(state.committed, state.flushed.index),
            protected_index=protected_index,
            now_ms=now_ms,
            local_hour=cleaner.local_hour(now_ms),
            usage_ratio=room.ratio,
            available_bytes=room.available_bytes,
            ran_out_of_space=self._ran_out_of_space,
            bytes_wanted=cleaner.segment_room(self._config),
        )

    def _removable(self) -> Iterator[cleaner.ClosedSegment]:
        """The segments before the one with the last entry.

        Lazily: each costs reads under the node's lock, and mostly the first one stays.
        """
        state, files = self._state, self._files.data.files()
        if not files or files[0].base + files[0].size > state.end:
            return  # without a look at the log, which costs more than all else of an idle one
        try:
            stop = self.positions(state.last.index, state.last.index)[0] if state.last.index > state.begin.index else 0
            for file in files:
                end = file.base + file.size
                if end > stop or not file.writable:
                    return
                try:
                    last_index = self.last_index_before(end)
                    self.chain_crc_at(last_index)
                except CorruptLogError:  # ``on_damage`` reports it; it goes with the next intact one
                    continue
                modified_ms = file.path.stat().st_mtime_ns // 1_000_000
                yield cleaner.ClosedSegment(file.path, file.base, end, last_index, modified_ms)
        except (CorruptLogError, IndexBeforeBeginError):  # its end is damaged, or it was truncated meanwhile
            return

    def close(self) -> None:
        state = self._state
        with self._remove_lock, self._state.shape_lock, self._flush_lock:
            if state.closed:
                return
            try:
                if not state.poison:
                    self._flush()
                    self._sync_index_and_checkpoint(clean_stop=not self._unwiped)
                    self._opened.hard_state.mirror()
            finally:
                state.closed = True
                self._checkpoint_file.close()
                self._opened.hard_state.close()
                self._files.clear()
                for lock in self._opened.locks:
                    lock.release()
