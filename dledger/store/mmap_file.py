"""A segment file: fixed length, real blocks, written with ``pwrite`` and read through a read-only mapping.

Writes and the mapping share the page cache, so a reader sees a write as soon as it has returned. ``fdatasync`` (never
``mmap.flush``, which holds the GIL) makes it durable.

A file that leaves the log is merely dropped: its mapping and descriptor live as long as anyone reads or flushes it.
Reads return ``bytes`` and export nothing.

Invariant: everything beyond the log's end is zero. The warmer relies on this and helps: it writes zeros ahead of the
end so that blocks are converted and pages are present. ``warmed`` separates the two writers: below it only appends
write; above it appends and the warmer write under ``_warm_lock``.

``MappedFileList`` holds the segment files of one kind (data or index): equal sizes, named by their base, contiguous
from first to last.

A file beyond the end is a prepared one: all zero, and used as it is. Lookups need no lock; changes to the set of files
are made under ``_lock`` (guards ``_files``, ``_retired`` and ``_unsynced_dirs``), which also keeps the warmer and an
append from creating the same file twice.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError, DiskError
from dledger.store.durable_state import REPAIR_ADVICE
from dledger.store.format import parse_segment_name, segment_name
from dledger.store.fs import TMP_SUFFIX, FileSystem, create_durably, extents, non_zero_end

_ZERO_CHUNK: Final = bytes(512 * 1024)
_PROBE_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 4096
"""The unit of unreadable data around a bad sector."""


class UnreadableError(DiskError):
    """Raised when the disk does not return what was written: at ``offset`` of a segment, ``position`` of the log."""

    def __init__(self, path: Path, base: int, offset: int, length: int, reason: str) -> None:
        super().__init__(f"reading {length} bytes at offset {offset} of {path} failed: {reason}")
        self.position = base + offset
        self._path = path
        self._offset = offset
        self._reason = f"{length} bytes cannot be read: {reason}"

    def as_damage(self, index: int | None = None) -> CorruptLogError:
        """An unreadable sector of a data segment is damage like any other: reported and repaired as such."""
        return CorruptLogError(self._path, self._offset, self._reason, REPAIR_ADVICE, index)


def read_at_once(fd: int, offset: int, length: int) -> bytes | None:
    """``length`` bytes of a file if they are all in the page cache; None if not, or if its file system cannot say."""
    found = bytearray(length)
    try:
        done = os.preadv(fd, [found], offset, os.RWF_NOWAIT)
    except OSError:
        return None
    return bytes(found) if done == length else None


class MappedFile:
    """A segment: ``size`` bytes of the log from absolute offset ``base``, to which its methods' offsets are
    relative.
    """

    __slots__ = ("__weakref__", "_fd", "_fs", "_warm_lock", "base", "map", "path", "size", "warmed", "writable")

    def __init__(self, fs: FileSystem, path: Path, base: int, size: int, *, writable: bool) -> None:
        self.path = path
        self.base = base
        self.size = size
        self.writable = writable
        self.warmed = 0
        self._fs = fs
        self._warm_lock = threading.Lock()
        self._fd = fs.open(path, writable=writable)
        weakref.finalize(self, fs.close, self._fd)
        self.map = mmap.mmap(self._fd, size, mmap.MAP_SHARED, mmap.PROT_READ)

    def read(self, offset: int, length: int) -> bytes:
        """Copy ``length`` bytes out."""
        return self.map[offset : offset + length]

    def read_cold(self, offset: int, length: int) -> bytes:
        """The same with ``pread``, for data that is probably not in memory. Raises ``UnreadableError``.

        A page fault of the mapping holds the GIL until the disk has answered, so that a single reader of old entries
        delays heartbeats, and an unreadable sector raises SIGBUS, which ends the process, instead of an error.
        """
        try:
            found = os.pread(self._fd, length, offset)
            while len(found) < length and (more := os.pread(self._fd, length - len(found), offset + len(found))):
                found += more
        except OSError as error:
            raise UnreadableError(self.path, self.base, offset, length, str(error)) from error
        return found

    def read_at_once(self, offset: int, length: int) -> bytes | None:
        """The same if that needs no disk; otherwise None."""
        return read_at_once(self._fd, offset, length)

    def probe(self, offset: int) -> None:
        """Read everything written from ``offset`` on, so that the mapping is never used for a bad sector there.

        Raises ``UnreadableError`` with its place.
        """
        for start, end in extents(self._fd, offset, self.size):
            for at in range(start, end, _PROBE_BYTES):
                self.read_cold(at, min(_PROBE_BYTES, end - at))

    def is_empty(self) -> bool:
        """Whether it holds nothing but zeros; unreadable data counts as content."""
        try:
            return not self.non_zero_end(0)
        except OSError:
            return False

    def salvage(self, target: int, end: int) -> None:
        """Copy the readable part of what was written before ``end`` to the open file ``target``. Raises ``OSError``."""
        for start, stop in extents(self._fd, 0, end):
            for at in range(start, stop, _PROBE_BYTES):
                self._salvage(target, at, min(_PROBE_BYTES, stop - at))

    def _salvage(self, target: int, offset: int, length: int) -> None:
        try:
            found = self.read_cold(offset, length)
        except UnreadableError:
            if length > _PAGE_BYTES:
                for at in range(offset, offset + length, _PAGE_BYTES):
                    self._salvage(target, at, min(_PAGE_BYTES, offset + length - at))
            return
        if kept := found.rstrip(b"\0"):
            self._fs.write(target, kept, offset)

    def write(self, offset: int, data: bytes | bytearray) -> None:
        """Write ``data``, which must lie inside. Raises ``OSError``."""
        end = offset + len(data)
        if not self.writable:
            raise DiskError(f"{self.path} is in a read-only data directory and cannot be changed")
        if not 0 <= offset <= end <= self.size:
            raise DiskError(f"bytes {offset} to {end} are outside {self.path} ({self.size} bytes)")
        if end <= self.warmed:
            self._fs.write(self._fd, data, offset)
            return
        with self._warm_lock:
            self._fs.write(self._fd, data, offset)
            self.warmed = max(self.warmed, end)

    def zero(self, offset: int, end: int) -> None:
        """Write zeros over ``[offset, end)``. Raises ``OSError``."""
        while offset < end:
            length = min(end - offset, len(_ZERO_CHUNK))
            self.write(offset, _ZERO_CHUNK[:length])
            offset += length

    def warm(self, end: int, target: int) -> bool:
        """Write one chunk of zeros ahead of ``end``, towards ``target``; returns whether there is more to do."""
        with self._warm_lock:
            start = max(self.warmed, end)
            length = min(target - start, len(_ZERO_CHUNK))
            if length <= 0 or not self.writable:
                return False
            self._fs.write(self._fd, _ZERO_CHUNK[:length], start)
            self.warmed = start + length
            return self.warmed < target

    def sync(self) -> None:
        """Make everything written so far durable. Raises ``OSError``."""
        self._fs.sync(self._fd)

    def non_zero_end(self, offset: int) -> int:
        """The end of the last byte other than 0 from ``offset`` on; ``offset`` if there is none. Raises ``OSError``."""
        return non_zero_end(self._fd, offset, self.size)


@dataclass(frozen=True, slots=True)
class Placement:
    """The directories that hold a list's segments, and the choice of one for a new segment."""

    writable: tuple[Path, ...]
    read_only: tuple[Path, ...] = ()
    is_full: Callable[[Path], bool] = lambda _path: False

    def directory_for(self, number: int) -> Path:
        """The directory for segment ``number``: round robin over those with room, or over all when none has."""
        paths = sorted(path for path in self.writable if path not in self.read_only)
        with_room = [path for path in paths if not self.is_full(path)] if len(paths) > 1 else paths
        choice = with_room or paths
        return choice[number % len(choice)]


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A segment file found in a directory, whatever its length."""

    path: Path
    base: int
    size: int


@dataclass(frozen=True, slots=True)
class Found:
    """The contents of directories: segments by base, left-overs of unfinished creations, and unknown files."""

    segments: tuple[FoundFile, ...]
    temporary: tuple[Path, ...]
    foreign: tuple[Path, ...]


def list_segments(directories: Iterable[Path], segment_bytes: int) -> Found:
    """List directories; a name that is not a multiple of the segment's size is unknown."""
    segments: list[FoundFile] = []
    temporary: list[Path] = []
    foreign: list[Path] = []
    for path in (path for directory in directories for path in sorted(directory.iterdir())):
        base = parse_segment_name(path.name.removesuffix(TMP_SUFFIX))
        if base is None or base % segment_bytes or not path.is_file():
            if path.name != "lock":
                foreign.append(path)
        elif path.name.endswith(TMP_SUFFIX):
            temporary.append(path)
        else:
            segments.append(FoundFile(path, base, path.stat().st_size))
    return Found(tuple(sorted(segments, key=lambda one: one.base)), tuple(temporary), tuple(foreign))


