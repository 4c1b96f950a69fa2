"""Who holds connections or calls of the peer port and says nothing: members go on, and elect when they must."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import grpc
import pytest

from cluster.local.group import HOST
from dledger.rpc import options, tls
from dledger.rpc.front_door import UNKNOWN_MAX
from dledger.rpc.peers.listener import RELAYED_MAX
from dledger.rpc.peers.push_frames import TLS_PREAMBLE
from dledger.types import NodeId
from tests.integration.harness import Group, undisturbed
from tests.support.certificates import files
from tests.support.http2 import PREFACE
from tests.support.waiting import wait_until

CALLS = 40
"""More than a peer port has threads."""
SETTINGS_FRAME = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def secured(make_group: Callable[..., Group]) -> Group:
    """Three nodes that speak TLS and have a leader."""
    made = make_group(tls=True, settings={"segment_bytes": "16m"})
    made.start_all()
    made.leader()
    return made


@pytest.mark.parametrize(
    "method",
    [
        options.method(options.RAFT_SERVICE, "Vote"),
        options.method(options.RAFT_SERVICE, "Heartbeat"),
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_half_a_call_of_a_client_holds_no_thread_of_the_members(make_group: Callable[..., Group], method: str) -> None:
    """A client's certificate is good for a connection. Its calls that never end do not keep nodes from electing."""
    group = secured(make_group)
    assert group.tls is not None
    material = tls.read(files(group.tls.directory, "client"))
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    leader = group.leader()
    with ExitStack() as held:
        held.callback(over.set)
        for node in group.nodes.values():
            channel = held.enter_context(
                grpc.secure_channel(f"{HOST}:{node.peer_port}", material.channel_credentials())
            )
            for _ in range(CALLS):
                channel.stream_stream(method, None, None)(nothing(), timeout=60)
        group.append(10)
        group.kill(leader)
        assert group.leader(20, other_than=leader)
        group.append(10)


def test_half_a_push_connection_of_a_client_takes_no_place(make_group: Callable[..., Group]) -> None:
    """More of them than a node has places for pushes; a node that comes back finds its way to it."""
    group = secured(make_group)
    assert group.tls is not None
    context = tls.client_context(tls.read(files(group.tls.directory, "client")))
    leader = group.leader()
    victim, other = group.followers(leader)
    group.stop(other)
    group.stop(victim)
    group.start(victim)
    with ExitStack() as held, crowding(group.nodes[victim].peer_port, held, context):
        group.append(10)


@contextmanager
def crowding(port: int, held: ExitStack, context: object) -> Iterator[None]:
    """Somebody begins push connections all the time."""
    over = threading.Event()

    def crowd() -> None:
        while not over.is_set():
            try:
                link = held.enter_context(closing(socket.create_connection((HOST, port), timeout=5)))
                link.sendall(TLS_PREAMBLE)
                held.enter_context(context.wrap_socket(link))  # type: ignore[attr-defined]
            except OSError:
                continue

    thread = threading.Thread(target=crowd)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def descriptors(group: Group, node: NodeId) -> int:
    return len(os.listdir(f"/proc/{group.pid(node)}/fd"))


def test_connections_cost_a_bounded_number_of_descriptors(make_group: Callable[..., Group]) -> None:
    """Neither those that say nothing nor those that say HTTP/2; else the log would find none for its next segment.

    And a process has as many as it may have, whatever its shell was content with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        group = make_group(settings={"segment_bytes": "1m", "max_entry_bytes": "256k"})
        group.start_all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    victim = group.followers(group.leader())[0]
    before = descriptors(group, victim)
    with undisturbed(group), ExitStack() as held:
        for number in range(1500):
            link = held.enter_context(closing(socket.create_connection((HOST, group.nodes[victim].peer_port), 20)))
            if number % 2:
                link.sendall(PREFACE + SETTINGS_FRAME)
        most = 3 * RELAYED_MAX + UNKNOWN_MAX
        wait_until(lambda: descriptors(group, victim) < before + most + 100, "a bounded number of descriptors", 20)
        group.append(100)

    limits = Path(f"/proc/{group.pid(victim)}/limits").read_text()
    (line,) = (one for one in limits.splitlines() if one.startswith("Max open files"))
    assert int(line.split()[3]) == min(hard, 65_536)
