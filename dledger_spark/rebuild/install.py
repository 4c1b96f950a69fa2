"""Putting rebuilt files in the place of a broker's, while nobody else can have its directory.

A directory is exchanged by two renames. Should the process end between them, the broker finds no queues (or no index)
at its next start and builds them itself: slow once, never wrong.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import numpy as np

from dledger.store.format import parse_segment_name
from rocketstore.consume_queue.units import FILLER, UNIT

STAGING: Final = ".rebuild-"
"""How the names of directories begin in which a rebuild is under way."""


def keep_expired_queues(built: Path, old: Path, begin: int) -> list[str]:
    """Copy over queues whose messages have all expired: their files say how their numbering goes on.

    ``begin`` is where the log begins. Gives the names, as topic/queue.
    """
    kept: list[str] = []
    for queue in sorted(old.glob("*/*")):
        name = f"{queue.parent.name}/{queue.name}"
        if queue.is_dir() and not (built / name).exists() and _is_expired(queue, begin):
            shutil.copytree(queue, built / name)
            kept.append(name)
    return kept


def _is_expired(queue: Path, begin: int) -> bool:
    """Whether a queue has units, and all of records before ``begin``."""
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
    """Put ``staging/name`` in the place of ``root/name``, whose old content goes to ``staging``. Raises ``OSError``."""
    if (root / name).exists():
        os.rename(root / name, staging / f"old-{name}")
    os.rename(staging / name, root / name)
    sync_directory(root)


def remove_left_overs(root: Path) -> None:
    """Remove what rebuilds left that did not end; under the broker's lock."""
    for one in root.glob(f"{STAGING}*"):
        shutil.rmtree(one, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises ``OSError``."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
