"""Jobs on a Spark cluster of a master and two workers: the same answers as on one machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.spark_standalone import Cluster
from pipeline.packaging import write_zip
from tests.pipeline.jobs.logs import bodies, write_log
from tests.support.log_bytes import DiskLog
from tests.support.spark_cluster import ROOT, environment
from tests.support.spark_cluster import cluster as cluster

RECORDS = 4000
JOB_TIMEOUT_S = 400


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DiskLog:
    """A log directory of several segments."""
    return write_log(tmp_path_factory.mktemp("log"), RECORDS)


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
