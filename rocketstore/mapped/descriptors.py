"""A cache of open descriptors: of many files, only recently used ones are open.

A store may have tens of thousands of consume queues, and a process may open a few thousand files. So a queue's file is
opened when it is used, and may be closed at any time when another file needs room: the cache drops its descriptor,
which is closed once nobody uses it any more. Users hold it meanwhile, so none is closed during a read.

Closing loses nothing: a later ``fdatasync`` through another descriptor of the file covers what was written before, and
Linux reports a failed write-back to the next descriptor if it has not been reported yet.

Running out of descriptors anyway (because others took them) is not a disk failure. The cache then closes half of its
descriptors and lowers its capacity accordingly; only if it has none left to close, the ``OSError`` is raised.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from dledger.errors import DiskError
from dledger.store.fs import FileSystem, non_zero_end
from dledger.store.mmap_file import read_at_once

_log = logging.getLogger("rocketstore")
_SHARE: Final = 4
"""The cache's share of the process's descriptors: connections and log segments need the others."""
_OPEN_MAX: Final = 8192
_OPEN_MIN: Final = 16
_ZEROS: Final = bytes(512 * 1024)
_T = TypeVar("_T")


class Descriptor:
    """An open file; closed when nobody holds this object any more."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fs: FileSystem, path: Path, *, writable: bool) -> None:
        self.fd = fs.open(path, writable=writable)
        weakref.finalize(self, fs.close, self.fd)


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether a file could not be opened because too many are open."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


