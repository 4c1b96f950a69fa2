"""``dledger kv`` and ``dledger snapshot`` against a real node of the map."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from dledger.client import DLedgerClient
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.errors import RequestTimeoutError
from dledger.server import DLedgerServer
from dledger.types import NodeId
from dledger_cli.cli import main
from dledger_cli.commands import kv as commands
from dledger_cli.kv import KeyValueMap
from dledger_cli.local.group import free_ports
from tests.support.waiting import PATIENCE_S, wait_until


@dataclass
class Running:
    server: DLedgerServer
    machine: KeyValueMap
    directory: Path

    def run(self, *words: str) -> Result:
        found = list(words)
        if words[0] != "snapshot" or words[1] == "create":  # before the words of a command
            found[min(2, len(found)) : 2] = ["-b", self.server.client_address]
        return CliRunner().invoke(main, found, prog_name="dledger")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Running]:
    (port,) = free_ports(1)
    store = StoreConfig(tmp_path, segment_bytes=1 << 16, index_segment_bytes=1 << 14)
    members = (Member(NodeId("n0"), "127.0.0.1", port),)
    machine = KeyValueMap()
    config = ServerConfig(members=members, client_port=0, grpc_server_port=0, store=store)
    server = DLedgerServer(config, state_machine=machine).start()
    try:
        yield Running(server, machine, tmp_path / "dledger-n0")
    finally:
        server.stop()


def test_put_get_and_delete(node: Running) -> None:
    """As etcd's users know them; what is not there, or has another revision, is exit code 1."""
    first = node.run("kv", "put", "colour", "blue")
    assert first.exit_code == 0, first.output
    revision = first.output.strip()
    assert node.run("kv", "get", "colour").output == "blue\n"
    refused = node.run("kv", "put", "colour", "red", "--if-revision", "0")
    assert refused.exit_code == 1
    assert f"its revision is {revision}" in refused.output
    assert node.run("kv", "put", "colour", "red", "--if-revision", revision).exit_code == 0
    assert node.run("kv", "get", "--prefix", "co", "--local").output == "colour=red\n"
    assert json.loads(node.run("kv", "get", "colour", "--json").output)["items"][0]["value"] == "red"
    assert node.run("kv", "del", "colour").exit_code == 0
    assert node.run("kv", "del", "colour").exit_code == 1
    gone = node.run("kv", "get", "colour")
    assert (gone.exit_code, gone.output) == (1, "")


def test_a_watch_shows_what_came_and_comes(node: Running) -> None:
    """Each change once, in order, across its questions."""
    node.run("kv", "put", "a", "1")
    with DLedgerClient(node.server.client_address, timeout_s=60) as client:
        seen: list[object] = []

        class EnoughError(Exception):
            pass

        def show(event: dict[str, object]) -> None:
            seen.append((event["key"], event["value"]))
            if len(seen) == 1:
                assert node.run("kv", "del", "a").exit_code == 0
            if len(seen) == 2:
                raise EnoughError

        with pytest.raises(EnoughError):
            commands._watch(client, "a", 0, prefix=False, show=show)
    assert seen == [("a", "1"), ("a", None)]


def test_a_lock_is_held_while_its_command_runs(node: Running) -> None:
    """One holder at a time; its revision is the fencing token, and the command's exit code is passed on."""
    with DLedgerClient(node.server.client_address, timeout_s=60) as client:
        first, _ = commands._acquire(client, "lock/job", 60_000)
        held = node.run("kv", "get", "lock/job", "--json")
        assert json.loads(held.output)["items"][0]["revision"] == first
        commands._command(client, {"op": "delete", "key": "lock/job"})
    done = node.run("kv", "lock", "job", "--", "sh", "-c", f"test $DLEDGER_LOCK -gt {first} && exit 7")
    assert done.exit_code == 7, done.output
    assert node.run("kv", "get", "lock/job").exit_code == 1


