"""A series of mapped files: one sequence of bytes from the first file's start to the last file's end.

Used by the plain commit log (files created ahead by the allocation service) and by consume queues (created on demand).

The list of files is replaced as a whole, never changed, so lookups need no lock. ``_shape_lock`` guards its replacement
and is never held during I/O; ``_flush_lock`` lets one flush or truncation run at a time, ``_commit_lock`` one commit,
``_delete_lock`` one deletion of files (acquired after the flush lock). One thread appends at a time, under the caller's
lock.

Two rules where RocketMQ only logs. A failed flush moves nothing and poisons the queue: the kernel may have dropped the
pages, so no later flush can make up for it. A file of the wrong size does not make all others unusable: leftovers of a
crash at the end are completed or removed; only damage before the end is refused.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from dledger.errors import CorruptLogError, DiskError, DiskFullError, InvalidRequestError
from dledger.monitoring import SILENT, Instruments
from dledger.store.format import segment_name
from dledger.store.fs import FileSystem
from dledger.store.mmap_file import Found, FoundFile, Placement, list_segments
from rocketstore.mapped.allocation import AllocationService
from rocketstore.mapped.file import DescriptorCache, StoreFile, create_sparse_file, is_out_of_descriptors

DELETED_MAX: Final = 10
"""The maximum number of expired files that one call removes: unlinking gigabytes takes long."""
_RESTORE: Final = "Restore it from a copy, or move it and all later files away to continue with the ones before it"


@dataclass(frozen=True, slots=True)
class ForcedFileRemoval:
    """A file that was removed although it had not expired."""

    path: Path
    base: int
    end: int
    age_ms: int
    """Since its last write."""


OnForced = Callable[[ForcedFileRemoval], None]


def untold(_removed: ForcedFileRemoval) -> None:
    """Nobody is told."""


class Unflushed(NamedTuple):
    """The part of a queue that is not durable."""

    files: list[tuple[StoreFile, int]]
    """With the end of what each holds."""
    directories: list[Path]


class MappedFileQueue:
    """Files of ``file_bytes`` each. Offsets are absolute; a file's name is the offset of its first byte."""

    def __init__(
        self,
        fs: FileSystem,
        placement: Placement,
        file_bytes: int,
        *,
        allocation: AllocationService | None = None,
        descriptors: DescriptorCache | None = None,
        instruments: Instruments = SILENT,
    ) -> None:
        """``allocation`` creates files ahead; with ``descriptors`` they are open only while recently used.

        ``instruments`` are notified of every flush.
        """
        self.file_bytes = file_bytes
        self.placement = placement
        self.flushed_where = 0
        """Everything before it is durable."""
        self.committed_where = 0
        """Everything before it has left the buffers of the transient pool."""
        self.store_timestamp = 0
        """Every message up to this store timestamp is durable; 0 if unknown."""
        self.poison = ""
        """Why nothing can be written any more; empty if writable."""
        self.may_empty = False
        """Whether even the last file may be deleted: nothing will be appended."""
        self.before_delete: Callable[[int], None] = lambda _end: None
        """Called with the end of the first file before it is deleted; if it raises ``OSError``, the file stays."""
        self._fs = fs
        self._allocation = allocation
        self._descriptors = descriptors
        self._delete_lock = threading.Lock()
        self._shape_lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._files: tuple[StoreFile, ...] = ()
        self._reserved: StoreFile | None = None
        """Created and not yet used. Only for the appending thread."""
        self._unsynced_dirs: set[Path] = set()
        self._instruments = instruments

    # Lookups

    def files(self) -> Sequence[StoreFile]:
        """All files, oldest first."""
        return self._files

    @property
    def min_offset(self) -> int:
        """The first file's start; -1 if there is none."""
        files = self._files
        return files[0].base if files else -1

    @property
    def max_offset(self) -> int:
        """The end of what is readable without gaps; 0 if there is no file."""
        files = self._files
        if len(files) > 1 and files[-2].buffered:  # a file is started when at most the previous one is uncommitted
            return files[-2].base + files[-2].readable
        return files[-1].base + files[-1].readable if files else 0

    @property
    def max_wrote(self) -> int:
        """The end of what is written, perhaps only to a buffer; 0 if there is no file."""
        files = self._files
        return files[-1].base + files[-1].wrote if files else 0

    def find(self, offset: int, *, first_if_missing: bool = False) -> StoreFile | None:
        """The file containing ``offset``."""
        files = self._files
        if not files:
            return None
        number = offset // self.file_bytes - files[0].base // self.file_bytes
        if 0 <= number < len(files):
            return files[number]
        return files[0] if first_if_missing else None

    def read(self, offset: int, size: int, *, cold: bool = False) -> bytes | None:
        """``size`` bytes from ``offset`` on, all in one file; None if they are not all readable.

        ``cold``: see ``StoreFile.read``. Raises ``DiskError`` then.
        """
        file = self.find(offset)
        return None if file is None else file.read(offset - file.base, size, cold=cold)

    # Opening

    def load(self, below: int | None = None) -> None:
        """Map the existing files (``below``: only those that start before it), regarding them as full: recovery sets
        the end.

        A crash while creating a file may leave it short, and files created ahead are blank: short files at the end that
        contain nothing are removed, a short last one with contents is padded with zeros. Raises ``CorruptLogError`` for
        any other file of the wrong size and for a missing one, ``DiskError``.
        """
        directories = [path for path in (*self.placement.writable, *self.placement.read_only) if path.is_dir()]
        try:
            found = list_segments(dict.fromkeys(directories), self.file_bytes)
            for path in found.temporary:
                if path.parent not in self.placement.read_only:
                    self._fs.unlink(path)
            segments = self._settle_sizes([one for one in _without_doubles(found) if below is None or one.base < below])
            files = tuple(self._open(one) for one in segments)
        except OSError as error:
            raise DiskError(f"opening {', '.join(map(str, directories))} failed: {error}") from error
        for file in files:
            file.set_end(file.size)
        self._files = files
        self.flushed_where = self.committed_where = self.max_offset

    def adopt(self, bases: Sequence[int], end: int) -> None:
        """Like ``load`` and ``set_end``, for files that the caller knows to exist with the right size."""
        directory = self.placement.writable[0]
        found = [FoundFile(directory / segment_name(base), base, self.file_bytes) for base in bases]
        self._files = tuple(self._open(one) for one in found)
        self.set_end(end)

    def _settle_sizes(self, segments: list[FoundFile]) -> list[FoundFile]:
        kept = list(segments)
        while kept and kept[-1].size < self.file_bytes and not kept[-1].path.read_bytes().strip(b"\0"):
            self._fs.unlink(kept.pop().path)
        if kept and kept[-1].size < self.file_bytes:
            self._fill_up(kept[-1].path)
        for number, one in enumerate(kept):
            if one.base != kept[0].base + number * self.file_bytes:
                missing = segment_name(kept[0].base + number * self.file_bytes)
                raise CorruptLogError(one.path.parent / missing, 0, "the file is missing", _RESTORE)
            if one.size != self.file_bytes and (one.size > self.file_bytes or number < len(kept) - 1):
                reason = f"the file has {one.size} bytes instead of {self.file_bytes}"
                raise CorruptLogError(one.path, min(one.size, self.file_bytes), reason, _RESTORE)
        return kept

    def _fill_up(self, path: Path) -> None:
        fd = self._fs.open(path)
        try:
            self._fs.write(fd, b"\0", self.file_bytes - 1)
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)

    def _open(self, found: FoundFile) -> StoreFile:
        writable = found.path.parent not in self.placement.read_only
        return StoreFile(
            self._fs, found.path, found.base, self.file_bytes, writable=writable, descriptors=self._descriptors
        )

    def set_end(self, offset: int) -> None:
        """Regard everything before ``offset`` as existing and durable; no file may start after it. For recovery."""
        for file in self._files:
            file.set_end(min(max(offset - file.base, 0), file.size))
        self.flushed_where = self.committed_where = offset

    def truncate(self, offset: int, *, keep_first: bool = False, durable: bool = True) -> None:
        """Remove everything from ``offset`` on: delete later files, and zero the rest of its file.

        ``keep_first``: keep the first file, which shows where the queue starts. Not ``durable``: only the next flush
        makes it so. After ``DiskError``, the queue accepts no more writes.
        """
        self._check_usable()
        files_min = 1 if keep_first else 0
        with self._flush_lock, self._delete_lock:
            try:
                while len(self._files) > files_min and self._files[-1].base >= offset:
                    self._remove(self._files[-1], durable=durable)
                if self._files and self._files[-1].base + self._files[-1].wrote > offset:
                    self._files[-1].cut(offset - self._files[-1].base, durable=durable)
            except OSError as error:
                raise self.poisoned("truncating", error) from error
            self.flushed_where = min(self.flushed_where, offset)
            self.committed_where = min(self.committed_where, offset)

    def _remove(self, file: StoreFile, *, durable: bool = True) -> None:
        """Delete a file at either end, durably before the next: a crash must not leave a gap. Raises ``OSError``."""
        file.detach_buffer()
        file.let_go()  # first: later attempts to open it then fail with the right reason
        if file.writable:
            self._fs.unlink(file.path)
            if durable:
                self._fs.sync_dir(file.path.parent)
            else:
                self._unsynced_dirs.add(file.path.parent)
        with self._shape_lock:
            self._files = tuple(one for one in self._files if one is not file)

    # Writing

    def last_file(self, start_offset: int = 0, *, create: bool = True) -> StoreFile | None:
        """The file to append to: the last one, or a new one after it if it is full.

        The very first file is the one that contains ``start_offset``. Without ``create``: the last file or None. Raises
        ``DiskFullError``, ``DiskError`` if it cannot be created, which does not affect the queue.
        """
        files = self._files
        if files and not (create and files[-1].is_full):
            return files[-1]
        if not create:
            return None
        file, self._reserved = self._reserved, None
        if file is None:
            file = self._create(files[-1].base + self.file_bytes if files else self.base_of(start_offset))
        with self._shape_lock:
            file.first_in_queue = not self._files
            if not self._files:
                self.flushed_where = max(self.flushed_where, file.base)
                self.committed_where = max(self.committed_where, file.base)
            self._files = (*self._files, file)
        return file

    def reserve_next(self) -> None:
        """Create the file after the last one now, to be used when the last one is full.

        So a full disk is noticed before the rest of the last file is given up. Raises the same as ``last_file``.
        """
        if self._files and self._reserved is None:
            self._reserved = self._create(self._files[-1].base + self.file_bytes)

    @property
    def next_is_buffered(self) -> bool:
        """Whether the file created by ``reserve_next`` has a buffer of the transient pool. Only for the appending
        thread.
        """
        return self._reserved is not None and self._reserved.buffered

    def base_of(self, offset: int) -> int:
        """The start of the file that contains ``offset``."""
        return offset - offset % self.file_bytes

    def _create(self, base: int) -> StoreFile:
        self._check_usable()
        size, path = self.file_bytes, self._path_for(base)
        try:
            if self._allocation is None:
                file = create_sparse_file(self._fs, path, base, size, self._descriptors)
                self._unsynced_dirs.add(path.parent)
            else:
                file = self._allocation.create(path, self._path_for(base + size), base, size)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFullError(f"no space left to create {path}") from error
            if is_out_of_descriptors(error):
                raise DiskFullError(f"no file descriptor is left to create {path}") from error
            raise DiskError(f"creating {path} failed: {error}") from error
        return file

    def _path_for(self, base: int) -> Path:
        return self.placement.directory_for(base // self.file_bytes) / segment_name(base)

    def append(self, data: bytes) -> int:
        """Append ``data`` and return its offset. The caller must move on to the next file in time.

        Raises ``InvalidRequestError`` if it does not fit into the rest of the last file; ``DiskFullError`` without
        having changed anything; ``DiskError``, after which the queue accepts no more writes.
        """
        file = self.last_file()
        if file is None or len(data) > file.size - file.wrote:
            raise InvalidRequestError(f"{len(data)} bytes do not fit into the rest of a file of {self.file_bytes}")
        offset = file.base + file.wrote
        self.append_to(file, data)
        return offset

    def append_to(self, file: StoreFile, data: bytes | bytearray, *, fill: bool = False) -> bool:
        """Append to the last ``file``; False if ``data`` does not fit. Raises the same as ``append``.

        ``fill``: pad the file with zeros after ``data``, so that it is full.
        """
        if self.poison:
            self._check_usable()
        try:
            return file.fill(data) if fill else file.append(data)
        except DiskError as error:
            self.poison = self.poison or str(error)
            raise

    def poisoned(self, what: str, error: OSError) -> DiskError:
        """Accept no more writes because ``what`` failed; returns the error to raise."""
        directory = self.placement.writable[0] if self.placement.writable else ""
        self.poison = self.poison or f"{what} in {directory} failed: {error}"
        return DiskError(self.poison)

    def _check_usable(self) -> None:
        if self.poison:
            raise DiskError(f"no more writes until a restart: {self.poison}")

    # Durability

    def flush(self, least_pages: int) -> bool:
        """Make one file durable, the one containing ``flushed_where``; True if nothing moved.

        A file is flushed when it is full, when ``least_pages`` pages are waiting, or, with 0, when any byte is. After
        ``DiskError`` nothing is known to be durable, and the queue accepts no more writes. After ``DiskFullError`` the
        file could not be opened: retry.
        """
        with self._flush_lock:
            self._check_usable()
            files = self._files
            if files and self.flushed_where < files[0].base:
                self.flushed_where = files[0].base  # earlier files were deleted
            file = self.find(self.flushed_where)
            if file is not None and not file.flush_due(least_pages):
                file = None
            timestamp, wrote = (0, 0) if file is None else (file.store_timestamp, file.wrote)
            before, began_s = self.flushed_where, time.monotonic()
            try:
                if file is not None:
                    file.flush()
                if file is not None or not least_pages:
                    self._sync_dirs()
            except OSError as error:
                if is_out_of_descriptors(error):
                    raise DiskFullError(f"no file descriptor is left to flush {self.placement.writable[0]}") from error
                raise self.poisoned("flushing", error) from error
            if file is None:
                return True
            if file.flushed >= wrote:  # otherwise the message with that time is still in a buffer
                self.store_timestamp = max(self.store_timestamp, timestamp)
            self.flushed_where = file.base + file.flushed
            self._instruments.flushed(self.flushed_where - before, time.monotonic() - began_s)
            return self.flushed_where == before

    def begin_flush(self) -> Unflushed:
        """The part not durable now, for a caller that makes it so by syncing the whole file system; see ``end_flush``.

        Raises ``DiskError`` if the queue accepts no writes.
        """
        with self._flush_lock:
            self._check_usable()
            found = Unflushed([(file, file.readable) for file in self._files if file.flush_due(0)], [])
            while self._unsynced_dirs:  # others may add to it meanwhile
                found.directories.append(self._unsynced_dirs.pop())
            return found

    def end_flush(self, found: Unflushed, *, durable: bool) -> None:
        """Note that what ``begin_flush`` found is durable, or that it still may not be."""
        with self._flush_lock:
            if not durable:
                self._unsynced_dirs.update(found.directories)
                return
            for file, reached in found.files:
                if file.readable >= reached:  # it was not cut meanwhile
                    file.flushed = max(file.flushed, reached)
            while (first := self.find(self.flushed_where)) and first.base + first.flushed > self.flushed_where:
                self.flushed_where = first.base + first.flushed

    def _sync_dirs(self) -> None:
        while self._unsynced_dirs:
            directory = self._unsynced_dirs.pop()
            try:
                self._fs.sync_dir(directory)
            except OSError:
                self._unsynced_dirs.add(directory)
                raise

    def commit(self, least_pages: int) -> bool:
        """Copy one file's buffer into it, for the file containing ``committed_where``; True if nothing moved.

        After ``DiskError``, the queue accepts no more writes.
        """
        with self._commit_lock:
            self._check_usable()
            files = self._files
            if files and self.committed_where < files[0].base:
                self.committed_where = files[0].base
            file = self.find(self.committed_where)
            if file is None:
                return True
            before = self.committed_where
            try:
                file.commit(least_pages)
            except OSError as error:
                raise self.poisoned("committing", error) from error
            self.committed_where = file.base + file.readable
            return self.committed_where == before

    # Deleting

    def delete_expired_by_time(
        self,
        age_ms_max: int,
        *,
        now_ms: int,
        gap_ms: int = 0,
        immediately: bool = False,
        keep_from: int | None = None,
        on_forced: OnForced = untold,
    ) -> int:
        """Delete the oldest files not modified for ``age_ms_max`` (or of any age, ``immediately``).

        Never the last file (unless ``may_empty``), or one that ends after ``keep_from``; at most ``DELETED_MAX``, with
        a pause of ``gap_ms`` between two; stops at the first one that is younger or cannot be deleted. ``on_forced``
        gets each one that was deleted only because of ``immediately``. Returns how many were deleted.
        """
        deleted = 0
        for file in self._deletable[:DELETED_MAX]:
            age_ms = now_ms - file.last_modified_ms
            if not (immediately or age_ms >= age_ms_max):
                break
            if keep_from is not None and file.base + file.size > keep_from:
                break
            if deleted and gap_ms:
                time.sleep(gap_ms / 1000)
            if not self.delete_first(file):
                break
            deleted += 1
            if age_ms < age_ms_max:
                on_forced(ForcedFileRemoval(file.path, file.base, file.base + file.size, max(0, age_ms)))
        return deleted

    def expired_end(self, age_ms_max: int, *, now_ms: int, immediately: bool) -> int:
        """The end of the first file that ``delete_expired_by_time`` would delete; 0 if there is none."""
        first = next(iter(self._deletable), None)
        if first is None or not (immediately or first.last_modified_ms + age_ms_max <= now_ms):
            return 0
        return first.base + first.size

    @property
    def _deletable(self) -> Sequence[StoreFile]:
        return self._files if self.may_empty else self._files[:-1]

    def retry_delete_first(self) -> bool:
        """Delete the first file if that has failed before; returns whether it is gone now."""
        first = next(iter(self._files), None)
        return first is not None and first.doomed and self.delete_first(first)

    def delete_first(self, file: StoreFile) -> bool:
        """Delete ``file`` if it is the first, and not the last unless ``may_empty``; returns whether it is gone.

        A failure is remembered.
        """
        with self._delete_lock:
            if next(iter(self._deletable), None) is not file:
                return False
            try:
                self.before_delete(file.base + file.size)
                self._remove(file)
            except OSError:
                file.doomed = True
                return False
            return True

    def destroy(self) -> None:
        """Delete all files, newest first. Raises ``DiskError``."""
        with self._flush_lock, self._delete_lock:
            try:
                while self._files:
                    self._remove(self._files[-1])
            except OSError as error:
                raise self.poisoned("deleting", error) from error
            self.flushed_where = self.committed_where = 0

    def close(self) -> None:
        """Release all files; those being read stay open until then."""
        if self._allocation is not None:
            self._allocation.forget()
        if self._reserved is not None:
            self._remove_quietly(self._reserved)
        with self._flush_lock, self._shape_lock:
            for file in self._files:
                file.detach_buffer()
                file.let_go()
            self._files, self._reserved = (), None

    def _remove_quietly(self, file: StoreFile) -> None:
        """Delete a blank file; if that fails, it does no harm."""
        file.detach_buffer()
        with contextlib.suppress(OSError):
            self._fs.unlink(file.path)


def _without_doubles(found: Found) -> list[FoundFile]:
    """One file per base; of duplicates, the first."""
    return list({one.base: one for one in reversed(found.segments)}.values())[::-1]
