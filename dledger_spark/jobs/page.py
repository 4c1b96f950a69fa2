"""A report as one HTML file that needs no network, script or other file, and follows the reader's theme."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

from dledger import html_page
from dledger_spark.jobs.chart import legend, svg
from dledger_spark.jobs.report import Fact, JobReport, Table
from dledger_spark.jobs.units import shown

ROWS_MAX: Final = 2000
"""Rows of a table on the page: more make browsers slow, and ``--json`` has all."""

_CSS: Final = """\
:root { --s0: #0b61b8; --s1: #d68f00; --s2: #12703a; --s3: #8a4fbf; --hatch: rgba(255, 255, 255, .55); }
@media (prefers-color-scheme: dark) {
  :root { --s0: #6ab4ff; --s1: #f2c14e; --s2: #63d08f; --s3: #c79bf2; --hatch: rgba(17, 22, 29, .5); }
}
h2 { margin: 0 0 8px; font-size: 17px; }
section { margin-top: 20px; padding: 18px 20px; border: 1px solid var(--line); border-radius: 10px;
          background: var(--card); }
.tiles { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }
.tile.text b { font-size: 15px; line-height: 1.6; }
svg text.label { fill: var(--text); }
svg g:hover rect { opacity: .75; }
.hatch { stroke: var(--hatch); stroke-width: 3; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); }
.legend { margin: 0 0 6px; }
.key { width: 14px; height: 10px; margin-right: 6px; }
@media print { section { break-inside: avoid-page; } }
"""


def page(report: JobReport) -> str:
    """The whole document."""
    state = "problems found" if report.problems else "done"
    return html_page.document(
        f"{report.job}: {state}",
        _CSS,
        [
            f"<h1>{escape(report.title)}</h1>",
            html_page.banner("✗ Problems were found", items=report.problems) if report.problems else "",
            html_page.tiles(map(_tile, report.summary)),
            *map(html_page.paragraph, report.notes),
            *(
                f"<section><h2>{escape(chart.title)}</h2>{html_page.paragraph(chart.caption)}{legend(chart, number)}"
                f'<div class="scroll">{svg(chart, number)}</div></section>'
                for number, chart in enumerate(report.charts, 1)
            ),
            *map(_table, report.tables),
        ],
    )


def write_page(report: JobReport, path: Path) -> None:
    """Write the file atomically."""
    html_page.write(page(report), path)


def _tile(fact: Fact) -> str:
    return html_page.tile(fact.name, shown(fact.value, fact.unit), "" if fact.unit.is_number else "text")


def _table(table: Table) -> str:
    units = [column.unit for column in table.columns]
    rows = (
        html_page.row(
            html_page.cell(shown(value, unit), is_number=unit.is_number) for value, unit in zip(row, units, strict=True)
        )
        for row in table.rows[:ROWS_MAX]
    )
    more = len(table.rows) - ROWS_MAX
    rest = html_page.paragraph(f"… and {more:,} more: --json has all of them" if more > 0 else "")
    columns = [(column.name, column.unit.is_number) for column in table.columns]
    return f"<section><h2>{escape(table.title)}</h2>{html_page.table(columns, rows)}{rest}</section>"
