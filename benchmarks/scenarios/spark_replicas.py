"""The jobs that check and repair a broker's disk: the audit of two replicas, the rebuild of queues and index.

Both run in a warm session: starting Java, Spark's planner and the Python workers takes ten seconds, whatever the log's
size, and would hide the measured work. The log is in the page cache for ours and for the baseline.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario, constant
from benchmarks.targets import MD5SUM
from rocketstore.config import MessageStoreConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from benchmarks.spark_data import WrittenLog

GIB: Final = 1024**3
LOG_GIB_MAX: Final = 3.0


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Alternating rounds of the jobs and of md5sum."""
    from benchmarks.spark_data import LogSpec, cached_log
    from dledger_spark.session import spark_session

    log_bytes = int(min(LOG_GIB_MAX, context.settings.log_gib) * GIB)
    log = cached_log(context.settings.directory or context.kept, LogSpec(log_bytes=log_bytes))
    spark = spark_session(None, "bench", **{"spark.driver.memory": "1g"})
    try:
        if "spark_audit" in names:
            ours, md5 = audit(context, spark, log)
            yield Figure("spark_audit", ours, "GB/s", MD5SUM, md5)
        if "spark_rebuild" in names:
            yield Figure("spark_rebuild", rebuild(context, spark, log), "records/s", "none", None)
    finally:
        spark.stop()


def audit(context: Context, spark: SparkSession, log: WrittenLog) -> tuple[float, float]:
    """Gigabytes of log per second when comparing two replicas, and when md5sum reads one."""
    from dledger_spark.jobs.audit import AuditOptions, run

    copy = context.directory / "dledger-n1"
    shutil.copytree(log.directory, copy)
    identity = copy / "identity"
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"node_id": "n1"}))
    options = AuditOptions((log.directory, copy))

    def compare() -> None:
        report = run(spark, options)
        if report.exit_code or int(report.fact("compared") or 0) < log.log_bytes * 0.99:  # a blank may be at its end
            raise RuntimeError(f"the audit of equal replicas says {report.title}: {report.problems}")

    files = sorted(str(path) for path in (log.directory / "data").iterdir())
    try:
        compare()
        ours, md5 = [], []
        for _ in range(context.settings.rounds):
            ours.append(_seconds(compare))
            md5.append(_seconds(lambda: subprocess.run(["md5sum", *files], check=True, stdout=subprocess.DEVNULL)))
    finally:
        shutil.rmtree(copy)
    return log.log_bytes / stats.median(ours) / 1e9, log.log_bytes / stats.median(md5) / 1e9


def rebuild(context: Context, spark: SparkSession, log: WrittenLog) -> float:
    """Records per second when building queues and index, including writing the files."""
    from dledger_spark.jobs.rebuild import RebuildOptions, run

    root, target = context.directory / "broker", context.directory / "rebuilt"
    root.mkdir()
    (root / log.directory.name).symlink_to(log.directory)

    def derive(out: Path) -> None:
        report = run(spark, RebuildOptions(root, MessageStoreConfig(store_path_root_dir=root), out))
        if report.fact("messages") != log.records:
            raise RuntimeError(f"{report.fact('messages')} of {log.records} messages were rebuilt")
        shutil.rmtree(out)

    try:
        derive(target)
        took = [_seconds(lambda: derive(target)) for _ in range(context.settings.rounds)]
    finally:
        shutil.rmtree(root)
    return log.records / stats.median(took)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


SCENARIO: Final = Scenario(
    "replicas compared and rebuilt on Spark", ("spark_audit", "spark_rebuild"), measure, constant(12)
)
