"""Opening a directory: lock, identity, left-overs, recovery. Ends with a whole, durable log, marked as in use."""

from __future__ import annotations

import errno
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.errors import ConfigError, CorruptLogError, DiskError, DiskFullError, IdentityError
from dledger.records import INDEX_UNIT_BYTES
from dledger.store.durable_state import (
    HARD_STATE_FILE,
    REPAIR_ADVICE,
    FileHardState,
    LogCheckpoint,
    LogCheckpointFile,
    Mark,
    boot_record_of,
    create_checkpoint,
    create_hard_state,
    last_life,
    mark_of,
    read_checkpoint,
    write_boot_record,
)
from dledger.store.format import HEADER, EntryHeader
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably, non_zero_end
from dledger.store.identity import (
    CHECKPOINT_FILE,
    IDENTITY_FILE,
    DirectoryLock,
    Layout,
    MembersFile,
    StoreIdentity,
    as_text,
    check_identity,
    create_members,
    layout_of,
    read_identity,
    write_identity,
)
from dledger.store.java_files import (
    begin_of,
    forget_java,
    imported_end,
    is_javas,
    java_committed,
    may_be_lost,
    newest_hard_state,
    note_imported,
    was_used_by_java,
)
from dledger.store.log_files import LogFiles
from dledger.store.mmap_file import Found, FoundFile, MappedFile, MappedFileList, Placement, list_segments
from dledger.store.quarantine import DamagedStart
from dledger.store.recovery import (
    Cut,
    LogScanOutcome,
    Plan,
    Refuse,
    ScanSettings,
    ScanWalk,
    doubt,
    plan,
    scan_log,
    walk,
)
from dledger.types import GENESIS, NO_INDEX, NO_TERM, Boundary, EntryId, HardState, LogIndex, Position, Standing, Term

"""Of a state machine on the log (``dledger.statemachine.snapshots``)."""
_OWN_FILES = (IDENTITY_FILE, HARD_STATE_FILE, CHECKPOINT_FILE)
"""Created once and written in place from then on."""
_IMPORTED = HardState(
    standing=Standing.DOUBTFUL,
    doubt="the log was imported: its earlier votes and acknowledgements are unknown",
)


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """The findings and changes of opening, for the log line."""

    clean_stop: bool
    last_index: int
    verified_from: int
    verified_entries: int
    cut_at: int | None = None
    """The position from which unflushed remains were dropped."""
    cut_reason: str = ""
    index_rewritten_from: int | None = None
    removed: tuple[Path, ...] = ()
    duration_ms: int = 0
    doubt: str = ""
    """Why the member may have forgotten statements, as far as this opening found out; empty if it found nothing."""

    def __str__(self) -> str:
        entry = "the log is empty" if self.last_index < 0 else f"the last entry is {self.last_index}"
        more = [
            f"verified {self.verified_entries} from {self.verified_from}" if self.verified_entries else "",
            "" if self.cut_at is None else f"cut at position {self.cut_at} ({self.cut_reason})",
            "" if self.index_rewritten_from is None else f"index rewritten from {self.index_rewritten_from}",
            f"removed {', '.join(map(str, self.removed))}" if self.removed else "",
            f"in doubt: {self.doubt}" if self.doubt else "",
        ]
        stop = " after a clean stop" if self.clean_stop else " after no clean stop"
        if self.last_index < 0 and not self.clean_stop:
            stop = ""  # a new node has never been stopped
        return f"recovered in {self.duration_ms} ms{stop}: {'; '.join((entry, *filter(None, more)))}"


@dataclass(slots=True)
class Opened:
    """The parts of an open store."""

    layout: Layout
    locks: list[DirectoryLock]
    files: LogFiles
    checkpoint_file: LogCheckpointFile
    checkpoint: LogCheckpoint
    last: EntryId
    hard_state: FileHardState
    members: MembersFile
    report: RecoveryReport
    unchecked: bool
    """Whether entries without CRCs are taken for Java's."""
    foreign_files: tuple[Path, ...] = field(default=())
    damage: tuple[CorruptLogError, ...] = field(default=())
    """Segments that are empty, to be fetched from peers."""


