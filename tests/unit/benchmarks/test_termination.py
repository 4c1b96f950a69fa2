"""A SIGTERM ends a run like an exception: what it started is cleaned up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import main
from benchmarks.context import BenchSettings, Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario


def test_sigterm_unwinds_the_running_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario's clean-up runs, the data directory goes, and the old handler is back."""
    monkeypatch.setattr(main, "_describe_machine", lambda _context: None)
    monkeypatch.setattr(main, "busy_share", lambda: 0.0)
    cleaned: list[bool] = []

    def measure(context: Context, _names: frozenset[str]) -> Iterator[Figure]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            yield Figure("a", 1.0, "s", "", None)
        finally:
            cleaned.append(context.directory.is_dir())

    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(SystemExit) as raised:
        main.run(
            [],
            tmp_path / "o.json",
            settings=BenchSettings(directory=tmp_path),
            scenarios=[Scenario("s", ("a",), measure)],
        )

    assert raised.value.code == 128 + signal.SIGTERM
    assert cleaned == [True]
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
