"""A report as one HTML file that needs no network and no other file, and follows the reader's theme."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

from dledger.command_line import html_page
from dledger.command_line.chart import Chart, svg
from dledger.command_line.units import CountUnit, shown
from dledger_spark.jobs.report import Fact, JobReport, Table

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
    return html_page.document(
        f"{report.job}: {state}",
        _CSS,
        [
            f"<h1>{escape(report.title)}</h1>",
            html_page.banner("✗ Problems were found", items=report.problems) if report.problems else "",
            html_page.facts(one for one in texts if one[1] not in report.title),
            html_page.tiles(
                html_page.tile(one.name, shown(one.value, one.unit)) for one in report.summary if _is_figure(one)
            ),
            *(html_page.paragraph(note, "note") for note in report.notes),
            *(_picture(chart, number) for number, chart in enumerate(report.charts, 1)),
            *map(_table, report.tables),
        ],
    )


def _is_figure(fact: Fact) -> bool:
    return fact.unit.is_number


def _picture(chart: Chart, number: int) -> str:
    return (
        f'<section class="card"><h2>{escape(chart.title)}</h2>{html_page.paragraph(chart.caption)}'
        f"{html_page.picture(svg(chart, number))}</section>"
    )


def write_page(report: JobReport, path: Path) -> None:
    """Write the file atomically."""
    html_page.write(page(report), path)


def _table(table: Table) -> str:
    units = [column.unit for column in table.columns]
    rows = (
        html_page.row(
            html_page.cell(shown(value, unit), is_number=unit.is_number, is_time=unit is CountUnit.TIME_MS)
            for value, unit in zip(row, units, strict=True)
        )
        for row in table.rows[:ROWS_MAX]
    )
    more = len(table.rows) - ROWS_MAX
    rest = html_page.paragraph(f"… and {more:,} more: --json has all of them" if more > 0 else "")
    columns = [(column.name, column.unit.is_number) for column in table.columns]
    return f'<section class="card"><h2>{escape(table.title)}</h2>{html_page.table(columns, rows)}{rest}</section>'
