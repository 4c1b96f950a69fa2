"""Brings the logs of a group's future members to the end of the master's, verified record by record.

A member that is *behind* gets the missing end: the rest of its last file, then whole files. One that has no log, or
whose log was named to be given up, gets a copy of everything. Nothing is deleted: a discarded log is renamed, beside
itself.

Killed at any time, this leaves a log that is a whole record's prefix of the master's, or a torn end behind one: a file
is begun when everything before it is durable, and appears with all its contents. So it can be repeated. The member is
marked as not cleanly stopped before anything changes, and its checkpoint never says more than was derived from what it
had: the next start cuts queues and index there, and builds them anew from the log.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.errors import DiskError, DiskFullError
from dledger.store.format import segment_name
from dledger.store.fs import (
    FileSystem,
    create_durably,
    extents,
    make_dirs_durably,
    non_zero_end,
    read_whole,
    replace_durably,
)
from dledger.store.mmap_file import Placement
from rocketstore.commit_log.base_log import FileDigest, FileEnding, PlainFileReader, digest_file
from rocketstore.config import MIB
from rocketstore.ha.promotion import EPOCH_FILE, MEMORY_FILE
from rocketstore.message.record import BLANK, BLANK_MAGIC
from rocketstore.store.directory import CHECKPOINT_FILE, StoreCheckpoint, StoreCheckpointFile, StoreDirectory
from rocketstore.upgrade.compare import (
    BELONGING,
    DISCARDED,
    FITTING,
    STATE_FILES,
    Compared,
    LogStanding,
    OldLog,
    OldMember,
)

Advance = Callable[[int], None]

_OWN: Final = (EPOCH_FILE, MEMORY_FILE)
"""The files of one broker only."""
_SPARE_BYTES: Final = 64 * MIB
"""How much must be left on a disk."""
_CHUNK_BYTES: Final = 8 * MIB


@dataclass(frozen=True, slots=True)
class Alignment:
    """The step for one member: to copy what the master has from ``begin`` on."""

    member: OldMember
    log: OldLog
    begin: int
    messages: int
    bytes: int
    whole: bool
    """Everything is copied, derived files and state included."""
    gives_up: bool
    """Whether the member's files are renamed first."""
    older: OldLog | None = None
    """Whose files before ``older_end`` are copied, too, because neither the member nor the master has them any more."""
    older_end: int = 0

    @property
    def older_files(self) -> list[FileDigest]:
        """Those files."""
        return [] if self.older is None else [one for one in self.older.digest.files if one.base < self.older_end]

    @property
    def bytes_in_all(self) -> int:
        """Bytes of all records to be copied."""
        return self.bytes + sum(one.length for one in self.older_files)

    def sentence(self, master: str) -> str:
        """For people."""
        what = f"{self.messages:,} messages ({self.bytes:,} bytes)"
        steps = []
        if self.gives_up:
            steps.append("rename its log, queues, index and state")
        if self.whole:
            steps.append(f"copy all of {master}: {what}")
        elif self.messages:
            steps.append(f"append {what} of {master} from offset {self.begin:,} on")
        if self.older is not None:
            count = sum(one.records for one in self.older_files)
            steps.append(f"copy {count:,} messages before offset {self.older_end:,} from {self.older.name}")
        return f"{self.member.name}: {', then '.join(steps)}"


def plan(
    members: Sequence[OldMember], compared: Sequence[Compared], reference: OldLog, give_up: Collection[str]
) -> tuple[list[Alignment], list[str]]:
    """The steps that make all members equal, and why there is none for some. ``give_up``: names of members."""
    steps, refused = [], []
    fit = [one.log for one in compared if one.standing in FITTING and one.log.name not in give_up]
    for member, one in zip(members, compared, strict=True):
        given_up = member.name in give_up
        if one.is_ready and not given_up:
            continue
        problem = _refusal(member, one, reference, given_up=given_up)
        if given_up and not problem:
            others = [other for other in members if other is not member]
            problem = _what_giving_up_takes(member, others, is_reference=one.log is reference)
        if problem:
            refused.append(f"{member.name}: {problem}")
            continue
        whole = given_up or not one.log.digest.files
        messages = sum(file.records for file in reference.digest.files) if whole else one.messages_apart
        size = sum(file.length for file in reference.digest.files) if whole else one.bytes_apart
        begin = reference.digest.min_offset if whole else one.log.digest.end
        own_begin = reference.digest.min_offset if whole else one.log.digest.min_offset
        older = _oldest_before(own_begin, fit)
        if one.standing is LogStanding.EQUAL and not whole and older is None:
            continue  # those that have older messages end before its begin
        gives_up = given_up and bool(one.log.files.paths)
        steps.append(Alignment(member, one.log, begin, messages, size, whole, gives_up, older, own_begin))
    return steps, refused


def _oldest_before(begin: int, logs: Sequence[OldLog]) -> OldLog | None:
    """The log that has most of what is before ``begin``, without a gap; None if none has anything."""
    there = [one for one in logs if one.digest.files and one.digest.min_offset < begin <= one.digest.divided]
    whole = [one for one in there if one.digest.divided > begin or one.digest.files[-1].ending is FileEnding.FULL]
    return min(whole, key=lambda one: one.digest.min_offset, default=None)


