"""Digests the files of plain logs on Spark, one in a task, for ``dledger upgrade check --spark``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dledger.errors import DiskError
from dledger_spark.jobs.command import JobFrame, job_session, spark_errors_in_a_sentence
from rocketstore.commit_log.base_log import FileDigest, FileEnding, PlainFiles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def digest_on_spark(
    logs: Sequence[PlainFiles], master: str | None, conf: Mapping[str, str] | None = None
) -> list[list[FileDigest]]:
    """The digests of each log's files, oldest first; workers must see the files under the same paths.

    ``master``: where Spark runs; None: on this machine. Raises ``DiskError`` for a file that a task cannot read, and
    what ``job_session`` raises.
    """
    with job_session(JobFrame(master, conf or {}, as_json=True, html=None)) as spark, spark_errors_in_a_sentence():
        return digest_in(spark, logs)


def digest_in(spark: SparkSession, logs: Sequence[PlainFiles]) -> list[list[FileDigest]]:
    """The same in a session."""
    from dledger_spark.source.old_logs import NAME, OldLogsDataSource

    wanted = [
        (number, base, str(path.absolute()), files.segment_bytes)
        for number, files in enumerate(logs)
        for base, path in files.paths.items()
    ]
    found: list[list[FileDigest]] = [[] for _ in logs]
    if not wanted:
        return found
    spark.dataSource.register(OldLogsDataSource)
    for row in spark.read.format(NAME).option("plan", json.dumps(wanted)).load().collect():
        if row["error"] is not None:
            raise DiskError(f"a Spark task cannot read a log file: {row['error']}")
        ending = FileEnding(row["ending"])
        one = FileDigest(row["base"], row["length"], row["crc32c"], row["records"], ending, row["reason"])
        found[row["log"]].append(one)
    return [sorted(digests, key=lambda one: one.base) for digests in found]
