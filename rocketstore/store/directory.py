"""The store's root directory and the small files in it: lock, mark of a running store, checkpoint, deleted queues.

``lock`` is held while a store has the directory open: with an ``flock`` for stores of this project, and with the POSIX
lock on its first byte that RocketMQ uses, so that neither opens what the other has open. ``abort`` exists from the
moment a store starts to change anything until it has stopped and everything derived from the log is durable. (RocketMQ
creates it only at the end of its start, so a crash during recovery looks like a clean stop.)

``checkpoint`` says from where the consume queues and the index must be built again after a crash. It is RocketMQ's file
of 4096 bytes, with what this store adds far behind RocketMQ's fields. All integers are big-endian:

    0            8             16           24                 64       68             76            84     92
    +------------+-------------+------------+------------------+--------+--------------+-------------+------+-----+
    | log time   | queues' time| index time | (5.x), zero here | "RSC1" | replay from  | queue units | index| crc |
    +------------+-------------+------------+------------------+--------+--------------+-------------+------+-----+
    96       100             108   112
    +--------+---------------+-----+
    | "RSC2" | index entries | crc |
    +--------+---------------+-----+

The times are store timestamps of messages (ms). RocketMQ guesses from them at which file to begin; a clock that was set
back misleads it. ``replay_from`` is exact: everything derived from the log before that offset was durable when the
checkpoint was written. ``queue_units`` is how many messages the consume queues counted then, ``index`` the physical
offset up to which the index was durable: if a start finds less, someone has deleted files. ``index entries`` is how
many entries the last file of the index had then; it was added later, in a block of its own.

Each CRC32 covers all before it. RocketMQ keeps bytes it does not know when it writes its own, so after RocketMQ has
used the directory the CRC does not match, and the whole log is replayed: slow once, but right.

``deletedQueues.json`` remembers where the numbering of deleted topics' queues ended. The messages of a deleted topic
stay in the log until they expire. If the topic is created again and its queues start at 0, two messages would claim the
same place in a queue, and whenever the queues are rebuilt from the log, the later one would be left out. So a queue's
numbering continues where it was, also after a restart and on the next master.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from typing import Final

from dledger.errors import CorruptLogError, DirectoryLockedError, DiskError, DiskFullError
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably, read_whole, replace_durably
from dledger.store.identity import LOCK_FILE, DirectoryLock
from rocketstore.types import QueueKey

ABORT_FILE: Final = "abort"


class StoreDirectory:
    """An open root directory. ``stopped_cleanly`` says how the last store that used it ended."""

    def __init__(self, root: Path, fs: FileSystem) -> None:
        """Lock the directory, creating it if necessary. Raises ``DirectoryLockedError``, ``DiskError``."""
        self._fs = fs
        self._abort = root / ABORT_FILE
        try:
            make_dirs_durably(fs, root)
            keep_private(root)
            self._lock = DirectoryLock(root)
        except OSError as error:
            raise DiskError(f"opening the store directory {root} failed: {error.strerror}") from error
        self._posix_fd = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.lockf(self._posix_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError as error:
            self._release()
            raise DirectoryLockedError(f"{root} is in use by a RocketMQ broker: stop it first") from error
        self._held = True
        self.stopped_cleanly = not self._abort.exists()

    def mark_running(self) -> None:
        """Durably mark the store as not cleanly stopped. Raises ``DiskError``."""
        if not self.stopped_cleanly:
            return  # it exists, and there may be no room for another
        try:
            replace_durably(self._fs, self._abort, b"")
        except OSError as error:
            raise DiskError(f"creating {self._abort} failed: {error}") from error

    def mark_clean(self) -> None:
        """Remove the mark: everything derived from the log is durable. Raises ``DiskError``."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(self._abort)
            self._fs.sync_dir(self._abort.parent)
        except OSError as error:
            raise DiskError(f"removing {self._abort} failed: {error}") from error

    def release(self) -> None:
        """Unlock the directory; idempotent."""
        if self._held:
            self._held = False
            self._release()

    def _release(self) -> None:
        os.close(self._posix_fd)
        self._lock.release()


CHECKPOINT_FILE: Final = "checkpoint"
CHECKPOINT_BYTES: Final = 4096
UNKNOWN: Final = -1
_TIMES: Final = Struct(">qqq")
_OWN_AT: Final = 64
_OWN: Final = Struct(">4sqqq")
_CRC: Final = Struct(">I")
_MAGIC: Final = b"RSC1"
_LATER: Final = Struct(">4sq")
_LATER_MAGIC: Final = b"RSC2"
_SLACK_MS: Final = 3000
"""RocketMQ's tolerance for times that are slightly out of log order."""


@dataclass(frozen=True, slots=True)
class StoreCheckpoint:
    """How far files are durable. Times are ms since 1970; ``UNKNOWN`` in a field that only this store writes."""

    physic_ms: int = 0
    logics_ms: int = 0
    index_ms: int = 0
    replay_from: int = UNKNOWN
    queue_units: int = UNKNOWN
    index_end: int = UNKNOWN
    index_entries: int = UNKNOWN

    def replay_time(self, *, with_index: bool) -> int:
        """RocketMQ's rule: messages stored before this time need no replay (ms)."""
        oldest = max(0, min(self.physic_ms, self.logics_ms) - _SLACK_MS)
        return min(oldest, self.index_ms) if with_index else oldest

    def encode(self) -> bytes:
        head = _TIMES.pack(self.physic_ms, self.logics_ms, self.index_ms).ljust(_OWN_AT, b"\0")
        head += _OWN.pack(_MAGIC, self.replay_from, self.queue_units, self.index_end)
        head += _CRC.pack(zlib.crc32(head))
        head += _LATER.pack(_LATER_MAGIC, self.index_entries)
        return (head + _CRC.pack(zlib.crc32(head))).ljust(CHECKPOINT_BYTES, b"\0")


