"""The segment files of one kind (data or index): equal sizes, named by their base, contiguous from first to last.

A file beyond the end is a prepared one: all zero, and used as it is. Lookups need no lock; changes to the set of files
are made under ``_lock`` (guards ``_files``, ``_retired`` and ``_unsynced_dirs``), which also keeps the warmer and an
append from creating the same file twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dledger.store.format import parse_segment_name, segment_name
from dledger.store.fs import TMP_SUFFIX, FileSystem, create_durably
from dledger.store.mmap_file import MappedFile


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
