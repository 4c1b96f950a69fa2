"""Settings of a run and what is said about the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import context
from benchmarks.context import QUICK, BenchSettings, Context
from dledger.errors import ConfigError


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    """Every setting has its variable; what is not set keeps its default."""
    settings = BenchSettings.from_environment({"BENCH_LOG_GIB": "0.5", "BENCH_ROUNDS": "1", "BENCH_DIR": str(tmp_path)})

    assert settings == BenchSettings(log_gib=0.5, rounds=1, directory=tmp_path)


def test_all_wrong_settings_are_reported_at_once() -> None:
    """One run tells everything that must be corrected."""
    with pytest.raises(ConfigError) as raised:
        BenchSettings.from_environment(
            {"BENCH_SECONDS": "soon", "BENCH_KILLS": "-3", "BENCH_ROUNDS": "0.5", "BENCH_DIR": "/no/such"}
        )

    text = str(raised.value)
    assert all(
        part in text for part in ("BENCH_SECONDS='soon'", "BENCH_KILLS='-3'", "at least 1", "BENCH_DIR='/no/such'")
    )


def test_cpu_ticks_count_waiting_as_idle_and_leave_guests_out() -> None:
    """Guest time is part of user time in /proc/stat already."""
    assert context.cpu_ticks("cpu  10 1 5 70 4 1 2 7 900 900\ncpu0 1 1 1\n") == (74, 100)


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    """The longest mount point that holds the directory wins; a common prefix of names is no mount."""
    mounts = tmp_path / "mounts"
    inner = tmp_path / "inner"
    inner.mkdir()
    mounts.write_text(f"a / ext4 rw 0 0\nb {tmp_path} xfs rw 0 0\nc {inner} tmpfs rw 0 0\nd {tmp_path}/in nfs rw 0 0\n")

    assert context.file_system_of(inner, mounts) == "tmpfs"
    assert context.file_system_of(tmp_path, mounts) == "xfs"


def test_a_missing_baseline_is_noted_once() -> None:
    """Several figures may lack the same peer; it is said once."""
    said: list[str] = []
    run = Context(BenchSettings(), Path(), Path(), said.append)

    labels = [run.baseline_missing("etcd", "etcd-server") for _ in range(2)]

    assert labels == ["baseline missing: etcd: install etcd-server"] * 2
    assert said == [f"!!! {labels[0]}"]
    assert run.missing == labels[:1]


def test_quick_settings_can_still_be_changed_one_by_one() -> None:
    """QUICK=1 only has other defaults; QUICK=0 is as good as none."""
    assert BenchSettings.from_environment({"QUICK": "1"}) == QUICK
    assert BenchSettings.from_environment({"QUICK": "1", "BENCH_ROUNDS": "2"}) == replace(QUICK, rounds=2)
    assert BenchSettings.from_environment({"QUICK": "0"}) == BenchSettings()
    assert (QUICK.sized(100_000), BenchSettings().sized(100_000), QUICK.sized(3)) == (5000, 100_000, 1)
