"""One file of a mapped queue: how far it is written, committed and flushed; of many files, only used ones are open.

The bytes are those of ``dledger.store.mmap_file.MappedFile``: written with ``pwrite``, read through a read-only mapping
that lives as long as someone holds the file, so reading a deleted file is harmless. There is no reference count to
release. Files that are numerous have no mapping and are open only while recently used.

Positions are relative to the file's start and only grow, except for truncation: flushed <= readable <= wrote <= size.
With a buffer of the transient pool, appends go to memory first and ``commit`` copies them to the file; readers see only
what is committed. One thread appends at a time, one flushes, one commits; any thread reads.

**Descriptors.** A store may have tens of thousands of consume queues, and a process may open a few thousand files. So a
queue's file is opened when it is used, and may be closed at any time when another file needs room: the cache drops its
descriptor, which is closed once nobody uses it any more. Users hold it meanwhile, so none is closed during a read.
Closing loses nothing: a later ``fdatasync`` through another descriptor of the file covers what was written before, and
Linux reports a failed write-back to the next descriptor if it has not been reported yet. Running out of descriptors
anyway (because others took them) is not a disk failure. The cache then closes half of its descriptors and lowers its
capacity accordingly; only if it has none left to close, the ``OSError`` is raised.

**Stop records** are small JSON files that a clean stop leaves for the next start, which trusts them only if they are
whole. The first line is the CRC32 of the rest, eight hexadecimal digits.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import resource
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from dledger.errors import DiskError, DiskFullError
from dledger.store.fs import (
    TMP_SUFFIX,
    FileSystem,
    create_durably,
    make_dirs_durably,
    non_zero_end,
    read_whole,
    replace_durably,
)
from dledger.store.mmap_file import MappedFile, read_at_once

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


PAGE_BYTES: Final = 4096
_COMMIT_CHUNK_BYTES: Final = 4 * 1024 * 1024


class StoreFile:
    """``size`` bytes of a queue from absolute offset ``base`` on."""

    __slots__ = (
        "_buffer", "_file", "_give_back", "base", "committed", "doomed", "first_in_queue", "flushed", "path", "size",
        "store_timestamp", "wrote",
    )  # fmt: skip

    def __init__(  # the last two are rarely given
        self,
        fs: FileSystem,
        path: Path,
        base: int,
        size: int,
        *,
        writable: bool = True,
        descriptors: DescriptorCache | None = None,
    ) -> None:
        """An existing file of ``size`` bytes, regarded as empty: mapped, or opened by ``descriptors`` on use.

        Raises ``OSError``.
        """
        self._file: MappedFile | CachedFile
        if descriptors is None:
            self._file = MappedFile(fs, path, base, size, writable=writable)
            self._file.warmed = size  # nobody writes zeros ahead of appends here, so they need no lock
        else:
            self._file = CachedFile(descriptors, path, base, size, writable=writable)
        self._buffer: mmap.mmap | None = None
        self._give_back: Callable[[mmap.mmap], None] | None = None
        self.path = path
        self.base = base
        self.size = size
        self.wrote = 0
        self.committed = 0
        self.flushed = 0
        self.store_timestamp = 0
        """Store timestamp of the last message appended; 0 if unknown."""
        self.first_in_queue = False
        """Whether the queue had no file when this one was created."""
        self.doomed = False
        """Whether deleting it has failed."""

    @property
    def end(self) -> int:
        """The absolute offset after its last byte."""
        return self.base + self.size

    @property
    def readable(self) -> int:
        """The end of what is visible to readers and flushes."""
        return self.wrote if self._buffer is None else self.committed

    @property
    def is_full(self) -> bool:
        """Whether it is completely filled."""
        return self.wrote == self.size

    @property
    def writable(self) -> bool:
        """Whether it is in a writable directory."""
        return self._file.writable

    @property
    def buffered(self) -> bool:
        """Whether appends go to a buffer of the transient pool."""
        return self._buffer is not None

    @property
    def last_modified_ms(self) -> int:
        """When the file was last modified, in ms since 1970; 0 if it is deleted."""
        try:
            return self.path.stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return 0

    def attach_buffer(self, buffer: mmap.mmap, give_back: Callable[[mmap.mmap], None]) -> None:
        """Append through ``buffer`` (``size`` bytes) until the file is full; then pass it to ``give_back``."""
        self._give_back = give_back
        self._buffer = buffer

    def append(self, data: bytes | bytearray) -> bool:
        """Append ``data``; False, without effect, if it does not fit. Raises ``DiskError``, ``DiskFullError``.

        After ``DiskFullError`` nothing of ``data`` is there; after ``DiskError`` the file must not be appended to.
        """
        start = self.wrote
        end = start + len(data)
        if end > self.size:
            return False
        if self._buffer is not None:
            self._buffer[start:end] = data
        else:
            try:
                self._file.write(start, data)
            except OSError as error:
                raise self._failed(start, error) from error
        self.wrote = end
        return True

    def fill(self, data: bytes | bytearray) -> bool:
        """Append ``data`` and zeros up to the file's end; False if ``data`` does not fit. Raises the same as
        ``append``.
        """
        if self._buffer is not None and self.wrote + len(data) <= self.size:
            data = data + bytes(self.size - self.wrote - len(data))  # the buffer may contain old data
        if not self.append(data):
            return False
        self.wrote = self.size
        return True

    def _failed(self, start: int, error: OSError) -> DiskError | DiskFullError:
        """The error for a failed write from ``start`` on; on a full disk, a partial write is erased."""
        if is_out_of_descriptors(error):
            return DiskFullError(f"no file descriptor is left for {self.path}: nothing was appended")
        if error.errno != errno.ENOSPC:
            return DiskError(f"writing {self.path} at offset {start} failed: {error}")
        try:
            self._file.zero(start, self._file.non_zero_end(start))
            self._file.sync()  # a power cut must not restore it
        except OSError as wiping:
            return DiskError(f"wiping a partly written record at offset {start} of {self.path} failed: {wiping}")
        return DiskFullError(f"no space left for {self.path}: nothing was appended")

    def read(self, offset: int, size: int, *, cold: bool = False) -> bytes | None:
        """A copy of ``size`` bytes from ``offset`` on; None if they are not all readable.

        ``cold``: they are probably not in memory, so read them in a way that lets other threads run meanwhile. Raises
        ``DiskError`` then.
        """
        if offset < 0 or size < 0 or offset + size > self.readable:
            return None
        return self._file.read_cold(offset, size) if cold else self._file.read(offset, size)

    def read_at_once(self, offset: int, size: int) -> bytes | None:
        """The same bytes if that needs no disk; None also if it does."""
        if offset < 0 or size < 0 or offset + size > self.readable:
            return None
        return self._file.read_at_once(offset, size)

    def peek(self, offset: int, size: int) -> bytes:
        """Bytes of the file itself, regardless of the positions: for recovery. Raises ``DiskError``."""
        return self._file.read_cold(offset, min(size, self.size - offset))

    def read_once(self, offset: int, size: int) -> bytes:
        """Like ``peek``, but a file that is not open does not stay open. Raises ``DiskError``."""
        return self._file.read_once(offset, size) if isinstance(self._file, CachedFile) else self.peek(offset, size)

    def flush_due(self, least_pages: int) -> bool:
        """Whether a flush is due: the file is full, or enough pages (0: any byte) are not durable."""
        return _due(self.flushed, self.readable, self.size, least_pages)

    def flush(self) -> None:
        """Make the readable part durable. Raises ``OSError``, leaving ``flushed`` unchanged."""
        reached = self.readable
        self._file.sync()
        self.flushed = reached

    def commit(self, least_pages: int) -> bool:
        """Copy the buffer's contents to the file, if enough; returns whether anything moved. Raises ``OSError``.

        A full and committed file releases its buffer. Without a buffer there is nothing to do.
        """
        buffer, start, end = self._buffer, self.committed, self.wrote
        if buffer is None or not _due(start, end, self.size, least_pages):
            return False
        for at in range(start, end, _COMMIT_CHUNK_BYTES):
            stop = min(at + _COMMIT_CHUNK_BYTES, end)
            self._file.write(at, buffer[at:stop])
            self.committed = stop
        if self.committed == self.size:
            self.detach_buffer()
        return True

    def detach_buffer(self) -> None:
        """Return the buffer; uncommitted data are lost."""
        buffer, give_back = self._buffer, self._give_back
        if buffer is not None and give_back is not None:
            self.wrote = self.committed
            self._buffer = self._give_back = None
            give_back(buffer)

    def set_end(self, position: int) -> None:
        """Set ``position`` as written, committed and flushed, as found by recovery."""
        self.wrote = self.committed = self.flushed = position

    def cut(self, position: int, *, durable: bool = True) -> None:
        """Zero everything from ``position`` on, durably (otherwise with the next flush), so that it cannot reappear.

        Raises ``OSError``.
        """
        end = self._file.non_zero_end(position)
        if self.writable:
            self._file.zero(position, end)
            if durable:
                self._file.sync()
        self.set_end(position)
        if end > position and not durable:
            self.flushed = -1  # before every position, so that a flush is due

    def rewrite(self, position: int, data: bytes) -> None:
        """Rewrite bytes durably, before the end. Raises ``OSError``."""
        self._file.write(position, data)
        self._file.sync()

    def sync(self) -> None:
        """Make the file durable, without changing positions. Raises ``OSError``."""
        self._file.sync()

    def is_blank(self, position: int = 0) -> bool:
        """Whether there are only zeros from ``position`` on."""
        return self._file.non_zero_end(position) == position

    def let_go(self) -> None:
        """The file leaves its queue and need not be kept open. Current readers finish."""
        if isinstance(self._file, CachedFile):
            self._file.close()


def _due(done: int, reached: int, size: int, least_pages: int) -> bool:
    if reached == size and done < size:
        return True
    if least_pages > 0:
        return reached // PAGE_BYTES - done // PAGE_BYTES >= least_pages
    return reached > done


def create_file(fs: FileSystem, path: Path, base: int, size: int) -> StoreFile:
    """Create a file with allocated blocks, atomically with respect to crashes. Raises ``OSError``."""
    create_durably(fs, path, lambda fd: fs.allocate(fd, size))
    return StoreFile(fs, path, base, size)


def create_sparse_file(
    fs: FileSystem, path: Path, base: int, size: int, descriptors: DescriptorCache | None = None
) -> StoreFile:
    """Create a file that takes disk space only as it is written, without syncing. Raises ``OSError``.

    For derived, numerous files: ten thousand consume queues must not take sixty gigabytes, nor a sync each.
    """
    temporary = path.with_name(path.name + TMP_SUFFIX)
    try:
        fd = fs.create(temporary) if descriptors is None else descriptors.with_room(lambda: fs.create(temporary))
        try:
            fs.write(fd, b"\0", size - 1)
        finally:
            fs.close(fd)
        fs.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return StoreFile(fs, path, base, size, descriptors=descriptors)


_CRC_BYTES: Final = 9
"""Eight hexadecimal digits and a line feed."""


def write_stop_record(fs: FileSystem, path: Path, content: object) -> None:
    """Replace the file durably. Raises ``OSError``."""
    text = json.dumps(content, separators=(",", ":")).encode()
    make_dirs_durably(fs, path.parent)
    replace_durably(fs, path, b"%08x\n" % zlib.crc32(text) + text)


def read_stop_record(path: Path, parse: Callable[[Any], _T]) -> _T | None:  # Any: JSON, which ``parse`` checks
    """The content as parsed; None if there is none, if it is not whole, or if ``parse`` finds it wrong."""
    try:
        data = read_whole(path)
        if data[:_CRC_BYTES] != b"%08x\n" % zlib.crc32(data[_CRC_BYTES:]):
            return None
        return parse(json.loads(data[_CRC_BYTES:]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        _log.warning("%s cannot be read, so the files that it describes are: %s", path, error)
        return None
