"""The files of the commit log: created ahead of need, on a separate thread, and recognized by their size.

Allocating real blocks for a gigabyte takes milliseconds to seconds; a requested file is usually ready, because each
request also orders the next file. A file created ahead and not in use is blank and full-sized; recovery treats that as
normal. ``_condition`` guards ``_wanted``, ``_ready``, ``_failed`` and ``_stopping``; nothing is created while it is
held.

A store that was made with files of another size is recognized before anything in it is opened or changed. Only the
names and sizes of the files say how large they should be, and every reader relies on that: with another size, files
would be overlooked, padded, or taken for damaged.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from dledger.errors import ConfigError, CorruptLogError, DiskError
from dledger.runtime.threads import Supervisor
from dledger.store.format import parse_segment_name
from dledger.store.fs import FileSystem, non_zero_end
from dledger.store.mmap_file import FoundFile
from rocketstore.mapped.file import StoreFile, create_file

_WAIT_S_MAX: Final = 5.0


class _Order(NamedTuple):
    base: int
    path: Path
    size: int


class AllocationService:
    """Creates files on a background thread; before ``start`` and after ``stop``, on the caller's.

    With a ``pool``, files get one of its buffers when they are first used. Without a free buffer, they do without one
    or, with ``fail_fast``, are refused.
    """

    def __init__(
        self,
        fs: FileSystem,
        *,
        supervisor: Supervisor,
        pool: TransientStorePool | None = None,
        fail_fast: bool = False,
        wait_s: float = _WAIT_S_MAX,
    ) -> None:
        self._fs = fs
        self._pool = pool
        self._fail_fast = fail_fast
        self._wait_s = wait_s
        self._condition = threading.Condition()
        self._wanted: list[_Order] = []
        self._ready: dict[int, StoreFile] = {}
        self._failed: dict[int, OSError] = {}
        self._stopping = True
        self._supervisor = supervisor
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._stopping = False
            self._thread = self._supervisor.thread("rocketstore-allocation", self._run)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and remove unused files. Idempotent."""
        with self._condition:
            self._stopping = True
            self._wanted.clear()
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(self._wait_s)  # a hanging disk must not block the stop
            self._thread = None
        self.forget()

    def create(self, path: Path, next_path: Path, base: int, size: int) -> StoreFile:
        """The file at ``path`` that starts at offset ``base``; orders the next one at ``next_path``.

        Raises ``OSError`` if it cannot be created, ``DiskError`` if that takes too long or no buffer is free.
        """
        buffer = None
        if self._pool is not None:
            buffer = self._pool.borrow()
            if buffer is None and self._fail_fast:
                raise DiskError("all buffers of the transient store pool are in use")
        try:
            file = self._take(_Order(base, path, size))
        except BaseException:
            if self._pool is not None and buffer is not None:
                self._pool.give_back(buffer)
            raise
        if self._pool is not None and buffer is not None:
            file.attach_buffer(buffer, self._pool.give_back)
        with self._condition:
            if not self._stopping and base + size not in self._ready:
                self._order(_Order(base + size, next_path, size))
        return file

    def forget(self) -> None:
        """Remove files that were created and not taken."""
        with self._condition:
            unused, self._ready = list(self._ready.values()), {}
            self._wanted.clear()
        for file in unused:
            try:
                self._fs.unlink(file.path)
            except OSError:
                continue  # a blank file at the end does no harm

    def _order(self, order: _Order) -> None:
        if order not in self._wanted:
            self._wanted.append(order)
            self._condition.notify_all()

    def _take(self, order: _Order) -> StoreFile:
        deadline_s = time.monotonic() + self._wait_s
        with self._condition:
            if order.base not in self._ready and self._stopping:
                return self._make(order)
            self._failed.pop(order.base, None)
            if order.base not in self._ready:
                self._order(order)
            while order.base not in self._ready:
                if order.base in self._failed:
                    raise self._failed.pop(order.base)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._stopping:
                    raise DiskError(f"creating {order.path} timed out after {self._wait_s} s")
                self._condition.wait(left_s)
            return self._ready.pop(order.base)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._wanted and not self._stopping:
                    self._condition.wait()
                if self._stopping:
                    return
                order = self._wanted[0]
            try:
                made: StoreFile | OSError = self._make(order)
            except OSError as error:
                made = error
            with self._condition:
                if isinstance(made, OSError):
                    self._failed[order.base] = made  # for current waiters; later callers order again
                elif order in self._wanted:
                    self._ready[order.base] = made
                if order in self._wanted:
                    self._wanted.remove(order)
                    unused = None
                else:  # forgotten in the meantime
                    unused = made
                self._condition.notify_all()
            if isinstance(unused, StoreFile):
                self._fs.unlink(unused.path)

    def _make(self, order: _Order) -> StoreFile:
        return create_file(self._fs, order.path, order.base, order.size)


