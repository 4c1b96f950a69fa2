"""The life of our own Docker engine: who starts it, who ends it, what is left. With a stand-in for ``dockerd``."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.containers import engine as engines
from cluster.containers import firewall
from cluster.containers.engine import EngineUnavailableError, engine, is_own, why_not
from tests.support.lacking import need_root

FAKE = Path(__file__).with_name("fake_dockerd.py")


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A machine with no engine, and a ``dockerd`` of the tests; what was done to its packet filter."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("containerd", "runc", "iptables"):
        (tools / name).write_text("#!/bin/sh\nexit 1\n")
    (tools / "dockerd").write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    done: list[str] = []
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(engines, "RUN_DIR", tmp_path / "run")
    monkeypatch.setattr(engines, "DATA_DIR", tmp_path / "data")
    monkeypatch.setattr(firewall, "prepare", lambda _memory: done.append("prepared"))
    monkeypatch.setattr(firewall, "restore", lambda _memory: done.append("restored"))
    yield done
    with engine():  # ends what a failed test left running
        pass


def test_an_engine_of_our_own_ends_with_its_user(restored: list[str], tmp_path: Path) -> None:
    """And leaves neither process nor data."""
    assert why_not() == ""
    with engine() as client:
        assert is_own(client)
        pid = engines._pid()
        assert pid is not None
        assert client.containers.list() == []

    assert engines._pid() is None
    assert not (tmp_path / "data").exists()
    assert restored == ["prepared", "restored"]


def test_users_share_one_engine_and_the_last_one_ends_it(restored: list[str]) -> None:
    """Two at once must not start two, and the first to leave must not take it from the other."""
    inside, leave = threading.Event(), threading.Event()
    pids: list[int | None] = []

    def use() -> None:
        with engine():
            pids.append(engines._pid())
            inside.set()
            leave.wait(30)

    other = threading.Thread(target=use)
    other.start()
    try:
        assert inside.wait(30)
        with engine() as client:
            assert engines._pid() == pids[0]
            assert client.ping()
        assert engines._pid() == pids[0], "it still has a user"
    finally:
        leave.set()
        other.join()

    assert engines._pid() is None
    assert restored == ["prepared", "restored"]


def test_an_engine_is_kept_if_that_is_wanted(restored: list[str]) -> None:
    """With what it holds; the next user who does not want that ends it."""
    with engine(keep=True):
        pid = engines._pid()
    assert engines._pid() == pid is not None

    with engine() as client:
        assert engines._pid() == pid
        assert client.ping()

    assert engines._pid() is None


def test_an_engine_is_over_when_its_process_is(restored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when its pid file is gone: until then it listens, and holds the directories that are removed next."""
    monkeypatch.setenv("FAKE_DOCKERD_LINGERS_S", "0.5")
    with engine():
        pid = engines._pid()

    assert pid is not None
    assert not engines._is_engine(pid)
    monkeypatch.delenv("FAKE_DOCKERD_LINGERS_S")


def test_an_engine_that_ends_while_it_is_asked_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Docker's library keeps that of a failed connection, which the garbage collector then complains of."""
    monkeypatch.setattr(engines, "_listens", lambda _path: True)
    gc.collect()
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        assert engines._connect(f"unix://{tmp_path}/nobody.sock") is None
        gc.collect()

    assert complaints == []


@pytest.mark.parametrize("kept", [True, False])
def test_what_a_killed_engine_left_is_used_only_with_its_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, kept: bool
) -> None:
    """Those that lay in memory are gone with the machine's restart, and what is known of them is of no use."""
    monkeypatch.setattr(engines, "DATA_DIR", tmp_path / "data")
    monkeypatch.setattr(engines, "_available_bytes", lambda: 0)
    (tmp_path / "data" / "overlay2").mkdir(parents=True)
    (tmp_path / "data" / "image").mkdir()
    if kept:
        (tmp_path / "data" / "overlay2" / "layer").mkdir()

    engines._lay_out_data()

    assert (tmp_path / "data" / "image").exists() == kept


def test_what_the_engine_left_mounted_is_unmounted(tmp_path: Path) -> None:
    """Else its directory cannot be removed: dockerd mounts it on itself."""
    need_root()
    inner = tmp_path / "data" / "inner"
    inner.mkdir(parents=True)
    for directory in (tmp_path / "data", inner):
        subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    try:
        engines._unmount(tmp_path / "data")

        assert not (tmp_path / "data").is_mount()
        assert not inner.is_mount()
        assert inner.is_dir()
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", str(tmp_path / "data")], check=False)


def test_an_engine_that_does_not_start_says_why(
    restored: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the end of its log, and the machine is as it was."""
    monkeypatch.setenv("FAKE_DOCKERD_FAILS", "1")
    monkeypatch.setattr(engines, "START_TIMEOUT_S", 3.0)

    with pytest.raises(EngineUnavailableError, match="no cgroup to be had"), engine():
        pass

    assert restored == ["prepared", "restored"]
    monkeypatch.delenv("FAKE_DOCKERD_FAILS")


def test_another_process_with_the_same_number_is_let_be(restored: list[str]) -> None:
    """A pid file of an engine that was killed may name anybody by now: here this very process."""
    with engine():
        pass
    engines._pid_file().write_text(str(os.getpid()))

    assert engines._pid() is None


def test_without_root_there_is_a_reason(restored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, for who skips tests or drills."""
    with monkeypatch.context() as without:
        without.setattr(os, "geteuid", lambda: 1000)
        assert "only root" in why_not()
        with pytest.raises(EngineUnavailableError, match="only root"), engine():
            pass


def test_without_dockers_programs_there_is_a_reason(restored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the packages that have them."""
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        assert "dockerd, containerd, runc, iptables, setsid missing" in why_not()
        assert "apt-get install docker.io" in why_not()
