"""Tests that need more than Python: skipped where the machine lacks it, with one line of the summary per lacking thing.

Every skip of this project goes through ``lacks``. Where all is meant to be installed, ``LACKING_FAILS=1`` (which
``.ci/run`` sets) makes such a test fail instead.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import pytest

FAILS: Final = "LACKING_FAILS"
ROOT: Final = "root"
AS_ROOT: Final = "run the tests as root"
_REASON: Final = re.compile(r"lacking: (?P<thing>[^:]+): (?P<install>.*)", re.DOTALL)


def lacks(thing: str, install: str) -> NoReturn:
    """Skip the test, because the machine has no ``thing``; ``install`` says in one line what to do about it."""
    reason = f"lacking: {thing}: {' '.join(install.split())}"
    if os.environ.get(FAILS, "") not in ("", "0"):
        pytest.fail(f"{reason} ({FAILS} is set)", pytrace=False)
    pytest.skip(reason)


def program(name: str, package: str = "") -> str:
    """The path of a program; skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        lacks(name, f"apt-get install {package or name}")
    return found


def module(name: str, extra: str) -> Any:  # noqa: ANN401  # a module that need not be installed
    """A module of one of the project's extras; skips the test where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        lacks(name.partition(".")[0], f"pip install 'dledger[{extra}]'")


def need_root(why: str = "") -> None:
    """Skip the test unless root runs it."""
    if os.geteuid() != 0:
        lacks(ROOT, AS_ROOT + (f": {why}" if why else ""))


def summary(reasons: Iterable[str]) -> list[str]:
    """One line per lacking thing, from the reasons of all skipped tests; and one per other reason."""
    counts: dict[str, int] = {}
    hints: dict[str, str] = {}
    for reason in reasons:
        match = _REASON.search(reason)
        name = match["thing"] if match else reason.removeprefix("Skipped: ")
        hints.setdefault(name, match["install"] if match else "")
        counts[name] = counts.get(name, 0) + 1
    return [
        f"no {name}: {count} test{'' if count == 1 else 's'} skipped ({hints[name]})"
        if hints[name]
        else f"{name}: {count} test{'' if count == 1 else 's'} skipped"
        for name, count in sorted(counts.items())
    ]
