"""A Spark application of its own that has no classic session, only one of Spark Connect, with a server that it starts.

``python -m tests.support.spark_connect DIRECTORY LOG ENTRIES BROKERS``: where its files go, a log directory, and the
options of a group of plain entries and of one of brokers as JSON. Prints what it has found as one line of JSON.

Both kinds of session cannot be in one process, so this is one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 60
SERVER = "local[2]"


def main(directory: str, log: str, entries: str, brokers: str) -> None:
    """The application."""
    from pyspark.errors import PySparkException

    from dledger_spark import register, spark_session

    os.environ["SPARK_REMOTE"] = SERVER
    conf = {
        "spark.driver.memory": "768m",
        "spark.local.dir": f"{directory}/local",
        "spark.sql.warehouse.dir": f"{directory}/warehouse",
        "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dderby.system.home={directory}",
    }
    spark = spark_session(app_name="connect", **conf)
    entry_options, broker_options = json.loads(entries), json.loads(brokers)
    found: dict[str, Any] = {"session": type(spark).__module__}  # Any: JSON

    def load(**options: str) -> DataFrame:
        return spark.read.format("dledger").schema("body binary").options(**options).load()

    found["directory"] = texts(spark.read.format("dledger").load(log))
    found["live"] = numbers(load(**entry_options))

    copy(spark, f"{directory}/checkpoint", entry_options, {**broker_options, "topic": "copied"})
    found["copied"] = numbers(load(**broker_options, subscribe="copied"))

    rows = spark.range(0, ROWS, 1, 3).selectExpr("cast(id AS string) AS body")
    target = {**broker_options, "topic": "written", "writerId": "connect"}
    for _ in range(2):  # the second time, everything is there
        rows.write.format("dledger").mode("append").options(**target).save()
    found["written"] = numbers(load(**broker_options, subscribe="written"))

    register(spark)  # as for a server that does not find the format
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as that something cannot be set any more
        spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
        assert spark_session(app_name="connect") is spark
        found["kept"] = spark.conf.get("spark.sql.session.timeZone")
    places = ", ".join(f"'{name}' '{text}'" for name, text in entry_options.items())
    spark.sql(f"CREATE TEMPORARY VIEW entries USING dledger OPTIONS ({places})")
    found["sql"] = spark.sql("SELECT count(*) AS n FROM entries").collect()[0]["n"]
    try:
        rows.selectExpr("body AS bodi").write.format("dledger").mode("append").options(**target).save()
    except PySparkException as error:
        found["refused"] = str(error)
    found["jobs"] = jobs(log, f"{directory}/copy", {**broker_options, "topic": "paced"})
    found["paced"] = len(texts(load(**broker_options, subscribe="paced")))
    spark.stop()
    sys.stdout.write(json.dumps(found) + "\n")


def jobs(log: str, replica: str, target: dict[str, str]) -> dict[str, Any]:
    """What commands give that use the session there is."""
    from click.testing import CliRunner

    from dledger_cli.cli import main as dledger

    shutil.copytree(log, replica)
    to = ("--to", target["bootstrap.servers"], "--to-group", target["group"], "--to-topic", target["topic"])
    words = {
        "stats": ("stats", log, "--json"),
        "audit": ("audit", log, replica, "--json"),
        "replay": ("replay", log, *to, "--rate", "100000", "--json"),
        "table": ("table", "-b", target["bootstrap.servers"], "-g", target["group"], "-o", f"{replica}-table"),
    }
    found = {}
    for job, typed in words.items():
        result = CliRunner().invoke(dledger, ["pipeline", *typed])
        found[job] = json.loads(result.stdout) if result.exit_code == 0 else result.output + str(result.exception)
    return found


def copy(spark: SparkSession, checkpoint: str, read: dict[str, str], write: dict[str, str]) -> None:
    """What the group of entries has now, as a stream of several batches."""
    limits = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "80"}
    frame = spark.readStream.format("dledger").schema("body binary").options(**{**read, **limits}).load()
    writer = frame.writeStream.format("dledger").options(**write).option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()


def texts(frame: DataFrame) -> list[str]:
    """The bodies, sorted."""
    return sorted(bytes(row.body).decode() for row in frame.collect())


def numbers(frame: DataFrame) -> list[int]:
    """The bodies as numbers, sorted."""
    return sorted(map(int, texts(frame)))


if __name__ == "__main__":
    main(*sys.argv[1:])
