"""Displays figures and judgements: rich tables on a terminal, aligned text elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.figures import Figure
from benchmarks.targets import Judgement, TargetVerdict

COLUMNS = ("name", "value", "unit", "baseline", "baseline value", "ratio", "target")
RIGHT_ALIGNED = frozenset({"value", "baseline value", "ratio", "first", "second", "change"})


def shown(value: float | None) -> str:
    """A number with its significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rows_of(figures: Sequence[Figure], judgements: Sequence[Judgement]) -> list[tuple[str, ...]]:
    """The table's cells: each limit is in the row it was judged by."""
    rows: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for figure in figures:
        first = figure.name not in seen
        seen.add(figure.name)
        baselines = {one.baseline for one in figures if one.name == figure.name}
        limits = [
            f"{one.limit}: {one.verdict}"
            for one in judgements
            if one.name == figure.name
            and (one.limit.baseline == figure.baseline or (first and one.limit.baseline not in baselines))
        ]
        rows.append(
            (
                figure.name,
                shown(figure.value),
                figure.unit,
                figure.baseline,
                shown(figure.baseline_value),
                shown(figure.ratio),
                "; ".join(limits),
            )
        )
    return rows


def show(console: Console, figures: Sequence[Figure], judgements: Sequence[Judgement]) -> None:
    """Print the table."""
    rows = rows_of(figures, judgements)
    if console.is_terminal:
        table = Table(title="benchmarks", title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="right" if column in RIGHT_ALIGNED else "left")
        for row in rows:
            table.add_row(*row[:-1], Text(row[-1], style=_style(row[-1])))
        console.print(table)
        return
    for line in plain_lines(rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def plain_lines(rows: Sequence[tuple[str, ...]], columns: Sequence[str] = COLUMNS) -> list[str]:
    """A table as text, columns aligned, no line folded."""
    everything = [tuple(columns), *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(columns))]
    lines = []
    for row in everything:
        cells = [
            cell.rjust(width) if name in RIGHT_ALIGNED else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _style(judged: str) -> str:
    if TargetVerdict.MISSED in judged or TargetVerdict.UNPROVEN in judged:
        return "bold red"
    if TargetVerdict.NOISY in judged:
        return "yellow"
    return "green" if judged else ""
