"""The environment of ``make``: made once, and worked on by one process at a time."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from tools import environment, install

ROOT = Path(__file__).parents[3]


def test_a_second_installation_waits_for_the_first(tmp_path: Path) -> None:
    """It would take what the first one has half installed for left-overs, and remove them."""
    script = (
        "import sys; from pathlib import Path; from tools.environment import one_at_a_time\n"
        "with one_at_a_time(Path(sys.argv[1])): print('after the first:', Path(sys.argv[1], 'ready').exists())"
    )
    with (tmp_path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = [sys.executable, "-c", script, str(tmp_path)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == f"waiting for another installation into {tmp_path}\n"
            assert second.poll() is None
            (tmp_path / "ready").touch()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert second.stdout.read() == "after the first: True\n"


def test_an_installation_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it removes left-overs and while pip runs."""
    held: list[str] = []

    def look(what: str) -> int:
        with (tmp_path / ".lock").open("a") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(what)
        return 0

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(install, "remove_unfinished", lambda _: look("left-overs"))
    monkeypatch.setattr(install, "run_pip", lambda *_: look("pip"))

    assert install.main([str(ROOT / "requirements-dev.lock"), "--size", "x"]) == 0
    assert held == ["left-overs", "pip", "pip"]


def test_an_environment_that_cannot_be_written_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with a traceback."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "file"))

    assert install.main([str(ROOT / "requirements-dev.lock"), "--size", "x"]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'}: File exists\n"


def test_an_interrupted_environment_is_made_anew_and_a_whole_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was interrupted may lack anything; what else is in the directory stays."""
    made: list[str] = []

    def run(words: list[str], **_options: object) -> subprocess.CompletedProcess[bytes]:
        if words[1:3] == ["-m", "venv"]:
            made.append(words[3])
            (tmp_path / "bin").mkdir()
            (tmp_path / "bin" / "python").touch()
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "half").touch()
    (tmp_path / ".unfinished").touch()

    assert environment.make(tmp_path) == 0
    assert environment.make(tmp_path) == 0

    assert made == [str(tmp_path)]
    assert sorted(one.name for one in tmp_path.iterdir()) == [".lock", "bin"]
    assert [one.name for one in (tmp_path / "bin").iterdir()] == ["python"]


def test_an_environment_that_could_not_be_made_counts_as_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there of it is no environment, even if it has a pip: the next make begins anew."""
    codes = [1, 0]

    def run(words: list[str], **_options: object) -> subprocess.CompletedProcess[bytes]:
        if words[1:3] != ["-m", "venv"]:
            return subprocess.CompletedProcess(words, 0)
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").touch()
        return subprocess.CompletedProcess(words, codes.pop(0))

    monkeypatch.setattr(subprocess, "run", run)

    assert [environment.make(tmp_path) for _ in range(3)] == [1, 0, 0]
    assert not codes
