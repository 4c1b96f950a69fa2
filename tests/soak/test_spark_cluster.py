"""Jobs on a Spark cluster of a master and two workers: the same answers as on one machine, also when executors die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster import spark_standalone
from cluster.spark_standalone import Cluster, Options
from pipeline.errors import JavaMissingError
from pipeline.packaging import write_zip
from tests.pipeline.jobs.logs import bodies, write_log
from tests.support.log_bytes import DiskLog
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
RECORDS = 4000
JOB_TIMEOUT_S = 400
EXECUTOR = b"CoarseGrainedExecutorBackend"

SLOW_COUNT = """
import sys, time
from pathlib import Path
from pipeline import spark_session

running = sys.argv[3]

def slowly(rows):
    Path(running).touch()  # the first task runs
    time.sleep(1)
    return rows

spark = spark_session(sys.argv[1], **{"spark.executor.memory": "512m", "spark.executor.cores": "1"})
frame = spark.read.format("dledger").option("splitBytes", "64k").load(sys.argv[2])
found = sorted(bytes(row.body).decode() for row in frame.select("body").rdd.mapPartitions(slowly).collect())
print(len(found), len(set(found)), frame.rdd.getNumPartitions())
spark.stop()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Running, and at the end gone with all its processes."""
    directory = tmp_path_factory.mktemp("spark-cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # executors inherit it from the workers
        try:
            made = spark_standalone.start(Options(directory, port=0, ui_port=0))
        except JavaMissingError as error:
            pytest.skip(f"NOT TESTED ON A SPARK CLUSTER: {error}")
    yield made
    spark_standalone.stop(directory)
    assert not any(process.alive for process in made.processes)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DiskLog:
    """A log directory of several segments."""
    return write_log(tmp_path_factory.mktemp("log"), RECORDS)


def environment() -> Mapping[str, str]:
    """Of whoever drives a job from this source tree."""
    return os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}


def executors() -> list[int]:
    """The processes of executors on this machine that this user runs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if EXECUTOR in path.read_bytes() and path.stat().st_uid == os.getuid():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_a_job_gives_on_a_cluster_what_it_gives_here(cluster: Cluster, log: DiskLog) -> None:
    """``dledger pipeline … --master``."""
    words = [sys.executable, "-m", "cluster.entry", "pipeline", "stats", str(log.directory), "--json"]
    done = subprocess.run(
        [*words, "--master", cluster.master, "--conf", "spark.executor.memory=512m"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=JOB_TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["summary"]["messages"] == sum(bodies(log).values())


def test_killed_executors_lose_and_double_nothing(cluster: Cluster, log: DiskLog, tmp_path: Path) -> None:
    """kill -9 in the middle of a job: its tasks run again elsewhere."""
    script, running = tmp_path / "job.py", tmp_path / "running"
    script.write_text(SLOW_COUNT)
    words = [sys.executable, str(script), cluster.master, str(log.directory), str(running)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as driver:
        wait_until(lambda: running.exists() or driver.poll() is not None, "the first task", JOB_TIMEOUT_S)
        ours = executors()
        assert ours
        os.kill(ours[0], signal.SIGKILL)
        said, complaints = driver.communicate(timeout=JOB_TIMEOUT_S)

    assert driver.returncode == 0, complaints
    rows, distinct, partitions = map(int, said.split())
    assert (rows, distinct) == (sum(bodies(log).values()), len(bodies(log)))
    assert partitions > 2


def test_spark_submit_ships_the_packages(cluster: Cluster, log: DiskLog, tmp_path: Path) -> None:
    """``--py-files`` with a zip of pure Python, on nodes that have only the libraries."""
    archive = tmp_path / "dledger.zip"
    write_zip(archive)
    submit = Path(sys.executable).with_name("spark-submit")
    words = [str(submit), "--master", cluster.master, "--conf", "spark.executor.memory=512m"]
    job = [str(ROOT / "pipeline" / "jobs" / "stats.py"), str(log.directory), "--json"]
    without_source = {name: value for name, value in environment().items() if name != "PYTHONPATH"}

    done = subprocess.run(
        [*words, "--py-files", str(archive), *job],
        capture_output=True,
        text=True,
        env=without_source | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_DRIVER_PYTHON": sys.executable},
        cwd=tmp_path,
        timeout=JOB_TIMEOUT_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)
