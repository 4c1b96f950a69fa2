"""Export under kill -9: whatever is killed when, what readers see is whole, and in the end every row is there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from pipeline.jobs.batches import MANIFEST
from tests.pipeline.jobs.logs import bodies, write_log
from tests.support.spark import ROOT
from tests.support.waiting import wait_until

COUNT = 6_000
KILLS = 3
START_S = 300.0


def _start(log: Path, out: Path, errors: Path) -> subprocess.Popen[bytes]:
    """A run with many small batches."""
    words = [str(log), "--out", str(out), "--batch-bytes", "200k", "--master", "local[2]", "--json"]
    words += ["--conf", "spark.driver.memory=1g", "--conf", f"spark.local.dir={errors.parent / 'local'}"]
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.jobs.export", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=errors.open("ab"),
        start_new_session=True,
    )


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


def _batches(out: Path) -> int:
    return len(list(out.glob(f"batch=*/{MANIFEST}")))


def _seen(out: Path) -> Counter[bytes]:
    """What a reader sees now, who knows nothing of Spark or of us."""
    if not out.is_dir():
        return Counter()
    return Counter(ds.dataset(out, partitioning="hive").to_table(columns=["body"])["body"].to_pylist())


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
        process = _start(log.directory, out, errors)
        sessions.append(process.pid)
        before = _batches(out)
        wanted = before + moments.randrange(1, 3)
        staged = moments.random() < 0.7

        def due(run: subprocess.Popen[bytes] = process, count: int = wanted, staging: bool = staged) -> bool:
            far = _batches(out) >= count
            return run.poll() is not None or (far and (not staging or any(out.glob("_state/staging-*/**/*.parquet"))))

        wait_until(due, f"batch {wanted}: {errors.read_text()[-2000:] if errors.exists() else ''}", START_S)
        if process.poll() is None:
            killed += 1
            _kill(_processes(process.pid) if round_number % 2 else [process.pid])
        process.wait()
        seen = _seen(out)
        assert seen <= expected, "a row is there twice, or is none of the log's"
        wait_until(partial(_all_gone, process.pid), "the JVM ends with its driver", START_S)

    last = _start(log.directory, out, errors)
    sessions.append(last.pid)
    assert last.wait(timeout=START_S) == 0, errors.read_text()[-4000:]

    assert killed >= KILLS - 1
    assert _seen(out) == expected
    assert not list(out.glob("_state/staging-*"))
