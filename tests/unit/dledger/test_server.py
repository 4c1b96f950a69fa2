"""The life of one node in this process: starting, stopping, and the two at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.config import Member, SecurityConfig, ServerConfig, StoreConfig
from dledger.core.messages import Outbox, RoleChange
from dledger.core.quorum_ack import _PendingRead
from dledger.errors import DiskError, IdentityError, ShutdownError
from dledger.maintenance import protected_index
from dledger.runtime.threads import EXIT_FATAL, Task
from dledger.server import DLedgerServer
from dledger.types import AppendedBatch, ChangeKind, HardState, LogIndex, MemberChange, NodeId, Role, Term
from dledger_cli.local.group import free_ports
from tests.support.cluster import N1, N2, Outcome
from tests.support.solo import Solo
from tests.support.waiting import wait_until

N0 = NodeId("n0")


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    """A group of one."""
    store = StoreConfig(tmp_path, segment_bytes=1 << 20, index_segment_bytes=1 << 16)
    (port,) = free_ports(1)
    return ServerConfig(node_id=N0, members=(Member(N0, "127.0.0.1", port),), client_port=0, store=store)


@pytest.fixture
def server(config: ServerConfig) -> Iterator[DLedgerServer]:
    """A node, stopped at the end whatever happens."""
    server = DLedgerServer(config)
    yield server
    server.stop(graceful=False)


def threads() -> list[str]:
    """The node's threads that live; a client's, which others in this process may keep, is no node's."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("dledger-") and name != "dledger-client"]


