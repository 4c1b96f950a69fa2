"""Frame, style, tables, charts and figures of all reports: one HTML file each, which needs no network or other file.

Colours follow the reader's light or dark theme. Every picture can be saved as SVG or PNG; without the script for that,
the page is complete. A report adds what only it has: styles, and a script. The page's policy allows nothing else to run
or to be fetched, whatever a log contains.

Charts are SVG elements. Columns and bars are here, with the parts that a drill's chart over time shares with them:
title, legend, text widths. Their colours are those of the page (classes, see ``report_page.css``). Nothing depends on
colour alone: series also have a legend and patterns, every mark shows its value on hover, and the report's tables
contain the same figures. Figures are formatted for people; in JSON they stay plain numbers.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from html import escape
from importlib import resources
from pathlib import Path
from typing import Final

CHART_WIDTH: Final = 1000
"""In a chart's own units; the page scales it."""
_WIDTHS_PX: Final = {
    **dict.fromkeys("iljtfI.,:;'|!()[]/ -", 5.0),
    **dict.fromkeys("mwMW%@", 12.0),
    **dict.fromkeys("ABCDEFGHKLNOPQRSTUVXYZ", 9.5),
    **dict.fromkeys("#&+<=>^~", 10.1),
}
_OTHER_PX: Final = (7.7, 13.0)
"""Of all other characters: ASCII, and any other."""
LEGEND_LINE: Final = 22
"""Height of a line of a chart's legend."""
PLOT_HEIGHT: Final = 220
SERIES_MAX: Final = 4
"""The number of colours on the page."""

_LEFT: Final = 86
_RIGHT: Final = 14
_TOP: Final = 12
_AXIS: Final = 30
_COLUMN_MAX: Final = 64
"""A column is no wider, so that a log of an hour is a column, too, and no wall."""
_ROW: Final = 24
_LINE: Final = 16
"""Height of a line of a label that stands above its bar."""
_BAR: Final = 16
_BESIDE_PX_MAX: Final = 220
"""If a label is wider, all stand above their bars, whole."""
_VALUE_PX: Final = 120
_TICKS: Final = 4
_STEPS: Final = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10)
"""Multiples that divide well by ``_TICKS``."""


