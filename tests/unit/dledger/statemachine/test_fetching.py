"""A member whose log cannot be continued any more gets a snapshot from another one: real nodes, over the network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dledger.client import DLedgerClient
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.errors import DLedgerError, UnavailableError
from dledger.monitoring import ConditionKind
from dledger.rpc.peers.exchanges import PIECE_BYTES, SnapshotTransfer
from dledger.server import DLedgerServer
from dledger.statemachine.fetching import SnapshotFetcher
from dledger.statemachine.host import MachineHost
from dledger.statemachine.snapshots import STATE_FILE
from dledger.types import NO_INDEX, NodeId, Role
from dledger_cli.local.group import free_ports
from tests.support.counting import History
from tests.support.waiting import wait_until

NAMES = tuple(map(NodeId, ("n0", "n1", "n2")))
LARGE = 40_000


class Newer(History):
    """The machine of a later version."""

    format = 2


@dataclass
class Group:
    """Members whose segments go as soon as snapshots include them."""

    configs: dict[NodeId, ServerConfig]
    machines: dict[NodeId, History] = field(default_factory=dict)
    servers: dict[NodeId, DLedgerServer] = field(default_factory=dict)

    def start(self, name: NodeId, machine: type[History] = History) -> DLedgerServer:
        self.machines[name] = machine()
        self.servers[name] = DLedgerServer(self.configs[name], state_machine=self.machines[name]).start()
        return self.servers[name]

    def stop(self, name: NodeId, *, graceful: bool = True) -> None:
        self.servers.pop(name).stop(graceful=graceful)

    def stop_all(self) -> None:
        for name in list(self.servers):
            self.stop(name)

    def leader(self) -> NodeId:
        def found() -> list[NodeId]:
            return [name for name, one in self.servers.items() if one.status().role is Role.LEADER]

        wait_until(lambda: bool(found()), "somebody leads")
        return found()[0]

    def follower(self) -> NodeId:
        leader = self.leader()
        return next(name for name in self.servers if name != leader)

    def client(self) -> DLedgerClient:
        return DLedgerClient([one.client_address for one in self.servers.values()], timeout_s=60)

    def fill(self, count: int, size: int = LARGE) -> None:
        """Commands of several segments."""
        with self.client() as client:
            for number in range(count):
                client.command(b"%d" % number + b"x" * size)

    def drop_log(self) -> int:
        """Have all members write a snapshot and remove the log before it; the least index at which one begins."""
        for name, server in self.servers.items():
            results: queue.SimpleQueue[object] = queue.SimpleQueue()
            server.submit_snapshot(results.put)
            result = results.get(timeout=30)
            assert not isinstance(result, DLedgerError), (name, result)

        def begin() -> int:
            return min(one.status().begin_index for one in self.servers.values())

        wait_until(lambda: begin() > 0, "the log before the snapshots has gone")
        return begin()

    def catches_up(self, name: NodeId) -> None:
        reference = next(one for one in self.servers if one != name)
        wait_until(
            lambda: (
                bool(self.machines[name].bodies)
                and self.machines[name].bodies == self.machines[reference].bodies
                and self.servers[name].status().end_index == self.servers[reference].status().end_index
            ),
            f"{name} has all of it",
        )


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    ports = free_ports(6)
    members = tuple(Member(name, "127.0.0.1", port) for name, port in zip(NAMES, ports[:3], strict=True))
    configs = {
        name: ServerConfig(
            node_id=name,
            members=members,
            client_port=port,
            grpc_server_port=0,
            store=StoreConfig(
                tmp_path / name,
                segment_bytes=1 << 18,
                index_segment_bytes=1 << 14,
                retention_hours=0,
                delete_hour=tuple(range(24)),
                clean_interval_ms=20,
                follower_keep_bytes=0,
            ),
        )
        for name, port in zip(NAMES, ports[3:], strict=True)
    }
    group = Group(configs)
    with ExitStack() as ending:
        ending.callback(group.stop_all)
        for name in NAMES:
            group.start(name)
        group.leader()
        yield group


def fetcher_of(server: DLedgerServer) -> SnapshotFetcher:
    assert server._fetcher is not None
    return server._fetcher


def test_a_follower_whose_log_has_gone_catches_up_without_an_election(group: Group) -> None:
    """S8: state and log from the leader's snapshot on, and what follows from the log; nobody campaigns meanwhile."""
    group.fill(5)
    late = group.follower()
    group.stop(late)
    group.fill(30)
    begin = group.drop_log()
    term = group.servers[group.leader()].status().term

    server = group.start(late)
    group.catches_up(late)

    status = server.status()
    assert status.begin_index >= begin
    assert status.snapshot_index >= begin
    assert status.term == term
    assert fetcher_of(server).bytes_received > 0
    wait_until(lambda: not server.conditions.holds(ConditionKind.REPAIRING), "it is told that all is well")
    assert not server.conditions.holds(ConditionKind.SNAPSHOT_FAILED)
    group.fill(3)
    group.catches_up(late)
    group.stop(late)
    group.start(late)  # its own directory is enough now
    group.catches_up(late)
    assert fetcher_of(group.servers[late]).bytes_received == 0


