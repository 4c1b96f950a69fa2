"""The manifests of an export's batches, and the report of a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from dledger.command_line.chart import Bars, Chart, ColumnChart, Series
from dledger.command_line.units import CountUnit
from dledger_spark.jobs.batches import MANIFEST, BatchDirectory
from dledger_spark.jobs.errors import JobError
from dledger_spark.jobs.report import Fact, JobReport, ReportColumn, Table

VERSION: Final = 1
_NUMBERS: Final = ("batch", "first", "end", "lost")
_HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_BARS_MAX: Final = 20
_DATES_MAX: Final = 120


@dataclass(frozen=True, slots=True)
class FileFact:
    """One Parquet file of a batch; its path is relative to the batch."""

    path: str
    size_bytes: int
    rows: int

    def part(self, name: str) -> str | None:
        """The value of one of its partition columns."""
        for one in self.path.split("/"):
            if one.startswith(f"{name}="):
                value = unquote(one.partition("=")[2])
                return None if value == _HIVE_NULL else value
        return None


@dataclass(frozen=True, slots=True)
class ExportedBatch:
    """A batch's manifest: the log from ``first`` up to ``end`` (exclusive), by index or position; ``lost`` entries at
    its start were no longer kept.
    """

    number: int
    first: int
    end: int
    lost: int = 0
    files: tuple[FileFact, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> int:
        """The number of messages in it."""
        return sum(one.rows for one in self.files)

    @property
    def size_bytes(self) -> int:
        """The total size of its files."""
        return sum(one.size_bytes for one in self.files)

    def to_manifest(self) -> dict[str, Any]:  # Any: a JSON document
        """The manifest as JSON."""
        return {
            "version": VERSION,
            "batch": self.number,
            "first": self.first,
            "end": self.end,
            "lost": self.lost,
            "rows": self.rows,
            "bytes": self.size_bytes,
            "files": [{"path": one.path, "bytes": one.size_bytes, "rows": one.rows} for one in self.files],
            "written_ms": int(time.time() * 1000),
        }

    @classmethod
    def of_manifest(cls, document: dict[str, Any], path: Path) -> ExportedBatch:  # Any: a JSON document
        """Parse a manifest. Raises ``JobError`` if it is not an export's."""
        try:
            if document["version"] != VERSION:
                raise JobError(f"{path} was written by another version ({document['version']}, this one has {VERSION})")
            files = tuple(FileFact(one["path"], one["bytes"], one["rows"]) for one in document["files"])
            number, first, end, lost = (int(document[name]) for name in _NUMBERS)
            return cls(number, first, end, lost, files)
        except (KeyError, TypeError, ValueError) as error:
            raise JobError(f"{path} is not the manifest of an export ({error!r}): move its batch away") from error


def batches_of(out: BatchDirectory) -> list[ExportedBatch]:
    """The existing batches. Raises ``JobError`` unless each starts where the previous one ends."""
    found = [ExportedBatch.of_manifest(out.manifest(number), out.place(number) / MANIFEST) for number in out.numbers()]
    for at, one in enumerate(found):
        if one.number != found[0].number + at or (at and one.first != found[at - 1].end):
            raise JobError(
                f"{out.place(one.number)} starts at {one.first}, which is not where the previous batch ended: "
                "put back the batches that were moved away, or export to a new directory"
            )
    return found


# -- the report -------------------------------------------------------------------------------------------------------


def report(
    log: str, out: Path, before: Sequence[ExportedBatch], made: Sequence[ExportedBatch], seconds: float
) -> JobReport:
    """The additions of a run to the batches that existed ``before``."""
    every = [*before, *made]
    rows = sum(one.rows for one in made)
    lost = sum(one.lost for one in made)
    summary = (
        Fact("log", log),
        Fact("directory", str(out)),
        Fact("new batches", len(made), CountUnit.COUNT),
        Fact("new rows", rows, CountUnit.COUNT),
        Fact("new bytes", sum(one.size_bytes for one in made), CountUnit.BYTES),
        Fact("read", sum(one.end - one.first - one.lost for one in made), CountUnit.COUNT),
        Fact("lost", lost, CountUnit.COUNT),
        Fact("seconds", seconds, CountUnit.SECONDS),
        Fact("rows per second", rows / seconds if made else None, CountUnit.PER_SECOND),
        Fact("all batches", len(every), CountUnit.COUNT),
        Fact("all rows", sum(one.rows for one in every), CountUnit.COUNT),
        Fact("next", every[-1].end if every else None, CountUnit.COUNT),
    )
    notes = () if made else ("nothing new is committed: every entry that was requested is exported",)
    title = f"Export of {log} to {out}"
    return JobReport("export", title, summary, (_batch_table(made), _topic_table(made)), _charts(made), notes=notes)


def _batch_table(made: Sequence[ExportedBatch]) -> Table:
    columns = (
        ReportColumn("batch"),
        ReportColumn("first", CountUnit.COUNT),
        ReportColumn("end", CountUnit.COUNT),
        ReportColumn("rows", CountUnit.COUNT),
        ReportColumn("files", CountUnit.COUNT),
        ReportColumn("bytes", CountUnit.BYTES),
    )
    rows = tuple((one.number, one.first, one.end, one.rows, len(one.files), one.size_bytes) for one in made)
    return Table("New batches", columns, rows)


def _sums(made: Sequence[ExportedBatch], name: str) -> list[tuple[str, int, int, int]]:
    """Rows, files and bytes per value of a partition column, in order."""
    sums: dict[str, list[FileFact]] = defaultdict(list)
    for one in (file for batch in made for file in batch.files):
        sums[one.part(name) or "-"].append(one)
    return [
        (value, sum(one.rows for one in files), len(files), sum(one.size_bytes for one in files))
        for value, files in sorted(sums.items())
    ]


def _by_topic(made: Sequence[ExportedBatch]) -> list[tuple[str, int, int, int]]:
    return sorted(_sums(made, "topic"), key=lambda sums: -sums[1])


def _topic_table(made: Sequence[ExportedBatch]) -> Table:
    columns = (
        ReportColumn("topic"),
        ReportColumn("rows", CountUnit.COUNT),
        ReportColumn("files", CountUnit.COUNT),
        ReportColumn("bytes", CountUnit.BYTES),
    )
    return Table("New rows by topic", columns, tuple(_by_topic(made)))


def _charts(made: Sequence[ExportedBatch]) -> tuple[Chart, ...]:
    topics = _by_topic(made)[:_BARS_MAX]
    dates = _sums(made, "date")[-_DATES_MAX:]
    charts: list[Chart] = []
    if len(dates) > 1:
        rows = Series("rows", tuple(float(row[1]) for row in dates))
        charts.append(ColumnChart("New rows by date", CountUnit.COUNT, tuple(row[0] for row in dates), (rows,)))
    if topics:
        rows = Series("rows", tuple(float(row[1]) for row in topics))
        charts.append(Bars("New rows by topic", CountUnit.COUNT, tuple(row[0] for row in topics), (rows,)))
    return tuple(charts)