def open_directory(
    config: StoreConfig,
    identity: StoreIdentity,
    clock: Clock,
    fs: FileSystem,
    *,
    mend: bool = False,
    first_position: int = 0,
) -> Opened:
    """Open or create a node's directory. Raises what ``FileStore.open`` documents."""
    started_ms = clock.monotonic_ms()
    layout = layout_of(config, identity.node_id)
    locks: list[DirectoryLock] = []
    try:
        writable = sorted(set(layout.data) - set(layout.read_only))
        for directory in (layout.directory, layout.index, *writable):
            make_dirs_durably(fs, directory)
        shared = [path for path in writable if path.parent != layout.directory]
        for directory in (layout.directory, *shared):
            keep_private(directory)
            locks.append(DirectoryLock(directory))
        opened = _Opener(config, identity, fs, layout, locks, mend=mend, first_position=first_position).open()
    except OSError as error:
        _release(locks)
        kind = DiskFullError if error.errno == errno.ENOSPC else DiskError
        raise kind(f"cannot open {layout.directory}: {error}") from error
    except BaseException:
        _release(locks)
        raise
    opened.report = replace(opened.report, duration_ms=clock.monotonic_ms() - started_ms)
    return opened


def _release(locks: list[DirectoryLock]) -> None:
    for lock in locks:
        lock.release()


