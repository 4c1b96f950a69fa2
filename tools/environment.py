"""Makes the virtual environment, unless it is there, and lets one process at a time work on it.

Two who say ``make`` at the same time would otherwise take each other's half-done work for that of an interrupted
installation, and remove it. Imports only the standard library: nothing is installed yet.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_UNFINISHED: Final = ".unfinished"
_LOCK: Final = ".lock"


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Wait until no other process works on this environment. Raises ``OSError`` if it cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another installation into {directory}", flush=True)  # noqa: T201  # for people
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(directory: Path) -> int:
    """Make it, if it is not there; begin anew what was interrupted. Returns the exit code."""
    with one_at_a_time(directory):
        unfinished = directory / _UNFINISHED
        if not unfinished.exists() and _has_pip(directory):
            return 0
        if unfinished.exists():
            for name in ("bin", "include", "lib"):
                shutil.rmtree(directory / name, ignore_errors=True)
            (directory / "lib64").unlink(missing_ok=True)
        unfinished.touch()
        print(f"{sys.executable} -m venv {directory}", flush=True)  # noqa: T201  # for people
        code = subprocess.run([sys.executable, "-m", "venv", str(directory)], check=False).returncode
        if code == 0:
            unfinished.unlink()
        return code


def _has_pip(directory: Path) -> bool:
    python = directory / "bin" / "python"
    if not python.exists():
        return False
    asked = [str(python), "-m", "pip", "--version"]
    return subprocess.run(asked, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    try:
        sys.exit(make(Path(sys.argv[1])))
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