class MappedFileList:
    """All segments of one kind."""

    def __init__(self, fs: FileSystem, placement: Placement, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.placement = placement
        self._fs = fs
        self._lock = threading.Lock()
        self._files: dict[int, MappedFile] = {}
        self._retired: list[Path] = []
        """No longer part of the log, but still in their directories."""
        self._unsynced_dirs: set[Path] = set()

    def adopt(self, found: FoundFile) -> None:
        """Map an existing file of the right size; of two with one base, the first one given."""
        if found.base in self._files:
            return
        writable = found.path.parent not in self.placement.read_only
        file = MappedFile(self._fs, found.path, found.base, self.segment_bytes, writable=writable)
        with self._lock:
            self._files[found.base] = file

    def base_of(self, position: int) -> int:
        """The base of the segment that ``position`` lies in."""
        return position - position % self.segment_bytes

    def find(self, position: int) -> MappedFile | None:
        """The file containing ``position``, if there is one."""
        return self._files.get(position - position % self.segment_bytes)

    def files(self) -> list[MappedFile]:
        """All files, oldest first."""
        with self._lock:
            return [self._files[base] for base in sorted(self._files)]

    def ensure(self, position: int) -> MappedFile:
        """The file containing ``position``, created durably if missing. Raises ``OSError``."""
        file = self.find(position)
        if file is not None:
            return file
        base = self.base_of(position)
        with self._lock:
            return self._files.get(base) or self._create(base)

    def prepare(self, position: int, still_wanted: Callable[[], bool]) -> bool:
        """Create the file for ``position`` ahead of need; ``still_wanted`` is asked once no drop can interfere."""
        base = self.base_of(position)
        with self._lock:
            if base in self._files or not still_wanted():
                return False
            self._create(base)
            return True

    def _create(self, base: int) -> MappedFile:
        size = self.segment_bytes
        path = self.placement.directory_for(base // size) / segment_name(base)
        create_durably(self._fs, path, lambda fd: self._fs.allocate(fd, size))
        if path in self._retired:  # just replaced
            self._retired.remove(path)
        file = MappedFile(self._fs, path, base, size, writable=True)
        self._files[base] = file
        return file

    def replace(self, file: MappedFile) -> None:
        """Put ``file`` in the place of the one with its base; readers of the old one continue with that."""
        with self._lock:
            self._files[file.base] = file

    def forget(self, base: int) -> None:
        """Release a file that was moved away."""
        with self._lock:
            self._files.pop(base, None)

    def drop_from(self, base: int) -> None:
        """Remove the files that start at or after ``base``, newest first. Raises ``OSError``."""
        with self._lock:
            for doomed in sorted((one for one in self._files if one >= base), reverse=True):
                file = self._files[doomed]
                if file.writable:
                    self._fs.unlink(file.path)
                    self._unsynced_dirs.add(file.path.parent)
                del self._files[doomed]

    def retire_below(self, position: int) -> list[Path]:
        """Forget the files that end at or before ``position``; ``remove_retired`` will remove those returned."""
        retired: list[Path] = []
        with self._lock:
            for base in sorted(one for one in self._files if one + self.segment_bytes <= position):
                file = self._files.pop(base)
                if file.writable:
                    retired.append(file.path)
            self._retired += retired
        return retired

    def remove_retired(self) -> None:
        """Remove retired files, oldest first, durably. Raises ``OSError``.

        The lock is released between two files, and the directories are synced here: an unlink takes long, and neither
        an append that needs a segment nor a flush (``sync_dirs``) should wait for all of them.
        """
        directories: set[Path] = set()
        while self._retired:
            with self._lock:
                if self._retired:
                    self._fs.unlink(self._retired[0])
                    directories.add(self._retired.pop(0).parent)
        for directory in sorted(directories):
            self._fs.sync_dir(directory)

    def sync_dirs(self) -> None:
        """Make removals durable. Raises ``OSError``."""
        if not self._unsynced_dirs:
            return
        with self._lock:
            directories, self._unsynced_dirs = sorted(self._unsynced_dirs), set()
        for directory in directories:
            self._fs.sync_dir(directory)

    def clear(self) -> None:
        with self._lock:
            self._files.clear()