def _refusal(member: OldMember, one: Compared, reference: OldLog, *, given_up: bool) -> str:
    name = reference.name
    if reference.digest.problems:
        return f"{name}, from which to copy, is damaged: name another --master"
    if member.group_log is not None:
        return f"has begun as a member of a group ({member.group_log}), whose offsets are fixed"
    if given_up:
        return ""
    discard = f"to replace it by {name}'s, name it with --discard {member.root}"
    match one.standing:
        case LogStanding.DIFFERS:
            return f"its log is not the begin of {name}'s: {discard}"
        case LogStanding.AHEAD:
            return f"has {one.messages_apart:,} messages that {name} lacks: name it as --master; {discard}"
        case LogStanding.DAMAGED:
            return f"its log is damaged: {discard}"
    if one.log.digest.files and one.log.digest.end < reference.digest.min_offset:
        return f"its log ends before that of {name} begins, and what is between has expired: {discard}"
    return ""


def _what_giving_up_takes(member: OldMember, others: Sequence[OldMember], *, is_reference: bool) -> str:
    """Why its log cannot be renamed; empty if it can."""
    if is_reference:
        return "its log is the one to copy from, and cannot be discarded: name another one with --master"
    mine = {path.resolve() for path in member.log_dirs}
    for other in others:
        shared = sorted(mine & {path.resolve() for path in other.log_dirs})
        if shared:
            return f"{shared[0]} holds files of {other.name}, too, which cannot be discarded with its own"
    return ""


def room_problems(steps: Sequence[Alignment], source: OldMember, reference: OldLog, fs: FileSystem) -> list[str]:
    """Which disks have too little room for it. Raises ``OSError``."""
    needed: dict[int, tuple[Path, int]] = {}
    size = reference.files.segment_bytes
    for step in steps:
        wanted = size * len(step.older_files)
        wanted += size * sum(1 for one in reference.digest.files if one.base + size > step.begin)
        if step.whole:
            wanted += sum(path.stat().st_size for path in _companions(source))
        place = next((path for path in step.member.writable_dirs if path.is_dir()), step.member.root)
        path, before = needed.get(fs.device(place), (place, 0))
        needed[fs.device(place)] = path, before + wanted
    return [
        f"the disk of {path} has {available:,} bytes left, and {wanted + _SPARE_BYTES:,} are needed"
        for path, wanted in needed.values()
        if (available := fs.usage(path).available_bytes) < wanted + _SPARE_BYTES
    ]


def align(  # one parameter per thing
    step: Alignment,
    directory: StoreDirectory,
    source: OldMember,
    reference: OldLog,
    fs: FileSystem,
    advance: Advance = lambda _bytes: None,
) -> list[Path]:
    """Carry out one step; ``directory`` is the member's, locked since before the logs were compared, as is the
    source's. ``advance`` is told of bytes copied.

    Of a source that has begun as a group's member, only the old log is copied: its queues and state are ahead of that.
    Returns what was renamed. Raises ``DiskError``, ``DiskFullError``.
    """
    is_ahead = source.group_log is not None
    renamed: list[Path] = []
    try:
        directory.mark_running()
        if step.whole:
            renamed += _give_up(step.member, fs)
            for path in [] if is_ahead else _companions(source):
                _copy_file(path, step.member.root / path.relative_to(source.root), fs)
            _copy_log(step, reference, fs, advance)
            if step.older is not None:
                _copy_older(step, fs, advance)
            elif source.stopped_cleanly and not is_ahead:
                directory.mark_clean()
        else:
            _lower_checkpoint(step, fs)
            _copy_log(step, reference, fs, advance)
            _copy_older(step, fs, advance)
            if not is_ahead:
                _copy_state(source, step.member, fs)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFullError(
                f"aligning {step.member.root} failed: no space left; make room and repeat it"
            ) from error
        raise DiskError(f"aligning {step.member.root} failed: {error}") from error
    return renamed


# -- the log -----------------------------------------------------------------------------------------------------------


def _copy_log(step: Alignment, reference: OldLog, fs: FileSystem, advance: Advance) -> None:
    size = reference.files.segment_bytes
    ours = {} if step.whole else {one.base: one for one in step.log.digest.files}
    for theirs in reference.digest.files:
        if theirs.base + size <= step.begin:
            continue
        source = reference.files.paths[theirs.base]
        found = ours.get(theirs.base)
        if found is not None:
            path = step.log.files.paths[theirs.base]
            _append(source, theirs, path, found, size, fs, advance)
        else:
            path = _new_path(step.member, theirs.base, size, fs)
            _create(source, theirs, path, size, fs, advance)
            _keep_time(source, path)
        _check_copy(source, theirs, path, size)


