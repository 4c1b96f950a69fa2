"""A Spark session that scans: ``python -m benchmarks.children.spark_scan``, commands as JSON on stdin.

It is a separate process because it is pinned to certain processors, together with everything it starts: the JVM, the
Python workers. ``start`` creates the session; ``scan`` runs the query once over a log or a Parquet directory and
returns the time; ``convert`` writes the log's rows as Parquet; ``memory`` returns the peak memory of any Python worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.spark_data import ORDER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: Final = (
    "index bigint, topic string, queueId int, queueOffset bigint, flag int, sysFlag int, bornTimestamp timestamp, "
    "storeTimestamp timestamp, properties string, body binary"
)
"""The columns read by a job that needs everything."""
HEADERS: Final = "queueId int, queueOffset bigint, sysFlag int, storeTimestamp timestamp, bodyLength int"
"""Columns from the headers of records; includes body lengths, so that the query is the same."""
_QUERIES: Final = {
    "all": ("count(*)", "sum(length(body))", "max(storeTimestamp)"),
    "headers": ("count(*)", "sum(bodyLength)", "max(storeTimestamp)"),
    "typed": ("count(*)", "sum(length(note))", "sum(total)", "max(id)", "max(item)"),
}
"""What is computed of each choice of columns, so that all are read."""
_KIB: Final = 1024


def rows(spark: SparkSession, command: dict[str, Any]) -> DataFrame:  # Any: the values of a JSON object
    """The data frame named in a command."""
    if command["format"] == "parquet":
        return spark.read.parquet(command["path"])
    reader = spark.read.format("dledger")
    if command["columns"] == "typed":
        reader = reader.schema(ORDER).options(bodyFormat="json", bodySchema=ORDER)
    else:
        reader = reader.schema(HEADERS if command["columns"] == "headers" else COLUMNS)
    return reader.options(splitBytes=command.get("split", "256m")).load(command["path"])


def scan(frame: DataFrame, columns: str) -> int:
    """Read every row, with these columns: the number of rows."""
    return int(frame.selectExpr(*_QUERIES[columns]).collect()[0][0])


def start(command: dict[str, Any]) -> SparkSession:
    """Create the session, on as many processors as there are task threads."""
    from dledger_spark.session import spark_session

    threads = int(command["threads"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
    settings = {
        "spark.driver.memory": "2g",
        "spark.local.dir": command["scratch"],
        "spark.sql.warehouse.dir": command["scratch"],
        "spark.sql.parquet.compression.codec": "snappy",
        "spark.sql.files.maxPartitionBytes": "256m",
    }
    return spark_session(f"local[{threads}]", "dledger-bench", **settings)


def worker_peak_bytes() -> int:
    """The peak memory of any Python process below this one."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines() if ":" in line)
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields["PPid"])
        if fields["Name"].strip().startswith("python"):
            peaks[pid] = int(fields.get("VmHWM", "0").split()[0]) * _KIB
    return max((peak for pid, peak in peaks.items() if _is_below(pid, os.getpid(), parents)), default=0)


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    pid = parents.get(pid, 0)
    while pid and pid != ancestor:
        pid = parents.get(pid, 0)
    return pid == ancestor


def main() -> None:
    """Serve until stdin closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # Spark may print to stdout
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spark: SparkSession | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, object] = {}
        if spark is None:
            spark = start(command)
        elif command["do"] == "scan":
            frame = rows(spark, command)
            began = time.perf_counter()
            answer["rows"] = scan(frame, command["columns"])
            answer["seconds"] = time.perf_counter() - began
        elif command["do"] == "convert":
            rows(spark, command).write.mode("overwrite").parquet(command["target"])
        elif command["do"] == "memory":
            answer["bytes"] = worker_peak_bytes()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if spark is not None:
        spark.stop()


if __name__ == "__main__":
    main()
