"""What the recorded disk may lose in a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.crash_fs import RecordingFs, crash_states


@pytest.mark.parametrize("synced", [False, True])
def test_a_directory_is_there_once_the_one_above_it_was_synced(*, synced: bool, tmp_path: Path) -> None:
    """Whatever is durable in it goes with it."""
    fs = RecordingFs()
    directory = tmp_path / "new"
    fs.make_dir(directory)
    if synced:
        fs.sync_dir(tmp_path)
    file = fs.create(directory / "file")
    fs.write(file, b"x", 0)
    fs.sync(file)
    fs.close(file)
    fs.sync_dir(directory)

    disks = [state.files for state in crash_states(fs.changes, len(fs.changes))]

    assert {directory / "file": b"x"} in disks
    assert ({} in disks) is not synced
