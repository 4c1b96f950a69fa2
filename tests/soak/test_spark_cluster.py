"""Jobs on a Spark cluster of a master and two workers: the same answers as on one machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dledger_spark.packaging import PACKAGES, write_zip
from tests.spark.jobs.logs import bodies, write_log
from tests.support.log_bytes import DiskLog
from tests.support.spark_cluster import ROOT, environment, libraries_only
from tests.support.spark_cluster import bare_cluster as bare_cluster
from tests.support.spark_cluster import cluster as cluster
from tools.spark_standalone import StandaloneCluster

RECORDS = 4000
JOB_TIMEOUT_S = 400


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DiskLog:
    """A log directory of several segments."""
    return write_log(tmp_path_factory.mktemp("log"), RECORDS)


def test_a_job_gives_on_a_cluster_what_it_gives_here(cluster: StandaloneCluster, log: DiskLog) -> None:
    """``dledger pipeline … --master``."""
    words = [sys.executable, "-m", "dledger_cli.entry", "pipeline", "stats", str(log.directory), "--json"]
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


def test_spark_submit_ships_the_packages(bare_cluster: StandaloneCluster, log: DiskLog, tmp_path: Path) -> None:
    """``--py-files`` with a zip of pure Python, on nodes that have only the libraries."""
    archive = tmp_path / "dledger.zip"
    write_zip(archive)
    python = libraries_only(tmp_path / "libraries")
    assert not finds_the_package(python, tmp_path)

    done = submit(bare_cluster, python, ROOT, log, tmp_path, "--py-files", str(archive))

    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["summary"]["messages"] == sum(bodies(log).values())


def test_spark_submit_runs_what_a_wheel_has_installed(
    bare_cluster: StandaloneCluster, log: DiskLog, tmp_path: Path
) -> None:
    """Nodes find the packages, and Spark the format, without anything that is shipped, and without the source tree."""
    python = libraries_only(tmp_path / "installed")
    site = install_wheel(python, tmp_path)

    done = submit(bare_cluster, python, site, log, tmp_path)

    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["summary"]["messages"] == sum(bodies(log).values())


def submit(
    cluster: StandaloneCluster, python: Path, packages: Path, log: DiskLog, directory: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    """Job ``stats``, from where the packages are, with this interpreter on the driver and on executors."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    job = [str(packages / "dledger_spark" / "jobs" / "stats.py"), str(log.directory), "--json"]
    return subprocess.run(
        [
            *(str(Path(sys.executable).with_name("spark-submit")), "--master", cluster.master),
            *("--conf", "spark.executor.memory=512m", *words, *job),
        ],
        capture_output=True,
        text=True,
        env=inherited
        | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)},
        cwd=directory,
        timeout=JOB_TIMEOUT_S,
        check=False,
    )


def finds_the_package(python: Path, directory: Path) -> bool:
    """Whether an environment has it installed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import importlib.util; raise SystemExit(importlib.util.find_spec('dledger_spark') is None)"
    return subprocess.run([python, "-c", code], env=inherited, cwd=directory, check=False).returncode == 0


def install_wheel(python: Path, directory: Path) -> Path:
    """Build one of a copy of the sources, for setuptools leaves files beside them; gives where it is installed."""
    source = directory / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*PACKAGES, "dledger_cli"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    site = next((python.parents[1] / "lib").glob("python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    made = directory / "wheel"
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(made), str(source)],
        check=True,
        capture_output=True,
    )
    (wheel,) = made.glob("dledger-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, capture_output=True)
    shutil.rmtree(source)
    return site
