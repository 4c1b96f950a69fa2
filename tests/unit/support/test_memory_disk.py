"""Properties of where tests keep their files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import memory_disk


@pytest.fixture(autouse=True)
def asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have asked for the disk."""
    monkeypatch.delenv("TESTS_ON_DISK", raising=False)


def mounts_of(directory: Path, kind: str, at: Path) -> Path:
    """A table of mounts that says ``directory`` is of this kind."""
    table = directory / "mounts"
    table.write_text(f"proc /proc proc rw 0 0\n{kind} {at} {kind} rw 0 0\n")
    return table


def test_a_tmpfs_with_room_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else has to be said for it."""
    monkeypatch.setattr(memory_disk, "FREE_BYTES_MIN", 1)

    assert memory_disk.why_not(tmp_path, mounts_of(tmp_path, "tmpfs", tmp_path)) == ""


def test_what_will_not_do_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tmpfs, none at all, too small, or not wanted."""
    assert "no tmpfs" in memory_disk.why_not(tmp_path, mounts_of(tmp_path, "ext4", tmp_path))
    assert "no tmpfs" in memory_disk.why_not(tmp_path, mounts_of(tmp_path, "tmpfs", Path("/elsewhere")))
    monkeypatch.setattr(memory_disk, "FREE_BYTES_MIN", 1 << 60)
    assert "MiB free" in memory_disk.why_not(tmp_path, mounts_of(tmp_path, "tmpfs", tmp_path))
    monkeypatch.setenv("TESTS_ON_DISK", "1")
    assert memory_disk.why_not() == "TESTS_ON_DISK is set"


def test_only_what_nobody_owns_any_more_is_removed(tmp_path: Path) -> None:
    """Of this session and of a running one nothing; of a dead one all; of others nothing."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {
        "mine": f"{memory_disk.PREFIX}{os.getpid()}-a",
        "dead": f"{memory_disk.PREFIX}{gone.pid}-b",
        "odd": f"{memory_disk.PREFIX}x-c",
        "other": "somebody-else-1",
    }
    for name in names.values():
        (tmp_path / name / "deep").mkdir(parents=True)

    memory_disk.remove_orphans(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        name for key, name in names.items() if key != "dead"
    )
