"""One peer port for several groups: the handshake says whose a connection is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import NamedTuple

import pytest

from dledger.config import Member, ServerConfig
from dledger.core.messages import PushCommit
from dledger.rpc.peers.frames import FrameKind, Purpose
from dledger.rpc.peers.port import PeerPort
from dledger.rpc.peers.transport import PeerTransport
from dledger.types import LogIndex, NodeId, Term
from dledger_cli.local.group import free_ports
from tests.support.peer_wire import PeerWire, handshake_frame
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until

N0, N1 = NodeId("n0"), NodeId("n1")


class Served(NamedTuple):
    """A group's member at the port."""

    config: ServerConfig
    transport: PeerTransport
    receiver: RecordingReceiver


@pytest.fixture
def configs() -> tuple[ServerConfig, ...]:
    """Of n1 in the groups a, b and c, at one port; c is not expected there."""
    members = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(free_ports(2)))
    return tuple(ServerConfig(node_id=N1, group=group, members=members, client_port=0) for group in "abc")


@pytest.fixture
def port(configs: tuple[ServerConfig, ...]) -> Iterator[PeerPort]:
    """The open port."""
    with closing(PeerPort(configs[0], {"a", "b"})) as port:
        port.open()
        port.accept()
        yield port


@pytest.fixture
def served(configs: tuple[ServerConfig, ...], port: PeerPort) -> Iterator[tuple[Served, Served]]:
    """The groups a and b."""
    with ExitStack() as stack:
        made = []
        for config in configs[:2]:
            transport, receiver = stack.enter_context(closing(PeerTransport(config, port=port))), RecordingReceiver()
            transport.start(receiver)
            made.append(Served(config, transport, receiver))
        yield made[0], made[1]


def _commit(index: int) -> PushCommit:
    return PushCommit(Term(1), 0, LogIndex(index))


def test_a_message_reaches_the_group_that_its_handshake_names(port: PeerPort, served: tuple[Served, Served]) -> None:
    """Two logs have nothing to do with each other: a push for one must never be taken for the other's."""
    with ExitStack() as stack:
        for number, one in enumerate(served):
            wire = stack.enter_context(PeerWire(("127.0.0.1", port.port)).begin(one.config, N0, Purpose.PUSH))
            wire.send(FrameKind.PUSH, _commit(number))
        wait_until(lambda: all(len(one.receiver.received) == 1 for one in served), "each has its push")

    for number, one in enumerate(served):
        (envelope,) = one.receiver.received
        assert (envelope.group, envelope.message) == (one.config.group, _commit(number))


def test_a_peer_of_another_group_is_told_which_are_here(
    port: PeerPort, configs: tuple[ServerConfig, ...], served: tuple[Served, Served]
) -> None:
    """A wrong address in a member list must be found."""
    del served
    with PeerWire(("127.0.0.1", port.port)) as wire:
        wire.link.sendall(handshake_frame(configs[2], N0, Purpose.PUSH))
        (refusal,) = wire.rest()

    assert refusal[0] is FrameKind.REFUSAL
    assert bytes(refusal[1]).decode() == (
        "message for group 'c' reached a process of the groups 'a', 'b': check the addresses in the member list"
    )


def test_a_group_that_ends_leaves_the_others_serving(port: PeerPort, served: tuple[Served, Served]) -> None:
    """Its peers are hung up on, without a word that would look like a mistake of theirs (N1)."""
    first, second = served
    address = ("127.0.0.1", port.port)
    with PeerWire(address).begin(second.config, N0, Purpose.PUSH) as wire:
        with PeerWire(address).begin(first.config, N0, Purpose.PUSH) as ended:
            first.transport.close()
            assert ended.rest() == []
        with PeerWire(address) as late:
            late.link.sendall(handshake_frame(first.config, N0, Purpose.PUSH))
            assert late.rest() == []

        wire.send(FrameKind.PUSH, _commit(7))
        wait_until(lambda: len(second.receiver.received) == 1, "the other group's push")

    assert first.receiver.received == []


def test_peers_of_two_groups_with_the_same_ids_have_connections_of_their_own(
    port: PeerPort, served: tuple[Served, Served]
) -> None:
    """A newer connection ends the peer's older one, but only of its own group."""
    address = ("127.0.0.1", port.port)
    first, second = served
    with PeerWire(address).begin(first.config, N0, Purpose.PUSH) as older:
        with PeerWire(address).begin(second.config, N0, Purpose.PUSH):
            older.send(FrameKind.PUSH, _commit(1))
            wait_until(lambda: len(first.receiver.received) == 1, "the older one serves on")
        with PeerWire(address).begin(first.config, N0, Purpose.PUSH):
            assert older.rest() == []


def test_the_members_of_each_group_are_judged_by_their_own_settings(
    port: PeerPort, served: tuple[Served, Served]
) -> None:
    """Groups of one process may have segments of other sizes; members of one group may not."""
    first, second = served
    store = replace(first.config.store, max_entry_bytes=first.config.store.max_entry_bytes // 2)
    differing = replace(first.config, store=store)
    with PeerWire(("127.0.0.1", port.port)) as wire:
        wire.link.sendall(handshake_frame(differing, N0, Purpose.PUSH))
        answer = wire.frame()
    assert answer is not None
    assert b"max_entry_bytes" in bytes(answer[1])

    with PeerWire(("127.0.0.1", port.port)).begin(second.config, N0, Purpose.PUSH):
        pass
