"""What all readers do with batches on their way to Spark, and once per worker process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from dledger_spark.schema import Projection

_frozen: Final[list[bool]] = []


def projected(found: Iterator[pa.RecordBatch], projection: Projection) -> Iterator[pa.RecordBatch]:
    """The batches under the names that Spark expects, with exactly the schema that it compares them with."""
    schema = projection.schema
    for batch in found:
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def settle_worker() -> None:
    """Take what is loaded out of the garbage collector's sight, once per process.

    Spark forks its workers from a daemon; a collection in each task then copies the memory that they share, and scans
    the modules of pyspark, numpy and Arrow: together 40 ms per task.
    """
    if not _frozen:
        _frozen.append(True)
        gc.collect()
        gc.freeze()
