"""The members of several groups in one process: wired together, failing apart."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from dledger.client import DLedgerClient
from dledger.clock import Clock
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.errors import ConfigError, DirectoryLockedError, DiskFullError, NoStateMachineError
from dledger.host import Host
from dledger.hosted_groups import GroupsServer, HostedGroups, check_together
from dledger.log_output import speaking_group
from dledger.monitoring import ConditionKind
from dledger.pb import client_pb2
from dledger.runtime.threads import NodeFailedError
from dledger.server import DLedgerServer
from dledger.store.durable_state import FileHardState
from dledger.store.fs import DiskUsage, FileSystem
from dledger.types import AppendedBatch, HardState, NodeId, Role
from dledger_cli.local.group import free_ports
from tests.support.cluster import Outcome
from tests.support.counting import History
from tests.support.waiting import wait_until

N0 = NodeId("n0")
Named = list[tuple[str, ServerConfig]]


@pytest.fixture
def named(tmp_path: Path) -> Named:
    """The groups a and b, of one member each."""
    (port,) = free_ports(1)
    members = (Member(N0, "127.0.0.1", port),)
    return [
        (
            f"{group}.conf",
            ServerConfig(
                group=group,
                node_id=N0,
                members=members,
                client_port=0,
                store=StoreConfig(tmp_path / group, segment_bytes=1 << 20, index_segment_bytes=1 << 16),
            ),
        )
        for group in "ab"
    ]


@pytest.fixture
def server(named: Named) -> Iterator[GroupsServer]:
    """Both, started and leading."""
    server = GroupsServer(named)
    server.start()
    _wait_leading(server)
    yield server
    server.stop(graceful=False)


def _wait_leading(server: GroupsServer) -> None:
    def lead() -> bool:
        now = [one.status() for one in server.servers.values()]
        return all(one.role is Role.LEADER and one.committed_index >= 0 for one in now)

    wait_until(lead, "all lead")


def _threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]  # a client may be kept by others in this process
    return [name for name in names if name.startswith("dledger-") and name != "dledger-client"]


def test_each_member_has_a_log_of_its_own(server: GroupsServer) -> None:
    """What is appended to one is not in the other."""
    appended = Outcome[AppendedBatch]()
    server.servers["a"].submit_append([b"of a"], appended)
    wait_until(lambda: not appended.pending, "it is appended")

    assert server.servers["a"].log.last.index > server.servers["b"].log.last.index


def test_what_is_due_by_time_and_the_ports_have_one_thread_for_all(server: GroupsServer) -> None:
    """A further group costs a flusher and what its peers need, not a set of threads."""
    del server
    names = _threads()

    for shared in ("timers", "checkpoint", "warm", "clean", "scrub", "client-rpc", "peers"):
        assert names.count(f"dledger-{shared}-n0") == 1, shared


def test_each_group_has_a_state_machine_of_its_own(named: Named) -> None:
    """Commands and queries go to the machine of the group that they name, at one port; snapshots and restarts, too."""
    for round_ in (1, 2):
        machines = {"a": History(), "b": History()}
        server = GroupsServer(named, state_machine=machines.get)
        try:
            server.start()
            _wait_leading(server)
            address = server.servers["a"].client_address
            for group in "ab":
                with DLedgerClient(address, group=group, timeout_s=30) as client:
                    results = [int(client.command(f"{group} {number}".encode())) for number in range(2)]
                    assert results == [2 * round_ - 1, 2 * round_]
                    told = json.loads(client.query(b"").result)
                    assert told == [f"{group} 0", f"{group} 1"] * round_
                    assert client.create_snapshot(address).index > 0
        finally:
            server.stop()


def test_a_group_without_a_state_machine_stands_beside_one_that_has_one(named: Named) -> None:
    """A bare log refuses commands, and the other group's machine gets none of its entries."""
    machine = History()
    server = GroupsServer(named, state_machine={"a": machine}.get)
    try:
        server.start()
        _wait_leading(server)
        address = server.servers["a"].client_address
        with DLedgerClient(address, group="b", timeout_s=30) as client:
            client.append(b"of b")
            with pytest.raises(NoStateMachineError):
                client.command(b"x")
        with DLedgerClient(address, group="a", timeout_s=30) as client:
            client.command(b"of a")
        assert machine.bodies == [b"of a"]
    finally:
        server.stop(graceful=False)


