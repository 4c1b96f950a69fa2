"""Garbage, floods and idlers at both ports: refused, and the group does not even change its term."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import threading
from contextlib import ExitStack, closing
from dataclasses import replace

import grpc
import pytest

from dledger.client import DLedgerClient
from dledger.errors import DLedgerError, EntryTooLargeError, InvalidRequestError
from dledger.pb import client_pb2, raft_pb2
from dledger.rpc.peers.frames import Frame, FrameKind, Purpose, pack
from dledger.types import LogIndex, NodeId
from dledger_cli.local.group import HOST
from tests.integration.harness import N0, Group, like_the_members, undisturbed
from tests.support.lacking import lacks
from tests.support.peer_wire import PeerWire, handshake_frame

MIB = 1 << 20
IDLERS = 2000
FLOODERS = 4
FLOOD_ACKS = 15_000
GARBAGE = {
    "noise": random.Random(1).randbytes(64 * 1024),
    "http/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("160301020001000" + "1" * 401),
    "http/2 and noise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.Random(2).randbytes(64 * 1024),
    "huge frame": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x04\x00\x00\x00\x00\x00" + bytes(64 * 1024),
    "endless headers": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x40\x00\x01\x00\x00\x00\x00\x01" * 4000,
    "handshake and noise": pack(FrameKind.HANDSHAKE, b"") + random.Random(3).randbytes(64 * 1024),
    "push of 4 GiB": pack(FrameKind.HANDSHAKE, b"") + b"\x0a\xff\xff\xff\xff" + bytes(64 * 1024),
    "half a frame": pack(FrameKind.HANDSHAKE, bytes(1000))[:500],
}
CLIENT_METHODS = ("Append", "AppendStream", "Read", "Follow", "Metadata", "WatchRole", "TransferLeadership")
STREAMS_IN = ("AppendStream",)


def ports_of(group: Group) -> list[int]:
    leader = group.nodes[group.leader()]
    follower = group.nodes[group.followers(leader.node_id)[0]]
    return [port for node in (leader, follower) for port in (node.peer_port, node.client_port, node.grpc_port)]


def test_garbage_bytes_are_hung_up_on(steady: Group) -> None:
    """What is neither gRPC nor a frame, at the ports of a leader and of a follower."""
    with undisturbed(steady):
        for port in ports_of(steady):
            for garbage in GARBAGE.values():
                with closing(socket.create_connection((HOST, port), timeout=60)) as link:
                    try:
                        link.sendall(garbage)
                        link.shutdown(socket.SHUT_WR)
                        while link.recv(4096):
                            pass
                    except OSError:  # hung up on while we were still talking
                        continue


def call(channel: grpc.Channel, method: str, payload: bytes) -> grpc.StatusCode:
    """Call a method of any kind with one message; gives how it ended."""
    name = method.rpartition("/")[2]
    try:
        if name in STREAMS_IN:
            list(channel.stream_stream(method, None, None)(iter([payload]), timeout=60))
        elif name in ("Follow", "WatchRole"):
            next(iter(channel.unary_stream(method, None, None)(payload, timeout=60)))
        else:
            channel.unary_unary(method, None, None)(payload, timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def channel_to(port: int) -> grpc.Channel:
    return grpc.insecure_channel(f"{HOST}:{port}", [("grpc.max_send_message_length", -1)])


def test_garbage_messages_are_refused(steady: Group) -> None:
    """gRPC whose payload is no message: INVALID_ARGUMENT from every method; frames with such a payload: a refusal."""
    noise = b"\xff" * 100
    with undisturbed(steady):
        leader = steady.nodes[steady.leader()]
        with channel_to(leader.grpc_port) as clients:
            ends = {name: call(clients, f"/dledger.v1.LogService/{name}", noise) for name in CLIENT_METHODS}
        frames = [as_peer(steady, leader.node_id, purpose, kind, noise) for purpose, kind in PEER_FRAMES]

    assert set(ends.values()) == {grpc.StatusCode.INVALID_ARGUMENT}, ends
    assert [frame and frame[0] for frame in frames] == [FrameKind.REFUSAL] * len(PEER_FRAMES), frames


PEER_FRAMES = (
    (Purpose.CONTROL, FrameKind.VOTE),
    (Purpose.CONTROL, FrameKind.HEARTBEAT),
    (Purpose.CONTROL, FrameKind.HEARTBEATS),
    (Purpose.CONTROL, FrameKind.TAKE_LEADERSHIP),
    (Purpose.PUSH, FrameKind.PUSH),
    (Purpose.LOG, FrameKind.READ_LOG),
    (Purpose.LOG, FrameKind.CHAIN_CRCS),
)


def as_peer(
    group: Group, target: NodeId, purpose: Purpose, kind: FrameKind, payload: bytes, header: bytes | None = None
) -> Frame | None:
    """A node's answer to one frame that is sent in another one's name; None: it hung up. ``header``: of the frame.

    The other one dials anew when its own connection is replaced by this one, and may replace this one in turn before
    it is answered: so a node that hangs up is asked once more, twice at most.
    """
    config = like_the_members(group, target)
    sender = next(node for node in group.nodes if node != target)
    for _ in range(3):
        with PeerWire((HOST, group.nodes[target].peer_port)).begin(config, sender, purpose) as wire:
            with contextlib.suppress(ConnectionError):  # hung up on while we were still talking
                wire.link.sendall(pack(kind, payload) if header is None else header + payload)
            answer = wire.frame()
        if answer is not None:
            return answer
    return None


def test_forged_peer_messages_are_refused(steady: Group) -> None:
    """A connection for another cluster, for another node or from the node itself, and a vote with a term from another
    galaxy: no effect. A stranger is answered, since it may be a member that this one does not know yet (M7): no effect.
    """
    leader = steady.leader()
    victim = steady.followers(leader)[0]
    config = like_the_members(steady, victim)
    vote = raft_pb2.VoteRequest(term=steady.term() + 1, last=raft_pb2.EntryId(term=9, index=9), transfer=True)
    forged = (
        handshake_frame(replace(config, cluster_id="x"), leader, Purpose.CONTROL),
        handshake_frame(replace(config, group="x"), leader, Purpose.CONTROL),
        handshake_frame(config, leader, Purpose.CONTROL, target=NodeId("x")),
        handshake_frame(config, NodeId("x"), Purpose.CONTROL),
        handshake_frame(config, victim, Purpose.CONTROL),
    )

    ends = []
    with undisturbed(steady):
        for hello in forged:
            with PeerWire((HOST, steady.nodes[victim].peer_port)) as wire:
                wire.link.sendall(hello + pack(FrameKind.VOTE, vote.SerializeToString()))
                ends.append(wire.frame())
        vote.term = 1 << 62
        ends.append(as_peer(steady, victim, Purpose.CONTROL, FrameKind.VOTE, vote.SerializeToString()))

    refused, answered = FrameKind.REFUSAL, FrameKind.HANDSHAKE_ANSWER
    assert [end and end[0] for end in ends] == [refused, refused, refused, answered, refused, refused], ends


def test_oversized_messages_are_refused(steady: Group) -> None:
    """A message beyond the limit ends with RESOURCE_EXHAUSTED before it is kept; a large entry with a named error."""
    big = client_pb2.AppendRequest(bodies=[bytes(32 * MIB)]).SerializeToString()
    with undisturbed(steady):
        leader = steady.nodes[steady.leader()]
        with channel_to(leader.grpc_port) as clients:
            ends = [
                call(clients, "/dledger.v1.LogService/Append", big),
                call(clients, "/dledger.v1.LogService/AppendStream", big),
            ]
        claimed = bytes([FrameKind.VOTE]) + (1 << 31).to_bytes(4, "big")
        frame = as_peer(steady, leader.node_id, Purpose.CONTROL, FrameKind.VOTE, bytes(1000), claimed)
        with closing(steady.client()) as client, pytest.raises(EntryTooLargeError):
            client.append(bytes(2 * MIB))

    assert set(ends) == {grpc.StatusCode.RESOURCE_EXHAUSTED}, ends
    assert frame is not None
    assert b"at most 1048576 are allowed" in bytes(frame[1])


def test_each_port_serves_its_own_protocol_only(steady: Group) -> None:
    """Peers' frames get nowhere at the client port, nor gRPC at the peer port."""
    leader = steady.nodes[steady.leader()]
    with undisturbed(steady), channel_to(leader.peer_port) as peers:
        ends = [call(peers, f"/dledger.v1.LogService/{name}", b"") for name in CLIENT_METHODS]
        with PeerWire((HOST, leader.client_port)) as wire:
            wire.link.sendall(handshake_frame(like_the_members(steady, leader.node_id), N0, Purpose.CONTROL))
            wire.link.shutdown(socket.SHUT_WR)
            with contextlib.suppress(InvalidRequestError):  # what gRPC says is no frame
                assert wire.frame() is None

    assert set(ends) == {grpc.StatusCode.UNAVAILABLE}, ends


