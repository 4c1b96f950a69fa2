"""The keeper of processes, with small stand-ins for ``dledger serve``: nothing it starts may outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dledger.types import NodeId
from dledger_cli.local import group as group_module
from dledger_cli.local.group import (
    LocalGroup,
    LocalGroupError,
    free_ports,
    processor_ticks,
    wait_until,
    wait_while_working,
)

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
OBEDIENT = "import sys; print('one is ready: yes', flush=True); sys.stdin.read()"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('x is ready: y', flush=True); signal.pause()"
BROKEN = "import sys; print('the disk is on fire'); sys.exit(9)"


class FakeGroup(LocalGroup):
    """Runs a line of Python instead of a node."""

    script = OBEDIENT

    def command(self, node: NodeId) -> list[str]:
        return [sys.executable, "-c", self.script]


class LastingGroup(FakeGroup):
    """Its processes do not look at their standard input."""

    script = "import signal; print('x is ready: y', flush=True); signal.pause()"


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it is gone, or went while this was read
        return False


def test_all_nodes_run_inside_and_none_after(tmp_path: Path) -> None:
    """The context starts them, waits until each is ready and ends each."""
    with FakeGroup(tmp_path) as group:
        pids = [group.pid(node) for node in group.nodes]
        assert list(group.nodes) == [N0, N1, N2]
        assert all(is_alive(pid) for pid in pids)
        assert len({*group.addresses, *(f"127.0.0.1:{one.peer_port}" for one in group.nodes.values())}) == 6

    assert not any(is_alive(pid) for pid in pids)
    group.close()


def test_an_error_inside_ends_the_nodes_too(tmp_path: Path) -> None:
    """Also of a detached group: it is left running only when all went well."""
    group = LastingGroup(tmp_path, size=1, detached=True)

    def fail_inside() -> None:
        with group:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()

    assert not is_alive(group.pid(N0))


def test_a_detached_group_stays(tmp_path: Path) -> None:
    """``--keep``: the processes outlive the context, and ``close`` still ends them."""
    with LastingGroup(tmp_path, size=1, detached=True) as group:
        pass
    alive = is_alive(group.pid(N0))
    group.close()

    assert alive
    assert not is_alive(group.pid(N0))


def test_nodes_end_with_a_maker_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL runs no handlers; the closed pipe does the work."""
    script = (
        "import os, pathlib, sys; sys.path.insert(0, '.')\n"
        "from tests.unit.dledger_cli.local.test_local_group import FakeGroup\n"
        f"group = FakeGroup(pathlib.Path({str(tmp_path)!r}), size=2); group.start_all()\n"
        "print(*(group.pid(node) for node in group.nodes), flush=True); os.kill(os.getpid(), 9)\n"
    )

    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)

    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 60, "the nodes live on")


def test_kill_stop_and_restart_one_node(tmp_path: Path) -> None:
    """SIGKILL and SIGTERM reach only the named node; its log goes on after a restart."""
    with FakeGroup(tmp_path) as group:
        group.kill(N0)
        assert not group.is_running(N0)
        assert group.stop(N1) == -signal.SIGTERM
        assert group.is_running(N2)
        group.start(N0)
        assert group.is_running(N0)
        assert group.logs(N0).count("is ready") == 2
        with pytest.raises(LocalGroupError, match="n0 runs already"):
            group.start(N0)


def test_pause_and_resume(tmp_path: Path) -> None:
    """A paused node runs, but does nothing; a paused node can be ended."""
    with FakeGroup(tmp_path, size=1) as group:
        stat = Path(f"/proc/{group.pid(N0)}/stat")
        group.pause(N0)
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 60, "not stopped")
        group.resume(N0)
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", 60, "not resumed")
        group.pause(N0)

    assert not group.is_running(N0)


def test_a_node_that_fails_to_start_shows_its_log(tmp_path: Path) -> None:
    """The error holds what the node said; nothing is left running."""

    class Broken(FakeGroup):
        script = BROKEN

    group = Broken(tmp_path, size=2)

    with pytest.raises(LocalGroupError, match=r"n0 exited with code 9 during startup\nthe disk is on fire"), group:
        pass

    assert not any(group.is_running(node) for node in group.nodes)


