"""Creates the directories of topics and queues, and makes them durable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dledger.store.fs import FileSystem


class QueueDirectories:
    """Creates directories for all queues of a table. Many are created at a time, so new directory entries are made
    durable once for all of them.
    """

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self.making: Final = threading.Lock()
        """Held while directories are created, and while an empty topic directory is removed."""
        self._syncing = threading.Lock()  # held until everything is durable, so that no caller returns before that
        self._unsynced: dict[Path, None] = {}

    def make(self, directory: Path) -> None:
        """Make a queue's directory and the topic's above it. Raises ``OSError``."""
        with self.making:
            self._fs.make_dir(directory.parent)
            self._fs.make_dir(directory)
        self._unsynced.update({directory.parent: None, directory.parent.parent: None})

    @contextmanager
    def synced_by_caller(self) -> Iterator[None]:
        """Regard everything created before as durable once the context, which syncs the whole file system, succeeds."""
        with self._syncing:
            found: dict[Path, None] = {}
            while self._unsynced:  # others may add to it meanwhile
                found[self._unsynced.popitem()[0]] = None
            try:
                yield
            except BaseException:
                self._unsynced.update(found)
                raise

    def sync(self) -> None:
        """Make everything created before durable. Raises ``OSError``."""
        with self._syncing:
            while self._unsynced:
                directory, _ = self._unsynced.popitem()
                try:
                    self._fs.sync_dir(directory)
                except FileNotFoundError:
                    continue  # the topic was deleted
                except OSError:
                    self._unsynced[directory] = None
                    raise
