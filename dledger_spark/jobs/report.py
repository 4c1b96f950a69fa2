"""What a job found, as one value: printed, written as JSON or as a page with charts by others, never by the job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dledger_spark.jobs.chart import Chart
from dledger_spark.jobs.units import CountUnit, Value

EXIT_DONE = 0
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Fact:
    """One row of the summary."""

    name: str
    value: Value
    unit: CountUnit = CountUnit.TEXT


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A column of a table."""

    name: str
    unit: CountUnit = CountUnit.TEXT


@dataclass(frozen=True, slots=True)
class Table:
    """Details. ``rows`` are all there are to say; ``shown_max`` bounds what is printed, JSON has all of them."""

    title: str
    columns: tuple[ReportColumn, ...]
    rows: tuple[tuple[Value, ...], ...]
    shown_max: int | None = 40

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ValueError(f"{self.title}: {len(self.columns)} columns, but a row is {wrong[0]!r}")

    def records(self) -> list[dict[str, Value]]:
        """The rows with the columns' names, as JSON has them."""
        names = [key(column.name) for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True)
class JobReport:
    """What a job found. ``problems``: what is wrong with the log or with what was made, one sentence each; with any of
    them the job ends with exit code 1. ``notes``: what people should know besides.
    """

    job: str
    title: str
    summary: tuple[Fact, ...]
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0, or 1 if there are problems."""
        return EXIT_FAILED if self.problems else EXIT_DONE

    def fact(self, name: str) -> Value:
        """The value of a row of the summary. Raises ``KeyError``."""
        for one in self.summary:
            if one.name == name:
                return one.value
        raise KeyError(name)

    def table(self, title: str) -> Table:
        """The table of this title. Raises ``KeyError``."""
        for one in self.tables:
            if one.title == title:
                return one
        raise KeyError(title)

    def to_json(self) -> dict[str, Any]:  # Any: a JSON document
        """The report for scripts: names in snake_case, numbers as they are, times in ms since 1970."""
        return {
            "job": self.job,
            "ok": not self.problems,
            "title": self.title,
            "summary": {key(one.name): one.value for one in self.summary},
            "tables": {key(one.title): one.records() for one in self.tables},
            "problems": list(self.problems),
            "notes": list(self.notes),
        }


def key(name: str) -> str:
    """A title as the name of a JSON field: ``longest gap`` is ``longest_gap``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
