"""Files of tests in memory, where there is a tmpfs with room: what tests code shall not wait for the machine's disk.

A disk that other tests (groups of processes, container images) keep busy stalls for seconds, which a test of threads
and deadlines takes for a fault. Nothing is lost by it: what a disk does to files in a crash is simulated anyway
(``tests/crash/crash_fs.py``), and tests of real processes and containers stay on the real disk.

A session has one directory here, named after its process. A test's files go when it has passed; what tests that failed
left is kept until the next session finds that its owner is gone. ``TESTS_ON_DISK=1`` keeps everything on the disk.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

MEMORY: Final = Path("/dev/shm")
FREE_BYTES_MIN: Final = 2 << 30
PREFIX: Final = "dledger-tests-"


def why_not(memory: Path = MEMORY, mounts: Path = Path("/proc/mounts")) -> str:
    """Why files are better kept on the disk; empty if memory will do."""
    if os.environ.get("TESTS_ON_DISK", "") not in ("", "0"):
        return "TESTS_ON_DISK is set"
    try:
        kinds = [line.split()[2] for line in mounts.read_text().splitlines() if line.split()[1] == str(memory)]
        if kinds[-1:] != ["tmpfs"]:
            return f"{memory} is no tmpfs"
        found = os.statvfs(memory)
    except OSError as error:
        return str(error)
    if found.f_flag & os.ST_NOEXEC:
        return f"{memory} is mounted noexec, and tests run scripts that they write"
    if not os.access(memory, os.W_OK | os.X_OK):
        return f"{memory} is not ours to write to"
    free = min(found.f_bavail * found.f_frsize, _available_bytes())
    return "" if free >= FREE_BYTES_MIN else f"{memory} has only {free >> 20} MiB free"


def _available_bytes() -> int:
    """Memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@cache
def directory() -> Path:
    """This process's directory: in memory if it can be, else on the disk; removed at exit unless something is in it."""
    where = Path(tempfile.gettempdir()) if why_not() else MEMORY
    remove_orphans(where)
    made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
    atexit.register(_remove_if_empty, made)
    return made


def new_directory(name: str = "test") -> Path:
    """A fresh directory, for its caller to remove (or, if the test fails, to leave)."""
    return Path(tempfile.mkdtemp(prefix=f"{name[:40]}-", dir=directory()))


def remove_orphans(where: Path) -> None:
    """Remove what sessions left that are no more: of tests that failed, or of a session that was killed."""
    for path in where.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        with suppress(FileNotFoundError):  # another session may be quicker
            if owner.isdigit() and not Path(f"/proc/{owner}").exists() and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


def _remove_if_empty(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()
