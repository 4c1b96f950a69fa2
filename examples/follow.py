"""Count a topic's messages per minute and tag while they come, exactly, also over kills: a Spark stream into Parquet.

With Spark and Java installed (``pip install '.[spark]'``) and brokers running::

    python examples/follow.py 127.0.0.1:10911 --topic orders --out /tmp/counts
    spark-submit --master spark://HOST:7077 examples/follow.py 127.0.0.1:10911 --topic orders --out /shared/counts

Ctrl-C ends it; started again with the same --out it goes on where it was. Add up what is there:
``spark.read.parquet("/tmp/counts/batch=*").groupBy("window", "tags").sum("messages")``. The job ``dledger pipeline
follow`` does the same with options, reports and more checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from dledger_spark import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def counts(messages: DataFrame) -> DataFrame:
    """What is counted: change this to your liking."""
    from pyspark.sql import functions as f

    return messages.groupBy(f.window("storeTimestamp", "1 minute"), "tags").agg(f.count(f.lit(1)).alias("messages"))


def write(out: str, batch: DataFrame, number: int) -> None:
    """A batch's counts: a directory of their own, written anew if Spark gives the batch again after a kill.

    It then has the same messages, so the counts of all batches add up to the messages of the log, each once.
    """
    counts(batch).coalesce(1).write.mode("overwrite").parquet(f"{out}/batch={number}")


def start(spark: SparkSession, addresses: str, group: str, topic: str, out: str, *, once: bool) -> StreamingQuery:
    """Begin with the oldest message, or where the checkpoint in ``out`` says; with ``once``, end with the newest."""
    messages = (
        spark.readStream.format("dledger")
        .schema("tags string, storeTimestamp timestamp")  # only what is needed is read
        .options(**{"bootstrap.servers": addresses, "group": group, "subscribe": topic})
        .options(startingOffsets="earliest", maxBytesPerTrigger="1g")
        .load()
    )
    writer = messages.writeStream.foreachBatch(partial(write, out)).option("checkpointLocation", f"{out}/_checkpoint")
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="5 seconds")).start()


def main(words: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Count a topic's messages while they come.")
    parser.add_argument("addresses", help="of one or more brokers: HOST:PORT,HOST:PORT")
    parser.add_argument("--group", default="RaftNode00", help="the brokers' name (brokerName)")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--once", action="store_true", help="end when everything is counted that is committed now")
    given = parser.parse_args(words)
    spark = spark_session()
    query = start(spark, given.addresses, given.group, given.topic, given.out, once=given.once)
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()


if __name__ == "__main__":
    main()
