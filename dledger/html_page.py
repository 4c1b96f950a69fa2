"""Common parts of reports in one HTML file each, which need no network and no other file.

Colours follow the reader's light or dark theme; a report adds its own styles, and a script if it has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

CHART_WIDTH: Final = 1000
"""In a chart's own units; the page scales it."""

_CSS: Final = """\
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #d7dce3; --text: #1b2430; --quiet: #566273;
  --bad: #b3211f; --bad-back: #fbe3e1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11161d; --card: #1a212b; --line: #34404e; --text: #e6ebf2; --quiet: #a3b0c0;
    --bad: #ff8f87; --bad-back: #431b1a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
       font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { margin: 0 0 4px; font-size: 26px; }
.quiet { color: var(--quiet); margin: 4px 0; }
.banner { margin: 16px 0; padding: 12px 16px; border-radius: 8px; font-weight: 600; }
.banner ul { margin: 6px 0 0; padding-left: 22px; font-weight: 400; }
.bad { background: var(--bad-back); color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(118px, 1fr)); gap: 10px; margin: 16px 0; }
.tile { padding: 10px 12px; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
.tile b { display: block; font-size: 20px; line-height: 1.25; font-variant-numeric: tabular-nums;
          overflow-wrap: anywhere; }
.tile span { color: var(--quiet); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 15px 5px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--quiet); font-weight: 600; font-size: 13px; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
svg.chart { display: block; width: 100%; min-width: 660px; height: auto;
            font: 12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
svg text { fill: var(--quiet); }
.grid { stroke: var(--line); }
.legend { display: flex; gap: 18px; flex-wrap: wrap; color: var(--quiet); font-size: 13px; }
@media print { body { background: #fff; } }
"""


def document(title: str, css: str, body: Iterable[str], script: str = "") -> str:
    """The whole file. ``body``: elements; empty ones are left out."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_CSS}{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + f"\n</main>\n{f'<script>{chr(10)}{script}</script>{chr(10)}' if script else ''}</body>\n</html>\n"
    )


def write(text: str, path: Path) -> None:
    """Write a document, whole or not at all; what is not a file, such as /dev/stdout, is written directly."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    half = path.with_name(f".{path.name}.tmp")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def paragraph(words: str, kind: str = "quiet") -> str:
    """A paragraph; nothing for an empty text."""
    return f'<p class="{kind}">{escape(words)}</p>' if words else ""


def banner(words: str, kind: str = "bad", items: Sequence[str] = ()) -> str:
    """The most important message, and its parts."""
    listed = f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in items)}</ul>" if items else ""
    return f'<div class="banner {kind}" role="status">{escape(words)}{listed}</div>'


def tile(name: str, value: str, kind: str = "") -> str:
    """One figure, for ``tiles``."""
    return f'<div class="{f"tile {kind}".strip()}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def tiles(parts: Iterable[str]) -> str:
    """Figures side by side."""
    return f'<div class="tiles">{"".join(parts)}</div>'


def table(columns: Sequence[tuple[str, bool]], rows: Iterable[str]) -> str:
    """``columns``: a name, and whether it holds numbers. ``rows``: made by ``row``."""
    head = "".join(f'<th scope="col"{_kind(is_number)}>{escape(name)}</th>' for name, is_number in columns)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row(cells: Iterable[str], kind: str = "") -> str:
    """One row of cells."""
    return f"<tr{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{''.join(cells)}</tr>"


def cell(words: str, *, is_number: bool = False) -> str:
    """One cell of a row."""
    return f"<td{_kind(is_number)}>{escape(words)}</td>"


def svg(number: int, height: float, names: tuple[str, str], body: str, data: str = "") -> str:
    """A chart of ``CHART_WIDTH``. ``names``: its title, and a sentence that describes it for screen readers.

    ``number`` makes its ids unique on the page; ``data``: further attributes, for a script.
    """
    title, text = f"chart-title-{number}", f"chart-text-{number}"
    return (
        f'<svg class="chart" viewBox="0 0 {CHART_WIDTH} {height}" role="img" aria-labelledby="{title} {text}"{data}>'
        f'<title id="{title}">{escape(names[0])}</title><desc id="{text}">{escape(names[1])}</desc>{body}</svg>'
    )


def _kind(is_number: bool) -> str:
    return ' class="number"' if is_number else ""
