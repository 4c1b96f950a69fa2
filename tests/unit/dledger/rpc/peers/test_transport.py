"""What only the gRPC transport has: ports, sockets, garbage, a black-holed peer, health and reflection."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.local.group import free_ports
from dledger.config import Member, ReplicationConfig, ServerConfig
from dledger.core.messages import Envelope, HeartbeatRequest, Message, PushCommit, PushKind, PushResponse, VoteRequest
from dledger.errors import ConfigError, InvariantError, ResponseCode
from dledger.rpc import front_door, options
from dledger.rpc.peers import codec, push_frames
from dledger.rpc.peers.control_link import HEARTBEATS_MAX, OTHERS_MAX
from dledger.rpc.peers.listener import PeerListener
from dledger.rpc.peers.push_frames import Frame, FrameType
from dledger.rpc.peers.push_link import PushLink
from dledger.rpc.peers.transport import GrpcTransport
from dledger.types import NO_ENTRY, LogIndex, NodeId, Term
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until

N0, N1 = NodeId("n0"), NodeId("n1")


@pytest.fixture
def config() -> ServerConfig:
    ports = free_ports(2)
    members = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(ports))
    return ServerConfig(node_id=N1, members=members, client_port=0, cluster_id="c")


@pytest.fixture
def receiver() -> RecordingReceiver:
    return RecordingReceiver()


@pytest.fixture
def channel(config: ServerConfig, receiver: RecordingReceiver) -> Iterator[grpc.Channel]:
    """A raw channel to n1's peer port."""
    transport = GrpcTransport(config)
    transport.start(receiver)
    with grpc.insecure_channel(config.self_member.address, options.peer_channel_options()) as channel:
        yield channel
    transport.close()