def test_senseless_requests_get_named_errors(steady: Group) -> None:
    """What a client can ask and no node can do: an error that says so, and is safe to repeat."""
    with undisturbed(steady), closing(steady.client()) as client:
        for senseless in (lambda: client.append_many([]), lambda: client.read(LogIndex(-1), count=1)):
            with pytest.raises(DLedgerError) as raised:
                senseless()
            assert raised.value.outcome == "not_applied"
        with closing(DLedgerClient(steady.addresses, group="another", timeout_s=60)) as stranger:
            with pytest.raises(DLedgerError) as raised:
                stranger.append(b"x")
            assert raised.value.outcome == "not_applied"
            assert not isinstance(raised.value, InvalidRequestError)


@pytest.mark.slow
def test_idle_connections_delay_no_heartbeat(steady: Group) -> None:
    """2,000 connections that say nothing, half of them at the peer port, and some that say it slowly."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLERS + 500:
        lacks("room for open files", f"ulimit -n {IDLERS + 500}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, IDLERS + 500), hard))
    leader = steady.nodes[steady.leader()]
    with undisturbed(steady), ExitStack() as links:
        links.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        idlers = []
        for number in range(IDLERS):
            port = (leader.peer_port, leader.client_port, leader.grpc_port)[number % 3]
            idlers.append(links.enter_context(closing(socket.create_connection((HOST, port), timeout=60))))
        for number, link in enumerate(idlers):
            if number % 10 == 0:
                try:
                    link.sendall(b"PRI * HTTP/2.0\r\n"[: number % 16 + 1])
                except ConnectionError:
                    continue  # hung up on: as good


@pytest.mark.slow
def test_client_flood_starves_no_peer(group: Group) -> None:
    """Saturating appends of several clients: heartbeats and votes have a server of their own (trap 33)."""
    term = group.term()
    goal = threading.Semaphore(0)

    def flood() -> None:
        with closing(group.client(timeout_s=30)) as client:
            futures = [client.submit(os.urandom(8).hex().encode() * 64) for _ in range(FLOOD_ACKS // FLOODERS)]
            for future in futures:
                future.result(60)
            goal.release()

    threads = [threading.Thread(target=flood) for _ in range(FLOODERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert all(goal.acquire(blocking=False) for _ in threads), "not all floods were acknowledged"
    statuses = group.wait_converged()
    assert {one.term for one in statuses.values()} == {term}
    assert min(one.committed_index for one in statuses.values()) >= FLOOD_ACKS // FLOODERS * FLOODERS
