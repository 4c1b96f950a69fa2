"""Memory buffers to which a plain commit log appends before they are copied to its files.

They decouple producers from slow disks: an append never waits for the page cache. In return, a crash of the process
loses what was not yet committed, whereas data written to a file survive it.
"""

from __future__ import annotations

import mmap
import threading


class TransientStorePool:
    """At most ``count`` buffers of ``buffer_bytes``, created on first use and then reused.

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
