"""Curves are kept until they are measured again, and drawn the same for the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import curves
from benchmarks.curves import Curve, line
from benchmarks.figures import FiguresFileError
from tests.support import lacking

CLIENTS = Curve("clients", "Appends by clients", "clients", "entries/s", (line("entries/s", [(1, 800), (10, 6000)]),))
LOAD = Curve("load", "Latency", "entries/s", "ms", (line("p50", [(1000, 1.5)]), line("p99", [(1000, 4.0)])))


def test_curves_are_as_they_were_saved(tmp_path: Path) -> None:
    """Each replaces the one of its name; others stay."""
    curves.save(tmp_path / "build", [CLIENTS, LOAD])
    slower = Curve("clients", "Appends by clients", "clients", "entries/s", (line("entries/s", [(1, 700)]),))

    curves.save(tmp_path / "build", [slower])

    assert curves.load(tmp_path / "build") == {"clients": slower, "load": LOAD}


def test_there_need_be_no_curves(tmp_path: Path) -> None:
    """Before the first run."""
    assert curves.load(tmp_path) == {}


@pytest.mark.parametrize("text", ["", "{}", '[{"name": "a"}]', '[{"name": "a", "lines": 3}]', "[1]"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    """With its name, and without being replaced."""
    path = tmp_path / curves.FILE
    path.write_text(text)

    with pytest.raises(FiguresFileError, match="remove it"):
        curves.save(tmp_path, [CLIENTS])

    assert path.read_text() == text


def test_the_same_figures_give_the_same_drawing(tmp_path: Path) -> None:
    """So that a drawing in the documents changes with its figures only; its texts are texts."""
    lacking.module("matplotlib", "bench")

    one, other = (curves.draw(LOAD, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))

    assert one == other
    assert all(text in one for text in (b"Latency", b"p99", b"entries/s", b"<svg"))


def test_labels_do_not_overlap() -> None:
    """A tick too close to the one before has none."""
    assert curves._apart([1000, 2500, 5000, 7500, 9000, 10000]) == [1000, 2500, 5000, 7500, 10000]
    assert curves._apart([3.0]) == [3.0]
