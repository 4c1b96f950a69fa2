"""The directories of topics and queues, and when they are durable."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from dledger.store.fs import FileSystem


class QueueDirectories:
    """The directories above those of queues. Shared by all queues of a table, of which many are made at a time: what is
    new in a directory is made durable once for all of them.
    """

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self.making: Final = threading.Lock()
        """Held while they are made: whoever removes a topic's empty one holds it, too."""
        self._syncing = threading.Lock()  # held until all is durable: nobody takes another's beginning for the end
        self._unsynced: dict[Path, None] = {}

    def make(self, directory: Path) -> None:
        """Make a queue's directory and the topic's above it. Raises ``OSError``."""
        with self.making:
            self._fs.make_dir(directory.parent)
            self._fs.make_dir(directory)
        self._unsynced.update({directory.parent: None, directory.parent.parent: None})

    def sync(self) -> None:
        """Make durable what was made before. Raises ``OSError``."""
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
