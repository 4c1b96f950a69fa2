"""Jobs for logs too large for one machine: one module per job, and their common framework.

A job's module has three parts: ``run(spark, options) -> Report``, ``command`` (its command line, also in ``dledger
pipeline``), and ``main(argv)`` for ``python -m dledger_spark.jobs.<job>`` and ``spark-submit``. A job's module must not
import pyspark or pyarrow at its top: they are an optional extra, and ``--help`` works without them.
"""

from __future__ import annotations

from typing import Final

JOBS: Final[tuple[str, ...]] = (
    "audit",
    "rebuild",
    "export",
    "stats",
    "retention",
    "replay",
    "table",
    "changes",
)
"""Names of the jobs; each is a module of this package."""