class _Opener:
    """One opening in progress; the directory is locked."""

    def __init__(
        self,
        config: StoreConfig,
        identity: StoreIdentity,
        fs: FileSystem,
        layout: Layout,
        locks: list[DirectoryLock],
        *,
        mend: bool,
        first_position: int,
    ) -> None:
        self._config = config
        self._first = Boundary(NO_INDEX, NO_TERM, Position(first_position), 0)
        self._identity = identity
        self._fs = fs
        self._layout = layout
        self._locks = locks
        self._removed: list[Path] = []
        self._damage = DamagedStart(fs, layout.directory) if mend else None
        self._unchecked = config.import_unchecked
        """Whether entries without CRCs are taken for Java's."""
        self._is_new = False
        """Whether no node of ours has used the directory before."""

    def open(self) -> Opened:
        layout, config = self._layout, self._config
        data = self._without_older_log(list_segments([*layout.data, *layout.read_only], config.segment_bytes))
        index = list_segments([layout.index], config.index_segment_bytes)
        life = last_life(layout.directory)
        imported = self._settle_identity(data, index)
        checkpoint = read_checkpoint(layout.checkpoint)
        if self._begins_elsewhere(checkpoint, data):
            data, checkpoint = self._move_empty_log(data)
        files = self._files()
        misshapen = self._adopt(files, data, index, checkpoint)
        self._unchecked = config.import_unchecked or checkpoint.begin.position < imported_end(layout.directory)
        settings = ScanSettings(config.recovery_verify_bytes, self._unchecked, layout.data[0])
        outcome = scan_log(files, misshapen, checkpoint, settings)
        decision = plan(outcome.findings)
        hard_state = self._hard_state()
        members = MembersFile(self._fs, layout.directory, self._identity.node_id)
        if isinstance(decision, Refuse):
            damage = decision.damage
            self._refuse_javas(files, outcome.findings.end)
            if self._damage is None:
                raise CorruptLogError(damage.path, damage.offset, damage.reason, REPAIR_ADVICE)
            decision, misshapen = self._damage.settle(files, outcome.findings, misshapen, hard_state)
        if imported:
            self._check_import(files, outcome, checkpoint)
        doubted = "" if imported else doubt(outcome.findings, decision, life)
        if doubted:  # durably, before its evidence is gone
            hard_state.doubt(doubted)
        self._remove_leftovers([*data.temporary, *index.temporary, *(one.path for one in misshapen)])
        end = self._carry_out(files, outcome, decision)
        self._check_last_is_writable(files, end)
        if self._damage is not None and self._damage.cut:
            checkpoint = replace(checkpoint, committed=LogIndex(min(checkpoint.committed, end.index)))
        recovered = self._mark_in_use(checkpoint, end)
        last = _entry_at(files, recovered)
        members.hold_to(recovered.committed)
        if imported and members.saved.clear_to == NO_INDEX:
            members.save_committed(None, last.index)  # Java writes no configurations: nobody need look for them
        if config.import_unchecked:
            known = hard_state.load()
            newest = newest_hard_state(known, layout.directory, last.term)
            if newest != known:
                hard_state.save(newest)
            forget_java(self._fs, layout.directory)
        write_boot_record(self._fs, layout.directory, boot_record_of(layout.directory, _OWN_FILES, config.flush_mode))
        report = replace(self._report(outcome, decision, checkpoint, end), doubt=doubted)
        foreign = (*data.foreign, *index.foreign)
        file = LogCheckpointFile(self._fs, layout.checkpoint)
        holes = () if self._damage is None else tuple(self._damage.holes)
        return Opened(
            layout=layout,
            locks=self._locks,
            files=files,
            checkpoint_file=file,
            checkpoint=recovered,
            last=last,
            hard_state=hard_state,
            members=members,
            report=report,
            unchecked=self._unchecked,
            foreign_files=foreign,
            damage=holes,
        )

    def _refuse_javas(self, files: LogFiles, end: Mark) -> None:
        """Raise ``IdentityError`` if what follows ``end`` is no damage, but Java's: nothing may be set aside for it."""
        file = files.data.find(end.position)
        offset = end.position - file.base if file is not None else 0
        if self._unchecked or file is None or offset + HEADER.size > file.size:
            return
        header = EntryHeader(*HEADER.unpack_from(file.map, offset))
        if is_javas(header, end.position) and not may_be_lost(file.map, offset):
            raise IdentityError(
                f"entry {header.index} in {file.path} was written by a Java node, without CRCs: start with "
                "import_unchecked=true, on all members"
            )

    def _without_older_log(self, data: Found) -> Found:
        """The files found, without those of the older log, which may lie in the same read-only directories."""
        position, read_only = self._first.position, self._layout.read_only
        older = [one for one in data.segments if one.base < position and one.path.parent in read_only]
        return replace(data, segments=tuple(one for one in data.segments if one not in older)) if older else data

    def _begins_elsewhere(self, checkpoint: LogCheckpoint, data: Found) -> bool:
        """Whether an empty log does not begin where the older one ends. Raises ``IdentityError`` if it is not empty."""
        begin, first = checkpoint.begin, self._first
        if begin.index != NO_INDEX or begin.position == first.position:
            return False
        written = next((one for one in data.segments if not _is_blank(one)), None)
        if written is not None and first.position:
            raise IdentityError(
                f"{written.path.parent} holds a log that begins at {begin.position}, and the older log that it "
                f"continues ends at {first.position}: restore the older log's files, as they were, from a copy"
            )
        # A log whose entries are gone is damaged, which recovery finds: it is not empty.
        return written is None and max(checkpoint.flushed.index, checkpoint.committed) == begin.index

    def _move_empty_log(self, data: Found) -> tuple[Found, LogCheckpoint]:
        """Let an empty log begin where the older one ends by now: it went on, or this directory was emptied.

        Its segments are only prepared ones.
        """
        self._removed.extend(one.path for one in data.segments)
        checkpoint = LogCheckpoint(mark_of(self._first), begin=self._first)
        create_checkpoint(self._fs, self._layout.checkpoint, checkpoint)
        return replace(data, segments=()), checkpoint

    def _hard_state(self) -> FileHardState:
        """Term and vote; if they are unreadable and may be mended, a doubtful member without either."""
        directory = self._layout.directory
        try:
            return FileHardState(self._fs, directory)
        except CorruptLogError as error:
            if self._damage is None:
                raise
            self._damage.put_aside(error.path)
            doubt = f"its term and vote were unreadable: {error.reason}"
            create_hard_state(self._fs, directory, HardState(standing=Standing.DOUBTFUL, doubt=doubt))
            return FileHardState(self._fs, directory)

    def _settle_identity(self, data: Found, index: Found) -> bool:
        """Check the identity, or give one to a new directory; returns whether a log of the Java line is imported.

        It is if no node of ours has used the directory, and again whenever Java has used it in between.
        """
        directory, path = self._layout.directory, self._layout.checkpoint
        try:
            found = read_identity(directory)
        except CorruptLogError as error:  # no reason to give up the log, as a repair would
            raise IdentityError(
                f"{error.path}: {error.reason}, so nothing was changed. If this is the directory of "
                f"{self._identity.node_id!r}, write this into the file and start again: {as_text(self._identity)}"
            ) from error
        if found is not None:
            check_identity(directory, found, self._identity)
            if not was_used_by_java(directory, path):
                return False
            if not self._config.import_unchecked:
                raise IdentityError(
                    f"{directory} has since been used by a Java node: open it with import_unchecked, because "
                    "entries written by Java have no CRCs"
                )
            self._note_imported(data)
            self._doubt_imported()  # before the checkpoint, which may be the only evidence of Java
            committed = java_committed(path)
            if committed is not None:
                create_checkpoint(self._fs, path, _unflushed(self._begin_of(data, index), committed))
                return True
            ours = read_checkpoint(path)
            first = data.segments[0].base if data.segments else 0
            begin = ours.begin if ours.begin.position >= first else self._begin_of(data, index)
            create_checkpoint(self._fs, path, _unflushed(begin, ours.committed))
            return True
        if data.segments and not self._config.import_unchecked:
            raise IdentityError(
                f"{directory} holds segments but no identity: restore the file {directory / 'identity'}, or open "
                "a log written by Java with import_unchecked"
            )
        # The identity is written last: without it nothing here was ever used, and a start after a crash starts over.
        self._note_imported(data)
        committed = java_committed(path)
        begin = self._begin_of(data, index) if data.segments else self._first
        create_hard_state(self._fs, directory, _IMPORTED if data.segments else HardState())
        create_checkpoint(self._fs, path, _unflushed(begin, NO_INDEX if committed is None else committed))
        create_members(self._fs, directory, self._identity.node_id)
        write_identity(self._fs, directory, self._identity)
        return bool(data.segments)

    def _note_imported(self, data: Found) -> None:
        """Java's entries end somewhere before the end of its last segment."""
        if data.segments:
            note_imported(self._fs, self._layout.directory, data.segments[-1].base + self._config.segment_bytes)

    def _doubt_imported(self) -> None:
        """Doubt an imported log: Java acknowledges unflushed entries, and does not sync its vote."""
        with closing(self._hard_state()) as hard_state:
            hard_state.doubt(_IMPORTED.doubt)

    def _begin_of(self, data: Found, index: Found) -> Boundary:
        return begin_of(data, index, self._config.segment_bytes)

    def _check_import(self, files: LogFiles, outcome: LogScanOutcome, checkpoint: LogCheckpoint) -> None:
        """An imported log has no checksums: refuse to drop more than a torn end. Raises ``CorruptLogError``."""
        findings = outcome.findings
        later = files.data.base_of(findings.stop.position) + files.segment_bytes
        nothing = findings.end.index == checkpoint.begin.index
        if (nothing and findings.rest_in_use) or any(
            file.non_zero_end(0) for file in files.data.files() if file.base >= later
        ):
            stop = findings.stop
            raise CorruptLogError(stop.path, stop.offset, f"{stop.reason}, and valid entries follow it", REPAIR_ADVICE)

    def _files(self) -> LogFiles:
        config = self._config

        def is_full(path: Path) -> bool:
            return self._fs.usage(path).ratio > config.disk_clean_ratio

        data = Placement(self._layout.data, self._layout.read_only, is_full)
        return LogFiles(
            MappedFileList(self._fs, data, config.segment_bytes),
            MappedFileList(self._fs, Placement((self._layout.index,)), config.index_segment_bytes),
        )

    def _adopt(self, files: LogFiles, data: Found, index: Found, checkpoint: LogCheckpoint) -> tuple[FoundFile, ...]:
        """Map files of the right size that are not below the begin; returns data files of a wrong size.

        Of two names of one file neither can be written without the other: the second counts as a file of a wrong size.
        """
        begin = checkpoint.begin
        misshapen: list[FoundFile] = []
        known: set[tuple[int, int]] = set()
        for one in data.segments:
            if one.base + files.segment_bytes <= begin.position:
                self._removed.append(one.path)
            elif one.size == files.segment_bytes and _is_new(one.path, known):
                files.data.adopt(one)
            else:
                misshapen.append(one)
        for one in index.segments:
            if one.base + one.size <= (begin.index + 1) * INDEX_UNIT_BYTES:
                self._removed.append(one.path)
            elif one.size == files.index.segment_bytes and not one.path.is_symlink() and _is_new(one.path, known):
                files.index.adopt(one)
            else:
                self._removed.append(one.path)  # derived: rebuilt from data
        return tuple(misshapen)

    def _remove_leftovers(self, paths: list[Path]) -> None:
        """Remove left-overs of cleaning, of resets and of unfinished creations."""
        doomed = [path for path in (*self._removed, *paths) if path.parent not in self._layout.read_only]
        for path in doomed:
            with suppress(FileNotFoundError):  # an empty segment may already have replaced it
                self._fs.unlink(path)
        for directory in sorted({path.parent for path in doomed}):
            self._fs.sync_dir(directory)
        self._removed = doomed

    def _carry_out(self, files: LogFiles, outcome: LogScanOutcome, decision: Plan) -> Mark:
        """Drop what the plan drops and mend the index; afterwards everything kept is durable."""
        end = decision.end if isinstance(decision, Cut) else outcome.findings.end
        clean = outcome.findings.checkpoint.clean_stop and not isinstance(decision, Cut)
        if isinstance(decision, Cut):
            files.cut_data(end.position, MappedFile.non_zero_end)
        if outcome.index_wrong_from is not None:
            self._rewrite_index(files, outcome, end)
        if clean and outcome.index_wrong_from is None:
            return end
        files.cut_index(end.index + 1, MappedFile.non_zero_end)
        for file in files.data.files():
            if file.base + file.size > outcome.start.stop_position and file.writable:
                file.sync()
        for file in files.index.files():
            file.sync()
        files.sync_dirs()
        return end

    def _rewrite_index(self, files: LogFiles, outcome: LogScanOutcome, end: Mark) -> None:
        start = ScanWalk(outcome.start.follow, outcome.start.end, outcome.start.stop_position)
        for first, scan in walk(files, start, end.index, unchecked=self._unchecked):
            if first > end.index:
                return
            files.write_units(first, scan.units)

    def _check_last_is_writable(self, files: LogFiles, end: Mark) -> None:
        file = files.data.find(end.position)
        if file is not None and not file.writable:
            raise ConfigError([f"{file.path} is still being written: move it to a writable data directory"])

    def _mark_in_use(self, checkpoint: LogCheckpoint, end: Mark) -> LogCheckpoint:
        """Record the recovered state durably, without the clean stop, before anything new is written."""
        begin = checkpoint.begin
        if end.index == begin.index:
            end = mark_of(begin)
        committed = LogIndex(max(checkpoint.committed, begin.index))
        recovered = LogCheckpoint(end, LogIndex(end.index), committed, begin, clean_stop=False)
        file = LogCheckpointFile(self._fs, self._layout.checkpoint)
        try:
            file.write_durably(lambda: recovered)
        finally:
            file.close()
        return recovered

    def _report(self, outcome: LogScanOutcome, decision: Plan, checkpoint: LogCheckpoint, end: Mark) -> RecoveryReport:
        cut = decision if isinstance(decision, Cut) else None
        return RecoveryReport(
            clean_stop=checkpoint.clean_stop,
            last_index=end.index,
            verified_from=outcome.start.stop_position,
            verified_entries=outcome.entries,
            cut_at=cut.end.position if cut else None,
            cut_reason=cut.reason if cut else "",
            index_rewritten_from=outcome.index_wrong_from,
            removed=tuple(self._removed),
        )


def _unflushed(begin: Boundary, committed: LogIndex) -> LogCheckpoint:
    """Of a log of which nothing is known to be durable."""
    nothing = mark_of(begin if begin.index == NO_INDEX else GENESIS)
    return LogCheckpoint(nothing, committed=committed, begin=begin)


def _is_blank(file: FoundFile) -> bool:
    with file.path.open("rb") as opened:
        return non_zero_end(opened.fileno(), 0, file.size) == 0


def _is_new(path: Path, known: set[tuple[int, int]]) -> bool:
    """Whether no other name of this file has been seen; remembers it."""
    status = path.stat()
    file = (status.st_dev, status.st_ino)
    is_new = file not in known
    known.add(file)
    return is_new


def _entry_at(files: LogFiles, recovered: LogCheckpoint) -> EntryId:
    index = recovered.flushed.index
    if index == recovered.begin.index:
        return EntryId(recovered.begin.term, recovered.begin.index)
    return EntryId(Term(files.unit(index).term), LogIndex(index))
