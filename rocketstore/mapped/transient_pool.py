"""Buffers in memory that a plain commit log is appended to, copied into its files a little later.

They keep slow disks out of the way of producers: an append never waits for the page cache. The price is that a crash
of the process loses what was not yet committed, which a crash does not do to what was written to a file.
"""

from __future__ import annotations

import mmap
import threading


class TransientStorePool:
    """At most ``count`` buffers of ``buffer_bytes``, made when first needed and then used again.

    RocketMQ makes and locks all of them in memory at start; here an unused one costs nothing.
    """

    def __init__(self, count: int, buffer_bytes: int) -> None:
        self.count = count
        self.buffer_bytes = buffer_bytes
        self._lock = threading.Lock()  # guards _free and _made
        self._free: list[mmap.mmap] = []
        self._made = 0

    @property
    def available(self) -> int:
        """How many buffers can be borrowed now."""
        with self._lock:
            return len(self._free) + self.count - self._made

    def borrow(self) -> mmap.mmap | None:
        """A buffer, with old content; None if all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made == self.count:
                return None
            self._made += 1
        return mmap.mmap(-1, self.buffer_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeroed page by page, when used

    def give_back(self, buffer: mmap.mmap) -> None:
        """Take a borrowed buffer back."""
        with self._lock:
            self._free.append(buffer)
