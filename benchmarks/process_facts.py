"""What ``/proc`` tells about a process: resident memory by mapping, and threads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ \d+ *(.*)$")


class Resident(NamedTuple):
    """Resident memory in bytes: all of it, and the part that mappings of files in one directory hold."""

    total: int
    mapped_there: int

    @property
    def own(self) -> int:
        """What the process needs beyond those mappings."""
        return self.total - self.mapped_there


def resident(smaps: str, directory: Path) -> Resident:
    """Sum the ``Rss`` lines of ``/proc/PID/smaps``; deleted files still count as mapped from where they were."""
    prefix = f"{os.path.realpath(directory)}/"
    total = there = 0
    path = ""
    for line in smaps.splitlines():
        if line.startswith("Rss:"):
            size = int(line.split()[1]) * 1024
            total += size
            there += size if path.startswith(prefix) else 0
        elif (mapping := _MAPPING.match(line)) is not None:
            path = mapping[1]
    return Resident(total, there)


def resident_of(pid: int, directory: Path) -> Resident:
    """Of a living process."""
    return resident(Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="surrogateescape"), directory)


def threads_of(pid: int) -> int:
    """How many threads a process has."""
    return len(os.listdir(f"/proc/{pid}/task"))
