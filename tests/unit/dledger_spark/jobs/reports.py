"""A report with one of everything."""

from __future__ import annotations

from dledger.command_line.report_page import Bars, ColumnChart, CountUnit, Series
from dledger_spark.jobs.report import Fact, JobReport, ReportColumn, Table

HOURS = tuple(f"{hour:02d}:00" for hour in range(24))

REPORT = JobReport(
    "sample",
    "Sample of /logs/<b>",
    (
        Fact("log", "/logs/<b>"),
        Fact("entries", 1_234_567, CountUnit.COUNT),
        Fact("log bytes", 3 << 30, CountUnit.BYTES),
        Fact("from", 1_700_000_000_000, CountUnit.TIME_MS),
        Fact("rate", 20_576.1, CountUnit.PER_SECOND),
    ),
    (
        Table(
            "By topic",
            (ReportColumn("topic"), ReportColumn("messages", CountUnit.COUNT), ReportColumn("share", CountUnit.SHARE)),
            (("orders", 1_000_000, 0.81), ("evil\x1b[2J", 234_567, 0.19), (None, None, None)),
        ),
        Table("Long", (ReportColumn("n", CountUnit.COUNT),), tuple((n,) for n in range(50)), shown_max=3),
    ),
    (
        ColumnChart(
            "Throughput by hour",
            CountUnit.PER_SECOND,
            HOURS,
            (Series("sent", tuple(float(hour * 100) for hour in range(24))),),
            caption="Messages per second",
        ),
        Bars(
            "Bytes by topic",
            CountUnit.BYTES,
            ("orders", "a-topic-whose-name-is-far-too-long-for-a-label-of-a-chart"),
            (Series("kept", (2.0**31, 2.0**29)), Series("deleted", (2.0**30, 0.0))),
        ),
    ),
    notes=("the log begins at index 17",),
)
