"""A Spark cluster of a master and two workers for tests, and its executors, which tests kill.

``cluster`` is the fixture: import it, and name it as an argument of a test. Each worker has one core, so that two tasks
run at a time, each in an executor of its own.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.support.spark import need_java
from tools import spark_standalone
from tools.spark_standalone import Options, StandaloneCluster

ROOT: Final = Path(__file__).parents[2]
WORKERS: Final = 2
SMALL: Final = {"spark.executor.memory": "512m", "spark.executor.cores": "1"}
"""What an application needs to say to have an executor on each worker."""
_EXECUTOR: Final = b"CoarseGrainedExecutorBackend"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """Running, and at the end gone with all its processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # executors inherit it from the workers
        yield from _running(tmp_path_factory.mktemp("spark-cluster"))


@pytest.fixture(scope="module")
def bare_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """The same, whose executors do not find this source tree by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        yield from _running(tmp_path_factory.mktemp("bare-spark-cluster"))


def libraries_only(directory: Path) -> Path:
    """An environment that has the libraries of this one, and none of our packages; its interpreter."""
    venv.create(directory, with_pip=False)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
    (own / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # its own .pth files do not count there
    return directory / "bin" / "python"


def _running(directory: Path) -> Iterator[StandaloneCluster]:
    need_java()
    made = spark_standalone.start(Options(directory, workers=WORKERS, port=0, ui_port=0))
    yield made
    spark_standalone.stop(directory)
    assert not any(process.alive for process in made.processes)


def environment() -> Mapping[str, str]:
    """Of whoever drives a job from this source tree."""
    return os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}


def executors(cluster: StandaloneCluster) -> list[int]:
    """The processes of its executors: what its workers have started."""
    workers = {process.pid for process in cluster.processes}
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        try:
            if _EXECUTOR in path.read_bytes() and parent_of(pid) in workers:
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def executor_of(cluster: StandaloneCluster, pid: int) -> int:
    """The executor that a process of Python works for; fails if it is nobody's."""
    known = executors(cluster)
    while pid > 1:
        if pid in known:
            return pid
        pid = parent_of(pid)
    raise AssertionError(f"none of the executors {known} has such a process")


def parent_of(pid: int) -> int:
    """Who has started a process. Raises ``FileNotFoundError``, ``ProcessLookupError``."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])