def test_a_failed_member_stops_and_the_other_goes_on(named: Named, server: GroupsServer) -> None:
    """N1: with a condition at the others, its directory unlocked, and its requests refused."""
    a, b = server.servers["a"], server.servers["b"]

    a.fail(OSError("its disk broke"))

    refused, appended = Outcome[AppendedBatch](), Outcome[AppendedBatch]()
    a.submit_append([b"x"], refused)
    b.submit_append([b"x"], appended)
    wait_until(lambda: not appended.pending, "the other one takes appends")
    assert isinstance(refused.error, NodeFailedError)
    assert server.wait(0) is None
    assert server.fatal is None
    assert list(server.failures) == ["a"]
    wait_until(lambda: b.conditions.holds(ConditionKind.GROUP_FAILED), "the other one tells of it")
    wait_until(lambda: "dledger-end-a" not in _threads(), "it has ended")
    (port,) = free_ports(1)
    again = replace(named[0][1], members=(Member(N0, "127.0.0.1", port),))
    DLedgerServer(again).stop(graceful=False)


def test_a_group_whose_disk_is_full_leaves_the_others_taking_appends(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group's room is its own: its directory, its refusal, its condition."""
    is_full, measure = threading.Event(), FileSystem.usage

    def usage(fs: FileSystem, path: Path) -> DiskUsage:
        found = measure(fs, path)
        if is_full.is_set() and path.is_relative_to(named[0][1].store.base_dir):
            return replace(found, available_bytes=0, used_bytes=found.total_bytes)
        return found

    monkeypatch.setattr(FileSystem, "usage", usage)
    server = GroupsServer(named)
    try:
        server.start()
        _wait_leading(server)
        is_full.set()  # not before: a member whose disk is full does not campaign
        a, b = server.servers["a"], server.servers["b"]
        wait_until(lambda: a.conditions.holds(ConditionKind.DISK_FULL), "the first one's disk counts as full")
        refused, appended = Outcome[AppendedBatch](), Outcome[AppendedBatch]()
        a.submit_append([b"x"], refused)
        b.submit_append([b"x"], appended)

        wait_until(lambda: not refused.pending and not appended.pending, "both are answered")
        assert isinstance(refused.error, DiskFullError)
        assert appended.value.last_index > 0
        assert not b.conditions.holds(ConditionKind.DISK_FULL)
        assert not server.failures
    finally:
        server.stop(graceful=False)


def test_the_process_ends_when_no_group_is_left(server: GroupsServer) -> None:
    """N1: with the status of a failure."""
    server.servers["a"].fail(OSError("its disk broke"))
    assert server.wait(0) is None

    server.servers["b"].fail(OSError("its disk broke, too"))

    assert server.wait(60) == 70
    assert str(server.fatal) == "its disk broke, too"


def test_a_stop_meets_no_thread_that_is_not_started(server: GroupsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It joins those that end failed members, and would fail half-way: with ports open, and a process that waits."""
    seen: list[bool] = []
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        if thread.name == "dledger-end-a":
            seen.append(thread not in server._endings or server._lock.locked())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched)
    server.servers["a"].fail(OSError("its disk broke"))
    assert seen == [True]


def test_the_process_ends_with_the_first_group_if_set_so(named: Named) -> None:
    """N1: ``exit_with_any_group``."""
    server = GroupsServer([(name, replace(config, exit_with_any_group=True)) for name, config in named])
    try:
        server.start()
        server.servers["a"].fail(OSError("its disk broke"))

        assert server.wait(60) == 70
        assert str(server.fatal) == "its disk broke"
    finally:
        server.stop(graceful=False)


def test_the_loss_of_what_they_share_ends_all(server: GroupsServer) -> None:
    """Nobody goes on without the event loop that serves clients, or the thread of elections."""
    server._supervisor.report(RuntimeError("the loop ended"))

    assert server.wait(60) == 70
    assert all(one.fatal is not None for one in server.servers.values())


def test_a_stop_closes_everything(named: Named) -> None:
    """Directories, ports and threads: the same process can start them again."""
    for _ in range(2):
        server = GroupsServer(named)
        server.start()
        _wait_leading(server)
        server.stop()

        assert server.wait(0) == 0
        wait_until(lambda: _threads() == [], "no thread is left")


def test_a_group_that_cannot_be_opened_keeps_none_of_the_others_open(named: Named) -> None:
    """The error names the directory; the next start finds the others free."""
    holder = DLedgerServer(named[1][1])
    try:
        with pytest.raises(DirectoryLockedError):
            GroupsServer(named)
        DLedgerServer(named[0][1]).stop(graceful=False)
    finally:
        holder.stop(graceful=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"metrics_port": 9}, "metrics_port is 0 in a.conf and 9 in b.conf"),
        ({"client_port": 30}, "the address for clients is 127.0.0.1:0 in a.conf and 127.0.0.1:30 in b.conf"),
        ({"members": (Member(N0, "127.0.0.1", 1),)}, "the peer address is"),
        ({"exit_with_any_group": True}, "exit_with_any_group is False in a.conf and True in b.conf"),
        ({"group": "a"}, "a.conf and b.conf are both of group 'a'"),
    ],
)
def test_settings_of_the_process_are_refused_if_they_differ(named: Named, change: dict[str, object], told: str) -> None:
    """With the names of both files, and what to do."""
    second = named[1][0], replace(named[1][1], **change)  # type: ignore[arg-type]  # by name

    with pytest.raises(ConfigError) as refused:
        check_together([named[0], second])

    assert any(told in problem for problem in refused.value.problems)


def test_differing_certificates_limits_and_access_rules_are_refused(named: Named, tmp_path: Path) -> None:
    """One port shows one certificate, and clients are counted once."""
    config = named[1][1]
    differing = replace(
        config,
        security=replace(config.security, tls_cert_path=tmp_path / "other.pem"),
        access=replace(config.access, account_share_percent=10),
        limits=replace(config.limits, connections_max=7),
    )

    with pytest.raises(ConfigError) as refused:
        check_together([named[0], ("b.conf", differing)])

    for name in ("tls_cert_path", "account_share_percent", "connections_max"):
        assert any(problem.startswith(f"{name} is ") and "b.conf" in problem for problem in refused.value.problems)


def test_two_groups_with_one_directory_are_refused(named: Named) -> None:
    """The second would find the first one's lock, or identity, with a less clear error."""
    (first, one), (second, other) = named
    shared = replace(other, store=replace(other.store, base_dir=one.store.base_dir))

    with pytest.raises(ConfigError, match=r"is a directory of group 'a' in a\.conf and of 'b' in b\.conf"):
        check_together([(first, one), (second, shared)])


# --- one group's trouble is not another one's -------------------------------------------------------------------------


def test_a_group_whose_lock_is_held_delays_no_other_one_s_timers(server: GroupsServer) -> None:
    """They share a thread: a step under one group's lock may wait for its disk."""
    a, b = server.servers["a"], server.servers["b"]
    with a._driver._lock:
        for _ in range(3):
            due_ms = b._driver._elector.worker.due_ms  # type: ignore[union-attr]  # it is a task
            wait_until(
                lambda due_ms=due_ms: b._driver._elector.worker.due_ms not in (due_ms, None),  # type: ignore[misc, union-attr]  # the default argument
                "the other one's heartbeats go on",
            )


def test_a_group_whose_vote_is_not_saved_delays_no_other_one_s_election(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may hang instead of failing; then one group waits, and votes for nobody meanwhile."""
    hanging, hangs, save = threading.Event(), threading.Event(), FileHardState.save

    def hang(self: FileHardState, state: HardState) -> None:
        if self._directory.parent.name == "a" and state.vote is not None:
            hanging.set()
            hangs.wait(60)
        save(self, state)

    monkeypatch.setattr(FileHardState, "save", hang)
    server = GroupsServer(named)
    try:
        server.start()
        b = server.servers["b"]
        wait_until(lambda: b.status().role is Role.LEADER, "the other one leads")
        appended = Outcome[AppendedBatch]()
        b.submit_append([b"x"], appended)
        wait_until(lambda: not appended.pending, "it takes appends")
        assert appended.value.last_index > 0
        assert hanging.wait(30)

        hangs.set()
        _wait_leading(server)
    finally:
        hangs.set()
        server.stop(graceful=False)


def test_a_member_that_fails_while_others_are_opened_ends_nobody_else(
    named: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are open already are not all; and they become more while those are told."""
    configs, ended = [config for _, config in named], []
    telling, opened = threading.Event(), threading.Event()

    def tell(*_: object, **__: object) -> None:
        telling.set()
        assert opened.wait(60)

    def make(number: int, host: Host) -> DLedgerServer:
        made = DLedgerServer(configs[number], host=host)
        if number == 0:
            monkeypatch.setattr(made.conditions, "set", tell)
        else:
            host.failed("a", OSError("its disk broke"))
            ended.append(server_of(host))
            assert telling.wait(60)
        return made

    def server_of(host: Host) -> bool:
        return HostedGroups.fatal.fget(host.failed.__self__) is not None  # type: ignore[attr-defined]  # its own method

    server = HostedGroups(configs, make, Clock())
    opened.set()
    server.stop(graceful=False)

    assert ended == [False]


def test_log_lines_name_the_group_that_they_are_about(named: Named) -> None:
    """Whichever thread of the process writes them."""
    lines: list[tuple[str, str, str]] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((speaking_group(), str(getattr(record, "event", "")), record.getMessage()))

    noting, log = Noting(), logging.getLogger("dledger")
    level = log.level
    log.addHandler(noting)
    log.setLevel(logging.INFO)
    try:
        server = GroupsServer(named)
        try:
            server.start()
            _wait_leading(server)
            server.servers["a"].fail(OSError("its disk broke"))
            b = server.servers["b"]
            wait_until(lambda: b.conditions.holds(ConditionKind.GROUP_FAILED), "the other one tells of it")
        finally:
            server.stop(graceful=False)
    finally:
        log.removeHandler(noting)
        log.setLevel(level)

    told = {(group, event) for group, event, _ in lines}
    assert told >= {(group, event) for group in "ab" for event in ("recovery", "role_change", "condition")}
    assert ("a", "group_failed") in told
    assert [group for group, _, text in lines if text.startswith("stopping the node")] == ["a"]
    assert all(group == text[0] for group, event, text in lines if event in ("recovery", "role_change", "condition"))


def test_limits_of_clients_that_differ_are_refused(named: Named) -> None:
    """They are the process's: by which file comes first, they would be one group's or the other's."""
    config = named[1][1]
    for name in ("pending_entries_max", "pending_bytes_max"):
        value = getattr(config.replication, name) // 2
        other = replace(config, replication=replace(config.replication, **{name: value}))
        with pytest.raises(ConfigError, match=f"{name} is .* in a.conf and {value} in b.conf"):
            check_together([named[0], ("b.conf", other)])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_group_takes_entries_of_its_own_size_whichever_file_comes_first(
    named: Named, order: tuple[int, int]
) -> None:
    """The port of gRPC, which serves all of them, receives what the largest of them allows."""
    (grpc_port,) = free_ports(1)
    sized = [
        (
            name,
            replace(
                config,
                grpc_server_port=grpc_port,
                store=replace(config.store, segment_bytes=1 << 25, max_entry_bytes=size),
            ),
        )
        for (name, config), size in zip(named, (1 << 16, 12 << 20), strict=True)
    ]
    server = GroupsServer([sized[number] for number in order])
    try:
        server.start()
        _wait_leading(server)
        with grpc.insecure_channel(f"127.0.0.1:{server.servers['b'].grpc_port}") as channel:
            append = channel.unary_unary(
                "/dledger.v1.LogService/Append",
                request_serializer=client_pb2.AppendRequest.SerializeToString,
                response_deserializer=client_pb2.AppendResponse.FromString,
            )
            answer = append(client_pb2.AppendRequest(group="b", bodies=[bytes(10 << 20)]), timeout=60)
        assert answer.first_index > 0
    finally:
        server.stop(graceful=False)


def test_a_failed_member_does_not_say_that_it_leads(server: GroupsServer) -> None:
    """Its process goes on, and answers for it: clients must look for the leader elsewhere."""
    a = server.servers["a"]
    a.fail(OSError("its disk broke"))

    for status in (a.status(), a.measure().status):
        assert (status.role, status.leader, status.peers) == (Role.FOLLOWER, None, ())


def test_a_start_after_a_stop_does_nothing(named: Named) -> None:
    """A signal may come before the start."""
    server = GroupsServer(named)
    try:
        server.stop()
        server.start()

        assert server.wait(0) == 0
        wait_until(lambda: _threads() == [], "no thread is left")
    finally:
        server.stop()


def test_a_start_that_fails_closes_what_it_has_opened(named: Named) -> None:
    """The peers' port is another process's: the groups' directories and the clients' port are free again."""
    with socket.create_server(("127.0.0.1", named[0][1].self_member.port)):
        server = GroupsServer(named)
        with pytest.raises(ConfigError):
            server.start()
    left = _threads()
    server.stop(graceful=False)

    assert left == []
    GroupsServer(named).stop()


def test_two_groups_with_one_data_directory_are_refused(named: Named, tmp_path: Path) -> None:
    """Also where only the segments of both would lie."""
    shared = [
        (name, replace(config, store=replace(config.store, data_dirs=(tmp_path / f"own-{name}", tmp_path / "data"))))
        for name, config in named
    ]

    with pytest.raises(ConfigError, match=r"data is a directory of group 'a' in a\.conf and of 'b' in b\.conf"):
        check_together(shared)
