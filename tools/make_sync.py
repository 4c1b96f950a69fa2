"""``python -m tools.make_sync [--check]``: generate the threaded modules from the asyncio ones.

``unasync`` removes ``async`` and ``await``, and replaces names and modules by their threaded counterparts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import unasync

ROOT: Final = Path(__file__).parent.parent
MADE: Final = {
    f"{package}/aio_{name}.py": f"{package}/{name}.py"
    for package, names in (
        ("dledger/client", ("calls", "append_calls")),
        ("rocketstore/nameserver", ("lookups",)),
    )
    for name in names
}
"""Each source and the file generated from it."""
_COUNTERPARTS: Final = {
    "aclosing": "closing",
    "aio": "threads",
    "asyncio": "threading",
    **{
        f"aio_{name}": name
        for name in (
            "calls",
            "append_calls",
            "channels",
            "futures",
            "stream",
        )
    },
    **{
        f"Async{name}": name
        for name in (
            "AppendCalls",
            "Appender",
            "Calls",
            "Channels",
            "Frames",
            "Links",
            "Seeker",
            "NameServers",
            "Sender",
            "SentItem",
            "Stream",
        )
    },
}


def make(source: Path) -> str:
    """Generate the threaded module."""
    with tempfile.TemporaryDirectory() as directory:
        begin, end = Path(directory, "async"), Path(directory, "sync")
        begin.mkdir()
        (begin / source.name).write_text(source.read_text())
        rule = unasync.Rule(f"{begin}/", f"{end}/", _COUNTERPARTS)
        unasync.unasync_files([str(begin / source.name)], [rule])
        made = end / source.name
        for command in (["check", "--select=I", "--fix", "--quiet"], ["format", "--quiet"]):
            ruff = [sys.executable, "-m", "ruff", *command, f"--config={ROOT / 'pyproject.toml'}", str(made)]
            subprocess.run(ruff, check=True)
        return made.read_text()


def main() -> int:
    """Write the modules, or with ``--check`` list the stale ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if something would change")
    check: bool = parser.parse_args().check
    stale = {name: text for source, name in MADE.items() if (text := make(ROOT / source)) != _text(ROOT / name)}
    for name, text in stale.items():
        if check:
            sys.stderr.write(f"{name} is stale: run `make unasync`\n")
        else:
            (ROOT / name).write_text(text)
    return 1 if check and stale else 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
