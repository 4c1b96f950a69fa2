"""Jobs over the log that outgrow one machine: one module per job, and the frame they share.

A job's module has three things: ``run(spark, options) -> Report``, ``command`` (its command line, also below ``dledger
pipeline``), and ``main(argv)`` for ``python -m dledger_spark.jobs.<job>`` and ``spark-submit``. At its top a job's
module imports neither pyspark nor pyarrow: they are an extra, and ``--help`` works without.
"""

from __future__ import annotations

from typing import Final

JOBS: Final[tuple[str, ...]] = ("audit", "rebuild", "export", "stats", "retention", "replay", "follow")
"""Names of the jobs that there are; each is a module of this package."""
