"""Garbage, floods and idlers at both ports: refused, and the group does not even change its term."""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
from contextlib import ExitStack, closing

import grpc
import pytest

from cluster.local.group import HOST
from dledger.client import DLedgerClient
from dledger.errors import DLedgerError, EntryTooLargeError, InvalidRequestError
from dledger.pb import client_pb2, raft_pb2
from dledger.rpc.peers.push_frames import PREAMBLE, FrameType, pack
from dledger.types import LogIndex
from tests.integration.harness import Group, undisturbed
from tests.support.lacking import lacks

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
    "push and noise": PREAMBLE + random.Random(3).randbytes(64 * 1024),
    "push of 4 GiB": PREAMBLE + pack(FrameType.HANDSHAKE, b"") + b"\x03\xff\xff\xff\xff" + bytes(64 * 1024),
    "half a push frame": PREAMBLE + pack(FrameType.HANDSHAKE, bytes(1000))[:500],
}
PEER_METHODS = ("Handshake", "Vote", "Heartbeat", "TakeLeadership")
CLIENT_METHODS = ("Append", "AppendStream", "Read", "Follow", "Metadata", "WatchRole", "TransferLeadership")
STREAMS_IN = ("AppendStream",)
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def ports_of(group: Group) -> list[int]:
    leader = group.nodes[group.leader()]
    follower = group.nodes[group.followers(leader.node_id)[0]]
    return [leader.peer_port, leader.client_port, follower.peer_port, follower.client_port]


def test_garbage_bytes_are_hung_up_on(group: Group) -> None:
    """What is neither gRPC nor a push connection, at the ports of a leader and of a follower."""
    with undisturbed(group):
        for port in ports_of(group):
            for garbage in GARBAGE.values():
                with closing(socket.create_connection((HOST, port), timeout=10)) as link:
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
            list(channel.stream_stream(method, None, None)(iter([payload]), timeout=5))
        elif name in ("Follow", "WatchRole"):
            next(iter(channel.unary_stream(method, None, None)(payload, timeout=5)))
        else:
            channel.unary_unary(method, None, None)(payload, timeout=5)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def channel_to(port: int) -> grpc.Channel:
    return grpc.insecure_channel(f"{HOST}:{port}", [("grpc.max_send_message_length", -1)])


def test_garbage_messages_are_refused(group: Group) -> None:
    """gRPC whose payload is no message: INVALID_ARGUMENT from every method of both services."""
    noise = b"\xff" * 100
    with undisturbed(group):
        leader = group.nodes[group.leader()]
        with channel_to(leader.peer_port) as peers, channel_to(leader.client_port) as clients:
            ends = {name: call(peers, f"/dledger.v1.RaftService/{name}", noise) for name in PEER_METHODS}
            ends |= {name: call(clients, f"/dledger.v1.LogService/{name}", noise) for name in CLIENT_METHODS}

    assert set(ends.values()) == {grpc.StatusCode.INVALID_ARGUMENT}, ends


def test_forged_peer_messages_are_refused(group: Group) -> None:
    """A vote for another cluster, for another node, from a stranger, or with a term from another galaxy: no effect."""
    status = group.statuses()[group.leader()]
    victim = group.followers(status.node_id)[0]
    good = raft_pb2.Header(cluster_id=status.cluster_id, group=status.group, sender=status.node_id, target=victim)
    forged = []
    for field, text in (("cluster_id", "x"), ("group", "x"), ("target", "x"), ("sender", "x"), ("sender", victim)):
        header = raft_pb2.Header()
        header.CopyFrom(good)
        setattr(header, field, text)
        forged.append(raft_pb2.VoteRequest(header=header, term=status.term + 1, transfer=True))
    forged.append(raft_pb2.VoteRequest(header=good, term=1 << 62, transfer=True))

    with undisturbed(group), channel_to(group.nodes[victim].peer_port) as channel:
        ends = [call(channel, "/dledger.v1.RaftService/Vote", one.SerializeToString()) for one in forged]

    assert all(end in REFUSALS for end in ends), ends


def test_oversized_messages_are_refused(group: Group) -> None:
    """A message beyond the limit ends with RESOURCE_EXHAUSTED before it is kept; a large entry with a named error."""
    big = client_pb2.AppendRequest(bodies=[bytes(32 * MIB)]).SerializeToString()
    with undisturbed(group):
        leader = group.nodes[group.leader()]
        with channel_to(leader.peer_port) as peers, channel_to(leader.client_port) as clients:
            ends = [
                call(peers, "/dledger.v1.RaftService/Vote", big),
                call(clients, "/dledger.v1.LogService/Append", big),
                call(clients, "/dledger.v1.LogService/AppendStream", big),
            ]
        with closing(group.client()) as client, pytest.raises(EntryTooLargeError):
            client.append(bytes(2 * MIB))

    assert set(ends) == {grpc.StatusCode.RESOURCE_EXHAUSTED}, ends


def test_each_port_serves_its_own_service_only(group: Group) -> None:
    """Peer calls never reach the client port, nor the other way round."""
    leader = group.nodes[group.leader()]
    with undisturbed(group), channel_to(leader.peer_port) as peers, channel_to(leader.client_port) as clients:
        ends = [call(clients, f"/dledger.v1.RaftService/{name}", b"") for name in PEER_METHODS]
        ends += [call(peers, f"/dledger.v1.LogService/{name}", b"") for name in CLIENT_METHODS]

    assert set(ends) == {grpc.StatusCode.UNIMPLEMENTED}, ends


def test_senseless_requests_get_named_errors(group: Group) -> None:
    """What a client can ask and no node can do: an error that says so, and is safe to repeat."""
    with undisturbed(group), closing(group.client()) as client:
        for senseless in (lambda: client.append_many([]), lambda: client.read(LogIndex(-1), count=1)):
            with pytest.raises(DLedgerError) as raised:
                senseless()
            assert raised.value.outcome == "not_applied"
        with closing(DLedgerClient(group.addresses, group="another", timeout_s=2)) as stranger:
            with pytest.raises(DLedgerError) as raised:
                stranger.append(b"x")
            assert raised.value.outcome == "not_applied"
            assert not isinstance(raised.value, InvalidRequestError)


@pytest.mark.slow
def test_idle_connections_delay_no_heartbeat(group: Group) -> None:
    """2,000 connections that say nothing, half of them at the peer port, and some that say it slowly."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLERS + 500:
        lacks("room for open files", f"ulimit -n {IDLERS + 500}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, IDLERS + 500), hard))
    leader = group.nodes[group.leader()]
    with undisturbed(group), ExitStack() as links:
        links.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        idlers = []
        for number in range(IDLERS):
            port = leader.peer_port if number % 2 else leader.client_port
            idlers.append(links.enter_context(closing(socket.create_connection((HOST, port), timeout=10))))
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
        with closing(group.client(timeout_s=30)) as client, client.appender() as appender:
            futures = [appender.append(os.urandom(8).hex().encode() * 64) for _ in range(FLOOD_ACKS // FLOODERS)]
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
