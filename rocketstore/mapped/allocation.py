"""Creates the files of the commit log ahead of need, on a separate thread.

Allocating real blocks for a gigabyte takes milliseconds to seconds; a requested file is usually ready, because each
request also orders the next file. A file created ahead and not in use is blank and full-sized; recovery treats that as
normal.

``_condition`` guards ``_wanted``, ``_ready``, ``_failed`` and ``_stopping``; nothing is created while it is held.
"""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

from dledger.errors import DiskError
from dledger.runtime.supervisor import Supervisor
from dledger.store.fs import FileSystem
from rocketstore.mapped.file import StoreFile, create_file

WAIT_S_MAX: Final = 5.0


class _Order(NamedTuple):
    base: int
    path: Path
    size: int


class AllocationService:
    """Creates files on a background thread; before ``start`` and after ``stop``, on the caller's.

    With a ``pool``, files get one of its buffers when they are first used. Without a free buffer, they do without one
    or, with ``fail_fast``, are refused. ``warm``: write zeros over each new file, so that appends find its pages in
    memory.
    """

    def __init__(
        self,
        fs: FileSystem,
        *,
        supervisor: Supervisor,
        pool: TransientStorePool | None = None,
        fail_fast: bool = False,
        warm: bool = False,
        wait_s: float = WAIT_S_MAX,
    ) -> None:
        self._fs = fs
        self._pool = pool
        self._fail_fast = fail_fast
        self._warm = warm
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
        file = create_file(self._fs, order.path, order.base, order.size)
        if self._warm:
            file.warm()
        return file


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
