"""kill -9 of executors, leader and driver under a table that follows a topic: it equals the topic, row for row."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from dledger_cli.local.brokers import LocalBrokers
from dledger_spark.jobs.source import LogSource
from dledger_spark.jobs.table import TableOptions, chosen_columns, projection_of, read_options
from dledger_spark.source.stream import LogStreamReader
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.message.message import Message
from tests.support.job_runs import end_of, start_table
from tests.support.spark_cluster import SMALL, executors
from tests.support.spark_cluster import cluster as cluster
from tests.support.waiting import POLL_S, wait_until
from tools.spark_standalone import StandaloneCluster

AT_ONCE: Final = 200
AHEAD_MAX: Final = 3000
"""How many more messages the topic has than the table, at most: so there is always some work, and never too much."""
ENTRIES_MAX: Final = 1000
"""Of a batch."""
PATIENCE_S: Final = 400


def test_a_table_equals_its_topic_whatever_dies(cluster: StandaloneCluster, tmp_path: Path) -> None:
    """An executor, all of them, the leader, the driver with its JVM, while messages come and batches are written."""
    out, errors = tmp_path / "table", tmp_path / "errors"
    with LocalBrokers(tmp_path / "brokers") as brokers, Sending(brokers, out) as sending:
        source = LogSource(bootstrap=",".join(brokers.addresses), group=brokers.name, topics=("orders",))

        def wait_committed(run: subprocess.Popen[bytes], more: int) -> None:
            """Until so many more versions are there, and a file that no version has yet."""
            wanted = version(out) + more
            wait_until(
                lambda: run.poll() is not None or (version(out) >= wanted and has_loose_files(out)),
                f"version {wanted}: {end_of(errors)}",
                PATIENCE_S,
            )
            assert run.poll() is None, end_of(errors)

        run = start_table(source, ENTRIES_MAX, out, errors, cluster.master, **SMALL)
        try:
            wait_committed(run, 2)
            kill(executors(cluster)[:1])
            wait_committed(run, 2)
            kill(executors(cluster))
            wait_committed(run, 2)
            leader = brokers.master()
            brokers.kill(leader)
            wait_committed(run, 2)
            brokers.start(leader)
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            between = DeltaTable(out).to_pyarrow_table(columns=["index"]).num_rows
            run = start_table(source, ENTRIES_MAX, out, errors, cluster.master, **SMALL)
            wait_committed(run, 2)
            sent = sending.stop()
            wait_until(lambda: run.poll() is not None or rows(out) >= sent, end_of(errors), PATIENCE_S)
            run.send_signal(signal.SIGINT)
            code = run.wait(PATIENCE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        assert code == 0, end_of(errors)
        wanted = topic(source, out)

    found = DeltaTable(out).to_pyarrow_table()
    assert 0 < between < found.num_rows == sent
    assert found.sort_by("index").to_pylist() == wanted.sort_by("index").to_pylist()


class Sending:
    """Sends numbered messages, some ahead of the table, until it is stopped, in a thread of its own."""

    def __init__(self, brokers: LocalBrokers, out: Path) -> None:
        self._brokers = brokers
        self._out = out
        self._stopped = threading.Event()
        self._sent = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sending:
        self._brokers.master()
        with Admin(self._brokers.addresses, timeout_s=30) as admin:
            admin.put_topic(TopicInfo("orders", 4, 4))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """How many were sent, each with its number."""
        self._stopped.set()
        self._thread.join()
        return self._sent

    def _run(self) -> None:
        with Producer(self._brokers.addresses, timeout_s=PATIENCE_S) as producer:
            while not self._stopped.wait(POLL_S):
                if self._sent - rows(self._out) > AHEAD_MAX:
                    continue
                numbers = range(self._sent, self._sent + AT_ONCE)
                producer.send_many([Message("orders", b"%d" % number) for number in numbers])
                self._sent += AT_ONCE


def version(out: Path) -> int:
    """The newest version of the table; -1 before there is one."""
    try:
        return DeltaTable(out).version()
    except TableNotFoundError:
        return -1


def rows(out: Path) -> int:
    """How many rows a reader sees."""
    if version(out) < 0:
        return 0
    return int(DeltaTable(out).to_pyarrow_table(columns=["index"]).num_rows)


def has_loose_files(out: Path) -> bool:
    """Whether files were written that belong to no version, or not yet."""
    return {one.name for one in out.glob("*.parquet")} > {Path(one).name for one in DeltaTable(out).file_uris()}


def topic(source: LogSource, out: Path) -> pa.Table:
    """The messages of the topic, from the log itself."""
    options = read_options(TableOptions(source, out))
    reader = LogStreamReader(options, projection_of(chosen_columns((), options, holds_messages=True)))
    start = reader.initialOffset()
    end = reader.reportLatestOffset() | {"initial": start["initial"]}
    return pa.Table.from_batches([batch for part in reader.partitions(start, end) for batch in reader.read(part)])


def kill(pids: list[int]) -> None:
    """kill -9; there must be somebody to die."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
