"""What ``spark_session`` and ``register`` do to a session that is there already."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from pipeline import register, spark_session

if TYPE_CHECKING:
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


@pytest.mark.parametrize(
    ("kind", "mistyped", "meant"),
    [
        ("dledger-blocks", "blockByte", "blockBytes"),
        ("dledger-derived", "delayLevel", "delayLevels"),
        ("dledger-cq", "fileByte", "fileBytes"),
        ("dledger-index", "slot", "slots"),
    ],
)
def test_register_makes_the_jobs_formats_known(spark: SparkSession, kind: str, mistyped: str, meant: str) -> None:
    """Spark finds only ``dledger`` by itself; all of them refuse an option with the nearest that there is."""
    register(spark)

    with pytest.raises(PySparkException, match=f"did you mean {meant}"):
        spark.read.format(kind).option(mistyped, "1").load("/nowhere").collect()
