"""Two runs compared: noise is no change, and a change is told by its direction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import figures
from benchmarks.comparison import FigureChange, command, compare
from benchmarks.figures import Figure

RATE = "entries/s"


def rows(*some: Figure) -> list[dict[str, object]]:
    """As they are read from a file."""
    loaded: list[dict[str, object]] = json.loads(json.dumps([one.as_json() for one in some]))
    return loaded


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((100, 101, 102), (110, 111, 112), FigureChange.BETTER),
        ((100, 101, 102), (90, 91, 92), FigureChange.WORSE),
        ((100, 101, 112), (110, 111, 112), FigureChange.SAME),  # rounds overlap
        ((100, 100, 100), (102, 102, 102), FigureChange.SAME),  # apart, but by little
        ((100,), (110,), FigureChange.SAME),  # single rounds show no noise
        ((100,), (120,), FigureChange.BETTER),
    ],
)
def test_only_what_is_beyond_the_noise_has_moved(
    before: tuple[float, ...], after: tuple[float, ...], expected: FigureChange
) -> None:
    """By the rounds of both runs, where there are enough."""
    (moved,) = compare(rows(Figure.median("send", before, RATE)), rows(Figure.median("send", after, RATE)))

    assert moved.change is expected


@pytest.mark.parametrize(("unit", "name"), [("ms", "latency"), ("s", "restart_clean"), ("MB", "memory")])
def test_of_times_and_memory_less_is_better(unit: str, name: str) -> None:
    """Only rates, and targets with a lower bound, are better if they are higher."""
    (moved,) = compare(rows(Figure.median(name, [1.0], unit)), rows(Figure.median(name, [2.0], unit)))

    assert moved.change is FigureChange.WORSE


def test_a_figure_with_a_baseline_is_compared_by_its_ratio() -> None:
    """A machine that is half as fast slows both."""
    before = Figure.median("send", [100, 101, 102], RATE, "peer", [50])
    after = Figure.median("send", [50, 51, 52], RATE, "peer", [25])

    (moved,) = compare(rows(before), rows(after))

    assert moved.change is FigureChange.SAME
    assert moved.change_share == pytest.approx(0.01, abs=0.01)


def test_what_only_one_run_has_is_told() -> None:
    """In either direction, with the value that there is."""
    moved = compare(rows(Figure.median("old", [1.0], "s")), rows(Figure.median("new", [2.0], "s")))

    assert [(one.key.name, one.before, one.after, one.change) for one in moved] == [
        ("new", None, 2.0, FigureChange.ADDED),
        ("old", 1.0, None, FigureChange.GONE),
    ]


def test_the_command_tells_what_moved_and_fails_if_something_became_worse(tmp_path: Path) -> None:
    """For a pipeline that stops at a slower commit."""
    steady = Figure.median("steady", [1.0], "s")
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    figures.save(first, [*rows(steady, Figure.median("send", [100, 101, 102], RATE))])
    figures.save(second, [*rows(steady, Figure.median("send", [50, 51, 52], RATE))])

    worse = CliRunner().invoke(command, [str(first), str(second)])
    same = CliRunner().invoke(command, [str(first), str(first)])

    assert worse.exit_code == 1
    assert worse.output.splitlines()[1].split() == ["send", "101", "51", RATE, "-49.5%", "WORSE"]
    assert worse.output.splitlines()[-1] == "2 figures, 1 within noise"
    assert (same.exit_code, same.output) == (0, "2 figures, 2 within noise\n")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """With its name and the reason."""
    path = tmp_path / "other.json"
    path.write_text("{}")

    result = CliRunner().invoke(command, [str(path), str(path)])

    assert result.exit_code == 2
    assert "is not a list of figures" in result.output
