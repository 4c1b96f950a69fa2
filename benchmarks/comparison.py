"""What moved between two runs of the benchmarks: ``python -m benchmarks.comparison A.json B.json``.

A figure has moved if the rounds of both runs do not overlap and their medians differ by more than ``MOVED_MIN``; where
a run has too few rounds to show its noise, by more than ``NOISE``. A figure with a baseline is compared by its ratio to
it, because the baseline of the same run had the same machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import click
from rich.console import Console

from benchmarks import figures, stats
from benchmarks.figures import FiguresFileError
from benchmarks.report import plain_lines, shown
from benchmarks.targets import TARGETS

MOVED_MIN: Final = 0.03
"""Machines differ by so much from one hour to the next."""
NOISE: Final = 0.15
"""The noise of a figure whose rounds are not known."""
ROUNDS_MIN: Final = 3
"""With fewer rounds, that two runs do not overlap is too likely by chance."""
HIGHER_IS_BETTER: Final = ("/s",)
"""The ends of units of rates; of all others, less is better."""


class FigureChange(StrEnum):
    """What became of a figure."""

    BETTER = "better"
    WORSE = "WORSE"
    SAME = "within noise"
    ADDED = "only in the second"
    GONE = "only in the first"


class FigureKey(NamedTuple):
    """A row of both files."""

    name: str
    baseline: str


@dataclass(frozen=True, slots=True)
class Movement:
    """One figure of two runs; a value is None where a run has none. ``change_share``: of the first run's."""

    key: FigureKey
    unit: str
    before: float | None
    after: float | None
    change_share: float | None
    change: FigureChange


def compare(before: Sequence[Mapping[str, object]], after: Sequence[Mapping[str, object]]) -> list[Movement]:
    """Each figure of either run, in the order of the second; those that only the first has come last."""
    first, second = (dict(_keyed(rows)) for rows in (before, after))
    return [_movement(key, first.get(key), second.get(key)) for key in (*second, *(first.keys() - second.keys()))]


def _keyed(rows: Sequence[Mapping[str, object]]) -> Iterator[tuple[FigureKey, Mapping[str, object]]]:
    for row in rows:
        yield FigureKey(str(row["name"]), str(row["baseline"])), row


def _movement(key: FigureKey, before: Mapping[str, object] | None, after: Mapping[str, object] | None) -> Movement:
    old, new = (None if row is None else _number(row["value"]) for row in (before, after))
    unit = str((after or before or {})["unit"])
    if before is None or after is None:
        return Movement(key, unit, old, new, None, FigureChange.ADDED if before is None else FigureChange.GONE)
    one, other = _rounds(before), _rounds(after)
    if "ratio" in before and None not in (before["ratio"], after["ratio"]):
        one, other = (
            [
                value * _number(row["ratio"]) / _number(row["value"]) if _number(row["value"]) else value
                for value in rounds
            ]
            for rounds, row in ((one, before), (other, after))
        )
    middle = stats.median(one)
    share = stats.median(other) / middle - 1 if middle else 0.0
    if min(len(one), len(other)) >= ROUNDS_MIN:
        moved = (min(other) > max(one) or max(other) < min(one)) and abs(share) > MOVED_MIN
    else:
        moved = abs(share) > NOISE
    better = (share > 0) == _more_is_better(key.name, unit)
    change = (FigureChange.BETTER if better else FigureChange.WORSE) if moved else FigureChange.SAME
    return Movement(key, unit, old, new, share, change)


def _more_is_better(name: str, unit: str) -> bool:
    limits = TARGETS.get(name)
    return limits[0].at_least if limits else unit.endswith(HIGHER_IS_BETTER)


def _rounds(row: Mapping[str, object]) -> list[float]:
    rounds = row.get("rounds")
    return [_number(one) for one in rounds] if isinstance(rounds, list) and rounds else [_number(row["value"])]


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise FiguresFileError(f"{value!r} is no number: it was not written by the benchmarks")
    return float(value)


def rows_of(movements: Sequence[Movement]) -> list[tuple[str, ...]]:
    """The cells of the table."""
    return [
        (
            one.key.name,
            shown(one.before),
            shown(one.after),
            one.unit,
            "-" if one.change_share is None else f"{one.change_share:+.1%}",
            one.key.baseline,
            one.change,
        )
        for one in movements
    ]


COLUMNS: Final = ("name", "first", "second", "unit", "change", "beside", "")


@click.command()
@click.argument("first", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("second", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--all", "everything", is_flag=True, help="Show figures that did not move, too.")
def command(first: Path, second: Path, everything: bool) -> None:
    """Compare two files of figures, FIRST and SECOND; exit with 1 if one became worse beyond noise.

    A change is that of the figure's ratio to its baseline, where it has one.
    """
    console = Console(highlight=False)
    try:
        movements = compare(figures.load(first), figures.load(second))
    except (FiguresFileError, KeyError) as error:
        Console(stderr=True).print(f"{first}, {second}: {error}", style="red", markup=False)
        sys.exit(2)
    shown_ones = [one for one in movements if everything or one.change is not FigureChange.SAME]
    for line in plain_lines(rows_of(shown_ones), COLUMNS) if shown_ones else []:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"{len(movements)} figures, {sum(one.change is FigureChange.SAME for one in movements)} within noise")
    sys.exit(any(one.change is FigureChange.WORSE for one in movements))


if __name__ == "__main__":
    command()