@dataclass
class Peer:
    """n1, as a process that pushes to it sees it."""

    address: tuple[str, int]
    transport: GrpcTransport
    receiver: RecordingReceiver

    def connect(self) -> socket.socket:
        link = socket.create_connection(self.address, timeout=10)
        link.sendall(push_frames.PREAMBLE)
        return link


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports that hang up soon on whoever does not say what it is."""
    monkeypatch.setattr("dledger.rpc.peers.listener.FIRST_BYTES_TIMEOUT_S", 0.2)


@pytest.fixture
def peer(config: ServerConfig, receiver: RecordingReceiver) -> Iterator[Peer]:
    transport = GrpcTransport(config)
    transport.start(receiver)
    yield Peer((config.self_member.host, config.self_member.port), transport, receiver)
    transport.close()


def handshake_of(sender: NodeId) -> bytes:
    """The frame with which ``sender`` begins, if its configuration is that of the fixture."""
    header = codec.EnvelopeHeader("c", "default", sender, N1)
    store = ServerConfig().store
    handshake = codec.Handshake(
        header, codec.PROTOCOL_VERSION, ("n0", "n1"), store.segment_bytes, store.max_entry_bytes
    )
    return push_frames.pack(FrameType.HANDSHAKE, codec.encode_handshake(handshake))


def frames_until_end(link: socket.socket) -> list[Frame]:
    """What the other side says before it hangs up."""
    found = []
    try:
        while (frame := push_frames.receive(link, 1 << 20)) is not None:
            found.append(frame)
    except ConnectionResetError:  # it hung up with bytes of ours unread
        pass
    return found


def envelope(message: Message, sender: NodeId = N0, target: NodeId = N1) -> Envelope:
    return Envelope("c", "default", sender, target, message)


def call(channel: grpc.Channel, name: str, data: bytes) -> bytes:
    method = channel.unary_unary(
        options.method(options.RAFT_SERVICE, name), request_serializer=None, response_deserializer=None
    )
    answer: bytes = method(data, timeout=5)
    return answer


@pytest.mark.parametrize("name", ["Handshake", "Vote", "Heartbeat", "TakeLeadership"])
def test_garbage_is_an_invalid_argument(channel: grpc.Channel, name: str) -> None:
    """Bytes that are no message get a clear status, not an internal error."""
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, name, b"\xff\xff\xff")

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "are not a" in str(caught.value.details())


def test_garbage_on_a_push_connection_is_refused(peer: Peer) -> None:
    """It ends with a sentence that says why, whatever the garbage is."""
    handshake = handshake_of(N0)
    for garbage, reason in (
        (push_frames.pack(FrameType.PUSH, b""), "expected a handshake first on a push connection, got PUSH"),
        (push_frames.pack(FrameType.HANDSHAKE, b"\xff\xff"), "2 bytes are not a valid HandshakeRequest"),
        (b"\xff" * 100, "frame type 255 is unknown"),
        (push_frames.pack(FrameType.HANDSHAKE, bytes(65 * 1024)), "HANDSHAKE frame of 66560 bytes: at most 65536"),
        (handshake + push_frames.pack(FrameType.PUSH, b"\xff\xff"), "2 bytes are not a valid PushRequest"),
        (handshake + push_frames.pack(FrameType.PUSH_ANSWER, b""), "expected a push, got PUSH_ANSWER"),
        (handshake + struct.pack(">BI", FrameType.PUSH, 1 << 31), "PUSH frame of 2147483648 bytes"),
    ):
        with peer.connect() as link:
            link.sendall(garbage)
            refusal = [payload for kind, payload in frames_until_end(link) if kind is FrameType.REFUSAL]

        assert len(refusal) == 1
        assert reason in refusal[0].decode()
    assert peer.receiver.received == []


def test_a_push_connection_carries_one_sender_only(peer: Peer) -> None:
    """Identity is fixed by the handshake; an unknown sender is refused by name."""
    message = PushCommit(Term(1), 0, LogIndex(0))
    stranger = push_frames.pack(FrameType.PUSH, codec.encode(envelope(message, sender=NodeId("x"))))
    with peer.connect() as link:
        link.sendall(handshake_of(N0) + stranger)
        frames = frames_until_end(link)
    with peer.connect() as link:
        link.sendall(handshake_of(NodeId("x")))
        refused = frames_until_end(link)

    assert [kind for kind, _ in frames] == [FrameType.HANDSHAKE_ANSWER, FrameType.REFUSAL]
    for payload in (frames[1][1], refused[0][1]):
        assert "'x' is not a peer of 'n1'" in payload.decode()


def test_a_newer_push_connection_replaces_the_older(peer: Peer) -> None:
    """A connection that nobody noticed is dead must not swallow the answers."""
    push = push_frames.pack(FrameType.PUSH, codec.encode(envelope(PushCommit(Term(1), 0, LogIndex(0)))))
    at = LogIndex(3)
    answer = PushResponse(Term(1), 0, PushKind.APPEND, ResponseCode.SUCCESS, at, at, at, NO_ENTRY, 1)
    with peer.connect() as older, peer.connect() as newer:
        older.sendall(handshake_of(N0) + push)
        wait_until(lambda: len(peer.receiver.received) == 1, "the first push")
        newer.sendall(handshake_of(N0) + push)
        wait_until(lambda: len(peer.receiver.received) == 2, "the second push")

        assert [kind for kind, _ in frames_until_end(older)] == [FrameType.HANDSHAKE_ANSWER]
        peer.transport.send(envelope(answer, sender=N1, target=N0))
        assert push_frames.receive(newer, 1 << 20) is not None  # the handshake's
        frame = push_frames.receive(newer, 1 << 20)

    assert frame is not None
    assert frame[0] is FrameType.PUSH_ANSWER
    assert codec.decode_push_response(frame[1]).message == answer


@pytest.mark.usefixtures("hasty")
def test_a_push_connection_without_a_handshake_is_ended(peer: Peer) -> None:
    """It may be anybody's; one that has shaken hands may be silent as long as it likes."""
    with peer.connect() as begun, ExitStack() as stack:
        begun.sendall(handshake_of(N0))
        idle = [stack.enter_context(peer.connect()) for _ in range(4)]

        for link in idle:
            assert frames_until_end(link) == []
        begun.sendall(push_frames.pack(FrameType.PUSH, codec.encode(envelope(PushCommit(Term(1), 0, LogIndex(0))))))
        wait_until(lambda: len(peer.receiver.received) == 1, "a push on the connection that was silent")


