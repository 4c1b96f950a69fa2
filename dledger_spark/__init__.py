"""The replicated log on Spark: a data source and sink named ``dledger``, and jobs for logs too large for one machine.

``import dledger_spark`` loads neither Spark nor Arrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger_spark.session import register_topics, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "register_topics", "spark_session"]


def register(spark: SparkSession) -> None:
    """Register the formats with a session that does not discover them.

    ``dledger`` is discovered wherever the package is installed; the jobs' formats ``dledger-blocks``,
    ``dledger-derived``, ``dledger-cq`` and ``dledger-index`` never are.
    """
    from dledger_spark.source.blocks import BlocksDataSource
    from dledger_spark.source.datasource import DLedgerDataSource
    from dledger_spark.source.derived import DerivedDataSource, IndexDataSource, QueuesDataSource

    for one in (DLedgerDataSource, BlocksDataSource, DerivedDataSource, QueuesDataSource, IndexDataSource):
        spark.dataSource.register(one)