@dataclass(frozen=True, slots=True)
class Series:
    """One colour: a name and a value per label."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Drawn:
    title: str
    unit: CountUnit
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    """Stacked, at most ``SERIES_MAX``."""
    caption: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.series) <= SERIES_MAX:
            raise ValueError(f"{self.title}: 1 to {SERIES_MAX} series, not {len(self.series)}")
        for one in self.series:
            if len(one.values) != len(self.labels):
                raise ValueError(f"{self.title}: {len(one.values)} values of {one.name} for {len(self.labels)} labels")

    def totals(self) -> list[float]:
        """The heights of the stacks."""
        return [math.fsum(values) for values in zip(*(one.values for one in self.series), strict=True)]


@dataclass(frozen=True, slots=True)
class ColumnChart(_Drawn):
    """Vertical columns side by side, mostly over time."""


@dataclass(frozen=True, slots=True)
class Bars(_Drawn):
    """Horizontal bars below each other, for names."""


Chart = ColumnChart | Bars


def svg(chart: Chart, number: int) -> str:
    """The SVG element, with its legend; ``number`` makes its ids unique on the page."""
    keys, top = legend(_legend(chart, number), 14, _TOP / 2)
    body, height = _columns(chart, number, _TOP + top) if isinstance(chart, ColumnChart) else _bars(chart, number, top)
    patterns = _patterns(len(chart.series), number)
    return drawing(number, height, (chart.title, _described(chart)), patterns + keys + body)


def _legend(chart: Chart, number: int) -> list[tuple[list[str], str]]:
    """None for a single series."""
    if len(chart.series) == 1:
        return []
    return [
        ([f'class="s{at}"', *([f'fill="url(#hatch-{number}-{at})"'] if at else [])], one.name)
        for at, one in enumerate(chart.series)
    ]


def _described(chart: Chart) -> str:
    totals = chart.totals()
    if not totals:
        return "Nothing to show."
    most = max(range(len(totals)), key=totals.__getitem__)
    return (
        f"{len(totals)} values; the largest is {shown(totals[most], chart.unit)} at {chart.labels[most]}. The "
        "tables of the report have the figures."
    )


def _patterns(count: int, number: int) -> str:
    """Hatching for the second and every later series, so that they differ without colour."""
    if count == 1:
        return ""
    marks = "".join(
        f'<pattern id="hatch-{number}-{at}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({45 * at})"><line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern>'
        for at in range(1, count)
    )
    return f"<defs>{marks}</defs>"


def _mark(at: int, number: int, box: tuple[float, float, float, float], words: str) -> str:
    x, y, width, height = box
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    hatch = f'<rect fill="url(#hatch-{number}-{at})" {place}/>' if at else ""
    return f'<g><title>{escape(words)}</title><rect class="s{at}" {place}/>{hatch}</g>'


def _columns(chart: ColumnChart, number: int, top: float) -> tuple[str, float]:
    most = _ceiling(max(chart.totals(), default=0.0), chart.unit)
    bottom = top + PLOT_HEIGHT
    parts = [_grid(most, chart.unit, bottom)]
    step = (CHART_WIDTH - _LEFT - _RIGHT) / max(1, len(chart.labels))
    wide = min(step - min(4.0, step * 0.2), _COLUMN_MAX)
    for column, label in enumerate(chart.labels):
        base = bottom
        for at, one in enumerate(chart.series):
            value = one.values[column]
            height = value / most * PLOT_HEIGHT
            if height > 0:
                box = (_LEFT + (column + 0.5) * step - wide / 2, base - height, wide, height)
                parts.append(_mark(at, number, box, _words(label, one, value, chart)))
                base -= height
    widest = max(map(text_px, chart.labels), default=1)
    every = max(1, math.ceil(len(chart.labels) * (widest + 14) / (CHART_WIDTH - _LEFT - _RIGHT)))
    for column in range(0, len(chart.labels), every):
        label = chart.labels[column]
        x = min(_LEFT + (column + 0.5) * step, CHART_WIDTH - text_px(label) / 2)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(label)}</text>')
    return "".join(parts), bottom + _AXIS


def _bars(chart: Bars, number: int, top: float) -> tuple[str, float]:
    """Labels are left of their bars if all are short, otherwise above them; they are never cut."""
    widest = max(map(text_px, chart.labels), default=1)
    beside = widest <= _BESIDE_PX_MAX
    left = 14 + widest if beside else 14.0
    most = max(chart.totals(), default=0.0) or 1.0
    parts, y = [], _TOP + top
    for row, (label, total) in enumerate(zip(chart.labels, chart.totals(), strict=True)):
        if beside:
            place = f'x="{left - 8:.1f}" y="{y + _BAR / 2 + 4}" text-anchor="end"'
            parts.append(f'<text class="label" {place}>{escape(label)}</text>')
        else:
            for line in _lines(label):
                parts.append(f'<text class="label" x="{left:.1f}" y="{y + 11}">{escape(line)}</text>')
                y += _LINE
        x = left
        for at, one in enumerate(chart.series):
            width = one.values[row] / most * (CHART_WIDTH - left - _VALUE_PX)
            if width > 0:
                parts.append(_mark(at, number, (x, y, width, _BAR), _words(label, one, one.values[row], chart)))
                x += width
        parts.append(f'<text x="{x + 8:.1f}" y="{y + _BAR / 2 + 4}">{escape(shown(total, chart.unit))}</text>')
        y += _ROW if beside else _ROW + 4
    return "".join(parts), y + 6


def _lines(label: str) -> list[str]:
    lines, free_px = [""], 0.0
    for character in label:
        free_px -= text_px(character)
        if lines[-1] and free_px < 0:
            lines.append("")
        if not lines[-1]:
            free_px = CHART_WIDTH - 28 - text_px(character)
        lines[-1] += character
    return lines


def _words(label: str, series: Series, value: float, chart: Chart) -> str:
    name = f", {series.name}" if len(chart.series) > 1 else ""
    return f"{label}{name}: {shown(value, chart.unit)}"


def _grid(top: float, unit: CountUnit, bottom: float) -> str:
    y: Callable[[float], float] = lambda value: bottom - value / top * PLOT_HEIGHT  # noqa: E731  # one line of maths
    ticks: Sequence[float] = [top * step / _TICKS for step in range(_TICKS + 1)]
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{CHART_WIDTH - _RIGHT}" y1="{y(one):.1f}" y2="{y(one):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y(one) + 4:.1f}" text-anchor="end">{escape(_tick(one, unit))}</text>'
        for one in ticks
    )


def _tick(value: float, unit: CountUnit) -> str:
    """Without digits that say nothing: ``50/s``, not ``50.0/s``."""
    return re.sub(r"(\.\d*?)0+(?!\d)", lambda digits: digits[1].rstrip("."), shown(value, unit))


def _ceiling(most: float, unit: CountUnit) -> float:
    """The next higher number that divides well; of bytes, in the unit that they are shown in."""
    if most <= 0:
        return 1.0
    scale = 1.0
    while unit in (CountUnit.BYTES, CountUnit.BYTES_PER_SECOND) and most / scale >= 1024:
        scale *= 1024
    power = scale * 10.0 ** math.floor(math.log10(most / scale))
    return next(step * power for step in _STEPS if step * power >= most * (1 - 1e-9))


# --- what every chart has -------------------------------------------------------------------------------------


def text_px(text: str) -> float:
    """At most so wide is a text in a chart's font, whichever of the page's it is."""
    return sum(_WIDTHS_PX.get(one, _OTHER_PX[not one.isascii()]) for one in text)


def legend(items: Iterable[tuple[Sequence[str], str]], left: float, top: float) -> tuple[str, float]:
    """A chart's legend in as many lines as it needs, and their height.

    An item: attributes of the rectangles that make its key, one over the other, and its name.
    """
    found, x, y = [], left, top
    for keys, name in items:
        width = 22 + text_px(name)
        if x > left and x + width > CHART_WIDTH:
            x, y = left, y + LEGEND_LINE
        found += [f'<rect {one} x="{x:.1f}" y="{y + 2:.1f}" width="14" height="10"/>' for one in keys]
        found.append(f'<text x="{x + 20:.1f}" y="{y + 11:.1f}">{escape(name)}</text>')
        x += width + 14
    return "".join(found), (y - top + LEGEND_LINE if found else 0.0)


def drawing(number: int, height: float, names: tuple[str, str], body: str, data: str = "") -> str:
    """A chart of ``CHART_WIDTH``. ``names``: its title, and a sentence that describes it for screen readers.

    ``number`` makes its ids unique on the page; ``data``: further attributes, for a script.
    """
    title, text = f"chart-title-{number}", f"chart-text-{number}"
    return (
        f'<svg class="chart" viewBox="0 0 {CHART_WIDTH} {height}" role="img" aria-labelledby="{title} {text}"{data}>'
        f'<title id="{title}">{escape(names[0])}</title><desc id="{text}">{escape(names[1])}</desc>{body}</svg>'
    )


_REPLACEMENT: Final = 0xFFFD
_SHOWN_AS: Final = {
    **dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF), _REPLACEMENT),
    **dict.fromkeys((0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT),
    **{code: 0x2400 + code for code in range(0x20) if code not in b"\t\n"},
    0x7F: 0x2421,
}
"""Signs for characters that no XML may have, as a saved picture is, that are invisible, or that reorder text."""


def document(title: str, css: str, body: Iterable[str], script: str = "") -> str:
    """The whole file. ``body``: elements; empty ones are left out."""
    style, scripts = _own_file("css") + css, [_own_file("js"), *([script] if script else [])]
    whole = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, scripts)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + f"\n</main>\n{''.join(f'<script>{one}</script>{chr(10)}' for one in scripts)}</body>\n</html>\n"
    )
    return whole.translate(_SHOWN_AS)


def _own_file(ending: str) -> str:
    return resources.files("dledger.command_line").joinpath(f"report_page.{ending}").read_text(encoding="utf-8")


def _policy(style: str, scripts: Iterable[str]) -> str:
    """Only what the page was written with; ``data:`` is for the picture that becomes a PNG."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write(text: str, path: Path) -> None:
    """Write a document, whole or not at all; what is not a file, such as /dev/stdout, is written directly."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    half = path.with_name(f".{secrets.token_hex(8)}.tmp")  # nobody can have prepared it, as a link to another file
    try:
        with half.open("x", encoding="utf-8") as file:
            file.write(text)
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def paragraph(words: str, kind: str = "quiet") -> str:
    """A paragraph; nothing for an empty text."""
    return f'<p class="{kind}">{escape(words)}</p>' if words else ""


def facts(parts: Iterable[tuple[str, str]]) -> str:
    """Names and texts below each other; texts may be long. Nothing if there are none."""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in parts)
    return f'<dl class="facts">{listed}</dl>' if listed else ""


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
    return f"<tr{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{''.join(cells)}</tr>"


def cell(words: str, *, is_number: bool = False, is_time: bool = False) -> str:
    """One cell of a row."""
    return f"<td{_kind(is_number) or (_TIME if is_time else '')}>{escape(words)}</td>"


def picture(drawn: str, beside: str = "") -> str:
    """A chart made by ``svg``, with buttons that save it. ``beside``: what its script needs."""
    return (
        f'<figure class="picture"><div class="scroll"><div class="plot">{drawn}{beside}</div></div>'
        '<p class="save" hidden="hidden">Save this picture: <button type="button" data-as="svg">SVG</button>'
        '<button type="button" data-as="png">PNG</button></p></figure>'
    )


_TIME: Final = ' class="time"'


def _kind(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


Value = str | int | float | bool | None

_BYTES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class CountUnit(Enum):
    """The units of a number."""

    TEXT = "text"
    COUNT = "count"
    BYTES = "bytes"
    SECONDS = "seconds"
    PER_SECOND = "per second"
    BYTES_PER_SECOND = "bytes per second"
    SHARE = "share"
    """0 to 1, shown as a percentage."""
    RATIO = "ratio"
    """A factor."""
    TIME_MS = "time"
    """Milliseconds since 1970, shown as UTC."""

    @property
    def is_number(self) -> bool:
        """Whether it is right-aligned."""
        return self not in (CountUnit.TEXT, CountUnit.TIME_MS)


def shown(value: Value, unit: CountUnit) -> str:
    """``value`` formatted for people; a dash if there is none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else _SHOWN[unit](value)


def time_text(at_ms: int) -> str:
    """UTC, to the second."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _bytes(value: float) -> str:
    size, unit = float(value), 0
    while abs(size) >= 1024 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{_figures(size)} {_BYTES[unit]}"


def _figures(value: float) -> str:
    """About three significant digits; digits before the point are always kept."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{_figures(seconds)} s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    return f"{days:.1f} d" if days >= 2 else f"{hours:.1f} h" if hours >= 2 else f"{minutes:.1f} min"


_SHOWN: Final[dict[CountUnit, Callable[[float], str]]] = {
    CountUnit.TEXT: str,
    CountUnit.COUNT: lambda value: f"{value:,.0f}",
    CountUnit.BYTES: _bytes,
    CountUnit.SECONDS: _duration,
    CountUnit.PER_SECOND: lambda value: f"{_figures(value)}/s",
    CountUnit.BYTES_PER_SECOND: lambda value: f"{_bytes(value)}/s",
    CountUnit.SHARE: lambda value: f"{value:.1%}",
    CountUnit.RATIO: lambda value: f"{value:.2f}x",
    CountUnit.TIME_MS: lambda value: time_text(int(value)),
}