@pytest.mark.usefixtures("hasty")
def test_a_connection_that_shows_nothing_is_ended(peer: Peer) -> None:
    """Nobody knows what it is: not even its first bytes came."""
    with (
        socket.create_connection(peer.address, timeout=10) as silent,
        closing(socket.create_connection(peer.address, timeout=10)) as slow,
    ):
        slow.sendall(push_frames.PREAMBLE[:2])

        assert silent.recv(1) == b""
        assert slow.recv(1) == b""


def test_every_address_of_the_host_is_listened_on() -> None:
    """``localhost`` means 127.0.0.1 to one caller and ::1 to another."""
    listener = PeerListener("dledger-peer-listen-test", lambda link, _found: link.close())
    listener.start("localhost", 0, "/nobody")
    hosts = {str(info[4][0]) for info in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}

    for host in hosts:
        socket.create_connection((host, listener.port), timeout=5).close()

    listener.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((hosts.pop(), listener.port), timeout=5)


def test_nobody_else_reaches_the_grpc_server_behind_the_port(config: ServerConfig, receiver: RecordingReceiver) -> None:
    """Its socket has no name that another user, or process, could connect to: the port's limits hold for all."""
    before = _listening_unix_sockets()  # other libraries of this process may have some
    transport = GrpcTransport(config)
    transport.start(receiver)

    names = [name for inode, name in _listening_unix_sockets().items() if inode not in before]
    with grpc.insecure_channel(f"{config.self_member.host}:{config.self_member.port}") as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    transport.close()

    assert status.status is health_pb2.HealthCheckResponse.SERVING
    assert names
    assert not [name for name in names if name.startswith("@") or Path(name).exists()]


def _listening_unix_sockets() -> dict[str, str]:
    """The names of this process's listening sockets of the family UNIX, by inode."""
    ours = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[6]: row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in ours and row[3] == "00010000"}


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_silent_push_connections_shut_nobody_out(peer: Peer) -> None:
    """Whoever says nothing holds neither a place nor a thread that members need, however many they are.

    Those beyond a limit are hung up on, the oldest first; a member says whose it is at once.
    """
    push = push_frames.pack(FrameType.PUSH, codec.encode(envelope(PushCommit(Term(1), 0, LogIndex(0)))))
    with ExitStack() as stack:
        begun = stack.enter_context(peer.connect())
        begun.sendall(handshake_of(N0))
        assert push_frames.receive(begun, 1 << 20) is not None
        silent = [stack.enter_context(peer.connect()) for _ in range(300)]
        begun.sendall(push)
        wait_until(lambda: len(peer.receiver.received) == 1, "a push on the connection that was there before")

        newer = stack.enter_context(peer.connect())
        newer.sendall(handshake_of(N0)[:20])
        for _ in range(100):
            stack.enter_context(peer.connect())
        newer.sendall(handshake_of(N0)[20:] + push)
        wait_until(lambda: len(peer.receiver.received) == 2, "a push on a new connection")

        wait_until(lambda: sum(map(_has_ended, silent)) >= 400 - front_door.UNKNOWN_MAX, "the surplus to be ended")


def test_room_is_made_by_whoever_takes_most() -> None:
    """One host that opens many connections does not shut out another that has opened one."""
    listener = PeerListener("dledger-peer-listen-test", lambda link, _found: link.close())
    listener.start("127.0.0.1", 0, "/nobody")
    address = ("127.0.0.1", listener.port)
    with closing(listener), ExitStack() as stack:
        other = stack.enter_context(socket.create_connection(address, timeout=5, source_address=("127.0.0.2", 0)))
        many = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(400)]

        wait_until(lambda: sum(map(_has_ended, many)) > 400 - front_door.UNKNOWN_MAX, "the surplus to be hung up on")

        assert not _has_ended(other)


