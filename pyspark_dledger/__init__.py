"""Makes Spark find the format ``dledger``: it looks into top-level modules whose names begin with ``pyspark_``."""

from dledger_spark.source.datasource import DLedgerDataSource as DefaultSource

__all__ = ["DefaultSource"]