class DescriptorCache:
    """At most ``capacity`` open files; the least recently used makes room. Thread-safe."""

    def __init__(self, fs: FileSystem, capacity: int | None = None) -> None:
        """``capacity`` None: a share of the process's limit."""
        self.fs: Final = fs
        self.capacity = _default_capacity() if capacity is None else capacity
        self._lock = threading.Lock()  # guards _open, capacity, and the files' descriptors; nothing is opened under it
        self._open: OrderedDict[CachedFile, None] = OrderedDict()

    @property
    def open_count(self) -> int:
        """The number of open files."""
        return len(self._open)

    def of(self, file: CachedFile) -> Descriptor:
        """The open descriptor of ``file``: hold it while using it. Raises ``OSError``."""
        found = file.descriptor
        if found is not None:  # no lock: every append takes this path
            file.recent = True
            return found
        opened = self.with_room(lambda: Descriptor(self.fs, file.path, writable=file.writable))
        with self._lock:
            if file.descriptor is not None:  # another thread was faster
                return file.descriptor
            if not file.gone:
                file.descriptor = opened
                self._open[file] = None
            forgotten = self._shrink(self.capacity)
        del forgotten  # closed here, outside the lock
        return opened

    def _shrink(self, most: int) -> list[Descriptor]:
        """Drop all but ``most``; a file used since its last turn gets another one. Requires the lock."""
        forgotten: list[Descriptor] = []
        while len(self._open) > most:
            file, _ = self._open.popitem(last=False)
            if file.recent:
                file.recent = False
                self._open[file] = None
            elif file.descriptor is not None:
                forgotten.append(file.descriptor)
                file.descriptor = None
        return forgotten

    def forget(self, file: CachedFile) -> None:
        """Close ``file`` as soon as nobody uses it; it is no longer kept open."""
        with self._lock:
            file.gone = True
            self._open.pop(file, None)
            kept, file.descriptor = file.descriptor, None
        del kept

    def with_room(self, do: Callable[[], _T]) -> _T:
        """Call ``do``, which opens a file; cached files are closed while too many are open.

        Raises ``OSError``.
        """
        while True:
            try:
                return do()
            except OSError as error:
                if not is_out_of_descriptors(error) or not self._give_up_half():
                    raise

    def _give_up_half(self) -> bool:
        with self._lock:
            held = len(self._open)
            if not held:
                return False
            self.capacity = capacity = max(_OPEN_MIN, min(self.capacity, held // 2))
            forgotten = self._shrink(held // 2)
        del forgotten
        _log.warning("too many open files: keeping at most %d consume queue files open from now on", capacity)
        return True


class CachedFile:
    """``dledger.store.mmap_file.MappedFile`` without a mapping, and open only while recently used."""

    __slots__ = ("_descriptors", "base", "descriptor", "gone", "path", "recent", "size", "writable")

    def __init__(self, descriptors: DescriptorCache, path: Path, base: int, size: int, *, writable: bool) -> None:
        """Does not open the file yet."""
        self.path = path
        self.base = base
        self.size = size
        self.writable = writable
        self.gone = False
        """Whether the file was removed or released."""
        self.descriptor: Descriptor | None = None
        """The descriptor while it is open; managed by the cache."""
        self.recent = False
        """Whether it was used since the cache last checked."""
        self._descriptors = descriptors

    def read(self, offset: int, length: int) -> bytes:
        """A copy of ``length`` bytes; fewer if the file was removed meanwhile. Raises ``DiskError``."""
        try:
            used = self._descriptors.of(self)
            found = os.pread(used.fd, length, offset)
            while len(found) < length and (more := os.pread(used.fd, length - len(found), offset + len(found))):
                found += more
        except FileNotFoundError as error:
            if self.gone:
                return b""
            raise self._failed(offset, length, error) from error
        except OSError as error:
            raise self._failed(offset, length, error) from error
        return found

    read_cold = read

    def read_once(self, offset: int, length: int) -> bytes:
        """The same without keeping the file open, for callers that look at very many files. Raises ``DiskError``."""
        if self.descriptor is not None:
            return self.read(offset, length)
        descriptors, fs = self._descriptors, self._descriptors.fs
        try:
            fd = descriptors.with_room(lambda: fs.open(self.path, writable=False))
            try:
                return os.pread(fd, length, offset)
            finally:
                fs.close(fd)
        except OSError as error:
            raise self._failed(offset, length, error) from error

    def read_at_once(self, offset: int, length: int) -> bytes | None:
        """The same if that needs no disk, not even to open the file; otherwise None."""
        used = self.descriptor
        if used is None:
            return None
        self.recent = True
        return read_at_once(used.fd, offset, length)

    def _failed(self, offset: int, length: int, error: OSError) -> DiskError:
        return DiskError(f"reading {length} bytes at offset {offset} of {self.path} failed: {error}")

    def write(self, offset: int, data: bytes | bytearray) -> None:
        """Write ``data``, which must lie inside the file. Raises ``OSError``, ``DiskError``."""
        if not self.writable:
            raise DiskError(f"{self.path} is in a read-only data directory and cannot be changed")
        if not 0 <= offset <= offset + len(data) <= self.size:
            raise DiskError(f"{len(data)} bytes at {offset} are outside {self.path} ({self.size} bytes)")
        used = self._descriptors.of(self)
        self._descriptors.fs.write(used.fd, data, offset)

    def zero(self, offset: int, end: int) -> None:
        """Write zeros over ``[offset, end)``. Raises ``OSError``."""
        while offset < end:
            length = min(end - offset, len(_ZEROS))
            self.write(offset, _ZEROS[:length])
            offset += length

    def sync(self) -> None:
        """Make everything written so far durable; does nothing if the file was removed. Raises ``OSError``."""
        try:
            used = self._descriptors.of(self)
        except FileNotFoundError:
            if self.gone:
                return
            raise
        self._descriptors.fs.sync(used.fd)

    def non_zero_end(self, offset: int) -> int:
        """The end of the last non-zero byte from ``offset`` on; ``offset`` if there is none. Raises ``OSError``."""
        used = self._descriptors.of(self)
        return non_zero_end(used.fd, offset, self.size)

    def close(self) -> None:
        """Release the file for good; current readers finish."""
        self._descriptors.forget(self)


def _default_capacity() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _OPEN_MAX if soft == resource.RLIM_INFINITY else max(_OPEN_MIN, min(_OPEN_MAX, soft // _SHARE))
