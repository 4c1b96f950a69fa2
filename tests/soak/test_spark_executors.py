"""kill -9 of executors on a Spark cluster, in the middle of what they read and write: no row is lost, none is twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin
from tests.spark.jobs.logs import bodies, write_log
from tests.support.job_runs import batches, end_of, is_staging, seen, start_export
from tests.support.log_bytes import DiskLog
from tests.support.spark_cluster import SMALL, WORKERS, environment, executor_of, executors
from tests.support.spark_cluster import cluster as cluster
from tests.support.spark_copy import CopyProcess, Gate, stored_bodies, wait_stored
from tests.support.waiting import wait_until
from tools.spark_standalone import StandaloneCluster

ENTRIES: Final = 20_000
BODY_BYTES: Final = 200
HELD_AT: Final = (1500, 8700, 16_000)
"""Rows at which the copying waits until an executor is dead: none is near a boundary of partitions or batches."""
ON_THEIR_WAY: Final = 600
"""Of the rows before such a one, at most so many are not in the sink yet."""
RECORDS: Final = 4000
KILLS: Final = 3
PATIENCE_S: Final = 400

HELD_COUNT = """
import sys
from pathlib import Path
from dledger_spark import spark_session
from tests.support.waiting import wait_until

_, master, directory, tasks, *settings = sys.argv
running, killed = Path(tasks), Path(tasks) / "killed"

def held(partition, rows):
    (running / f"task-{partition}").touch()
    wait_until(killed.exists, "an executor is dead", 300)
    return rows

spark = spark_session(master, **dict(setting.split("=") for setting in settings))
frame = spark.read.format("dledger").option("splitBytes", "64k").load(directory)
found = sorted(bytes(row.body).decode() for row in frame.select("body").rdd.mapPartitionsWithIndex(held).collect())
print(len(found), len(set(found)), frame.rdd.getNumPartitions())
spark.stop()
"""


def test_a_job_that_reads(cluster: StandaloneCluster, tmp_path: Path) -> None:
    """Of two executors with a task each one dies: its task runs again elsewhere."""
    log = write_log(tmp_path / "log", RECORDS)
    script, tasks = tmp_path / "job.py", tmp_path / "tasks"
    script.write_text(HELD_COUNT)
    tasks.mkdir()
    words = [sys.executable, str(script), cluster.master, str(log.directory), str(tasks)]
    words += [f"{name}={text}" for name, text in SMALL.items()]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as driver:

        def due() -> bool:
            return driver.poll() is not None or len(list(tasks.glob("task-*"))) >= WORKERS

        wait_until(due, "every executor has a task", PATIENCE_S)
        kill(executors(cluster)[:1])
        (tasks / "killed").touch()
        said, complaints = driver.communicate(timeout=PATIENCE_S)

    assert driver.returncode == 0, complaints
    rows, distinct, partitions = map(int, said.split())
    assert (rows, distinct) == (sum(bodies(log).values()), len(bodies(log)))
    assert partitions > WORKERS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroup]:
    """A group whose log holds numbers."""
    with LocalGroup(tmp_path_factory.mktemp("source"), size=1) as group:
        with group.client(60) as client:
            for number in range(ENTRIES):
                client.submit((b"%d" % number).ljust(BODY_BYTES))
        yield group


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBrokers]:
    """A broker that remembers its producers."""
    with LocalBrokers(tmp_path_factory.mktemp("sink"), size=1) as brokers:
        brokers.master()
        yield brokers


@pytest.mark.parametrize(
    ("topic", "reading", "writing"),
    [
        ("streamed", {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "5000", "minPartitions": "2"}, {}),
        ("written", {"minPartitions": "6"}, {"writerId": "job"}),
    ],
    ids=["stream", "job"],
)
def test_what_reads_a_group_and_writes_into_another(
    cluster: StandaloneCluster,
    source: LocalGroup,
    sink: LocalBrokers,
    tmp_path: Path,
    topic: str,
    reading: dict[str, str],
    writing: dict[str, str],
) -> None:
    """A task dies when part of its rows is stored: alone, with all others, alone. What repeats it adds the rest."""
    with Admin(sink.addresses, timeout_s=30) as admin:
        admin.put_topic(TopicInfo(topic, 4, 4))
    read = {"bootstrap.servers": ",".join(source.addresses), "group": source.name, **reading}
    write = {"bootstrap.servers": ",".join(sink.addresses), "topic": topic, **writing}
    gate = Gate(tmp_path)
    gate.open_to(HELD_AT[0])
    with CopyProcess(tmp_path / "copy", read, write, cluster.master, gate) as copy:
        for number, opened_to in zip(HELD_AT, (*HELD_AT[1:], ENTRIES), strict=True):
            victim = executor_of(cluster, wait_held(gate, copy, number))
            wait_stored(sink, copy, topic, number - ON_THEIR_WAY)
            kill(executors(cluster) if number == HELD_AT[1] else [victim])
            gate.open_to(opened_to)
        copy.finish(PATIENCE_S)

    assert stored_bodies(sink, topic) == list(range(ENTRIES))


def test_an_export_read_by_others(cluster: StandaloneCluster, tmp_path: Path) -> None:
    """All executors die while Parquet files are written, thrice: pyarrow never sees a row twice, in the end all."""
    log: DiskLog = write_log(tmp_path / "log", RECORDS, segment_bytes=1 << 20)
    out, errors = tmp_path / "out", tmp_path / "errors"
    expected = bodies(log)
    run = start_export(log.directory, out, errors, cluster.master, **SMALL)
    try:
        for published in range(KILLS):

            def due(count: int = published) -> bool:
                return run.poll() is not None or (batches(out) >= count and is_staging(out))

            wait_until(due, f"batch {published}: {end_of(errors)}", PATIENCE_S)
            assert run.poll() is None, end_of(errors)
            kill(executors(cluster))
            assert seen(out) <= expected
        code = run.wait(PATIENCE_S)
    finally:
        run.kill()
        run.wait()

    assert code == 0, end_of(errors)
    assert seen(out) == expected


def wait_held(gate: Gate, copy: CopyProcess, number: int) -> int:
    """Which process waits with the row of this number, as soon as one does."""
    wait_until(lambda: copy.ended or gate.keeper(number) is not None, f"row {number} is held", PATIENCE_S)
    keeper = gate.keeper(number)
    assert keeper is not None, copy.said()
    return keeper


def kill(pids: list[int]) -> None:
    """kill -9; there must be somebody to die."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
