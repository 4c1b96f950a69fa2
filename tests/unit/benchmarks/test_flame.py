"""Flame graphs of a leader: what is asked of py-spy, and what becomes of its answer."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from benchmarks import flame
from benchmarks.processes import ChildError

DRAWS = """#!/bin/sh
echo "<svg><text>py-spy $*</text></svg>" >flame.svg
"""
REFUSES = """#!/bin/sh
echo "Permission Denied: Try running again with elevated permissions" >&2
exit 1
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that alone has programs, except the shell's own."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    return tmp_path


def install(programs: Path, script: str) -> None:
    """Something that goes by py-spy's name."""
    file = programs / "py-spy"
    file.write_text(script)
    file.chmod(stat.S_IRWXU)


def test_the_title_says_what_was_sampled(programs: Path) -> None:
    """Not py-spy's command line, with a process id that means nothing to a reader."""
    install(programs, DRAWS)

    assert flame.sample(os.getpid(), 1, "one <append>") == "<svg><text>one &lt;append&gt;</text></svg>\n"


def test_without_py_spy_it_says_what_to_install(programs: Path) -> None:
    """Before anything is measured for nothing."""
    with pytest.raises(ChildError, match=r"install the extra `bench` \(pip install py-spy\)"):
        flame.sample(os.getpid(), 1, "")


def test_what_py_spy_complains_of_is_told(programs: Path) -> None:
    """Looking into another process needs permission."""
    install(programs, REFUSES)

    with pytest.raises(ChildError, match=r"may need root[^\n]*\nPermission Denied"):
        flame.sample(os.getpid(), 1, "")