class TransientStorePool:
    """Memory buffers to which a plain commit log appends before they are copied to its files.

    They decouple producers from slow disks: an append never waits for the page cache. In return, a crash of the process
    loses what was not yet committed, whereas data written to a file survive it.

    At most ``count`` buffers of ``buffer_bytes``, created on first use and then reused.

    RocketMQ creates all of them at startup and locks them in memory; here an unused one costs nothing.
    """

    def __init__(self, count: int, buffer_bytes: int) -> None:
        self.count = count
        self.buffer_bytes = buffer_bytes
        self._lock = threading.Lock()  # guards _free and _made
        self._free: list[mmap.mmap] = []
        self._made = 0

    @property
    def available(self) -> int:
        """The number of buffers that can be borrowed now."""
        with self._lock:
            return len(self._free) + self.count - self._made

    def borrow(self) -> mmap.mmap | None:
        """A buffer, with old contents; None if all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made == self.count:
                return None
            self._made += 1
        return mmap.mmap(-1, self.buffer_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeroed on first use

    def give_back(self, buffer: mmap.mmap) -> None:
        """Return a borrowed buffer."""
        with self._lock:
            self._free.append(buffer)


def check_sizes(directories: Iterable[Path], file_bytes: int, setting: str) -> None:
    """Refuse files that do not have ``file_bytes``, the value of ``setting``, if a wrong value explains them.

    Raises ``ConfigError`` if the value is wrong now, or may be; ``CorruptLogError`` if an earlier start with a wrong
    one has padded a file; ``DiskError``. Other files of a wrong size are for those who open them.
    """
    try:
        files = _files(directories)
        stride = _stride(files)
        if stride is not None and stride != file_bytes:
            raise ConfigError(
                [
                    f"{setting} is {file_bytes}, but the files in {files[0].path.parent} have {stride} bytes: set it "
                    f"to {stride}. The size cannot change during a store's life. Nothing was changed"
                ]
            )
        if len(files) == 1 and files[0].size != file_bytes and not _is_blank(files[0], 0):
            raise ConfigError([_of_the_only_file(files[0], file_bytes, setting)])
        for one in files if stride is not None else ():
            if one.size > file_bytes and _is_blank(one, file_bytes):
                reason = f"a start with {setting}={one.size} has padded this file of {file_bytes} bytes with zeros"
                raise CorruptLogError(one.path, file_bytes, reason, _cut(one, file_bytes))
    except OSError as error:
        raise DiskError(f"looking at the size of a file failed: {error}") from error


def _files(directories: Iterable[Path]) -> list[FoundFile]:
    found: dict[int, FoundFile] = {}
    for directory in dict.fromkeys(directories):
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            base = parse_segment_name(path.name)
            if base is not None and path.is_file():
                found.setdefault(base, FoundFile(path, base, path.stat().st_size))
    return [found[base] for base in sorted(found)]


def _stride(files: list[FoundFile]) -> int | None:
    """The size that the second file's name and length both say; None if they do not agree: it may be anything."""
    if len(files) < 2:
        return None
    distance = files[1].base - files[0].base
    return distance if distance == files[1].size else None


def _of_the_only_file(one: FoundFile, file_bytes: int, setting: str) -> str:
    told = f"{setting} is {file_bytes}, but {one.path} has {one.size} bytes. Nothing was changed. "
    made = f"the store was made with {setting}={one.size}, set it to that"
    if one.size < file_bytes:
        return f"{told}If {made}; if the file was cut short, lengthen it: truncate -s {file_bytes} {one.path}"
    if _is_blank(one, file_bytes):
        return f"{told}If {made}; if a start with that value has padded the file with zeros: {_cut(one, file_bytes)}"
    return f"{told}It has contents behind {file_bytes} bytes, so {made}"


def _cut(one: FoundFile, file_bytes: int) -> str:
    return f"cut them off: truncate -s {file_bytes} {one.path}"


def _is_blank(one: FoundFile, start: int) -> bool:
    """Whether it contains only zeros from ``start`` on."""
    fd = os.open(one.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return non_zero_end(fd, start, one.size) == start
    finally:
        os.close(fd)
