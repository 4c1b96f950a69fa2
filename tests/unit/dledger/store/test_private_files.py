"""Who else on the machine can read what a node keeps, or hold it up."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dledger.config import StoreConfig
from dledger.errors import DiskError
from dledger.store.fs import keep_private
from tests.unit.dledger.store.support import fill, open_store, small_config


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return small_config(tmp_path)


def modes(directory: Path) -> dict[str, set[int]]:
    """Of the directories and of the files in and below it."""
    found: dict[str, set[int]] = {"directories": {mode_of(directory)}, "files": set()}
    for path in directory.rglob("*"):
        found["directories" if path.is_dir() else "files"].add(mode_of(path))
    return found


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def node_directory(config: StoreConfig) -> Path:
    return config.base_dir / "dledger-n0"


def write_and_close(config: StoreConfig) -> None:
    store = open_store(config)
    fill(store, 60)
    store.flush()
    store.sync_checkpoint()
    store.close()


def test_nobody_else_reads_a_log(config: StoreConfig) -> None:
    """Whatever the umask: directories 0700, files 0600."""
    before = os.umask(0)
    try:
        write_and_close(config)
    finally:
        os.umask(before)

    assert modes(node_directory(config)) == {"directories": {0o700}, "files": {0o600}}


def test_a_directory_that_was_open_to_everybody_is_closed(config: StoreConfig) -> None:
    """As earlier versions made them; the lock too, which whoever can read it could hold."""
    write_and_close(config)
    node_directory(config).chmod(0o755)
    (node_directory(config) / "lock").chmod(0o644)

    write_and_close(config)

    assert mode_of(node_directory(config)) == 0o700
    assert mode_of(node_directory(config) / "lock") == 0o600


def test_a_group_that_was_let_in_may_go_on_reading(config: StoreConfig) -> None:
    """0750 is a decision: what is made later can be read by the group, too, but for the lock."""
    write_and_close(config)
    for path in (node_directory(config), node_directory(config) / "data"):
        path.chmod(0o750)
    before = {path.name for path in (node_directory(config) / "data").iterdir()}

    write_and_close(config)
    new = [path for path in (node_directory(config) / "data").iterdir() if path.name not in before]

    assert mode_of(node_directory(config)) == 0o750
    assert {mode_of(path) for path in new} == {0o640}
    assert mode_of(node_directory(config) / "lock") == 0o600


def test_a_lock_that_is_a_link_is_refused(config: StoreConfig, tmp_path: Path) -> None:
    """And what it points to is left alone."""
    write_and_close(config)
    target = tmp_path / "target"
    target.write_text("precious")
    lock = node_directory(config) / "lock"
    lock.unlink()
    lock.symlink_to(target)

    with pytest.raises(DiskError, match="lock is a symbolic link"):
        open_store(config)

    assert target.read_text() == "precious"


def test_a_directory_of_somebody_else_is_left_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mount that is another's to change must not keep a node from starting."""
    tmp_path.chmod(0o755)

    def refuse(_path: Path, _mode: int) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "chmod", refuse)
    keep_private(tmp_path)

    assert "is readable by other users (mode 755)" in caplog.text
