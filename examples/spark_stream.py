"""Copy large messages from one topic to another, each once: Spark reads a stream, and writes one.

With Spark and Java (``pip install '.[spark]'``): ``python examples/spark_stream.py 127.0.0.1:10911 --from-topic orders
--to-topic large --state DIR``. Ctrl-C ends it; started again it goes on where it was. A batch that Spark repeats is not
stored twice: the sink numbers its rows, and the brokers know the numbers that they have.
"""

import argparse
from collections.abc import Sequence

from pyspark.sql import functions as f

from dledger_spark import spark_session


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
    read = spark_session().readStream.format("dledger").options(**brokers, subscribe=given.from_topic)
    messages = read.options(startingOffsets="earliest", maxOffsetsPerTrigger="100000").load()
    chosen = messages.where(f.octet_length("body") >= given.least_bytes).select("keys", "tags", "body")
    writer = chosen.writeStream.format("dledger").options(**brokers, topic=given.to_topic)
    writer = writer.option("checkpointLocation", given.state)
    writer = writer.trigger(availableNow=True) if given.once else writer.trigger(processingTime="1 second")
    writer.start().awaitTermination()


if __name__ == "__main__":
    main()
