"""The replicated log on Spark: a data source and sink named ``dledger``, and the jobs that outgrow one machine.

``import dledger_spark`` loads neither Spark nor Arrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger_spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "spark_session"]


def register(spark: SparkSession) -> None:
    """Make the formats known to a session that does not find them by itself.

    ``dledger`` is found wherever the package is installed; the formats of the jobs, ``dledger-blocks``,
    ``dledger-derived``, ``dledger-cq`` and ``dledger-index``, never are.
    """
    from dledger_spark.source.blocks import BlocksDataSource
    from dledger_spark.source.datasource import DLedgerDataSource
    from dledger_spark.source.derived import DerivedDataSource, IndexDataSource, QueuesDataSource

    for one in (DLedgerDataSource, BlocksDataSource, DerivedDataSource, QueuesDataSource, IndexDataSource):
        spark.dataSource.register(one)
