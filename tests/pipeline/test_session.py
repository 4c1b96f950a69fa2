"""What ``spark_session`` does to a session that is there already."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipeline import spark_session

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession

TIME_ZONE = "spark.sql.session.timeZone"
CODEC = "spark.sql.parquet.compression.codec"


def test_what_was_set_while_a_session_runs_stays(spark: SparkSession, request: pytest.FixtureRequest) -> None:
    """A second call sets only what nobody holds."""
    for name in (TIME_ZONE, CODEC):
        request.addfinalizer(partial(spark.conf.set, name, str(spark.conf.get(name))))
    spark.conf.set(TIME_ZONE, "Asia/Tokyo")
    spark.conf.unset(CODEC)

    assert spark_session() is spark

    assert (spark.conf.get(TIME_ZONE), spark.conf.get(CODEC)) == ("Asia/Tokyo", "zstd")