def test_a_node_that_ignores_sigterm_is_reported_and_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``stop`` says so; ``close`` uses SIGKILL."""

    class Stubborn(FakeGroup):
        script = STUBBORN

    monkeypatch.setattr("dledger_cli.local.group.STOP_TIMEOUT_S", 0.2)
    with Stubborn(tmp_path, size=1) as group:
        with pytest.raises(LocalGroupError, match="n0 did not stop"):
            group.stop(N0, timeout_s=0.1)
        with pytest.raises(LocalGroupError, match="n0 is still running"):
            group.wait_exit(N0, timeout_s=0.1)
        pid = group.pid(N0)

    assert not is_alive(pid)


def test_a_node_that_was_never_started_cannot_be_killed(tmp_path: Path) -> None:
    """A clear error instead of a KeyError."""
    with pytest.raises(LocalGroupError, match="n0 was never started"):
        FakeGroup(tmp_path).kill(N0)


def test_the_command_line_of_a_node_is_complete(tmp_path: Path) -> None:
    """All ports are passed, the settings too; only a detached node may outlive its maker."""
    group = LocalGroup(tmp_path, size=2, flush="async", settings={"segment_bytes": "64k"})
    words = group.command(N1)
    detached = LocalGroup(tmp_path, size=1, detached=True).command(N0)

    peers = words[words.index("-p") + 1]
    assert peers == f"n0-127.0.0.1:{group.nodes[N0].peer_port};n1-127.0.0.1:{group.nodes[N1].peer_port}"
    assert words[words.index("--client-port") + 1] == str(group.nodes[N1].client_port)
    assert "flush_mode=async" in words
    assert "segment_bytes=64k" in words
    assert "--until-stdin-closes" in words
    assert "--until-stdin-closes" not in detached


def test_free_ports_are_of_the_share_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody else takes the port of a node that is down for a moment."""
    monkeypatch.setenv("LOCAL_PORTS", "3/8")

    ports = free_ports(20, companion=10_000)
    assert {(port + offset) // 5 % 8 for port in ports for offset in (-2, 0, 2, 9_998, 10_002)} == {3}


def test_free_ports_are_distinct_and_not_the_kernels_to_give_away() -> None:
    """Inside the ephemeral range a reconnecting client could take a killed node's port."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])

    ports = free_ports(20)

    assert len(set(ports)) == 20
    assert all(1024 < port < max(low, 11_000) for port in ports)


def test_ports_that_were_just_given_are_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who got them may not listen there yet."""
    monkeypatch.setenv("LOCAL_PORTS", "3/8")

    assert len({free_ports(1)[0] for _ in range(group_module.GIVEN_MAX)}) == group_module.GIVEN_MAX


def test_ports_with_companions_overlap_with_nothing() -> None:
    """A port and the one so much higher belong together."""
    taken = free_ports(5)

    ports = free_ports(20, companion=7, taken=taken)

    assert len({*taken, *ports, *(port + 7 for port in ports)}) == 45


def test_a_start_is_waited_for_while_it_does_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine slows it: it is given up only once it has done nothing for the whole time, or after a limit."""
    monkeypatch.setattr(group_module, "START_TIMEOUT_S", 0.2)
    ready_s = time.monotonic() + 1
    work = iter(range(1_000_000))

    wait_while_working(lambda: time.monotonic() >= ready_s, lambda: next(work), "n0 is not ready")
    with pytest.raises(LocalGroupError, match=r"n0 is not ready within \d+ s"):
        wait_while_working(lambda: False, lambda: 0, "n0 is not ready")
    monkeypatch.setattr(group_module, "START_S_MAX", 0.5)
    with pytest.raises(LocalGroupError, match="n0 is not ready"):
        wait_while_working(lambda: False, lambda: next(work), "n0 is not ready")


def test_a_process_that_computes_is_seen_to() -> None:
    """By the processor time that the system counts."""
    before = processor_ticks(os.getpid())
    wait_until(lambda: sum(range(1_000_000)) > 0 and processor_ticks(os.getpid()) > before, 30, "it is counted")
    assert processor_ticks(1 << 30) == 0
