"""A Spark application of its own: copies a group's log into a topic, as a stream, until it has all there is now.

``python -m tests.support.spark_copy DIRECTORY READ WRITE``: where checkpoint and Spark's files go, and the options of
the source and of the sink as JSON. Killed and started again, it goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


class CopyProcess:
    """Runs it in a process group of its own, so that driver and JVM die together."""

    def __init__(self, directory: Path, read: Mapping[str, str], write: Mapping[str, str]) -> None:
        directory.mkdir(exist_ok=True)
        self._log = directory / "copy.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.spark_copy", str(directory), json.dumps(read), json.dumps(write)],
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
        assert code == 0, self._log.read_text(errors="replace")[-5000:]


def main(directory: str, read: str, write: str) -> None:
    """The application."""
    from pipeline.session import spark_session

    conf = {
        "spark.driver.memory": "768m",
        "spark.local.dir": f"{directory}/local",
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = spark_session("local[2]", "copy", **conf)
    frame = spark.readStream.format("dledger").schema("body binary").options(**json.loads(read)).load()
    writer = frame.writeStream.format("dledger").options(**json.loads(write)).trigger(availableNow=True)
    query = writer.option("checkpointLocation", f"{directory}/checkpoint").start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
