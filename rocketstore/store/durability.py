"""Makes a store durable: first log, queues and index, then the checkpoint that relies on them.

The order matters: the position in a checkpoint is taken before anything is flushed, so everything before it is durable
once all flushes have ended. If one of them fails, the checkpoint stays unchanged, and the others are still flushed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from dledger.errors import DiskFullError, DLedgerError
from rocketstore.store.checkpoint import UNKNOWN, StoreCheckpoint
from rocketstore.store.derived import Derived
from rocketstore.store.dispatch import DispatchService
from rocketstore.store.recovery import queue_units

_T = TypeVar("_T")
_log = logging.getLogger("rocketstore")


class Attempts:
    """Runs steps that must all be tried, and keeps the first error."""

    def __init__(self) -> None:
        self.first: DLedgerError | OSError | None = None
        self.failures = 0

    def run(self, step: Callable[[], _T]) -> _T | None:
        """The result of ``step``, or None if it failed."""
        try:
            return step()
        except (DLedgerError, OSError) as error:
            is_known = isinstance(error, DiskFullError)  # it goes on until there is room
            _log.error("a part of the store failed: %s", error, exc_info=None if is_known else error)
            self.first = self.first or error
            self.failures += 1
            return None

    def conclude(self) -> None:
        """Raise the first error, if there was one."""
        if self.first is not None:
            raise self.first


class Durability:
    """Flushes the parts of one store and writes its checkpoint. Thread-safe: one flush of everything at a time."""

    def __init__(self, derived: Derived, dispatch: DispatchService) -> None:
        self._derived = derived
        self._dispatch = dispatch
        self._lock = threading.Lock()  # one complete flush, or one deletion of a topic, at a time

    def flush(self) -> None:
        """Make everything durable and write the checkpoint. Raises ``DiskError``, ``DiskFullError``."""
        attempts = Attempts()
        self.flush_all(attempts)
        attempts.conclude()

    def flush_all(self, attempts: Attempts) -> None:
        """The same, as one of several attempts."""
        with self._lock:
            before = attempts.failures
            position, last_ms, units, indexed_to, entries = self._dispatch.standstill(self._mark)
            attempts.run(self._derived.log.flush)
            attempts.run(lambda: self._derived.queues.flush(0))
            attempts.run(self._derived.timers.flush)
            index_ms = attempts.run(self._derived.index.flush) if self._derived.index is not None else last_ms
            if attempts.failures == before and index_ms is not None:
                marked = StoreCheckpoint(last_ms, last_ms, index_ms, position, units, indexed_to, entries)
                attempts.run(lambda: self._write(marked))

    def _write(self, marked: StoreCheckpoint) -> None:
        self._derived.checkpoint.write(marked)
        self._derived.durable = marked.replay_from

    def flush_pages(self, least_pages: int) -> None:
        """Flush queues with at least this many waiting pages; skip those that cannot be flushed now. Raises
        ``DiskError``.
        """
        try:
            self._derived.queues.flush(least_pages)
        except DiskFullError as error:
            _log.warning("flushing consume queues is waiting: %s", error)

    def flush_if_room(self) -> None:
        """Like ``flush``; if the disk is too full for a checkpoint, the old one stays. Raises ``DiskError``."""
        try:
            self.flush()
        except DiskFullError as error:
            _log.warning("the checkpoint is waiting: %s", error)

    def delete_topic(self, topic: str) -> None:
        """Remove a topic's queues, recording their ends. Raises ``DiskError``, ``DiskFullError``."""
        with self._lock:
            living, given = self._derived.queues.next_offsets(), self._derived.log.queue_offsets
            ends = {key: max(end, given.get(key, 0)) for key, end in living.items() if key[0] == topic}
            self._derived.deleted.add(ends, living)
            self._derived.queues.delete_topic(topic)
        self.flush()  # otherwise the next start takes the queues for lost and rebuilds them

    def _mark(self) -> tuple[int, int, int, int, int]:
        dispatch, index = self._dispatch, self._derived.index
        indexed = (UNKNOWN, UNKNOWN) if index is None else (index.indexed_to, index.last_entries)
        return dispatch.position, dispatch.last_store_ms, queue_units(self._derived.queues), *indexed
