"""How a figure grows with something: curves, their file, and their drawings (matplotlib, from the extra ``bench``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.figures import FiguresFileError

FILE: Final = "curves.json"
_INCHES: Final = (6.4, 3.6)
_MARKERS: Final = "osD^v"
_LABEL_SHARE: Final = 0.09
"""The width of a label, of the axis."""


class CurvePoint(NamedTuple):
    """One measurement."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class CurveLine:
    """One line of a drawing, in the order of ``x``."""

    name: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """One drawing; both axes are logarithmic. ``name`` is the benchmark's and the file's."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[CurveLine, ...]


def load(directory: Path) -> dict[str, Curve]:
    """The curves of earlier runs, by name. Raises ``FiguresFileError``."""
    path = directory / FILE
    try:
        return _curves(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError) as error:
        raise FiguresFileError(f"{path} has no curves of `make bench` ({error!r}): remove it") from error


def _curves(rows: object) -> dict[str, Curve]:
    if not isinstance(rows, list):
        raise TypeError("not a list")
    return {row["name"]: _curve(row) for row in rows}


def _curve(row: Mapping[str, object]) -> Curve:
    lines = row["lines"]
    if not isinstance(lines, list):
        raise TypeError("lines must be a list")
    drawn = tuple(
        CurveLine(one["name"], tuple(CurvePoint(float(x), float(y)) for x, y in one["points"])) for one in lines
    )
    return Curve(str(row["name"]), str(row["title"]), str(row["x_label"]), str(row["y_label"]), drawn)


def save(directory: Path, curves: Sequence[Curve]) -> None:
    """Add them to the file in ``directory``, in the place of those of the same names. Raises ``FiguresFileError``."""
    together = {**load(directory), **{one.name: one for one in curves}}
    directory.mkdir(parents=True, exist_ok=True)
    text = ",\n".join("  " + json.dumps(asdict(one)) for one in together.values())
    (directory / FILE).write_text(f"[\n{text}\n]\n", encoding="utf-8")


def drawing(curve: Curve) -> str:
    """The name of its file."""
    return f"{curve.name.replace('_', '-')}.svg"


def draw(curve: Curve, path: Path) -> Path:
    """One SVG, the same for the same figures. Raises ``ImportError`` without the extra ``bench``."""
    import matplotlib  # only benchmarks that draw need it
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    with matplotlib.rc_context({"svg.hashsalt": curve.name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot(
            title=curve.title, xlabel=curve.x_label, ylabel=curve.y_label, xscale="log", yscale="log"
        )
        for line, marker in zip(curve.lines, _MARKERS * len(curve.lines), strict=False):
            axes.plot(*zip(*line.points, strict=True), marker=marker, markersize=4, label=line.name)
        ticks = _apart(sorted({point.x for line in curve.lines for point in line.points}))
        axes.set_xticks(ticks, [_short(tick) for tick in ticks])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        axes.grid(visible=True, which="major", linewidth=0.5, alpha=0.5)
        if len(curve.lines) > 1:
            axes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def _apart(ticks: Sequence[float]) -> list[float]:
    """Those that can be labelled without overlapping the one before."""
    least = (ticks[-1] / ticks[0]) ** _LABEL_SHARE
    kept = [ticks[0]]
    for tick in ticks[1:]:
        if tick >= kept[-1] * least:
            kept.append(tick)
    return kept


def _short(value: float) -> str:
    """With at most three digits: 1500000 is 1.5M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def line(name: str, points: Iterable[tuple[float, float]]) -> CurveLine:
    """A line of these points."""
    return CurveLine(name, tuple(CurvePoint(x, y) for x, y in points))
