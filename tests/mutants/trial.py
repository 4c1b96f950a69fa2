"""Does anything catch it? A copy of the project, one planted bug in it, and the tests that should notice."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from tests.mutants.mutant import ROOT, Mutant

TIMEOUT_S: Final = 300.0
SEED_S: Final = 3.0
"""What one seed may take at the most."""
WORLD_S: Final = 20.0
"""The same for a world of the broker simulator."""
_seconds = itertools.count(1_000_000_000)
_PYTEST: Final = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header")
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_SEED: Final = re.compile(r"^seed (\d+) FAILED", re.MULTILINE)
_WORLD: Final = re.compile(r"^group-rocketmq5 (\d+) FAILED", re.MULTILINE)


class Outcome(Enum):
    """What became of a planted bug."""

    CAUGHT = "caught"
    HUNG = "hung"
    """Nothing ended in time: whoever runs the tests notices that, too."""
    SURVIVED = "survived"
    BROKEN = "broken"
    """The row does not fit the code, or the tests could not run with it: this says nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one layer said of one bug: ``by`` is the test, or the seed."""

    layer: str
    outcome: Outcome
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.layer} {self.outcome.value} {self.by} after {self.seconds:.1f} s".replace("  ", " ")


@contextmanager
def copied(directory: Path) -> Iterator[Path]:
    """All files of the project that git knows, or would, below ``directory``."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, directory / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    yield directory


@contextmanager
def planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    """The bug is in the copy meanwhile. Raises ``MutantError`` if it does not fit."""
    spoilt = mutant.spoilt(copy)
    kept = {copy / name: (copy / name).read_bytes() for name in spoilt}
    for name, text in spoilt.items():
        (copy / name).write_text(text)
    _renew(kept)
    try:
        yield
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
        _renew(kept)


def _renew(paths: Iterable[Path]) -> None:
    """Python takes compiled code for that of a source of the same size and second: here no second comes twice."""
    for path in paths:
        second = next(_seconds)
        os.utime(path, (second, second))


def try_tests(mutant: Mutant, copy: Path, timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """One test file or directory after the other, until one fails."""
    findings: list[Finding] = []
    for tests in mutant.tests:
        finding = _run(layer_of(tests), [*_PYTEST, tests], copy, timeout_s, _FAILED)
        findings.append(finding)
        if finding.outcome is not Outcome.SURVIVED:
            break
    return findings


def try_seeds(mutant: Mutant, copy: Path) -> Finding:
    """The simulator, until a seed fails."""
    words = ["-m", "tests.sim", "--jobs", "1", "--stop", "--from", str(mutant.first), "--seeds", str(mutant.seeds)]
    return _run("simulator", words, copy, 60 + SEED_S * mutant.seeds, _SEED)


def try_worlds(mutant: Mutant, copy: Path) -> Finding:
    """The broker simulator, until a world fails."""
    words = ["-m", "tests.sim_store", "--world", "group-rocketmq5", "--jobs", "1", "--stop", "--seeds"]
    return _run("worlds", [*words, str(mutant.worlds)], copy, 60 + WORLD_S * mutant.worlds, _WORLD)


def layer_of(tests: str) -> str:
    """``unit``, ``scenarios``, ``store``, ...: the directory below ``tests``."""
    return Path(tests).parts[1]


def _run(layer: str, words: Sequence[str], copy: Path, timeout_s: float, pattern: re.Pattern[str]) -> Finding:
    environment = os.environ | {"PYTHONPATH": str(copy)}
    for name in [name for name in environment if name.startswith(("PYTEST_", "COVERAGE_", "PYTHONDONT"))]:
        del environment[name]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(layer, Outcome.HUNG, "", time.monotonic() - begun)
    seconds = time.monotonic() - begun
    found = pattern.search(done.stdout)
    if done.returncode == 0:
        return Finding(layer, Outcome.SURVIVED, "", seconds)
    if done.returncode == 1 and found is not None:
        return Finding(layer, Outcome.CAUGHT, found[1], seconds)
    if done.returncode < 0:
        return Finding(layer, Outcome.CAUGHT, f"signal {-done.returncode}", seconds)
    return Finding(layer, Outcome.BROKEN, (done.stdout + done.stderr)[-400:], seconds)
