"""A job's findings as one value; other modules print it, or write it as JSON or as a page with charts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dledger.command_line.chart import Chart
from dledger.command_line.units import CountUnit, Value

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
    """Details. ``rows`` is complete; ``shown_max`` limits what is printed, JSON has all rows."""

    title: str
    columns: tuple[ReportColumn, ...]
    rows: tuple[tuple[Value, ...], ...]
    shown_max: int | None = 40

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ValueError(f"{self.title}: {len(self.columns)} columns, but a row is {wrong[0]!r}")

    def records(self) -> list[dict[str, Value]]:
        """The rows as dictionaries by column name, as in JSON."""
        names = [key(column.name) for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job's findings. ``problems``: one sentence for each defect of the log or the output; if there are any, the exit
    code is 1. ``notes``: other remarks for the user.
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
        """The value of a summary row. Raises ``KeyError``."""
        for one in self.summary:
            if one.name == name:
                return one.value
        raise KeyError(name)

    def table(self, title: str) -> Table:
        """The table with this title. Raises ``KeyError``."""
        for one in self.tables:
            if one.title == title:
                return one
        raise KeyError(title)

    def to_json(self) -> dict[str, Any]:  # Any: a JSON document
        """The report for scripts: names in snake_case, plain numbers, times in ms since 1970."""
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
    """A title as a JSON field name: ``longest gap`` becomes ``longest_gap``."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
