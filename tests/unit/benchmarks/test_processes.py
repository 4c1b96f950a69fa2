"""Children of the benchmarks: spoken to, bounded in time, and gone afterwards."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.processes import ChildError, PythonChild, end, spawn_daemon

ECHO = """
import json, sys
for line in sys.stdin:
    command = json.loads(line)
    if command == {"do": "fail"}:
        raise SystemExit("the reason")
    sys.stdout.write(json.dumps({"got": command, "more": "x" * 100_000}) + chr(10))
    sys.stdout.flush()
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PythonChild:
    """A child that answers with what it was told."""
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return PythonChild("echo_child", [], tmp_path / "child.log")


def test_a_child_answers_and_is_gone_afterwards(echo: PythonChild) -> None:
    """Answers longer than a pipe's buffer come whole; the block's end ends the process."""
    with echo:
        answer = echo.ask({"do": "this"}, 10.0)

    assert answer["got"] == {"do": "this"}
    assert len(answer["more"]) == 100_000
    assert echo.process.returncode is not None


def test_a_child_that_fails_says_why(echo: PythonChild) -> None:
    """The end of its stderr is in the error."""
    with echo, pytest.raises(ChildError, match="the reason"):
        echo.ask({"do": "fail"}, 10.0)


def test_a_silent_child_is_an_error(echo: PythonChild) -> None:
    """Nothing waits for ever."""
    with echo, pytest.raises(ChildError, match="did not answer"):
        echo.hear(0.01)


def test_ending_a_daemon_takes_effect_even_when_it_is_stopped(tmp_path: Path) -> None:
    """A process that a benchmark paused is continued, or it could never leave."""
    process = spawn_daemon([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    process.send_signal(signal.SIGSTOP)

    end(process)

    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
