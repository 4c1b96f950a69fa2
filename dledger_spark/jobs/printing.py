"""A report on standard output: rich tables on a terminal, padded columns elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TextIO

from dledger.command_line.units import CountUnit, Value, shown
from dledger_spark.jobs.report import JobReport, ReportColumn, Table


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
