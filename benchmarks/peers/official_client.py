"""RocketMQ 5's official client for Python, with its own packages: they do not get along with this environment's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.processes import REPOSITORY, ChildError

PACKAGE: Final = "rocketmq-python-client==5.1.2"
INSTALL: Final = f"{PACKAGE} from PyPI (pip does it, if it reaches an index)"
INSTALL_S: Final = 900.0
_PACKAGES: Final = REPOSITORY / "build" / "rocketmq-python-client"


@cache
def install() -> None:
    """Once for all runs. Raises ``ChildError`` if pip does not find it."""
    mark = _PACKAGES / PACKAGE
    if mark.exists():
        return
    shutil.rmtree(_PACKAGES, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    argv = [*pip, "--target", str(_PACKAGES), PACKAGE]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if ended.returncode:
        raise ChildError(f"`{' '.join(argv)}` failed:\n{(ended.stdout + ended.stderr)[-4000:]}")
    mark.touch()


def command(program: Path, *arguments: str) -> Sequence[str]:
    """How a program is run with the client, and without the packages of this environment."""
    start = (
        f"import runpy, sys; sys.path.insert(0, {str(_PACKAGES)!r}); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], None, '__main__')"
    )
    return [getattr(sys, "_base_executable", sys.executable), "-s", "-E", "-c", start, str(program), *arguments]
