"""Facts about a process from ``/proc``: resident memory by mapping, threads, processor time."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ \d+ *(.*)$")


class Resident(NamedTuple):
    """Resident memory in bytes: the total, and the part in mappings of files in one directory."""

    total: int
    mapped_there: int

    @property
    def own(self) -> int:
        """The memory outside those mappings."""
        return self.total - self.mapped_there


def resident(smaps: str, directory: Path) -> Resident:
    """Sum the ``Rss`` lines of ``/proc/PID/smaps``; deleted files still count for their former directory."""
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
    """The resident memory of a running process."""
    return resident(Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="surrogateescape"), directory)


def processor_s(pid: int) -> float:
    """The processor time, user and system, that all its threads have used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def threads_of(pid: int) -> int:
    """The number of threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))
