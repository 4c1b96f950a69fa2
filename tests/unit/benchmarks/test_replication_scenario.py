"""Replication as a load: what its figures are worth, and the raw copy beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import java, rocketmq
from benchmarks.processes import PythonChild
from benchmarks.scenarios import replication
from benchmarks.targets import TARGETS

MODULE = "benchmarks.children.raw_copy"


def test_every_figure_has_a_target() -> None:
    """None is measured for its own sake."""
    assert set(replication.SCENARIO.names) <= TARGETS.keys()


def test_a_raw_copy_has_the_bytes_that_were_asked_for(tmp_path: Path) -> None:
    """The files one after the other, and not what is preallocated behind the log's end."""
    files = [tmp_path / "00", tmp_path / "10"]
    contents = [bytes(range(256)) * 8192, b"end" * 1000]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    wanted = b"".join(contents)[:-100]
    target = tmp_path / "copy"

    with PythonChild(MODULE, ["send", str(len(wanted)), *map(str, files)], tmp_path / "send.log") as sender:
        port = sender.hear(60)["port"]
        with PythonChild(MODULE, ["receive", str(port), str(target)], tmp_path / "receive.log") as receiver:
            answer = receiver.hear(60)

    assert answer["bytes"] == len(wanted)
    assert answer["seconds"] > 0
    assert target.read_bytes() == wanted


def test_javas_pair_is_a_master_and_its_slave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Different homes, ids and roles, one name."""
    started: list[list[str]] = []

    def no_start(argv: list[str], *_others: object) -> object:
        started.append(argv)
        return object()

    monkeypatch.setattr(rocketmq, "spawn_daemon", no_start)
    monkeypatch.setattr(rocketmq, "end", lambda _process: None)
    monkeypatch.setattr(java, "command", lambda *words, **_: [str(one) for one in words])

    with rocketmq.java_pair(tmp_path, "127.0.0.1:9876"):
        conf = {role: (tmp_path / role / "broker.conf").read_text() for role in ("SYNC_MASTER", "SLAVE")}

    assert len(started) == 2
    assert "brokerId=0\nbrokerRole=SYNC_MASTER\n" in conf["SYNC_MASTER"]
    assert "brokerId=1\nbrokerRole=SLAVE\n" in conf["SLAVE"]
    assert all(f"brokerName={rocketmq.BROKER_NAME}\n" in text for text in conf.values())
    assert all("namesrvAddr=127.0.0.1:9876\n" in text for text in conf.values())
