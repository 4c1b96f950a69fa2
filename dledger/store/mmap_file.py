"""A segment file: fixed length, real blocks, written with ``pwrite`` and read through a read-only mapping.

Writes and the mapping share the page cache, so a reader sees a write as soon as it has returned. ``fdatasync`` (never
``mmap.flush``, which holds the GIL) makes it durable.

A file that leaves the log is merely dropped: its mapping and descriptor live as long as anyone reads or flushes it.
Reads return ``bytes`` and export nothing.

Invariant: everything beyond the log's end is zero. The warmer relies on this and helps: it writes zeros ahead of the
end so that blocks are converted and pages are present. ``warmed`` separates the two writers: below it only appends
write; above it appends and the warmer write under ``_warm_lock``.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError, DiskError
from dledger.store.checkpoint import REPAIR_ADVICE
from dledger.store.fs import FileSystem, extents, non_zero_end

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
