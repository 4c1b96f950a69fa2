"""RocketMQ's own client as a load: what happens without a JDK, and the programs' command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.context import BenchSettings, Context
from benchmarks.peers import java
from benchmarks.scenarios import remoting
from benchmarks.targets import TARGETS


def test_without_a_jdk_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure, which fails the run, and the reason."""
    monkeypatch.setattr("shutil.which", lambda _program: None)
    said: list[str] = []
    context = Context(BenchSettings(), tmp_path, tmp_path, said.append)

    assert not list(remoting.measure(context, frozenset(remoting.SCENARIO.names)))
    assert context.missing == [f"baseline missing: RocketMQ: install {java.INSTALL}"]
    assert context.missing[0] in said[0]


def test_every_figure_has_a_target() -> None:
    """None is measured for its own sake."""
    assert set(remoting.SCENARIO.names) <= TARGETS.keys()
