"""Installs what a lock file names, and this project, into the environment of the Python that runs it.

Says first what it will do, shows progress, and repairs what an interrupted installation left half done. Imports only
the standard library: nothing else is installed yet.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.environment import one_at_a_time

_PINNED: Final = re.compile(r"^([a-z0-9.-]+)==", re.MULTILINE)
_FOUND: Final = re.compile(r"(?:Collecting|Requirement already satisfied:) ([A-Za-z0-9._-]+)")
_DOWNLOADING: Final = re.compile(r"\s*Downloading \S*?([^/\s]+?)-\d\S* \(([^)]+)\)")
_PIP: Final = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar", "off")
_LINES_OF_A_FAILURE: Final = 20
_INTERRUPTED: Final = 130


class PipProgress:
    """One line that says how far pip is, on a terminal; nothing elsewhere."""

    def __init__(self, total: int, columns: int | None) -> None:
        self._total = total
        self._columns = columns
        self._found: set[str] = set()

    def take(self, line: str) -> None:
        """Show what this line of pip's output means."""
        if found := _FOUND.match(line):
            self._found.add(found[1].lower().replace("_", "-"))
            self._show(f"[{min(len(self._found), self._total)}/{self._total}] {found[1]}")
        elif size := _DOWNLOADING.match(line):
            self._show(f"[{min(len(self._found), self._total)}/{self._total}] {size[1]}: downloading {size[2]}")
        elif line.startswith("Installing collected packages"):
            self._show("unpacking")

    def clear(self) -> None:
        """Leave an empty line."""
        self._show("")

    def _show(self, text: str) -> None:
        if self._columns is not None:
            print(f"\r\x1b[K{text[: self._columns - 1]}", end="", flush=True)  # noqa: T201  # for people


def remove_unfinished(site_packages: Path) -> list[str]:
    """Forget packages whose installation was interrupted, which pip would take for installed; returns their names.

    pip writes ``INSTALLER`` after all files of a package.
    """
    unfinished = [one for one in sorted(site_packages.glob("*.dist-info")) if not (one / "INSTALLER").exists()]
    for one in unfinished:
        shutil.rmtree(one)
    return [one.name.partition("-")[0] for one in unfinished]


def locked(lock: Path) -> int:
    """How many packages a lock file names."""
    return len(set(_PINNED.findall(lock.read_text(encoding="utf-8"))))


def run_pip(words: Sequence[str], progress: PipProgress) -> int:
    """Run ``pip install``; returns its exit code, after printing the end of its output if that is not 0."""
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, *_PIP, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        for line in pip.stdout or ():
            said.append(line)
            progress.take(line)
    progress.clear()
    if pip.returncode:
        print("".join(said[-_LINES_OF_A_FAILURE:]), end="", file=sys.stderr)  # noqa: T201  # for people
    return pip.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Install; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.install", description=__doc__)
    parser.add_argument("lock", type=Path, help="the exact versions, with hashes")
    parser.add_argument("--size", required=True, help="what to say about download and disk")
    parser.add_argument("--no-compile", action="store_true", help="let Python compile modules when it imports them")
    given = parser.parse_args(arguments)

    total, started = locked(given.lock), time.monotonic()
    print(f"installing up to {total} packages of {given.lock} into {sys.prefix}: {given.size}", flush=True)  # noqa: T201
    progress = PipProgress(total, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    compiling = ["--no-compile"] if given.no_compile else []
    try:
        with one_at_a_time(Path(sys.prefix)):
            remove_unfinished(Path(sysconfig.get_path("purelib")))
            code = run_pip([*compiling, "--require-hashes", "-r", str(given.lock)], progress) or run_pip(
                [*compiling, "--no-deps", "-e", "."], progress
            )
    except OSError as error:
        progress.clear()
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)  # noqa: T201  # for people
        return 1
    except KeyboardInterrupt:
        progress.clear()
        print("interrupted; the next make continues", file=sys.stderr)  # noqa: T201  # for people
        return _INTERRUPTED
    if code == 0:
        print(f"installed in {time.monotonic() - started:.0f} s", flush=True)  # noqa: T201  # for people
    return code


if __name__ == "__main__":
    sys.exit(main())
