"""Common to all readers: prepares batches for Spark, and worker processes for reading."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from dledger_spark.schema import Projection

_frozen: Final[list[bool]] = []


def projected(found: Iterator[pa.RecordBatch], projection: Projection) -> Iterator[pa.RecordBatch]:
    """The batches under the names that Spark expects, with exactly the schema that it checks."""
    schema = projection.schema
    for batch in found:
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def settle_worker() -> None:
    """Exclude everything loaded from garbage collection, once per process.

    Spark forks its workers from a daemon; a collection in each task would copy the memory that they share, and scan the
    modules of pyspark, numpy and Arrow: together 40 ms per task.
    """
    if not _frozen:
        _frozen.append(True)
        gc.collect()
        gc.freeze()
