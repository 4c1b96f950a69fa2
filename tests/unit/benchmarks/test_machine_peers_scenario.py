"""Commands beside etcd and Ratis: what happens without a JDK or etcd, and what a side makes of its rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.context import BenchSettings, Context
from benchmarks.load import CommandRates
from benchmarks.peers import java
from benchmarks.scenarios import machine_peers
from benchmarks.scenarios.machine_peers import MEDIAN, PROCESSOR, RATE, CommandsSide


def test_the_processor_time_is_per_command_of_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure that a busy machine leaves alone."""
    used = iter([1.0, 2.0, 1.5, 2.5])  # seconds of two members, before and after
    monkeypatch.setattr(machine_peers, "processor_s", lambda _pid: next(used))
    side = CommandsSide(lambda callers: CommandRates(100.0 * callers, 2.0), (1, 2))
    side.measure(5, 4.0)
    assert side.values(RATE) == [500.0]
    assert side.values(MEDIAN) == [2.0]
    assert side.values(PROCESSOR) == [1.0e6 / 2000]


def test_without_a_jdk_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is measured nevertheless; what is beside it fails the run, with the reason."""
    monkeypatch.setattr(java, "available", lambda: False)
    context = Context(BenchSettings(), tmp_path, tmp_path, lambda _line: None)
    machine_peers.report_missing(context)
    assert context.missing == [f"baseline missing: {peer}: install {java.INSTALL}" for peer in ("Apache Ratis", "etcd")]
