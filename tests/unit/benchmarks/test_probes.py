"""The raw costs that are printed beside the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import probes


def test_a_probe_measures_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives a directory of his own finds only figures in it afterwards."""
    monkeypatch.setattr(probes, "CACHED_BYTES", 4 << 20)

    new, again = probes.page_cache_gigabytes_per_second(tmp_path)

    assert new > 0
    assert again > 0
    assert probes.flush_milliseconds(tmp_path, 4096, 0.01) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_probe_leaves_nothing_behind_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot be made must not make the disk fuller."""

    def no_space(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space"):
        probes.page_cache_gigabytes_per_second(tmp_path)

    assert list(tmp_path.iterdir()) == []