def decode_checkpoint(content: bytes) -> StoreCheckpoint:
    """Parse a file; all zero and unknown, meaning a full replay, if it is not trustworthy."""
    end = _OWN_AT + _OWN.size
    if len(content) < end + _CRC.size:
        return StoreCheckpoint()
    physic_ms, logics_ms, index_ms = _TIMES.unpack_from(content)
    magic, replay_from, queue_units, index_end = _OWN.unpack_from(content, _OWN_AT)
    if magic != _MAGIC:
        return StoreCheckpoint(physic_ms, logics_ms, index_ms)
    if _CRC.unpack_from(content, end)[0] != zlib.crc32(content[:end]):
        return StoreCheckpoint()
    known = StoreCheckpoint(physic_ms, logics_ms, index_ms, replay_from, queue_units, index_end)
    start = end + _CRC.size
    end = start + _LATER.size
    if len(content) < end + _CRC.size:
        return known
    magic, index_entries = _LATER.unpack_from(content, start)
    if magic != _LATER_MAGIC or _CRC.unpack_from(content, end)[0] != zlib.crc32(content[:end]):
        return known  # written by an earlier version
    return replace(known, index_entries=index_entries)


def is_intact(content: bytes) -> bool:
    """Whether this store's fields after RocketMQ's are consistent, or were never written."""
    end = _OWN_AT + _OWN.size
    if len(content) < end + _CRC.size:
        return False
    magic = _OWN.unpack_from(content, _OWN_AT)[0]
    if magic != _MAGIC:
        return not any(content[_OWN_AT : end + _CRC.size])
    return bool(_CRC.unpack_from(content, end)[0] == zlib.crc32(content[:end]))


def read_checkpoint_file(path: Path) -> bytes:
    """The existing bytes of the file, up to the length that matters. Raises ``OSError``."""
    with path.open("rb") as file:
        return file.read(CHECKPOINT_BYTES)


class StoreCheckpointFile:
    """The checkpoint file of one store. Not thread-safe: the store writes it under its flush lock."""

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self._fs = fs
        self._path = path
        self._written: StoreCheckpoint | None = None

    def read(self) -> StoreCheckpoint:
        """Its contents; unknown if there is no file. Raises ``DiskError``."""
        try:
            return decode_checkpoint(read_checkpoint_file(self._path))
        except FileNotFoundError:
            return StoreCheckpoint()
        except OSError as error:
            raise DiskError(f"reading {self._path} failed: {error}") from error

    def write(self, checkpoint: StoreCheckpoint) -> None:
        """Replace it durably. Does nothing if the contents are those written last.

        Raises ``DiskFullError``, after which the old one stays, and ``DiskError``.
        """
        if checkpoint == self._written:
            return
        try:
            replace_durably(self._fs, self._path, checkpoint.encode())
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFullError(f"writing {self._path} failed: no space left on the device") from error
            raise DiskError(f"writing {self._path} failed: {error}") from error
        self._written = checkpoint


DELETED_FILE: Final = "deletedQueues.json"
_ADVICE: Final = "Remove the file; topics that are deleted and created again will then start at queue offset 0"
Offsets = dict[QueueKey, int]


class DeletedQueues:
    """The file. Changed by one thread at a time, under the store's flush lock."""

    def __init__(self, fs: FileSystem, path: Path) -> None:
        self._fs = fs
        self._path = path
        self._ends: Offsets = {}

    def load(self) -> None:
        """Read the file. Raises ``CorruptLogError`` if it is invalid, ``DiskError``."""
        try:
            topics = json.loads(read_whole(self._path))
            self._ends = {
                (str(topic), int(queue_id)): int(end)
                for topic, queues in topics.items()
                for queue_id, end in queues.items()
            }
        except FileNotFoundError:
            self._ends = {}
        except OSError as error:
            raise DiskError(f"reading {self._path} failed: {error}") from error
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptLogError(self._path, 0, f"not a list of queues ({error})", _ADVICE) from error

    def add(self, ends: Offsets, living: Offsets) -> None:
        """Record, durably, the ends of queues about to be deleted; drop those that ``living`` ones have passed.

        Raises ``DiskFullError``, ``DiskError``.
        """
        kept = {key: end for key, end in self._ends.items() if living.get(key, 0) < end}
        kept.update({key: max(end, kept.get(key, 0)) for key, end in ends.items() if end > 0})
        topics: dict[str, dict[str, int]] = {}
        for (topic, queue_id), end in sorted(kept.items()):
            topics.setdefault(topic, {})[str(queue_id)] = end
        try:
            make_dirs_durably(self._fs, self._path.parent)
            replace_durably(self._fs, self._path, (json.dumps(topics, indent=2) + "\n").encode())
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFullError(f"writing {self._path} failed: no space left on the device") from error
            raise DiskError(f"writing {self._path} failed: {error}") from error
        self._ends = kept

    @property
    def ends(self) -> Mapping[QueueKey, int]:
        return self._ends

    def over(self, offsets: Offsets) -> Offsets:
        """Next queue offsets, replaced by those of deleted queues where these are higher."""
        return offsets | {key: end for key, end in self._ends.items() if offsets.get(key, 0) < end}
