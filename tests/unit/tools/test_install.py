"""The installation before anything is installed: what it says, and what it makes of a half-done one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import install

ROOT = Path(__file__).parents[3]


def test_what_an_interrupted_installation_left_is_installed_again(tmp_path: Path) -> None:
    """pip takes a package without INSTALLER, which it writes last, for installed."""
    for name, whole in (("half-1.0", False), ("whole-2.0", True)):
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "METADATA").touch()
        if whole:
            (tmp_path / f"{name}.dist-info" / "INSTALLER").touch()

    assert install.remove_unfinished(tmp_path) == ["half"]
    assert [one.name for one in tmp_path.iterdir()] == ["whole-2.0.dist-info"]
    assert install.remove_unfinished(tmp_path) == []


def test_progress_keeps_within_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """How many of how many, and what is being downloaded; never wider than the terminal."""
    progress = install.PipProgress(2, 40)
    for line in (
        "Collecting numpy==2.4.6 (from -r requirements.lock (line 364))\n",
        "  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl (16.9 MB)\n",
        "Requirement already satisfied: typing_extensions==4.1 in x\n",
        "Installing collected packages: numpy\n",
        "noise\n",
        f"Collecting {'long' * 20}\n",
    ):
        progress.take(line)
    progress.clear()

    shown = capsys.readouterr().out.split("\r\x1b[K")[1:]
    assert shown[:4] == ["[1/2] numpy", "[1/2] numpy: downloading 16.9 MB", "[2/2] typing_extensions", "unpacking"]
    assert shown[5:] == [""]
    assert max(map(len, shown)) == 39


def test_a_pipe_gets_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be one line for each package."""
    progress = install.PipProgress(2, None)
    progress.take("Collecting numpy\n")
    progress.clear()

    assert capsys.readouterr().out == ""


def test_a_failure_shows_the_end_of_what_pip_said(capfd: pytest.CaptureFixture[str]) -> None:
    """And is the exit code."""
    code = install.run_pip(["--no-index", "no-such-package-anywhere"], install.PipProgress(1, None))

    assert code != 0
    assert "no-such-package-anywhere" in capfd.readouterr().err


def test_it_needs_nothing_installed() -> None:
    """It is run by an environment that has pip alone."""
    words = [sys.executable, "-S", "-m", "tools.install", "--help"]

    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_demo_s_packages_are_those_of_the_tests() -> None:
    """Installed into one environment, in either order, neither changes what the other installed."""
    demos, everything = (
        set(re.findall(r"^([a-z0-9.-]+==[^ \\;]+)", (ROOT / name).read_text(), flags=re.MULTILINE))
        for name in ("cluster/deploy/requirements.lock", "requirements-dev.lock")
    )

    assert len(demos) > 20
    assert demos - everything == set()
    assert install.locked(ROOT / "cluster/deploy/requirements.lock") < len(demos), "numpy in two versions is one"