def test_a_leader_that_takes_no_answers_is_hung_up_on(peer: Peer) -> None:
    """Waiting for it would stop the flusher; what it does not take is counted."""
    at = LogIndex(3)
    answer = PushResponse(Term(1), 0, PushKind.APPEND, ResponseCode.SUCCESS, at, at, at, NO_ENTRY, 1)
    with peer.connect() as link:
        link.sendall(handshake_of(N0))
        assert push_frames.receive(link, 1 << 20) is not None
        before = peer.transport.dropped_answers

        def hung_up() -> bool:
            for _ in range(1000):
                peer.transport.send(envelope(answer, sender=N1, target=N0))
            return peer.transport.dropped_answers > before

        wait_until(hung_up, "answers to be dropped")


def test_health_and_reflection_are_served(channel: grpc.Channel) -> None:
    """``grpcurl`` works on the peer port too."""
    health = health_pb2_grpc.HealthStub(channel)

    for service in ("", options.RAFT_SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    database = ProtoReflectionDescriptorDatabase(channel)
    assert options.RAFT_SERVICE in database.get_services()
    raft = DescriptorPool(database).FindServiceByName(options.RAFT_SERVICE)
    assert set(raft.methods_by_name) == {
        "Handshake",
        "Vote",
        "Heartbeat",
        "TakeLeadership",
        "ReadLog",
        "ChainCrcs",
    }


def test_a_taken_port_is_a_config_error(config: ServerConfig) -> None:
    """Two nodes on one port must not share it silently (SO_REUSEPORT is off)."""
    first, second = GrpcTransport(config), GrpcTransport(config)
    first.start(RecordingReceiver())

    with pytest.raises(ConfigError, match=f"peer address {config.self_member.address}: the port is in use"):
        second.start(RecordingReceiver())

    first.close()
    second.close()


def test_close_does_not_wait_for_a_dead_peer(config: ServerConfig) -> None:
    """A peer that accepts connections and says nothing (SIGSTOP, a black hole) delays neither send nor close."""
    before = set(threading.enumerate())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", config.peers[0].port))
        silent.listen()
        transport = GrpcTransport(config)
        transport.start(RecordingReceiver())
        started = time.monotonic()

        for _ in range(100):
            transport.send(envelope(HeartbeatRequest(Term(1)), sender=N1, target=N0))
            transport.send(envelope(PushCommit(Term(1), 0, LogIndex(0)), sender=N1, target=N0))
        transport.close()

        assert time.monotonic() - started < 5
        assert transport.dropped(N0) == 0  # a closed transport has no links
    wait_until(lambda: set(threading.enumerate()) <= before, "all threads joined")


def test_a_full_queue_breaks_the_stream(config: ServerConfig) -> None:
    """What the peer does not take is dropped and reported, never kept without limit."""
    small = replace(config, replication=ReplicationConfig(inflight_pushes_max=1, handler_queue_pushes_max=1))
    receiver = RecordingReceiver()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", config.peers[0].port))
        silent.listen()
        transport = GrpcTransport(small)
        transport.start(receiver)

        for index in range(100):
            transport.send(envelope(PushCommit(Term(1), 0, LogIndex(index)), sender=N1, target=N0))

        wait_until(lambda: bool(receiver.lost), "connection_lost")
        assert transport.dropped(N0) > 50
        transport.close()


def test_a_push_link_survives_a_machine_without_threads_to_spare(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure to connect that nobody thought of is not the last attempt: the peer would never hear of us again.

    Looking up a peer's name needs a thread, which cannot be had at the limit of a process or container.
    """
    pushed, receiver = RecordingReceiver(), RecordingReceiver()
    other = replace(config, node_id=N0)
    failures: list[PushLink] = []
    connect = PushLink._connect

    async def fail_twice(link: PushLink) -> None:
        if len(failures) < 2:
            failures.append(link)
            raise RuntimeError("can't start new thread")
        await connect(link)

    monkeypatch.setattr(PushLink, "_connect", fail_twice)
    with closing(GrpcTransport(config)) as target, closing(GrpcTransport(other)) as transport:
        target.start(pushed)
        transport.start(receiver)

        def push_and_look() -> bool:
            transport.send(envelope(PushCommit(Term(1), 0, LogIndex(1))))
            return bool(pushed.received)

        wait_until(push_and_look, "a push")

    assert len(failures) == 2
    assert len(receiver.lost) == 2  # the dispatcher hears of each


def test_a_push_link_that_fails_for_good_is_reported(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug must not leave a leader without a way to a peer: whoever can stop the node is told."""
    failures: list[BaseException] = []

    async def broken(_link: PushLink) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr(PushLink, "_connect", broken)
    with closing(GrpcTransport(config, report=failures.append)) as transport:
        transport.start(RecordingReceiver())
        transport.send(envelope(PushCommit(Term(1), 0, LogIndex(1)), sender=N1, target=N0))

        wait_until(lambda: bool(failures), "the report")

    assert str(failures[0]) == "a bug"


def test_control_calls_to_a_silent_peer_are_bounded(config: ServerConfig) -> None:
    """Votes and heartbeats that nobody answers do not pile up."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", config.peers[0].port))
        silent.listen()
        transport = GrpcTransport(config)
        transport.start(RecordingReceiver())

        for _ in range(100):
            transport.send(envelope(VoteRequest(Term(1), NO_ENTRY), sender=N1, target=N0))

        assert transport.dropped(N0) >= 100 - OTHERS_MAX - 1
        transport.close()


def test_heartbeats_that_nobody_answers_keep_nothing_else_from_arriving(
    config: ServerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """A follower that waits for its own lock, under many read rounds: votes arrive, then the newest heartbeat.

    It refuses none: what leaves is less than what is taken, so that nobody is told that two members do not talk.
    """
    slow = RecordingReceiver()
    with closing(GrpcTransport(config)) as target, closing(GrpcTransport(replace(config, node_id=N0))) as transport:
        target.start(slow)
        transport.start(RecordingReceiver())
        transport.send(envelope(HeartbeatRequest(Term(1), 1)))
        wait_until(lambda: len(slow.requested) == 1, "the first heartbeat")
        slow.release.clear()

        for number in range(2, 200):
            transport.send(envelope(HeartbeatRequest(Term(1), number)))
        transport.send(envelope(VoteRequest(Term(2), NO_ENTRY)))
        wait_until(lambda: envelope(VoteRequest(Term(2), NO_ENTRY)) in slow.requested, "the vote")
        under_way = len(slow.requested)
        slow.release.set()

        wait_until(lambda: envelope(HeartbeatRequest(Term(1), 199)) in slow.requested, "the newest heartbeat")
    assert under_way <= 1 + HEARTBEATS_MAX + 1
    assert "does not talk" not in caplog.text


def test_calls_that_were_given_up_meanwhile_shut_out_nobody(
    config: ServerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """After a pause of seconds a member finds all that it was asked meanwhile: none of it is refused for the rest."""
    slow = RecordingReceiver()
    with closing(GrpcTransport(config)) as target, closing(GrpcTransport(replace(config, node_id=N0))) as transport:
        target.start(slow)
        transport.start(RecordingReceiver())
        with grpc.insecure_channel(config.self_member.address, options.peer_channel_options()) as channel:
            vote = channel.unary_unary(
                options.method(options.RAFT_SERVICE, "Vote"), request_serializer=None, response_deserializer=None
            )
            slow.release.clear()
            given_up = [
                vote.future(codec.encode(envelope(VoteRequest(Term(1), NO_ENTRY))), timeout=0.05) for _ in range(60)
            ]
            wait_until(lambda: all(call.done() for call in given_up), "their deadline")
            slow.release.set()
            codes = {call.code() for call in given_up}
            transport.send(envelope(HeartbeatRequest(Term(1), 7)))
            wait_until(lambda: envelope(HeartbeatRequest(Term(1), 7)) in slow.requested, "the heartbeat")

    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert "does not talk" not in caplog.text


def test_transport_is_started_once_and_sends_only_messages_of_the_wire(config: ServerConfig) -> None:
    """Misuse is an ``InvariantError``."""
    transport = GrpcTransport(config)
    with pytest.raises(InvariantError):
        _ = transport.port
    transport.start(RecordingReceiver())

    assert transport.port == config.self_member.port
    with pytest.raises(InvariantError):
        transport.start(RecordingReceiver())
    transport.close()


def _has_ended(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return link.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
