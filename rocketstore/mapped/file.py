"""One file of a mapped queue: how far it is written, committed and flushed.

The bytes are those of ``dledger.store.mmap_file.MappedFile``: written with ``pwrite``, read through a read-only mapping
that lives as long as someone holds the file, so reading a deleted file is harmless. There is no reference count to
release. Files that are numerous have no mapping and are open only while recently used
(``rocketstore.mapped.descriptors``).

Positions are relative to the file's start and only grow, except for truncation: flushed <= readable <= wrote <= size.
With a buffer of the transient pool, appends go to memory first and ``commit`` copies them to the file; readers see only
what is committed. One thread appends at a time, one flushes, one commits; any thread reads.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dledger.errors import DiskError, DiskFullError
from dledger.store.fs import TMP_SUFFIX, FileSystem, create_durably
from dledger.store.mmap_file import MappedFile
from rocketstore.mapped.descriptors import CachedFile, DescriptorCache, is_out_of_descriptors

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
