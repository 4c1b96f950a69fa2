"""A Spark session that follows a running group and writes to it: ``python -m benchmarks.children.spark_live``.

Commands are JSON on stdin, responses JSON on stdout. ``drain`` reads a topic as a stream from the beginning to its
current end; ``follow`` reads it as it grows, until ``stop``, and ``seen`` returns the age of each batch's oldest
message when the batch was done; ``sink`` writes rows to a topic.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SCHEMA: Final = "topic string, storeTimestamp timestamp, body binary"
BATCH_ROWS_MAX: Final = 500_000


class SeenBatches:
    """The rows that a stream has read, by batch."""

    def __init__(self) -> None:
        self.rows = 0
        self.began = 0.0
        self.ended = 0.0
        self.oldest_seconds: list[float] = []

    def take(self, batch: DataFrame, _batch_id: int) -> None:
        """Read every row."""
        from pyspark.sql import functions as f

        sums = (f.count("*"), f.sum(f.length("body")), f.min(f.unix_millis("storeTimestamp")))
        rows, _, oldest_ms = batch.agg(*sums).collect()[0]
        if rows:
            self.rows += rows
            self.ended = time.time()
            self.oldest_seconds.append(self.ended - oldest_ms / 1000)


def stream(
    spark: SparkSession,
    command: dict[str, Any],
    seen: SeenBatches,
    scratch: Path,
    **trigger: Any,  # noqa: ANN401  # Spark's
) -> StreamingQuery:
    """Start reading."""
    options = {**command["options"], "maxOffsetsPerTrigger": str(BATCH_ROWS_MAX), "minPartitions": "2"}
    frame = spark.readStream.format("dledger").schema(SCHEMA).options(**options).load()
    checkpoint = scratch / f"checkpoint-{time.monotonic_ns()}"
    writer = frame.writeStream.foreachBatch(seen.take).option("checkpointLocation", str(checkpoint))
    seen.began = time.time()
    return writer.trigger(**trigger).start()


def write(spark: SparkSession, command: dict[str, Any]) -> None:
    """Write rows with random-looking bodies to a topic, with two tasks."""
    from pyspark.sql import functions as f

    count, size = int(command["rows"]), int(command["bytes"])
    body = f.rpad(f.sha2(f.col("id").cast("string"), 256), size, "x").alias("body")
    frame = spark.range(0, count, 1, 2).select(body, f.col("id").cast("string").alias("keys"))
    frame.write.format("dledger").mode("append").options(**command["options"]).save()


def start(scratch: Path) -> SparkSession:
    """Create the session."""
    from dledger_spark.session import spark_session

    settings = {
        "spark.driver.memory": "1g",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch),
        "spark.sql.shuffle.partitions": "2",
    }
    return spark_session("local[2]", "dledger-bench", **settings)


def main() -> None:
    """Serve until stdin closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # Spark may print to stdout
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    scratch = Path(sys.argv[1])
    spark = start(scratch)
    query: StreamingQuery | None = None
    seen = SeenBatches()
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, object] = {}
        match command["do"]:
            case "drain":
                seen = SeenBatches()
                stream(spark, command, seen, scratch, availableNow=True).awaitTermination()
                answer = {"rows": seen.rows, "seconds": seen.ended - seen.began}
            case "follow":
                seen = SeenBatches()
                query = stream(spark, command, seen, scratch, processingTime="500 milliseconds")
            case "seen":
                answer = {"rows": seen.rows, "began": seen.began, "ended": seen.ended, "oldest": seen.oldest_seconds}
            case "stop" if query is not None:
                query.stop()
            case "sink":
                began = time.perf_counter()
                write(spark, command)
                answer = {"seconds": time.perf_counter() - began}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    spark.stop()


if __name__ == "__main__":
    main()
