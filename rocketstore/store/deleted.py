"""Remembers where the numbering of deleted topics' queues ended.

The messages of a deleted topic stay in the log until they expire. If the topic is created again and its queues start at
0, two messages would claim the same place in a queue, and whenever the queues are rebuilt from the log, the later one
would be left out. So a queue's numbering continues where it was, also after a restart and on the next master.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError, DiskError, DiskFullError
from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from rocketstore.types import QueueKey

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
