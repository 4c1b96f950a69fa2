"""The replicated log on Spark: a data source and sink named ``dledger``, and the jobs that outgrow one machine.

``import pipeline`` loads neither Spark nor Arrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "spark_session"]


def register(spark: SparkSession) -> None:
    """Make the formats known to a session that does not find them by itself, as one of Spark Connect."""
    from pipeline.source.datasource import DLedgerDataSource

    spark.dataSource.register(DLedgerDataSource)
