"""The layout of ``bench.json`` and how runs are merged into it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import Figure, FiguresFileError


def figure(name: str, value: float = 1.0, baseline: str = "peer", baseline_value: float | None = 2.0) -> Figure:
    """A figure of which only some parts matter."""
    return Figure(name, value, "unit", baseline, baseline_value)


def test_a_row_has_the_documented_keys_in_order() -> None:
    """The layout that programs rely on; the rounds show how noisy the value is."""
    row = Figure("append", 600.0, "entries/s", "PySyncObj", 100.0).as_json()

    assert list(row) == ["name", "value", "unit", "baseline", "baseline_value", "ratio", "rounds"]
    assert (row["ratio"], Figure.median("append", [1, 9, 2], "s").as_json()["rounds"]) == (6.0, [1, 9, 2])


def test_a_missing_baseline_is_null_in_the_file(tmp_path: Path) -> None:
    """Without its peer a figure keeps its value; baseline_value and ratio are null."""
    path = tmp_path / "build" / "bench.json"

    figures.save(path, [figure("a", baseline="baseline missing: peer: install it", baseline_value=None).as_json()])

    (row,) = json.loads(path.read_text())
    assert row["baseline_value"] is None
    assert row["ratio"] is None
    assert row["baseline"] == "baseline missing: peer: install it"


def test_other_names_survive_a_partial_run() -> None:
    """A run of some benchmarks replaces their rows, in place, and keeps all others, also unknown ones."""
    existing = [figure("a").as_json(), figure("b").as_json(), {"name": "of_a_later_issue", "extra": 1}]

    rows = figures.merged(existing, [figure("a", 5.0), figure("new")], {"a", "new"})

    assert [(row["name"], row.get("value")) for row in rows] == [
        ("a", 5.0),
        ("b", 1.0),
        ("of_a_later_issue", None),
        ("new", 1.0),
    ]


def test_a_name_may_stand_beside_several_baselines() -> None:
    """All rows of a name are replaced together, whatever their baselines were."""
    existing = [figure("p99", baseline="etcd").as_json(), figure("p99", baseline="gone").as_json()]

    rows = figures.merged(existing, [figure("p99", baseline="etcd"), figure("p99", baseline="own p50")], {"p99"})

    assert [row["baseline"] for row in rows] == ["etcd", "own p50"]


def test_the_old_row_of_a_benchmark_that_broke_is_dropped() -> None:
    """An old figure must not pass for one of this run."""
    assert figures.merged([figure("a").as_json(), figure("b").as_json()], [], {"a"}) == [figure("b").as_json()]


def test_saved_rows_are_loaded_again(tmp_path: Path) -> None:
    """Saving and loading is the identity; a missing file is an empty one; nothing else is left behind."""
    path = tmp_path / "bench.json"
    rows = [figure("a").as_json(), figure("b").as_json()]

    assert figures.load(path) == []
    figures.save(path, rows)

    assert figures.load(path) == rows
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"value": 1}]'])
def test_a_foreign_file_is_refused(tmp_path: Path, content: str) -> None:
    """What is not a list of figures is not overwritten."""
    path = tmp_path / "bench.json"
    path.write_text(content)

    with pytest.raises(FiguresFileError, match="remove it or choose another output"):
        figures.load(path)
