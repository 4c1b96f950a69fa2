"""Old logs of a group's future members, digested on Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dledger.errors import DiskError
from dledger_spark.jobs.old_logs import digest_in
from rocketstore.commit_log.base_log import digest_of
from tests.unit.rocketstore.upgrade.support import bodies, copied, old_log, overwrite, record_offsets, write_broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_spark_finds_what_one_process_finds(spark: SparkSession, tmp_path: Path) -> None:
    """The same digests of all files, damage and ends included; a file that cannot be read is an error."""
    one = write_broker(tmp_path / "a", bodies(40))
    other = copied(one, "b")
    overwrite(other, record_offsets(one)[20] + 150, b"!")
    logs = [old_log(root) for root in (one, other)]

    found = digest_in(spark, [log.files for log in logs])

    assert [digest_of(log.files, digests) for log, digests in zip(logs, found, strict=True)] == [
        log.digest for log in logs
    ]
    assert logs[1].digest.problems
    assert digest_in(spark, []) == []
    (one / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(DiskError, match="cannot read a log file"):
        digest_in(spark, [logs[0].files])
