"""How often a log has changed its master: an old one that comes back is known by its lower number.

A slave keeps the number of the master that it follows, and counts one up when it starts as master. A master that is
only started again keeps its number: otherwise an old one would soon have that of its successor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably, replace_durably

EPOCH_FILE: Final = "haEpoch.json"
_MASTER: Final = "master"
_SLAVE: Final = "slave"


class EpochFile:
    """The number, and where its master began. Not thread-safe."""

    def __init__(self, fs: FileSystem, directory: Path) -> None:
        """Raises ``CorruptLogError``, ``OSError``."""
        self._fs = fs
        self._path = directory / EPOCH_FILE
        self.now = 0
        """The number; 0 before the first master."""
        self.begin_offset = -1
        """Where this broker began as master of that number; -1: it did not, or it is not known."""
        self._role = ""
        self._read()

    def _read(self) -> None:
        try:
            found = json.loads(self._path.read_bytes())
            epoch, begin, role = found["epoch"], found.get("begin", -1), found.get("role", "")
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError):
            epoch, begin, role = -1, -1, ""
        if type(epoch) is not int or epoch < 0 or type(begin) is not int or role not in ("", _MASTER, _SLAVE):
            advice = "Restore it from a copy, or remove it if no other broker has this log"
            raise CorruptLogError(self._path, 0, "it does not hold an epoch", advice)
        self.now, self.begin_offset, self._role = epoch, begin, role

    def begin(self, offset: int) -> None:
        """A master starts, whose log ends at ``offset``. Raises ``OSError``."""
        if self._role != _MASTER:
            self._write(self.now + 1, offset, _MASTER)

    def follow(self, epoch: int) -> None:
        """Keep the master's; never a lower one. Raises ``OSError``."""
        if epoch > self.now or self._role != _SLAVE:
            self._write(max(epoch, self.now), -1, _SLAVE)

    def _write(self, epoch: int, begin: int, role: str) -> None:
        make_dirs_durably(self._fs, self._path.parent)
        keep_private(self._path.parent)
        content = json.dumps({"epoch": epoch, "begin": begin, "role": role})
        replace_durably(self._fs, self._path, content.encode())
        self.now, self.begin_offset, self._role = epoch, begin, role
