"""A Delta table that follows a topic, while a producer sends all it can: ``dledger pipeline table`` as it is run.

Everything is read from the table itself afterwards: each commit has its time, the number of its rows and the time when
the oldest of them was stored.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.processes import REPOSITORY, end
from benchmarks.registry import Scenario, constant
from benchmarks.scenarios.spark_live import FOLLOWED_SECONDS, PATIENCE_SECONDS, QUEUES, SETTLE_SECONDS
from benchmarks.sending import send_count
from benchmarks.targets import OWN_P50, SENT_MEANWHILE
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.message.message import Message

BODY: Final = os.urandom(200)
RATE_MAX: Final = 75_000
"""The producer's maximum rate per second: more than the table has to keep up with."""
TOPIC: Final = "table"
_WORKERS: Final = b"pyspark.daemon"


@dataclass(frozen=True, slots=True)
class TableCommit:
    """One commit: when (seconds since 1970), how many rows, and when the oldest of them was stored."""

    at: float
    rows: int
    oldest: float


def commits(table: Path) -> list[TableCommit]:
    """Those with rows, in order, as their files say it."""
    found = []
    for file in sorted((table / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        added = [json.loads(one["add"]["stats"]) for one in actions if "add" in one]
        at = next(one["commitInfo"]["timestamp"] for one in actions if "commitInfo" in one) / 1000
        if added:
            oldest = min(datetime.fromisoformat(one["minValues"]["storeTimestamp"]) for one in added)
            found.append(TableCommit(at, sum(one["numRecords"] for one in added), oldest.timestamp()))
    return found


class TableProcess:
    """The job, in a process of its own with Spark's JVM and workers. A context manager, which ends it."""

    def __init__(self, context: Context, brokers: LocalBrokers) -> None:
        self.table = context.directory / "spark-table"
        scratch = context.directory / "spark-table-scratch"
        words = [sys.executable, "-m", "dledger_spark.jobs.table", "--master", "local[2]", "--json"]
        words += ["-b", ",".join(brokers.addresses), "-g", brokers.name, "-t", TOPIC, "-o", str(self.table)]
        words += ["--read-from", "follower", "--trigger", "1"]
        for name, value in {"spark.driver.memory": "1g", "spark.local.dir": str(scratch)}.items():
            words += ["--conf", f"{name}={value}"]
        log = context.directory / "spark-table.log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                words,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._log = log

    def __enter__(self) -> TableProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(PATIENCE_SECONDS)
        finally:
            end(self.process)

    def rows(self) -> int:
        """How many rows the table has. Raises ``RuntimeError`` if the job has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the job has ended: {self._log.read_text(errors='replace')[-2000:]}")
        return sum(one.rows for one in commits(self.table))

    def wait_rows(self, count: int) -> None:
        """Until the table has so many rows. Raises ``RuntimeError``."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (there := self.rows()) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the table has {there} rows of {count} after {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.2)

    def worker_megabytes(self) -> float:
        """The most that one of the Python workers has ever had in memory."""
        peaks = [0]
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if os.getsid(int(place.name)) == self.process.pid and _WORKERS in (place / "cmdline").read_bytes():
                    lines = (place / "status").read_text().splitlines()
                    peaks += [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
            except (FileNotFoundError, ProcessLookupError):
                continue
        return max(peaks) * 1024 / 1e6


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Send and follow at the same time; then wait until the table has everything."""
    with ExitStack() as stack:
        brokers = stack.enter_context(LocalBrokers(context.directory / "spark-table-brokers"))
        brokers.master()
        with Admin(brokers.addresses, timeout_s=30) as admin:
            admin.put_topic(TopicInfo(TOPIC, QUEUES, QUEUES))
        producer = stack.enter_context(Producer(brokers.addresses, timeout_s=60))
        follower = stack.enter_context(TableProcess(context, brokers))
        send_count(producer, Message(TOPIC, BODY), 1000)
        follower.wait_rows(1000)
        warm = context.settings.sized(int(RATE_MAX * SETTLE_SECONDS))
        send_count(producer, Message(TOPIC, BODY), warm, RATE_MAX)
        began, before = time.time(), follower.rows()
        count = int(RATE_MAX * max(context.settings.seconds, FOLLOWED_SECONDS * context.settings.share))
        sent = send_count(producer, Message(TOPIC, BODY), count, RATE_MAX)
        follower.wait_rows(1000 + warm + count)
        memory = follower.worker_megabytes()
    made = [one for one in commits(follower.table) if one.at > began]
    ages = [one.at - one.oldest for one in made]
    if "spark_table" in names:
        rate = (1000 + warm + count - before) / (made[-1].at - began)
        yield Figure("spark_table", rate, "messages/s", SENT_MEANWHILE, sent)
    if "spark_table_lag" in names:
        yield Figure("spark_table_lag", max(ages), "s", OWN_P50, stats.median(ages))
    if "spark_table_memory" in names:
        yield Figure("spark_table_memory", memory, "MB", "", None)


SCENARIO: Final = Scenario(
    "a Delta table that follows a topic",
    ("spark_table", "spark_table_lag", "spark_table_memory"),
    measure,
    constant(12),
)
