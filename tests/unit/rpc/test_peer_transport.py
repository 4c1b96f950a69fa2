"""What only the gRPC transport has: ports, sockets, garbage, a black-holed peer, health and reflection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from dledger.config import Member, ReplicationConfig, ServerConfig
from dledger.core.messages import Envelope, HeartbeatRequest, Message, PushCommit, PushKind, PushResponse, VoteRequest
from dledger.errors import ConfigError, InvariantError, ResponseCode
from dledger.rpc import codec, options, peer_server
from dledger.rpc.peer_transport import GrpcTransport
from dledger.types import NO_ENTRY, LogIndex, NodeId, Term
from tests.support.ports import free_ports
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


def test_garbage_on_a_push_stream_is_an_invalid_argument(channel: grpc.Channel) -> None:
    """As above, for the stream."""
    push = channel.stream_stream(
        options.method(options.RAFT_SERVICE, "Push"), request_serializer=None, response_deserializer=None
    )

    with pytest.raises(grpc.RpcError) as caught:
        list(push(iter([b"\xff\xff\xff"]), timeout=5))

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_carries_one_sender_only(channel: grpc.Channel, config: ServerConfig) -> None:
    """Identity is fixed by the first message; an unknown sender is refused by name."""
    push = channel.stream_stream(
        options.method(options.RAFT_SERVICE, "Push"), request_serializer=None, response_deserializer=None
    )
    message = PushCommit(Term(1), 0, LogIndex(0))

    with pytest.raises(grpc.RpcError) as caught:
        list(push(iter([codec.encode(envelope(message, sender=NodeId("x")))]), timeout=5))

    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "'x' is no peer of 'n1'" in str(caught.value.details())


def test_a_newer_stream_replaces_the_older(config: ServerConfig, receiver: RecordingReceiver) -> None:
    """A connection that nobody noticed is dead must not swallow the answers."""
    transport = GrpcTransport(config)
    transport.start(receiver)
    message = codec.encode(envelope(PushCommit(Term(1), 0, LogIndex(0))))
    at = LogIndex(3)
    answer = PushResponse(Term(1), 0, PushKind.APPEND, ResponseCode.SUCCESS, at, at, at, NO_ENTRY, 1)
    with ExitStack() as stack:
        calls = []
        for count in (1, 2):
            channel = stack.enter_context(
                grpc.insecure_channel(config.self_member.address, options.peer_channel_options())
            )
            push = channel.stream_stream(
                options.method(options.RAFT_SERVICE, "Push"), request_serializer=None, response_deserializer=None
            )
            hold = threading.Event()
            stack.callback(hold.set)
            calls.append(push(_one_then_hold(message, hold), timeout=10))
            wait_until(lambda count=count: len(receiver.received) == count, "the push")  # type: ignore[misc]

        with pytest.raises(grpc.RpcError) as caught:
            next(iter(calls[0]))
        transport.send(envelope(answer, sender=N1, target=N0))
        received = codec.decode_push_response(next(iter(calls[1])))

    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert "newer stream" in str(caught.value.details())
    assert received.message == answer
    transport.close()


def test_a_stream_without_a_message_is_ended(
    config: ServerConfig, receiver: RecordingReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a thread of the pool that answers votes; one that has begun may be silent as long as it likes."""
    monkeypatch.setattr(peer_server, "FIRST_MESSAGE_S", 0.2)
    transport = GrpcTransport(config)
    transport.start(receiver)
    hold = threading.Event()
    message = codec.encode(envelope(PushCommit(Term(1), 0, LogIndex(0))))
    with grpc.insecure_channel(config.self_member.address, options.peer_channel_options()) as channel:
        push = channel.stream_stream(
            options.method(options.RAFT_SERVICE, "Push"), request_serializer=None, response_deserializer=None
        )
        begun = push(_one_then_hold(message, hold), timeout=10)
        wait_until(lambda: len(receiver.received) == 1, "the push")
        idle = [push(_hold(hold), timeout=10) for _ in range(8)]

        codes = [one.code() for one in idle]

        assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED] * 8
        assert all("no push came" in one.details() for one in idle)
        assert begun.is_active()
        hold.set()
    transport.close()


def test_health_and_reflection_are_served(channel: grpc.Channel) -> None:
    """``grpcurl`` works on the peer port too."""
    health = health_pb2_grpc.HealthStub(channel)

    for service in ("", options.RAFT_SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    database = ProtoReflectionDescriptorDatabase(channel)
    assert options.RAFT_SERVICE in database.get_services()
    raft = DescriptorPool(database).FindServiceByName(options.RAFT_SERVICE)
    assert "Push" in raft.methods_by_name


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

        assert time.monotonic() - started < 2
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


def test_control_calls_to_a_silent_peer_are_bounded(config: ServerConfig) -> None:
    """Votes and heartbeats that nobody answers do not pile up."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", config.peers[0].port))
        silent.listen()
        transport = GrpcTransport(config)
        transport.start(RecordingReceiver())

        for _ in range(100):
            transport.send(envelope(VoteRequest(Term(1), NO_ENTRY), sender=N1, target=N0))

        assert transport.dropped(N0) >= 100 - 32
        transport.close()


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


def _hold(hold: threading.Event) -> Iterator[bytes]:
    hold.wait(10)
    yield from ()


def _one_then_hold(message: bytes, hold: threading.Event) -> Iterator[bytes]:
    yield message
    hold.wait(10)
