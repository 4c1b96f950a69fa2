"""A job's findings as one value, and its three forms: text, JSON, and one HTML file with charts.

Text is rich tables on a terminal, padded columns elsewhere. The page needs no network and no other file, and
follows the reader's theme. Figures are formatted for people; in JSON they stay plain numbers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final, TextIO

from dledger.command_line import report_page
from dledger.command_line.report_page import Chart, CountUnit, Value, shown, svg

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


def print_report(report: JobReport, out: TextIO | None = None) -> None:
    """Print the title, the summary, the tables, and finally the problems."""
    out = sys.stdout if out is None else out
    rich = out.isatty()
    out.write(f"{report.title}\n\n")
    facts = [(one.name, shown(one.value, one.unit)) for one in report.summary]
    width = max((len(name) for name, _ in facts), default=0)
    out.writelines(f"  {name.ljust(width)}  {text}\n" for name, text in facts)
    for table in report.tables:
        out.write(f"\n{table.title}\n")
        if rich:
            _print_rich(table, out)
        else:
            out.writelines(f"{line}\n" for line in _plain(table))
        hidden = len(table.rows) - len(_cut(table))
        if hidden:
            out.write(f"  … and {hidden:,} more: --json has all of them\n")
    for words, texts in (("note", report.notes), ("PROBLEM", report.problems)):
        if texts:
            out.write("\n")
        out.writelines(f"{words}: {text}\n" for text in texts)
    out.flush()


def print_json(report: JobReport, out: TextIO | None = None) -> None:
    """One JSON document on one line."""
    out = sys.stdout if out is None else out
    out.write(json.dumps(report.to_json(), ensure_ascii=False) + "\n")
    out.flush()


def _cut(table: Table) -> tuple[tuple[Value, ...], ...]:
    return table.rows if table.shown_max is None else table.rows[: table.shown_max]


def _cells(table: Table) -> list[list[str]]:
    return [
        [printable(shown(value, column.unit)) for value, column in zip(row, table.columns, strict=True)]
        for row in _cut(table)
    ]


def printable(text: str) -> str:
    """Text that cannot move the cursor or change colours: topics and tags are untrusted."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _plain(table: Table) -> Iterator[str]:
    rows = _cells(table)
    names = [column.name for column in table.columns]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        yield "  " + "  ".join(map(_aligned, row, widths, table.columns)).rstrip()


def _aligned(cell: str, width: int, column: ReportColumn) -> str:
    return cell.rjust(width) if column.unit.is_number else cell.ljust(width)


def _print_rich(table: Table, out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(header_style="bold underline", box=None, pad_edge=False)
    for column in table.columns:
        grid.add_column(
            column.name, justify="right" if column.unit.is_number else "left", no_wrap=column.unit != CountUnit.TEXT
        )
    for row in _cells(table):
        grid.add_row(*map(Text, row))
    Console(file=out).print(grid)


ROWS_MAX: Final = 2000
"""Rows of a table on the page: more make browsers slow, and ``--json`` has all."""

_CSS: Final = """\
svg g:hover rect { opacity: .75; }
.hatch { stroke: var(--hatch); stroke-width: 3; }
.s0 { fill: var(--accent); } .s1 { fill: var(--warm); } .s2 { fill: var(--good); } .s3 { fill: var(--violet); }
"""


def page(report: JobReport) -> str:
    """The whole document."""
    state = "problems found" if report.problems else "done"
    texts = [(one.name, shown(one.value, one.unit)) for one in report.summary if not _is_figure(one)]
    return report_page.document(
        f"{report.job}: {state}",
        _CSS,
        [
            f"<h1>{escape(report.title)}</h1>",
            report_page.banner("✗ Problems were found", items=report.problems) if report.problems else "",
            report_page.facts(one for one in texts if one[1] not in report.title),
            report_page.tiles(
                report_page.tile(one.name, shown(one.value, one.unit)) for one in report.summary if _is_figure(one)
            ),
            *(report_page.paragraph(note, "note") for note in report.notes),
            *(_picture(chart, number) for number, chart in enumerate(report.charts, 1)),
            *map(_table, report.tables),
        ],
    )


def _is_figure(fact: Fact) -> bool:
    return fact.unit.is_number


def _picture(chart: Chart, number: int) -> str:
    return (
        f'<section class="card"><h2>{escape(chart.title)}</h2>{report_page.paragraph(chart.caption)}'
        f"{report_page.picture(svg(chart, number))}</section>"
    )


def write_page(report: JobReport, path: Path) -> None:
    """Write the file atomically."""
    report_page.write(page(report), path)


def _table(table: Table) -> str:
    units = [column.unit for column in table.columns]
    rows = (
        report_page.row(
            report_page.cell(shown(value, unit), is_number=unit.is_number, is_time=unit is CountUnit.TIME_MS)
            for value, unit in zip(row, units, strict=True)
        )
        for row in table.rows[:ROWS_MAX]
    )
    more = len(table.rows) - ROWS_MAX
    rest = report_page.paragraph(f"… and {more:,} more: --json has all of them" if more > 0 else "")
    columns = [(column.name, column.unit.is_number) for column in table.columns]
    return f'<section class="card"><h2>{escape(table.title)}</h2>{report_page.table(columns, rows)}{rest}</section>'
