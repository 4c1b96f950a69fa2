"""A measured figure, and the file that contains all figures. Independent of the benchmarks."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import stats

FIELDS = ("name", "value", "unit", "baseline", "baseline_value", "ratio", "rounds")


class FiguresFileError(Exception):
    """Raised when an existing ``bench.json`` was not written by this module, so that it is not overwritten."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and its baseline.

    A name may occur several times, each time with another ``baseline`` (a p99 against a peer's p99 and against its own
    p50). ``baseline_value`` is None when the baseline could not be measured; ``baseline`` then says what to install.
    """

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float | None
    rounds: tuple[float, ...] = ()
    """The values that ``value`` is the median of, which show how noisy it is; empty: there were none."""

    @classmethod
    def median(
        cls, name: str, rounds: Sequence[float], unit: str, baseline: str = "", baseline_rounds: Sequence[float] = ()
    ) -> Figure:
        """The medians of the rounds of both; no rounds of the baseline: it could not be measured."""
        theirs = stats.median(baseline_rounds) if baseline_rounds else None
        return cls(name, stats.median(rounds), unit, baseline, theirs, tuple(rounds))

    @property
    def ratio(self) -> float | None:
        """The value over its baseline; None without one."""
        return stats.ratio(self.value, self.baseline_value)

    def as_json(self) -> dict[str, object]:
        """The object of ``bench.json``, keys in the documented order."""
        values = (self.name, self.value, self.unit, self.baseline, self.baseline_value, self.ratio, list(self.rounds))
        return dict(zip(FIELDS, values, strict=True))


def merged(
    existing: Sequence[Mapping[str, object]], fresh: Iterable[Figure], measured_names: Collection[str]
) -> list[dict[str, object]]:
    """The rows to write: those of other names are unchanged, those of ``measured_names`` are replaced.

    Rows of a requested name that failed are dropped, so that no old figure passes for a new one. A name keeps its place
    in the file; new names follow at the end, in the order they were measured.
    """
    rows: dict[str, list[dict[str, object]]] = {}
    for row in existing:
        kept = rows.setdefault(str(row["name"]), [])
        if row["name"] not in measured_names:
            kept.append(dict(row))
    for figure in fresh:
        rows.setdefault(figure.name, []).append(figure.as_json())
    return [row for group in rows.values() for row in group]


def load(path: Path) -> list[dict[str, object]]:
    """The rows of an earlier run; none if there was none. Raises ``FiguresFileError`` for anything else."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise FiguresFileError(f"{path} is not JSON ({error}): remove it or choose another output") from error
    if not isinstance(parsed, list) or not all(isinstance(row, dict) and "name" in row for row in parsed):
        raise FiguresFileError(f"{path} is not a list of figures: remove it or choose another output")
    return parsed


def save(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the rows, one per line, replacing the whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(f"[\n{lines}\n]\n" if rows else "[]\n", encoding="utf-8")
    os.replace(temporary, path)