def test_background_work_ends_before_the_node_that_it_uses(
    server: DLedgerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean-up that is due while the node stops must not make a failure (status 70) of a graceful stop."""
    server.start()
    wait_until(lambda: server.status().role is Role.LEADER, "it leads itself")
    stop_node, left = server._driver.stop, list[Task]()

    def note_and_stop() -> None:
        left.extend(task for task in server._maintenance._tasks if task.is_alive)
        stop_node()

    monkeypatch.setattr(server._driver, "stop", note_and_stop)

    server.stop()

    assert left == []
    assert server.fatal is None
    assert server.wait(0) == 0


def test_a_member_that_never_came_was_never_heard(server: DLedgerServer) -> None:
    """Not some time in the prehistory of this process."""
    server.start()
    wait_until(lambda: server.status().committed_index >= 0, "it leads itself")
    server.change_members(MemberChange(ChangeKind.ADD, N1, 1, "127.0.0.1", 9), timeout_s=60)

    (peer,) = server.status().peers

    assert (peer.node_id, peer.last_contact_ms, peer.health) == (N1, -1, "never seen")


def test_a_running_member_writes_its_vote_for_java_as_well(server: DLedgerServer) -> None:
    """Now and then, off the path of a vote: a killed process leaves it, too."""
    server.start()
    mirror = server.log.directory / "currterm"

    wait_until(lambda: mirror.exists() and mirror.read_text() == "voteLeader=n0\ncurrTerm=1\n", "it is written")


def test_a_bound_host_is_listened_on_and_not_advertised(config: ServerConfig) -> None:
    """In a container, every address of which may change: others are told the member's name all the same."""
    server = DLedgerServer(replace(config, bind_host="0.0.0.0", security=SecurityConfig(insecure=True)))
    try:
        server.start()
        port = int(server.client_address.rpartition(":")[2])
        assert server.client_address == f"127.0.0.1:{port}"
        for one in (port, config.self_member.port):
            socket.create_connection(("127.0.0.2", one), timeout=5).close()  # not the member's address
    finally:
        server.stop()


def test_a_log_that_cannot_be_closed_is_a_failure_and_no_hang(
    server: DLedgerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the node hears of it when its last flush fails."""
    server.start()
    close = server.log.close

    def fail() -> None:
        close()
        raise DiskError("flushing the log failed")

    monkeypatch.setattr(server.log, "close", fail)

    server.stop()

    assert server.wait(0) == EXIT_FATAL
    assert isinstance(server.fatal, DiskError)


def test_a_node_that_was_stopped_before_its_start_opens_nothing(server: DLedgerServer) -> None:
    """SIGTERM during a long recovery takes effect when the recovery has ended, just when the node is started."""
    server.stop()

    server.start()

    assert server.wait(0) == 0
    wait_until(lambda: threads() == [], "no thread is left")


def test_a_stop_during_the_start_waits_for_it(server: DLedgerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the start would go on to open what the stop believes to have closed."""
    start_clients, stopping = server._host.start, threading.Thread(target=server.stop)

    def start_while_stopping(*, client_ports: bool) -> None:
        stopping.start()
        stopping.join(0.2)  # it ends at once, unless it must wait for us
        start_clients(client_ports=client_ports)

    monkeypatch.setattr(server._host, "start", start_while_stopping)

    server.start()
    stopping.join()

    assert server.wait(0) == 0
    wait_until(lambda: threads() == [], "no thread is left")


def test_retention_waits_for_live_followers_only() -> None:
    """A dead follower must not fill the disks of those that live: it is given a newer begin when it returns."""
    solo = Solo(terms=[1] * 9, committed=8)
    assert protected_index(solo.node, solo.now_ms) == 8, "a follower keeps what is not committed"
    solo.lead()
    solo.leader_role.match |= {N1: LogIndex(8), N2: LogIndex(3)}
    assert protected_index(solo.node, solo.now_ms) == 3

    solo.now_ms += solo.config.election.election_timeout_ms_max + 1
    solo.beat(N1)

    assert protected_index(solo.node, solo.now_ms) == 8


def test_repair_looks_at_the_whole_log(config: ServerConfig) -> None:
    """Old damage is found by a read, which advises ``--repair``: that must then find it too, wherever it is."""
    config = replace(config, store=replace(config.store, recovery_verify_bytes=0))
    server = DLedgerServer(config)
    server.log.append_as_leader(Term(1), [b"damaged", b"sound", b"sound"])
    data = server.log.directory / "data" / f"{0:020}"
    server.stop()
    content = bytearray(data.read_bytes())
    content[content.index(b"damaged")] ^= 1
    data.write_bytes(content)

    unaware = DLedgerServer(config)
    unaware.stop()
    repaired = DLedgerServer(config, repair=True)
    repaired.stop()

    assert unaware.log.last.index == 2
    assert repaired.log.last.index == -1


def test_repair_never_gives_up_a_log_for_a_damaged_identity(config: ServerConfig) -> None:
    """The log is sound; the error says what to write, and that works."""
    server = DLedgerServer(config)
    server.log.append_as_leader(Term(1), [b"sound"])
    path = server.log.directory / "identity"
    server.stop()
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"node_id"', b'"nodd_id"'))

    with pytest.raises(IdentityError, match="so nothing was changed") as caught:
        DLedgerServer(config, repair=True)
    message = str(caught.value)
    path.write_text(message[message.index("{") :])
    again = DLedgerServer(config, repair=True)
    again.stop()

    assert again.log.last.index == 0
    assert path.read_bytes() == content


def test_a_role_handler_may_stop_its_node(server: DLedgerServer) -> None:
    """A broker that cannot become master stops its node on the very thread that told it."""
    finished = threading.Event()

    class Stopping:
        def startup(self) -> None:
            pass

        def role_changed(self, change: RoleChange) -> None:
            if change.role is Role.LEADER:
                server.stop()

        def shutdown(self) -> None:
            finished.set()

    server.add_role_change_handler(Stopping())
    server.start()

    assert finished.wait(60)
    assert server.wait(60) == 0
    wait_until(lambda: threads() == [], "all threads to end")


def test_a_stop_answers_whoever_still_waits(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append without a quorum must not wait for ever: it may be committed by the others, or not."""
    server = DLedgerServer(config)
    server.start()
    wait_until(lambda: server.status().role is Role.LEADER, "it leads itself")
    monkeypatch.setattr(server._node.quorum_ack, "_advance_commit", lambda: None)
    appended, read = Outcome[AppendedBatch](), Outcome[LogIndex]()
    server.submit_append([b"x"], appended)
    server._node.reads._pending.append(_PendingRead(server.status().term, 1 << 30, LogIndex(0), 1 << 60, read))

    server.stop(graceful=False)
    server.stop(graceful=False)

    assert [(type(one), one.outcome) for one in (appended.error, read.error)] == [(ShutdownError, "unknown")] * 2


def test_an_append_that_stops_the_node_is_answered_once(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written, then the flush failed on the same thread: refused there, and again when the node is stopped."""
    server = DLedgerServer(config)
    server.start()
    wait_until(lambda: server.status().role is Role.LEADER, "it leads itself")
    monkeypatch.setattr(server._node.quorum_ack, "_advance_commit", lambda: None)

    carry_out, appending = server._driver._carry_out, threading.get_ident()

    def fail(effects: Outbox, hard_state: HardState, version: int) -> None:
        """Only for the append: a part's own thread that failed first would stop the node before it."""
        if threading.get_ident() == appending:
            raise DiskError("broken")
        carry_out(effects, hard_state, version)

    monkeypatch.setattr(server._driver, "_carry_out", fail)
    outcome = Outcome[AppendedBatch]()

    server.submit_append([b"x"], outcome)
    server.stop(graceful=False)

    assert outcome.error.outcome == "unknown"
    assert server.wait(0) == EXIT_FATAL
