"""The store's root directory: locked by one process at a time, and marked while it is not cleanly stopped.

``lock`` is held while a store has the directory open: with an ``flock`` for stores of this project, and with the POSIX
lock on its first byte that RocketMQ uses, so that neither opens what the other has open. ``abort`` exists from the
moment a store starts to change anything until it has stopped and everything derived from the log is durable. (RocketMQ
creates it only at the end of its start, so a crash during recovery looks like a clean stop.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

from dledger.errors import DirectoryLockedError, DiskError
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably, replace_durably
from dledger.store.identity import LOCK_FILE, DirectoryLock

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
