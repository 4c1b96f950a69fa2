"""All consume queues of a store: ``<directory>/<topic>/<queue id>/<files>``.

One thread appends thousands of records at a time, in log order: they are grouped by queue, and each queue gets one
write. Any thread may look up queues. ``_lock`` guards additions to and removals from ``_queues``; lookups need no lock.

A directory whose name is not a topic or queue number is ignored. A record whose topic cannot be a directory's name gets
no queue.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from dledger.errors import DiskError, DiskFullError, InvalidRequestError
from dledger.store.fs import FileSystem, make_dirs_durably
from rocketstore.consume_queue.files import UNIT_BYTES, QueueDirectories, QueueEnd, QueueRecovery
from rocketstore.consume_queue.queue import FOREVER, ConsumeQueue, QueueContext
from rocketstore.mapped.file import Descriptor, DescriptorCache
from rocketstore.mapped.queue import Unflushed
from rocketstore.message.checks import check_topic
from rocketstore.message.columns import RecordColumns, UnitColumns
from rocketstore.types import QueueKey, RecordHead

_log = logging.getLogger(__name__)
_QUEUE_ID_MAX: Final = (1 << 31) - 1
_REFUSED_MAX: Final = 1000
_SYNCERS: Final = 8
"""Threads that make many queues durable in parallel."""
_FLUSHED_ALONE_MAX: Final = 32
"""Up to this many queues, starting threads is not worth it."""
_FLUSHED_TOGETHER_MIN: Final = 256
"""From this many queues on, syncing their whole file system takes less time than syncing them."""


class ConsumeQueueTable:
    """The queues below ``directory``, with files of ``file_bytes``, rounded up to whole units."""

    def __init__(
        self,
        directory: Path,
        file_bytes: int,
        fs: FileSystem | None = None,
        context: QueueContext | None = None,
    ) -> None:
        self.directory = directory
        self.file_bytes = -(-file_bytes // UNIT_BYTES) * UNIT_BYTES
        self._fs = fs or FileSystem()
        self._lock = threading.Lock()
        self._directories = QueueDirectories(self._fs)
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._dirty: dict[ConsumeQueue, None] = {}
        """May hold data that are not durable: queues written to since a ``flush(0)``."""
        self._refused_topics: set[str] = set()
        self._opened: Descriptor | None = None
        """The directory, open since before the first write: a sync of its file system tells of all that failed."""
        self.descriptors: Final = DescriptorCache(self._fs)
        """The open files of all queues."""
        self._context = replace(context or QueueContext(), descriptors=self.descriptors)

    # Opening

    def load(self, known: Mapping[QueueKey, QueueEnd] | None = None) -> None:
        """Open the existing queues. ``recover`` reports what was removed on the way. Raises ``DiskError``.

        ``known``: their ends at a clean stop; queues for which these are still valid are not read.
        """
        known = known or {}
        try:
            make_dirs_durably(self._fs, self.directory)
            self._opened = Descriptor(self._fs, self.directory, writable=False)
            found = list(self._list())
        except OSError as error:
            raise DiskError(f"listing {self.directory} failed: {error}") from error
        for topic, queue_id in found:
            queue = self._make(topic, queue_id)
            end = known.get((topic, queue_id))
            if end is None or not queue.adopt(end):
                queue.load()
            self._queues[topic, queue_id] = queue

    def _list(self) -> Iterator[tuple[str, int]]:
        for topic in _entries(self.directory):
            if not topic.is_dir() or check_topic(topic.name):
                _log.warning("ignoring %s: not the directory of a topic", topic.path)
                continue
            for queue in _entries(topic.path):
                if queue.is_dir() and _is_queue_id(queue.name) and int(queue.name) <= _QUEUE_ID_MAX:
                    yield topic.name, int(queue.name)
                else:
                    _log.warning("ignoring %s: not the directory of a queue", queue.path)

    def recover(self, limit: int = FOREVER, *, whole: bool = True) -> QueueRecovery:
        """Find the end of every queue and cut what is bad; see ``ConsumeQueue.recover``. Raises ``DiskError``."""
        found = [queue.recover(limit, whole=whole) for queue in self.all()]
        self._written([queue for queue in self.all() if not queue.is_adopted])  # the cuts are not durable yet
        repairs = tuple(repair for one in found for repair in one.repairs)
        for repair in repairs:
            _log.warning("%s", repair)
        return QueueRecovery(
            max((one.max_physical_offset for one in found), default=-1),
            min((one.replay_from for one in found if one.replay_from is not None), default=None),
            repairs,
        )

    # Looking

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """The queue, if it exists."""
        return self._queues.get((topic, queue_id))

    def all(self) -> list[ConsumeQueue]:
        with self._lock:
            return list(self._queues.values())

    def next_offsets(self) -> dict[tuple[str, int], int]:
        """The queue offset that each queue's next message gets."""
        return {(queue.topic, queue.queue_id): queue.max_offset for queue in self.all()}

    @property
    def max_physical_offset(self) -> int:
        """The end of the furthest record that has a unit; -1 if there is none."""
        return max((queue.max_physical_offset for queue in self.all()), default=-1)

    # Changing

    def find_or_create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, created if necessary; its files are created with its first unit.

        Raises ``InvalidRequestError`` for an invalid topic or queue name.
        """
        queue = self._queues.get((topic, queue_id))
        if queue is not None:
            return queue
        reason = check_topic(topic)
        if reason or not 0 <= queue_id <= _QUEUE_ID_MAX:
            raise InvalidRequestError(f"no consume queue {queue_id} of topic {topic!r}: {reason or 'no queue number'}")
        with self._lock:
            return self._queues.setdefault((topic, queue_id), self._make(topic, queue_id))

    def append(self, heads: Sequence[RecordHead]) -> None:
        """Append the units of records, which are in log order; existing ones are skipped.

        After ``DiskFullError`` or ``DiskError``, a part may be appended, and the same call may be repeated. Raises
        ``CorruptLogError`` if queue offsets jump implausibly far.
        """
        written: list[ConsumeQueue] = []
        try:
            if isinstance(heads, RecordColumns):
                for units in heads.by_queue:
                    self._append_to(units.topic, units.queue_id, units, written)
                return
            groups: defaultdict[tuple[str, int], list[RecordHead]] = defaultdict(list)
            for head in heads:
                groups[head[:2]].append(head)
            for key, group in groups.items():
                self._append_to(*key, group, written)
        finally:
            self._written(written)

    def _append_to(
        self, topic: str, queue_id: int, group: list[RecordHead] | UnitColumns, written: list[ConsumeQueue]
    ) -> None:
        queue = self._queues.get((topic, queue_id)) or self._queue_for(topic, queue_id, group)
        while queue is not None:
            written.append(queue)
            if queue.append(group):
                return
            with self._lock:  # until its topic is deleted
                pass
            queue = self._queue_for(topic, queue_id, group)

    def _written(self, queues: Sequence[ConsumeQueue]) -> None:
        """Mark queues as dirty after writing: an earlier flush has not seen all of it."""
        with self._lock:
            self._dirty.update(dict.fromkeys(queues))

    def _queue_for(self, topic: str, queue_id: int, group: list[RecordHead] | UnitColumns) -> ConsumeQueue | None:
        """The queue for records of one queue; None if they have no place in any."""
        if isinstance(group, list) and all(head.queue_offset < 0 for head in group):
            return None
        try:
            return self.find_or_create(topic, queue_id)
        except InvalidRequestError as error:
            if topic not in self._refused_topics and len(self._refused_topics) < _REFUSED_MAX:
                self._refused_topics.add(topic)
                offset = group[0].offset if isinstance(group, list) else int(group.offsets[0])
                _log.warning("the record at %d goes into no consume queue: %s", offset, error)
            return None

    def raise_to(self, next_offsets: Mapping[QueueKey, int]) -> None:
        """According to the log, next offsets are at least these; missing queues are created. Raises ``DiskError``."""
        for (topic, queue_id), offset in next_offsets.items():
            queue = self._queues.get((topic, queue_id))
            if queue is None:
                try:
                    queue = self.find_or_create(topic, queue_id)
                except InvalidRequestError:  # it never had a queue
                    continue
            if offset > queue.max_offset:
                queue.raise_to(offset)

    def flush(self, least_pages: int = 0) -> None:
        """Make queues with at least this many waiting pages durable (0: everything).

        After trying all queues, raises ``DiskError``, after which the queue concerned accepts no more units, or
        ``DiskFullError`` if it could not be opened just now.
        """
        with self._lock:
            dirty = list(self._dirty)
            if not least_pages:
                self._dirty = {}
        if not least_pages and len(dirty) >= _FLUSHED_TOGETHER_MIN and self._flush_together(dirty):
            return

        def failed(queue: ConsumeQueue) -> DiskError | DiskFullError | None:
            try:
                queue.flush(least_pages)
            except (DiskError, DiskFullError) as error:
                self._written((queue,))
                return error
            return None

        if len(dirty) <= _FLUSHED_ALONE_MAX:
            failures = [*map(failed, dirty)]
        else:  # many syncs take disks and file systems little longer than one
            with ThreadPoolExecutor(_SYNCERS, "rocketstore-sync") as syncers:
                failures = [*syncers.map(failed, dirty)]
        failure = next((one for one in failures if one is not None), None)
        if failure is not None:
            raise failure

    def _flush_together(self, queues: Sequence[ConsumeQueue]) -> bool:
        """Make queues durable with their whole file system; False if each must be synced, or asked for its error."""
        found: list[tuple[ConsumeQueue, Unflushed]] = []
        durable, opened = False, self._opened
        try:
            found.extend((queue, queue.begin_flush()) for queue in queues)
            devices = {self._fs.device(queue.directory) for queue in queues}
            if opened is not None and devices == {self._fs.device(self.directory)}:
                with self._directories.synced_by_caller():
                    self._fs.sync_all(opened.fd)
                durable = True
        except (OSError, DiskError):
            pass  # syncing each says which one is concerned
        finally:
            for queue, unflushed in found:  # extended as far as it went
                queue.end_flush(unflushed, durable=durable)
        return durable

    def at_rest(self) -> dict[QueueKey, QueueEnd]:
        """The ends to pass to ``load``, once all queues are flushed and nothing is appended any more. Raises
        ``DiskError``.
        """
        found = {(queue.topic, queue.queue_id): queue.at_rest() for queue in self.all()}
        return {key: end for key, end in found.items() if end is not None}

    def correct_min_offsets(self, physical: int) -> None:
        """Start every queue with its first message at or after ``physical``. Raises ``DiskError``."""
        firsts = self._context.firsts(physical)
        for queue in self.all():
            queue.correct_min_offset(physical, firsts.get((queue.topic, queue.queue_id)))

    def delete_expired(self, physical: int, /) -> int:
        """Like ``correct_min_offsets``, and also remove expired files; returns how many. Raises ``DiskError``."""
        self.correct_min_offsets(physical)  # first, so that nobody reads a unit without a message
        return sum(queue.delete_expired(physical) for queue in self.all())

    def delete_topic(self, topic: str) -> None:
        """Remove a topic's queues and their files. Raises ``DiskError``."""
        self._destroy([queue for queue in self.all() if queue.topic == topic])

    def close(self) -> None:
        """Release all files. Flush before."""
        for queue in self.all():
            queue.close()
        self._opened = None

    def _destroy(self, queues: Sequence[ConsumeQueue]) -> None:
        for queue in queues:
            with self._lock:  # a new queue of this name must not use the files before they are gone
                try:
                    queue.destroy()
                finally:
                    self._queues.pop((queue.topic, queue.queue_id), None)
                    self._dirty.pop(queue, None)
        for directory in sorted({queue.directory.parent for queue in queues}):
            with self._directories.making, suppress(OSError):  # not empty: a queue was created meanwhile
                directory.rmdir()
        if queues:
            try:
                self._fs.sync_dir(self.directory)
            except FileNotFoundError:
                pass  # it was empty
            except OSError as error:
                raise DiskError(f"cannot remove queues from {self.directory}: {error}") from error

    def _make(self, topic: str, queue_id: int) -> ConsumeQueue:
        directory = self.directory / topic / str(queue_id)
        return ConsumeQueue(topic, queue_id, directory, self.file_bytes, self._fs, self._directories, self._context)


def _entries(directory: Path | str) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return sorted(entries, key=lambda one: one.name)


def _is_queue_id(name: str) -> bool:
    """Whether it is a queue number as written by us and RocketMQ."""
    return name.isascii() and name.isdecimal() and len(name) <= 10 and str(int(name)) == name
