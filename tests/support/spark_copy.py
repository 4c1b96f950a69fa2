"""A Spark application of its own: copies a group's log into a topic, until it has all there is now.

``python -m tests.support.spark_copy DIRECTORY READ WRITE MASTER [GATE]``: where checkpoint and Spark's files go, and
the options of the source and of the sink as JSON. As a stream, which goes on if it is killed and started again; or as
one job, if the sink is told a ``writerId``. The rows' bodies are numbers; with a ``Gate`` it stops where that says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rocketstore.client.blocking import Admin
from rocketstore.client.blocking_consumer import Consumer
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dledger_cli.local.brokers import LocalBrokers

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 300
ASK_EVERY_S: Final = 0.1
"""A broker that is asked without a pause takes a core from Spark."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A directory that says how far rows may go, by their numbers, and which process waits with the first that may not.

    What is before the gate in a partition goes on to the sink: so whoever is killed at the gate dies between rows.
    """

    directory: Path

    def open_to(self, number: int) -> None:
        """Let the rows below this number pass."""
        new = self.directory / "limit.new"
        new.write_text(str(number))
        new.replace(self.directory / "limit")  # at once: others read it at any time

    def keeper(self, number: int) -> int | None:
        """The process that has come to the row of this number and waits, if one has."""
        path = self._waits_at(number)
        return int(path.read_text()) if path.exists() else None

    def let_through(self, body: bytes) -> bytes:
        """Return the body once it may pass. In a worker of Spark."""
        number = int(body)
        if number == self._limit():
            new = self._waits_at(number).with_suffix(f".{os.getpid()}")
            new.write_text(str(os.getpid()))
            new.replace(self._waits_at(number))
        wait_until(lambda: number < self._limit(), f"row {number} may pass", PATIENCE_S)
        return body

    def _limit(self) -> int:
        return int((self.directory / "limit").read_text())

    def _waits_at(self, number: int) -> Path:
        return self.directory / f"waits-{number}"


class CopyProcess:
    """Runs it in a process group of its own, so that driver and JVM die together."""

    def __init__(
        self,
        directory: Path,
        read: Mapping[str, str],
        write: Mapping[str, str],
        master: str = "local[2]",
        gate: Gate | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        words = [str(directory), json.dumps(read), json.dumps(write), master]
        words += [] if gate is None else [str(gate.directory)]
        self._log = directory / "copy.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.spark_copy", *words],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> CopyProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """``kill -9``, if it runs."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finish(self, timeout_s: float) -> None:
        """Wait for its end, which must be a good one."""
        code = self._process.wait(timeout_s)
        assert code == 0, self.said()

    def said(self) -> str:
        """The last of what it has written."""
        return self._log.read_text(errors="replace")[-5000:]


def stored_count(sink: LocalBrokers, topic: str) -> int:
    """How many messages the topic has."""
    with Admin(sink.addresses, timeout_s=30) as admin:
        return _count(admin, topic)


def _count(admin: Admin, topic: str) -> int:
    return sum(one.max_offset for one in admin.queue_ranges(topic))


def wait_stored(sink: LocalBrokers, copy: CopyProcess, topic: str, count: int) -> None:
    """Until the topic has more than so many, or the copying has ended."""
    with Admin(sink.addresses, timeout_s=30) as admin:

        def there() -> bool:
            return copy.ended or _count(admin, topic) > count

        wait_until(there, f"{count} messages are copied", PATIENCE_S, poll_s=ASK_EVERY_S)


def stored_bodies(sink: LocalBrokers, topic: str) -> list[int]:
    """What the topic holds, as numbers, sorted; read by RocketMQ's own way, not Spark's."""
    found: list[int] = []
    with Consumer(sink.addresses, topics=topic, assign="all", start="first") as consumer:
        while len(found) < stored_count(sink, topic):
            found += [int(message.body) for message in consumer.poll(timeout_s=10)]
    return sorted(found)


def main(directory: str, read: str, write: str, master: str, gate: str = "") -> None:
    """The application."""
    from dledger_spark.session import spark_session

    conf = {
        "spark.driver.memory": "768m",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.local.dir": f"{directory}/local",
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    if gate:  # few rows at a time between the steps of a task, so that few stay with the one that waits
        conf |= {"spark.buffer.size": "4096", "spark.sql.execution.arrow.maxRecordsPerBatch": "100"}
    spark = spark_session(master, "copy", **conf)
    source, sink = json.loads(read), json.loads(write)
    if "writerId" in sink:
        frame = spark.read.format("dledger").schema("body binary").options(**source).load()
        gated(frame, gate).write.format("dledger").mode("append").options(**sink).save()
    else:
        frame = spark.readStream.format("dledger").schema("body binary").options(**source).load()
        writer = gated(frame, gate).writeStream.format("dledger").options(**sink).trigger(availableNow=True)
        writer.option("checkpointLocation", f"{directory}/checkpoint").start().awaitTermination()
    spark.stop()


def gated(frame: DataFrame, gate: str) -> DataFrame:
    """The rows, each when the gate lets it through; all of them where there is none."""
    if not gate:
        return frame
    from pyspark.sql import functions as f
    from pyspark.sql.types import BinaryType

    from tests.support.spark_copy import Gate  # by its name: workers do not know what runs as __main__

    let_through = f.udf(Gate(Path(gate)).let_through, BinaryType(), useArrow=False)
    return frame.select(let_through("body").alias("body"))


if __name__ == "__main__":
    main(*sys.argv[1:])
