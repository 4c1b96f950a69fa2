"""Count a topic's messages per minute and tag while they come, exactly, also over kills: a Spark stream into Parquet.

With Spark and Java: ``python examples/follow.py 127.0.0.1:10911 --topic orders --out DIR``, or ``spark-submit`` it.
Ctrl-C ends it; started again it goes on where it was. Add up what is there:
``spark.read.parquet("DIR/batch=*").groupBy("window", "tags").sum("messages")``.
"""

import argparse
from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from dledger_spark import spark_session


def main(words: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Count a topic's messages while they come.")
    parser.add_argument("addresses", help="of one or more brokers: HOST:PORT,HOST:PORT")
    parser.add_argument("--group", default="RaftNode00", help="the brokers' name (brokerName)")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--once", action="store_true", help="end when everything is counted that is committed now")
    given = parser.parse_args(words)
    log = {"bootstrap.servers": given.addresses, "group": given.group, "subscribe": given.topic}
    read = spark_session().readStream.format("dledger").options(startingOffsets="earliest", **log)
    messages = read.schema("tags string, storeTimestamp timestamp").load()  # reads no more than these

    def write(batch: DataFrame, number: int) -> None:  # into a place of its own: Spark may give it again after a kill
        counts = batch.groupBy(f.window("storeTimestamp", "1 minute"), "tags").agg(f.count(f.lit(1)).alias("messages"))
        counts.coalesce(1).write.mode("overwrite").parquet(f"{given.out}/batch={number}")

    writer = messages.writeStream.foreachBatch(write).option("checkpointLocation", f"{given.out}/_checkpoint")
    writer = writer.trigger(availableNow=True) if given.once else writer.trigger(processingTime="5 seconds")
    writer.start().awaitTermination()


if __name__ == "__main__":
    main()
