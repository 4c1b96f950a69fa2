"""The table of figures."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks import report, targets
from benchmarks.figures import Figure

FIGURES = [
    Figure("append_roundtrip_p99", 3.0, "ms", "etcd", 2.0),
    Figure("append_roundtrip_p99", 3.0, "ms", "own p50", 1.0),
    Figure("idle_rss", 160.0, "MB", "python", None),
]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (61234.5, "61,234"), (100.4, "100"), (99.96, "100"), (0.01234, "0.0123")]
)
def test_numbers_show_the_digits_that_mean_something(value: float | None, text: str) -> None:
    """Three significant digits below a hundred, whole numbers above."""
    assert report.shown(value) == text


def test_each_limit_stands_in_the_row_it_was_judged_by() -> None:
    """A limit on a ratio stands beside that baseline; one on the value stands in the name's first row."""
    rows = report.rows_of(FIGURES, targets.judge(FIGURES, quiet=True))

    assert [row[-1] for row in rows] == ["≤ 1.2x etcd: MISSED", "≤ 5x own p50: met", "≤ 150 MB: MISSED"]


def test_plain_output_is_aligned_and_unfolded() -> None:
    """Off a terminal every figure is one line whose columns start where the header's do."""
    console = Console(file=io.StringIO(), width=40)

    report.show(console, FIGURES, targets.judge(FIGURES, quiet=True))

    assert isinstance(console.file, io.StringIO)
    header, *lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert all(
        line[header.index("baseline") :].startswith(name)
        for line, name in zip(lines, ["etcd", "own p50", "python"], strict=True)
    )


def test_a_terminal_gets_a_table() -> None:
    """Rich draws it there."""
    console = Console(file=io.StringIO(), force_terminal=True, width=160)

    report.show(console, FIGURES, targets.judge(FIGURES, quiet=True))

    assert isinstance(console.file, io.StringIO)
    assert "benchmarks" in console.file.getvalue()
    assert "MISSED" in console.file.getvalue()
