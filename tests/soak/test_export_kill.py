"""Export under kill -9: whatever is killed when, what readers see is whole, and in the end every row is there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.spark.jobs.logs import bodies, write_log
from tests.support.job_runs import batches, end_of, is_staging, seen, start_export
from tests.support.waiting import wait_until

COUNT = 6_000
KILLS = 3
START_S = 300.0
HERE = "local[2]"


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def sessions() -> Iterator[list[int]]:
    """Runs that were started: what is left of them ends with the test."""
    started: list[int] = []
    yield started
    for one in started:
        _kill(_processes(one))


def _processes(group: int) -> list[int]:
    """The processes of a session: the driver, its JVM, the Python workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _all_gone(session: int) -> bool:
    return not _processes(session)


def test_an_export_survives_kills_of_the_driver_and_of_everything(tmp_path: Path, sessions: list[int]) -> None:
    """At random moments of staging, publishing and planning; the driver alone, or with its JVM and workers."""
    log = write_log(tmp_path / "log", COUNT, segment_bytes=1 << 20)
    out, errors = tmp_path / "out", tmp_path / "errors"
    expected = bodies(log)
    moments = random.Random(5)
    killed = 0
    for round_number in range(KILLS):
        process = start_export(log.directory, out, errors, HERE)
        sessions.append(process.pid)
        wanted = batches(out) + moments.randrange(1, 3)
        staged = moments.random() < 0.7

        def due(run: subprocess.Popen[bytes] = process, count: int = wanted, staging: bool = staged) -> bool:
            far = batches(out) >= count
            return run.poll() is not None or (far and (not staging or is_staging(out)))

        wait_until(due, f"batch {wanted}: {end_of(errors)}", START_S)
        if process.poll() is None:
            killed += 1
            _kill(_processes(process.pid) if round_number % 2 else [process.pid])
        process.wait()
        assert seen(out) <= expected, "a row is there twice, or is none of the log's"
        wait_until(partial(_all_gone, process.pid), "the JVM ends with its driver", START_S)

    last = start_export(log.directory, out, errors, HERE)
    sessions.append(last.pid)
    assert last.wait(timeout=START_S) == 0, end_of(errors)

    assert killed >= KILLS - 1
    assert seen(out) == expected
    assert not list(out.glob("_state/staging-*"))