def _copy_older(step: Alignment, fs: FileSystem, advance: Advance) -> None:
    """The newest first: there is never a gap. Queues and index must be built anew, because they begin too late."""
    if step.older is None:
        return
    StoreCheckpointFile(fs, step.member.root / CHECKPOINT_FILE).write(StoreCheckpoint())
    size = step.older.files.segment_bytes
    for theirs in reversed(step.older_files):
        source, path = step.older.files.paths[theirs.base], _new_path(step.member, theirs.base, size, fs)
        _create(source, theirs, path, size, fs, advance)
        _keep_time(source, path)
        _check_copy(source, theirs, path, size)


def _new_path(member: OldMember, base: int, size: int, fs: FileSystem) -> Path:
    path = Placement(member.writable_dirs).directory_for(base // size) / segment_name(base)
    make_dirs_durably(fs, path.parent)
    return path


def _check_copy(source: Path, theirs: FileDigest, path: Path, size: int) -> None:
    """Raises ``DiskError`` unless the file holds the same records."""
    written = digest_file(path, theirs.base, size)
    if (written.length, written.crc32c) != (theirs.length, theirs.crc32c):
        raise DiskError(f"{path} does not contain what was copied from {source}: check the disk")


def _append(  # one parameter per thing
    source: Path, theirs: FileDigest, path: Path, ours: FileDigest, size: int, fs: FileSystem, advance: Advance
) -> None:
    """Continue a file where its last record ends; zeros follow, instead of what was torn there."""
    fd = fs.open(path)
    try:
        _write_records(source, theirs, size, fd, ours.end, fs, advance)
        fs.sync(fd)
    finally:
        fs.close(fd)


def _create(source: Path, theirs: FileDigest, path: Path, size: int, fs: FileSystem, advance: Advance) -> None:
    def fill(fd: int) -> None:
        fs.allocate(fd, size)
        _write_records(source, theirs, size, fd, theirs.base, fs, advance)

    create_durably(fs, path, fill)


def _write_records(
    source: Path, theirs: FileDigest, size: int, fd: int, begin: int, fs: FileSystem, advance: Advance
) -> None:
    """Write the records of ``source`` from ``begin`` on, and the blank behind them if there is one."""
    reader = PlainFileReader(source, theirs.base, size, begin)
    for piece in reader:
        fs.write(fd, piece.data, piece.offset - theirs.base)
        advance(len(piece.data))
    at = reader.end - theirs.base
    if reader.ending is FileEnding.FULL and size - at >= BLANK.size:
        fs.write(fd, BLANK.pack(size - at, BLANK_MAGIC), at)
        at += BLANK.size
    end = non_zero_end(fd, at, size)
    while at < end:
        zeros = bytes(min(_CHUNK_BYTES, end - at))
        fs.write(fd, zeros, at)
        at += len(zeros)


# -- what belongs to the log -------------------------------------------------------------------------------------------


def _lower_checkpoint(step: Alignment, fs: FileSystem) -> None:
    """A checkpoint that knows of more than the log had would spare queues from being built anew."""
    file = StoreCheckpointFile(fs, step.member.root / CHECKPOINT_FILE)
    if max(file.read().replay_from, file.read().index_end) > step.begin:
        file.write(StoreCheckpoint())


def _give_up(member: OldMember, fs: FileSystem) -> list[Path]:
    """Rename everything that belongs to the log; what is there already without a log, too."""
    found = [*member.log_dirs, *(member.root / name for name in BELONGING)]
    renamed = []
    for path in found:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            continue
        aside = next(one for one in _names_beside(path) if not one.exists())
        fs.rename(path, aside)
        fs.sync_dir(path.parent)
        renamed.append(aside)
    return renamed


def _names_beside(path: Path) -> Iterator[Path]:
    number = 1
    while True:
        yield path.with_name(f"{path.name}{DISCARDED}{number}")
        number += 1


def _companions(source: OldMember) -> list[Path]:
    """The files beside the log that belong to it."""
    places = [source.root / name for name in BELONGING]
    found = [path for place in places for path in (place, *sorted(place.rglob("*")))]
    return [path for path in found if path.is_file() and path.name not in _OWN]


def _copy_file(source: Path, path: Path, fs: FileSystem) -> None:
    make_dirs_durably(fs, path.parent)

    def fill(fd: int) -> None:
        with source.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size:
                fs.allocate(fd, size)
            for start, end in extents(file.fileno(), 0, size):
                for at in range(start, end, _CHUNK_BYTES):
                    fs.write(fd, os.pread(file.fileno(), min(_CHUNK_BYTES, end - at), at), at)

    create_durably(fs, path, fill)
    _keep_time(source, path)


def _keep_time(source: Path, path: Path) -> None:
    """Retention goes by when a log file was last written."""
    found = source.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def _copy_state(source: OldMember, member: OldMember, fs: FileSystem) -> None:
    """Replace topics, groups and offsets by the master's; the old ones are their backup, as in RocketMQ."""
    for name in STATE_FILES:
        with suppress(FileNotFoundError):
            content = read_whole(source.config_dir / name)
            path = member.config_dir / name
            if path.exists():
                if read_whole(path) == content:
                    continue
                replace_durably(fs, path.with_name(f"{name}.bak"), read_whole(path))
            make_dirs_durably(fs, path.parent)
            replace_durably(fs, path, content)
