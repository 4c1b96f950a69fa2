"""Compile test modules once, before workers load them: ``python -m tests.support.bytecode [--tier=test]``.

Every worker of pytest-xdist loads all modules. In a new clone each of them would rewrite all assertions and compile all
tests at the same time: with four workers, 100 s of processor time more than once is enough.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final

import pytest

from tests.support import tiers

FEW: Final = 40
"""Modules that workers compile as fast as another process would start."""
PROCESSES_MAX: Final = 8


def compiled(module: Path) -> Path:
    """Where pytest keeps the byte code of a test module with its assertions rewritten."""
    plain = Path(cache_from_source(str(module)))
    return plain.with_name(f"{plain.stem}-pytest-{pytest.__version__}.pyc")


def stale(modules: list[Path]) -> list[Path]:
    """Those of ``modules`` whose byte code is missing, or older than they are."""
    return [
        module
        for module in modules
        if not (code := compiled(module)).exists() or code.stat().st_mtime < module.stat().st_mtime
    ]


def main(arguments: list[str] | None = None) -> int:
    """Compile stale modules in as many processes as there are processors. Errors are left to the run that follows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=tiers.TIERS, default=tiers.ALL)
    tier = parser.parse_args(arguments).tier
    found = stale([one for one in sorted(tiers.TESTS.rglob("test_*.py")) if tiers.may_run(tier, one)])
    if len(found) <= FEW:
        return 0
    count = min(os.cpu_count() or 1, PROCESSES_MAX)
    sys.stdout.write(f"compiling {len(found)} test modules\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", f"--tier={tier}"]
    shares = [[str(one) for one in found[number::count]] for number in range(count)]
    running = [subprocess.Popen([*command, *share], stdout=subprocess.DEVNULL) for share in shares]
    for one in running:
        one.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