def test_a_lost_lock_ends_its_command(node: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds it now must not find the command still running."""
    command = commands._command

    def lost(client: DLedgerClient, wanted: dict[str, object], **how: float) -> dict[str, object]:
        if wanted.get("if_revision"):  # prolonged
            command(client, {"op": "delete", "key": "lock/job"})
        return command(client, wanted, **how)

    monkeypatch.setattr(commands, "_command", lost)
    done = node.run("kv", "lock", "job", "--ttl", "1", "--", "sleep", "1000")
    assert done.exit_code == 1
    assert "was lost" in done.output


def test_a_lock_that_cannot_be_prolonged_in_time_ends_its_command(node: Running) -> None:
    """The clients' own time-out is longer than the lease: another holder need not wait for it."""
    done: list[Result] = []
    script = f"trap '' TERM; echo > {node.directory}/began; sleep 1000 & echo $! > {node.directory}/pid; wait"
    words = ("kv", "lock", "job", "--ttl", "3", "--timeout", "3600", "--", "sh", "-c", script)
    thread = threading.Thread(target=lambda: done.append(node.run(*words)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)  # not the main thread
        patch.setattr(commands, "STOP_S", 0.2)
        thread.start()
        wait_until(
            lambda: (node.directory / "pid").exists() and (node.directory / "pid").read_text() != "", "the command runs"
        )
        patch.setattr(node.server, "submit_commands", lambda *_: None)  # what is sent is never answered
        thread.join(PATIENCE_S)
    os.kill(int((node.directory / "pid").read_text()), signal.SIGKILL)  # the shell's, which was killed
    assert done[0].exit_code == 1
    assert "was lost" in done[0].output


class Time:
    """In the place of the module: it passes when somebody sleeps, and while commands are on their way."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_lease_counts_from_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map counts from when it takes it: one that counts from the answer believes in a lock that is over."""
    now, left = Time(), list[float | None]()

    def command(_: DLedgerClient, wanted: dict[str, object], *, timeout_s: float | None = None) -> dict[str, object]:
        left.append(timeout_s)
        now.sleep(2)
        if len(left) > 3:
            raise RequestTimeoutError("no answer")
        return {"ok": True, "revision": len(left)}

    monkeypatch.setattr(commands, "time", now)
    monkeypatch.setattr(commands, "_command", command)
    nobody = cast(DLedgerClient, None)
    revision, began_s = commands._acquire(nobody, "lock/job", 9000)
    assert (revision, began_s) == (1, 100)
    assert commands._hold(nobody, "lock/job", 9000, revision, began_s, ()) == (1, False)
    # It asks every 3 s, and an answer takes 2 s: of the 9 s since the last request so many are left.
    assert left == [None, 9 - 5, 9 - 5, 9 - 5, 9]


def test_a_watch_asks_for_the_rest_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer holds a part of what has changed: the next question must not wait for something new."""
    waits: list[int] = []

    class EnoughError(Exception):
        pass

    def ask(_: DLedgerClient, wanted: dict[str, object], **how: int) -> tuple[dict[str, object], int]:
        waits.append(how["after"])
        if len(waits) == 3:
            raise EnoughError
        return {"events": [{"revision": 5}] if wanted["after"] == 0 else []}, 100

    monkeypatch.setattr(commands, "_ask", ask)
    with pytest.raises(EnoughError):
        commands._watch(cast(DLedgerClient, None), "a", 0, prefix=False, show=lambda _event: None)
    assert waits == [0, 5, 100]


def test_a_lock_that_is_told_to_end_ends_its_command_first(node: Running) -> None:
    """It would go on without the lock; whoever waits need not wait for the lease's end."""
    words = [
        sys.executable,
        "-m",
        "dledger_cli.entry",
        "kv",
        "lock",
        "-b",
        node.server.client_address,
        "job",
        "--ttl",
        "60",
    ]
    process = subprocess.Popen([*words, "--", "sleep", "1000"])
    try:
        wait_until(lambda: node.run("kv", "get", "lock/job").exit_code == 0, "it is held")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: children.read_text() != "", "the command runs")
        (child,) = children.read_text().split()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert not Path(f"/proc/{child}").exists()
        assert node.run("kv", "get", "lock/job").exit_code == 1
    finally:
        process.kill()
        process.wait()


def test_a_signal_while_the_command_starts_ends_it_too(node: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not lost between the start of a process and the moment that the lock knows of it."""
    started: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen

    def popen(*words: Any, **more: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401  # as the real one
        started.append(begin(*words, **more))
        signal.raise_signal(signal.SIGTERM)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ended = node.run("kv", "lock", "job", "--", "sleep", "1000")
        assert ended.exit_code == 128 + signal.SIGTERM
        assert [one.poll() for one in started] == [-signal.SIGTERM]
        assert node.run("kv", "get", "lock/job").exit_code == 1
    finally:
        signal.signal(signal.SIGTERM, before)
        for one in started:
            one.kill()
            one.wait()


def test_wrong_numbers_and_long_texts_are_refused_with_what_is_right(node: Running) -> None:
    """Also what the map refuses names the limit; nothing was changed."""
    for words, told in (
        (("put", "a", "1", "--if-revision", "-1"), "x>=0"),
        (("del", "a", "--if-revision", "-1"), "x>=0"),
        (("put", "a" * 1025, "1"), "key must be a text of at most 1024"),
        (("put", "a", "1", "--ttl", "1e10"), "ten years"),
        (("get", "a" * 1025), "key must be a text of at most 1024"),
    ):
        refused = node.run("kv", *words)
        assert refused.exit_code in (1, 2), words
        assert told in refused.output
    assert node.run("kv", "get", "--prefix", "").exit_code == 1
    assert node.run("kv", "put", "a", "1", "--ttl", "0.0001").exit_code == 0
    wait_until(lambda: node.machine.has_leases, "the shortest lease is one")


def test_ticks_let_leases_end_while_nothing_else_happens(node: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's time stands still without entries."""
    monkeypatch.setattr(commands, "TICK_S", 0.05)
    monkeypatch.setattr(node.server, "wait", lambda _timeout_s: None if node.machine.has_leases else 0)
    assert node.run("kv", "put", "a", "1", "--ttl", "0.2").exit_code == 0
    commands._tick(node.server, node.machine)  # returns when no lease is left
    assert node.run("kv", "get", "a").exit_code == 1


def test_a_process_may_serve_a_map_for_each_of_several_groups(tmp_path: Path) -> None:
    """Each knows its own keys only, and lets its own leases end."""
    peer, client = free_ports(2)
    files = []
    for group in ("eu", "us"):
        files.append(tmp_path / f"{group}.conf")
        lines = {
            "group": group,
            "members": f"n0-127.0.0.1:{peer}",
            "base_dir": str(tmp_path / group),
            "client_port": str(client),
            "segment_bytes": "64k",
            "index_segment_bytes": "16k",
        }
        files[-1].write_text("".join(f"{name}={text}\n" for name, text in lines.items()))

    def run(*words: str) -> Result:
        return CliRunner().invoke(main, ["kv", words[0], "-b", f"127.0.0.1:{client}", "--timeout", "30", *words[1:]])

    words = [sys.executable, "-m", "dledger_cli.entry", "kv", "serve", "--until-stdin-closes"]
    words += [word for file in files for word in ("-c", str(file))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert " of groups eu, us is ready: " in process.stdout.readline()
            assert run("put", "-g", "eu", "colour", "blue").exit_code == 0
            assert run("put", "-g", "us", "session", "x", "--ttl", "0.1").exit_code == 0
            assert run("get", "-g", "eu", "colour").output == "blue\n"
            assert run("get", "-g", "us", "colour").exit_code == 1
            wait_until(lambda: run("get", "-g", "us", "session").exit_code == 1, "its lease has ended")
        finally:
            process.stdin.close()
            code = process.wait(60)
    assert code == 0


def test_snapshots_are_created_listed_and_verified(node: Running) -> None:
    """Damage is named, and exit code 1."""
    assert "no snapshots" in node.run("snapshot", "list", str(node.directory)).output
    node.run("kv", "put", "a", "1")
    made = node.run("snapshot", "create", node.server.client_address)
    assert made.exit_code == 0, made.output
    row = json.loads(node.run("snapshot", "list", str(node.directory), "--json").output)
    assert f"entry {row['index']}," in made.output
    assert row["state"] == ""
    assert node.run("snapshot", "verify", str(node.directory)).output.strip().endswith("bytes")
    status = node.run("status").output
    assert "applied" in status
    path = next((node.directory / "snapshots").iterdir()) / "state"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    damaged = node.run("snapshot", "verify", str(node.directory))
    assert damaged.exit_code == 1
    assert "damaged" in damaged.output
    wait_until(lambda: node.server.status().snapshot_index == int(row["index"]), "the status tells of it")
