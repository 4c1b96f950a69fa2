"""Replaces a broker's files with rebuilt ones, while its directory is locked.

A directory is swapped by two renames. If the process is killed between them, the broker finds no queues (or no index)
at its next start and builds them itself: slow once, never wrong.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import numpy as np

from dledger.store.format import parse_segment_name
from rocketstore.consume_queue.files import FILLER, UNIT

STAGING: Final = ".rebuild-"
"""Prefix of directories in which a rebuild is in progress."""


def keep_expired_queues(built: Path, old: Path, begin: int) -> list[str]:
    """Copy queues whose messages have all expired, because their files hold the next queue offset.

    ``begin`` is the start of the log. Returns the names, as topic/queue.
    """
    kept: list[str] = []
    for queue in sorted(old.glob("*/*")):
        name = f"{queue.parent.name}/{queue.name}"
        if queue.is_dir() and not (built / name).exists() and _is_expired(queue, begin):
            shutil.copytree(queue, built / name)
            kept.append(name)
    return kept


def _is_expired(queue: Path, begin: int) -> bool:
    """Whether a queue has units, all of them for records before ``begin``."""
    files = sorted(one for one in queue.iterdir() if parse_segment_name(one.name) is not None)
    found = False
    for one in files:
        units = np.fromfile(one, UNIT)
        real = units[(units["size"] > 0) & (units["size"] != FILLER.size)]
        found = found or len(real) > 0
        if np.any(real["offset"] >= begin):
            return False
    return found


def exchange(root: Path, staging: Path, name: str) -> None:
    """Replace ``root/name`` by ``staging/name``, and move the old files to ``staging``. Raises ``OSError``."""
    if (root / name).exists():
        os.rename(root / name, staging / f"old-{name}")
    os.rename(staging / name, root / name)
    sync_directory(root)


def remove_left_overs(root: Path) -> None:
    """Remove the remains of interrupted rebuilds; requires the broker's lock."""
    for one in root.glob(f"{STAGING}*"):
        shutil.rmtree(one, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Make a directory's entries durable. Raises ``OSError``."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
