"""The peer port: whose connection it is comes first, within a time, and nobody shuts others out."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from dledger.config import Member, ServerConfig
from dledger.core.messages import PushCommit
from dledger.rpc.listening import UNKNOWN_MAX
from dledger.rpc.peers import frames, port
from dledger.rpc.peers.frames import FrameKind, Purpose
from dledger.rpc.peers.identity import REASONS_MAX
from dledger.rpc.peers.transport import PeerTransport
from dledger.types import LogIndex, NodeId, Term
from dledger_cli.local.group import free_ports
from tests.support.peer_wire import PeerWire, handshake_frame
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until

N0, N1 = NodeId("n0"), NodeId("n1")
COMMIT = PushCommit(Term(1), 0, LogIndex(0))


@pytest.fixture
def config() -> ServerConfig:
    ports = free_ports(2)
    members = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(ports))
    return ServerConfig(node_id=N1, members=members, client_port=0, cluster_id="c")


@pytest.fixture
def receiver() -> RecordingReceiver:
    return RecordingReceiver()


@pytest.fixture
def address(
    config: ServerConfig, receiver: RecordingReceiver, caplog: pytest.LogCaptureFixture
) -> Iterator[tuple[str, int]]:
    """n1's peer port. No connection ends by a mistake of its own."""
    with closing(PeerTransport(config)) as transport:
        transport.start(receiver)
        yield "127.0.0.1", transport.port
    assert "was lost" not in caplog.text


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that hangs up soon on whoever does not say what it is."""
    monkeypatch.setattr(port, "HANDSHAKE_TIMEOUT_S", 0.2)


@pytest.mark.usefixtures("hasty")
def test_a_connection_without_a_whole_handshake_is_ended(
    config: ServerConfig, address: tuple[str, int], receiver: RecordingReceiver
) -> None:
    """It may be anybody's; one that has shaken hands may be silent as long as it likes."""
    with PeerWire(address).begin(config, N0, Purpose.PUSH) as begun, ExitStack() as stack:
        idle = [stack.enter_context(PeerWire(address)) for _ in range(4)]
        idle[1].link.sendall(b"\x01")
        idle[2].link.sendall(b"\x01\0\0\0\5abc")
        idle[3].link.sendall(handshake_frame(config, N0, Purpose.PUSH)[:-1])

        for wire in idle:
            assert wire.rest() == []
        begun.send(FrameKind.PUSH, COMMIT)
        wait_until(lambda: len(receiver.received) == 1, "a push on the connection that was silent")


def test_a_peer_with_other_settings_teaches_no_address(config: ServerConfig) -> None:
    """What a handshake says is believed once the handshake is accepted."""
    with closing(PeerTransport(config)) as transport:
        transport.start(RecordingReceiver())
        address = ("127.0.0.1", transport.port)
        for version, known in (99, {}), (None, {N0: "10.0.0.1:1"}):
            with PeerWire(address) as wire:
                hello = handshake_frame(config, N0, Purpose.PUSH, version=version, client_address="10.0.0.1:1")
                wire.link.sendall(hello)
                assert wire.frame() is not None, "the answer"

            assert dict(transport.client_addresses) == known


def test_silent_connections_shut_nobody_out(
    config: ServerConfig, address: tuple[str, int], receiver: RecordingReceiver
) -> None:
    """Whoever says nothing holds neither a place nor a thread that members need, however many they are.

    Those beyond a limit are hung up on, the oldest first; a member says whose it is at once.
    """
    hello = handshake_frame(config, N0, Purpose.PUSH)
    with ExitStack() as stack:
        begun = stack.enter_context(PeerWire(address).begin(config, N0, Purpose.PUSH))
        silent = [stack.enter_context(PeerWire(address)) for _ in range(300)]
        begun.send(FrameKind.PUSH, COMMIT)
        wait_until(lambda: len(receiver.received) == 1, "a push on the connection that was there before")

        newer = stack.enter_context(PeerWire(address))
        newer.link.sendall(hello[:20])
        for _ in range(100):
            stack.enter_context(PeerWire(address))
        newer.link.sendall(hello[20:])
        newer.send(FrameKind.PUSH, COMMIT)
        wait_until(lambda: len(receiver.received) == 2, "a push on a new connection")

        ended = 400 - UNKNOWN_MAX
        wait_until(lambda: sum(wire.has_ended for wire in silent) >= ended, "the surplus to be ended")


def test_room_is_made_by_whoever_takes_most(address: tuple[str, int]) -> None:
    """One host that opens many connections does not shut out another that has opened one."""
    with ExitStack() as stack:
        other = stack.enter_context(socket.create_connection(address, timeout=5, source_address=("127.0.0.2", 0)))
        many = [stack.enter_context(PeerWire(address)) for _ in range(400)]

        ended = 400 - UNKNOWN_MAX
        wait_until(lambda: sum(wire.has_ended for wire in many) > ended, "the surplus to be hung up on")

        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_every_address_of_the_host_is_listened_on(config: ServerConfig) -> None:
    """``localhost`` means 127.0.0.1 to one caller and ::1 to another."""
    members = tuple(replace(member, host="localhost") for member in config.members)
    with closing(PeerTransport(replace(config, members=members))) as transport:
        transport.start(RecordingReceiver())
        port = transport.port
        hosts = {str(info[4][0]) for info in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}

        for host in hosts:
            socket.create_connection((host, port), timeout=5).close()

    with pytest.raises(OSError, match="refused"):
        socket.create_connection((hosts.pop(), port), timeout=5)


def test_the_reasons_of_refusals_are_logged_once_and_only_so_many(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone may connect, a thousand times and with a thousand kinds of garbage, and none fills the log."""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for size in range(2 * REASONS_MAX):
                with PeerWire(address) as wire:
                    wire.link.sendall(frames.pack(FrameKind.HANDSHAKE, b"\xff" * (1 + size)))
                    assert [kind for kind, _ in wire.rest()] == [FrameKind.REFUSAL]

    lines = [record.getMessage() for record in caplog.records if "refused a connection" in record.getMessage()]
    assert len(lines) == len(set(lines)) == REASONS_MAX
    assert "n1 refused a connection from 127.0.0.1: 1 bytes are not a valid HandshakeRequest" in lines


def test_a_machine_without_descriptors_to_spare_accepts_again_once_it_has_some(
    address: tuple[str, int], config: ServerConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then it does not try in a loop."""
    tries: list[int] = []
    accept = socket.socket.accept

    def refuse_twice(listening: socket.socket) -> tuple[socket.socket, object]:
        tries.append(len(tries))
        if len(tries) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", refuse_twice)
    with PeerWire(address).begin(config, N0, Purpose.CONTROL):
        assert len(tries) == 3
    assert caplog.text.count("cannot accept a connection to the peer port") == 2
