"""How often a log has got a master: an old one that comes back is known by its lower number.

A master counts one up when it starts; a slave keeps the number of the master that it follows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably, replace_durably

EPOCH_FILE: Final = "haEpoch.json"


class EpochFile:
    """``now`` is what it holds; 0 before the first master."""

    def __init__(self, fs: FileSystem, directory: Path) -> None:
        """Raises ``CorruptLogError``, ``OSError``."""
        self._fs = fs
        self._path = directory / EPOCH_FILE
        self.now = self._read()

    def _read(self) -> int:
        try:
            found = json.loads(self._path.read_bytes())["epoch"]
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError):
            found = -1
        if type(found) is not int or found < 0:
            advice = "Restore it from a copy, or remove it if no other broker has this log"
            raise CorruptLogError(self._path, 0, "it does not hold an epoch", advice)
        return found

    def begin(self) -> None:
        """A master starts. Raises ``OSError``."""
        self.follow(self.now + 1)

    def follow(self, epoch: int) -> None:
        """Keep the master's. Raises ``OSError``."""
        if epoch > self.now:
            make_dirs_durably(self._fs, self._path.parent)
            keep_private(self._path.parent)
            replace_durably(self._fs, self._path, json.dumps({"epoch": epoch}).encode())
            self.now = epoch
