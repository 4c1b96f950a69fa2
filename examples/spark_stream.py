"""Copy what is worth it from one topic to another, each message once: Spark reads a stream, and writes one.

With Spark and Java installed (``pip install '.[spark]'``) and brokers running::

    python examples/spark_stream.py 127.0.0.1:10911 --from-topic orders --to-topic large-orders --state /tmp/large

Ctrl-C ends it; started again with the same --state it goes on where it was. A batch that Spark repeats after a failure
is not stored twice: the sink numbers its rows, and the brokers know the numbers that they have.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dledger_spark import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def chosen(messages: DataFrame, least_bytes: int) -> DataFrame:
    """What is copied: change this to your liking. ``keys``, ``tags`` and ``body`` are what the sink writes."""
    from pyspark.sql import functions as f

    return messages.where(f.octet_length("body") >= least_bytes).select("keys", "tags", "body")


def start(
    spark: SparkSession, brokers: dict[str, str], topics: tuple[str, str], state: str, least_bytes: int, *, once: bool
) -> StreamingQuery:
    """Copy from the oldest message on; with ``once``, up to what is committed now."""
    source, target = topics
    messages = (
        spark.readStream.format("dledger")
        .options(**brokers)
        .options(subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger="100000")
        .load()
    )
    writer = (
        chosen(messages, least_bytes)
        .writeStream.format("dledger")
        .options(**brokers)
        .options(topic=target, checkpointLocation=state)
    )
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 second")).start()


def main(words: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Copy large messages to another topic.")
    parser.add_argument("addresses", help="of one or more brokers: HOST:PORT,HOST:PORT")
    parser.add_argument("--group", default="RaftNode00", help="the brokers' name (brokerName)")
    parser.add_argument("--from-topic", required=True)
    parser.add_argument("--to-topic", required=True)
    parser.add_argument("--state", required=True, metavar="DIR", help="remembers how far it is")
    parser.add_argument("--least-bytes", type=int, default=1000)
    parser.add_argument("--once", action="store_true", help="end when everything is copied that is committed now")
    given = parser.parse_args(words)
    brokers = {"bootstrap.servers": given.addresses, "group": given.group}
    topics = (given.from_topic, given.to_topic)
    query = start(spark_session(), brokers, topics, given.state, given.least_bytes, once=given.once)
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()


if __name__ == "__main__":
    main()
