"""Generates charts as SVG elements, so that a report is one file without network access or scripts.

Colours are those of the page (classes, see ``page.py``), so a chart follows the reader's light or dark theme. Nothing
depends on colour alone: series also have a legend and patterns, every mark shows its value on hover, and the report's
tables contain the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from dledger import html_page
from dledger.html_page import CHART_WIDTH
from dledger_spark.jobs.units import CountUnit, shown

PLOT_HEIGHT: Final = 220
SERIES_MAX: Final = 4
"""The number of colours on the page."""

_LEFT: Final = 86
_RIGHT: Final = 14
_TOP: Final = 12
_AXIS: Final = 30
_ROW: Final = 24
_BAR: Final = 16
_LABEL_PX: Final = 6.7
"""Approximate width of a character in the chart's font."""
_LABEL_CHARS_MAX: Final = 36
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
    """The SVG element; ``number`` makes its ids unique on the page."""
    body, height = _columns(chart, number) if isinstance(chart, ColumnChart) else _bars(chart, number)
    return html_page.svg(number, height, (chart.title, _described(chart)), _patterns(len(chart.series), number) + body)


def legend(chart: Chart, number: int) -> str:
    """The legend; empty for a single series. ``number``: the same as for ``svg``, whose patterns it uses."""
    if len(chart.series) == 1:
        return ""
    items = "".join(
        f'<span><svg class="key" viewBox="0 0 14 10" aria-hidden="true"><rect class="s{at}" width="14" height="10"/>'
        + (f'<rect fill="url(#hatch-{number}-{at})" width="14" height="10"/>' if at else "")
        + f"</svg>{escape(one.name)}</span>"
        for at, one in enumerate(chart.series)
    )
    return f'<p class="legend">{items}</p>'


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


def _columns(chart: ColumnChart, number: int) -> tuple[str, int]:
    top = _ceiling(max(chart.totals(), default=0.0))
    bottom = _TOP + PLOT_HEIGHT
    parts = [_grid(top, chart.unit, bottom)]
    step = (CHART_WIDTH - _LEFT - _RIGHT) / max(1, len(chart.labels))
    gap = min(4.0, step * 0.2)
    for column, label in enumerate(chart.labels):
        base = float(bottom)
        for at, one in enumerate(chart.series):
            value = one.values[column]
            height = value / top * PLOT_HEIGHT
            if height > 0:
                box = (_LEFT + column * step + gap / 2, base - height, step - gap, height)
                parts.append(_mark(at, number, box, _words(label, one, value, chart)))
                base -= height
    every = max(
        1, math.ceil(len(chart.labels) * (max(map(len, chart.labels), default=1) + 3) * _LABEL_PX / CHART_WIDTH)
    )
    parts += [
        f'<text x="{_LEFT + (column + 0.5) * step:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(label)}</text>'
        for column, label in enumerate(chart.labels)
        if column % every == 0
    ]
    return "".join(parts), bottom + _AXIS


def _bars(chart: Bars, number: int) -> tuple[str, int]:
    labels = [_short(label) for label in chart.labels]
    left = 14 + _LABEL_PX * max(map(len, labels), default=1)
    most = max(chart.totals(), default=0.0) or 1.0
    parts = []
    for row, (label, total) in enumerate(zip(labels, chart.totals(), strict=True)):
        y = _TOP + row * _ROW
        middle = y + _BAR / 2 + 4
        x = left
        parts.append(f'<text class="label" x="{left - 8:.1f}" y="{middle}" text-anchor="end">{escape(label)}</text>')
        for at, one in enumerate(chart.series):
            width = one.values[row] / most * (CHART_WIDTH - left - _VALUE_PX)
            if width > 0:
                parts.append(
                    _mark(at, number, (x, y, width, _BAR), _words(chart.labels[row], one, one.values[row], chart))
                )
                x += width
        parts.append(f'<text x="{x + 8:.1f}" y="{middle}">{escape(shown(total, chart.unit))}</text>')
    return "".join(parts), _TOP + _ROW * len(labels) + 6


def _words(label: str, series: Series, value: float, chart: Chart) -> str:
    name = f", {series.name}" if len(chart.series) > 1 else ""
    return f"{label}{name}: {shown(value, chart.unit)}"


def _short(label: str) -> str:
    """Shorten a long name in the middle, because its end is informative, too."""
    if len(label) <= _LABEL_CHARS_MAX:
        return label
    half = (_LABEL_CHARS_MAX - 1) // 2
    return f"{label[:half]}…{label[-half:]}"


def _grid(top: float, unit: CountUnit, bottom: int) -> str:
    y: Callable[[float], float] = lambda value: bottom - value / top * PLOT_HEIGHT  # noqa: E731  # one line of maths
    ticks: Sequence[float] = [top * step / _TICKS for step in range(_TICKS + 1)]
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{CHART_WIDTH - _RIGHT}" y1="{y(one):.1f}" y2="{y(one):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y(one) + 4:.1f}" text-anchor="end">{escape(shown(one, unit))}</text>'
        for one in ticks
    )


def _ceiling(most: float) -> float:
    """The next higher number that divides well."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in _STEPS if step * power >= most * (1 - 1e-9))
