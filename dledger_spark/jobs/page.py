"""A report as one HTML file: it needs no network, no script and no other file, and follows the reader's theme."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

from dledger_spark.jobs.chart import legend, svg
from dledger_spark.jobs.report import Fact, JobReport, Table
from dledger_spark.jobs.units import shown

ROWS_MAX: Final = 2000
"""How many rows of a table the page has at most: more make browsers slow, and ``--json`` has them."""

_CSS: Final = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #d7dce3; --text: #1b2430; --quiet: #566273;
  --bad: #b3211f; --bad-back: #fbe3e1;
  --s0: #0b61b8; --s1: #d68f00; --s2: #12703a; --s3: #8a4fbf; --hatch: rgba(255, 255, 255, .55);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11161d; --card: #1a212b; --line: #34404e; --text: #e6ebf2; --quiet: #a3b0c0;
    --bad: #ff8f87; --bad-back: #431b1a;
    --s0: #6ab4ff; --s1: #f2c14e; --s2: #63d08f; --s3: #c79bf2; --hatch: rgba(17, 22, 29, .5);
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
       font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { margin: 0 0 12px; font-size: 26px; }
h2 { margin: 0 0 8px; font-size: 17px; }
section { margin-top: 20px; padding: 18px 20px; border: 1px solid var(--line); border-radius: 10px;
          background: var(--card); }
.quiet { color: var(--quiet); margin: 4px 0; }
.banner { margin: 12px 0; padding: 12px 16px; border-radius: 8px; font-weight: 600; }
.banner ul { margin: 6px 0 0; padding-left: 22px; font-weight: 400; }
.bad { background: var(--bad-back); color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; margin: 16px 0; }
.tile { padding: 10px 12px; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
.tile b { display: block; font-size: 20px; line-height: 1.25; font-variant-numeric: tabular-nums;
          overflow-wrap: anywhere; }
.tile.text b { font-size: 15px; line-height: 1.6; }
.tile span { color: var(--quiet); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--quiet); font-weight: 600; font-size: 13px; }
td.number, th.number { text-align: right; white-space: nowrap; }
svg.chart { display: block; width: 100%; min-width: 640px; height: auto;
            font: 12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
svg text { fill: var(--quiet); }
svg text.label { fill: var(--text); }
svg g:hover rect { opacity: .75; }
.grid { stroke: var(--line); }
.hatch { stroke: var(--hatch); stroke-width: 3; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); }
.legend { display: flex; gap: 18px; flex-wrap: wrap; color: var(--quiet); font-size: 13px; margin: 0 0 6px; }
.key { width: 14px; height: 10px; margin-right: 6px; }
@media print { body { background: #fff; } section { break-inside: avoid-page; } }
"""


def page(report: JobReport) -> str:
    """The whole document."""
    state = "problems found" if report.problems else "done"
    body = [
        f"<h1>{escape(report.title)}</h1>",
        _banner(report),
        f'<div class="tiles">{"".join(map(_tile, report.summary))}</div>',
        *(f'<p class="quiet">{escape(note)}</p>' for note in report.notes),
        *(
            f"<section><h2>{escape(chart.title)}</h2>{_caption(chart.caption)}{legend(chart, number)}"
            f'<div class="scroll">{svg(chart, number)}</div></section>'
            for number, chart in enumerate(report.charts, 1)
        ),
        *map(_table, report.tables),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.job)}: {state}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(one for one in body if one)
        + "\n</main>\n</body>\n</html>\n"
    )


def write_page(report: JobReport, path: Path) -> None:
    """Write it, whole or not at all."""
    half = path.with_name(f".{path.name}.tmp")
    half.write_text(page(report), encoding="utf-8")
    half.replace(path)


def _banner(report: JobReport) -> str:
    if not report.problems:
        return ""
    items = "".join(f"<li>{escape(one)}</li>" for one in report.problems)
    return f'<div class="banner bad" role="status">✗ Problems were found<ul>{items}</ul></div>'


def _tile(fact: Fact) -> str:
    words = escape(shown(fact.value, fact.unit))
    kind = "tile" if fact.unit.is_number else "tile text"
    return f'<div class="{kind}"><b>{words}</b><span>{escape(fact.name)}</span></div>'


def _caption(words: str) -> str:
    return f'<p class="quiet">{escape(words)}</p>' if words else ""


def _table(table: Table) -> str:
    classes = [' class="number"' if column.unit.is_number else "" for column in table.columns]
    head = "".join(f"<th{kind}>{escape(column.name)}</th>" for kind, column in zip(classes, table.columns, strict=True))
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{escape(shown(value, column.unit))}</td>"
            for kind, value, column in zip(classes, row, table.columns, strict=True)
        )
        + "</tr>"
        for row in table.rows[:ROWS_MAX]
    )
    more = len(table.rows) - ROWS_MAX
    rest = _caption(f"… and {more:,} more: --json has all of them") if more > 0 else ""
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{rest}</section>"
    )