def test_a_repeated_command_has_its_first_result_on_a_member_that_fetched_it(group: Group) -> None:
    """S4: the results are part of what is sent; that member may lead next."""
    late = group.follower()
    group.stop(late)
    with group.client() as client:
        client.command(b"a")
    group.fill(30)
    group.drop_log()
    group.start(late)
    group.catches_up(late)

    def leads() -> bool:
        if group.leader() == late:
            return True
        results: queue.SimpleQueue[object] = queue.SimpleQueue()
        group.servers[group.leader()].submit_transfer(late, results.put)
        return not isinstance(results.get(timeout=30), DLedgerError) and group.leader() == late

    wait_until(leads, "it leads")
    with group.client() as client:
        assert client.command(b"b") == b"32"
    for name in NAMES:
        group.catches_up(name)


@pytest.mark.parametrize("wiped", [False, True], ids=["damaged", "with the log"])
def test_a_member_without_its_snapshots_gets_one(group: Group, wiped: bool) -> None:
    """S9: its log holds all that is committed, but not what the machine needs: an intact log is not enough."""
    group.fill(30)
    group.drop_log()
    late = group.follower()
    group.stop(late)
    directory = group.configs[late].store.base_dir / f"dledger-{late}"
    for path in sorted(directory.rglob("*"), reverse=True):
        if not path.is_dir() and (wiped or path.name == STATE_FILE):
            path.unlink()

    server = group.start(late)
    group.catches_up(late)

    assert server.status().snapshot_index > 0
    wait_until(lambda: not server.conditions.holds(ConditionKind.APPLIER_WAITING), "nothing is lacking")


def test_an_interrupted_transfer_goes_on_where_it_ended(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one piece is sent twice whenever the connection breaks."""
    late = group.follower()
    group.stop(late)
    group.fill(60, 100_000)
    group.drop_log()
    whole = SnapshotTransfer._ask
    asked: list[tuple[str, int]] = []
    breaks = [5, 3]

    def ask(self: SnapshotTransfer, file: str, offset: int) -> None:
        if breaks and len(asked) == breaks[-1]:
            breaks.pop()
            raise UnavailableError("the connection broke")
        asked.append((file, offset))
        whole(self, file, offset)

    monkeypatch.setattr(SnapshotTransfer, "_ask", ask)
    group.start(late)
    group.catches_up(late)

    of_state = [offset for file, offset in asked if file == STATE_FILE]
    assert of_state == sorted(of_state)
    assert len(of_state) == len(set(of_state)) + 2
    assert max(of_state) >= 5 * PIECE_BYTES


@pytest.mark.parametrize("crash", ["before it counts", "before it is loaded", "before the log is reset"])
def test_a_crash_during_an_installation_loses_nothing(
    group: Group, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    """S8: the old log is there, or the next start resets it to the newer snapshot."""
    group.fill(5)
    late = group.follower()
    group.stop(late)
    group.fill(30)
    begin = group.drop_log()
    reached = threading.Event()

    def stop_here(*_: object) -> object:
        reached.set()
        raise UnavailableError("crash")

    def never(*_: object) -> bool:
        reached.set()
        return False

    with monkeypatch.context() as patch:
        if crash == "before it counts":
            patch.setattr(SnapshotFetcher, "_receive", stop_here)
        elif crash == "before it is loaded":
            patch.setattr(MachineHost, "adopt", never)
        else:
            patch.setattr("dledger.core.handler.EntryHandler.adopt_snapshot", never)
        server = group.start(late)
        assert reached.wait(60)
        assert server.log.begin.index < begin
        group.stop(late, graceful=False)

    server = group.start(late)
    group.catches_up(late)
    assert server.status().begin_index >= begin


def test_an_older_program_fetches_nothing_that_it_cannot_load(group: Group) -> None:
    """S12: it says so, and its log stays as it is."""
    late = group.follower()
    group.stop(late)
    for name in list(group.servers):
        group.stop(name)
    for name in NAMES:
        if name != late:
            group.start(name, Newer)
    group.fill(30)
    group.drop_log()

    server = group.start(late)
    wait_until(lambda: server.conditions.holds(ConditionKind.SNAPSHOT_FAILED), "it says so")

    assert any("format 2" in one.message for one in server.conditions.now())
    assert fetcher_of(server).bytes_received == 0
    assert server.log.begin.index == NO_INDEX
