"""A report with one of everything."""

from __future__ import annotations

from dledger_spark.jobs.chart import Bars, Columns, Series
from dledger_spark.jobs.report import Column, Fact, Report, Table
from dledger_spark.jobs.units import Unit

HOURS = tuple(f"{hour:02d}:00" for hour in range(24))

REPORT = Report(
    "sample",
    "Sample of /logs/<b>",
    (
        Fact("log", "/logs/<b>"),
        Fact("entries", 1_234_567, Unit.COUNT),
        Fact("log bytes", 3 << 30, Unit.BYTES),
        Fact("from", 1_700_000_000_000, Unit.TIME_MS),
        Fact("rate", 20_576.1, Unit.PER_SECOND),
    ),
    (
        Table(
            "By topic",
            (Column("topic"), Column("messages", Unit.COUNT), Column("share", Unit.SHARE)),
            (("orders", 1_000_000, 0.81), ("evil\x1b[2J", 234_567, 0.19), (None, None, None)),
        ),
        Table("Long", (Column("n", Unit.COUNT),), tuple((n,) for n in range(50)), shown_max=3),
    ),
    (
        Columns(
            "Throughput by hour",
            Unit.PER_SECOND,
            HOURS,
            (Series("sent", tuple(float(hour * 100) for hour in range(24))),),
            caption="Messages per second",
        ),
        Bars(
            "Bytes by topic",
            Unit.BYTES,
            ("orders", "a-topic-whose-name-is-far-too-long-for-a-label-of-a-chart"),
            (Series("kept", (2.0**31, 2.0**29)), Series("deleted", (2.0**30, 0.0))),
        ),
    ),
    notes=("the log begins at index 17",),
)
