"""``PeerTransport`` while the members of its group, or their addresses, change."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest

from dledger.config import Member, ServerConfig
from dledger.core.membership import Membership, implicit_configuration
from dledger.core.messages import Envelope, HeartbeatRequest, Message, PushCommit
from dledger.rpc.peers.frames import FrameKind, Purpose
from dledger.rpc.peers.identity import PeerAddresses, PeerIdentity
from dledger.rpc.peers.server import CONNECTIONS_MAX, STRANGERS_MAX
from dledger.rpc.peers.transport import PeerTransport
from dledger.types import ClusterMember, Configuration, LogIndex, NodeId, Term
from dledger_cli.local.group import free_ports
from tests.support.peer_wire import PeerWire
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until

N0, N1, N2 = (NodeId(f"n{number}") for number in range(3))
COMMIT = PushCommit(Term(1), 0, LogIndex(0))


@dataclass
class Node:
    """A transport, whom it hears, and what it knows of the others."""

    config: ServerConfig
    addresses: PeerAddresses
    transport: PeerTransport
    receiver: RecordingReceiver = field(default_factory=RecordingReceiver)

    def send(self, target: NodeId, message: Message = COMMIT) -> None:
        config = self.config
        self.transport.send(Envelope(config.effective_cluster_id, config.group, config.node_id, target, message))

    def reaches(self, other: Node, message: Message = COMMIT) -> None:
        """Wait until the other one hears it."""
        before = len(other.receiver.received) + len(other.receiver.requested)

        def send_and_look() -> bool:
            self.send(other.config.node_id, message)
            return len(other.receiver.received) + len(other.receiver.requested) > before

        wait_until(send_and_look, f"{other.config.node_id} hears {self.config.node_id}")

    def serves(self, peer: NodeId) -> bool:
        """Whether it has a connection of this peer."""
        server = self.transport._server
        assert server is not None
        return any(caller.node_id == peer for caller, _ in list(server._threads.values()))

    def adopt(self, *configurations: Configuration) -> None:
        """The first is committed, the others are in the log."""
        membership = Membership(self.config.node_id, configurations[0])
        for one in configurations[1:]:
            membership.adopt(one)
        self.addresses.adopt(membership, frozenset())


@dataclass
class Nodes:
    """Makes nodes of one cluster, and closes them."""

    ports: list[int]
    stack: ExitStack

    def member(self, number: int) -> Member:
        return Member(NodeId(f"n{number}"), "127.0.0.1", self.ports[number])

    def configuration(self, index: int, *numbers: int) -> Configuration:
        members = [self.member(number) for number in numbers]
        listed = tuple(ClusterMember(one.node_id, one.host, one.port) for one in members)
        return Configuration(listed, LogIndex(index), Term(1))

    def start(self, number: int, *others: int, at: int | None = None, joins: bool = False) -> Node:
        """``others``: configured members; ``at``: whose port it listens on, if not its own."""
        own = replace(self.member(number), port=self.ports[number if at is None else at])
        members = (own, *map(self.member, others))
        config = ServerConfig(node_id=own.node_id, members=members, client_port=0, cluster_id="c")
        known = Configuration() if joins else implicit_configuration(config)
        addresses = PeerAddresses(own.node_id, config.peers, Membership(own.node_id, known))
        transport = PeerTransport(config, identity=PeerIdentity.of(config, addresses=addresses))
        node = Node(config, addresses, transport)
        self.stack.callback(transport.close)
        transport.start(node.receiver)
        return node


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(free_ports(4), stack)


@pytest.mark.parametrize("message", [COMMIT, HeartbeatRequest(Term(1))])
def test_a_new_member_is_reached_and_one_that_is_gone_is_hung_up_on(nodes: Nodes, message: Message) -> None:
    """From the configuration on; with both links."""
    n0, n1, n2 = nodes.start(0, 1), nodes.start(1, 0), nodes.start(2, 0, 1)
    n0.reaches(n1, message)
    n1.adopt(nodes.configuration(4, 0, 1, 2))  # its members are a matter of the log from then on, here and there
    n2.adopt(nodes.configuration(4, 0, 1, 2))

    n0.adopt(nodes.configuration(4, 0, 1, 2))
    n0.reaches(n2, message)
    n0.adopt(nodes.configuration(9, 0, 1))
    n0.send(N2, message)
    wait_until(lambda: not n2.serves(N0), "the connection's end")
    heard = len(n2.receiver.received), len(n2.receiver.requested)
    n0.reaches(n1, message)

    assert (len(n2.receiver.received), len(n2.receiver.requested)) == heard
    assert set(n0.addresses.reachable) == {N1}


@pytest.mark.parametrize("message", [COMMIT, HeartbeatRequest(Term(1))])
def test_a_member_that_moves_is_reached_at_its_new_address(nodes: Nodes, message: Message) -> None:
    """While its change is not committed, at whichever of both it is; afterwards at the new one first."""
    n0, old = nodes.start(0, 1), nodes.start(1, 0)
    n0.reaches(old, message)
    moved = replace(nodes.configuration(4, 0, 1).members[1], port=nodes.ports[3])
    before = nodes.configuration(3, 0, 1)
    after = Configuration((before.members[0], moved), LogIndex(4), Term(1))
    new = nodes.start(1, 0, at=3)

    n0.adopt(before, after)
    n0.reaches(old, message)
    assert not new.receiver.received + new.receiver.requested
    old.transport.close()
    n0.reaches(new, message)
    n0.adopt(after)

    n0.reaches(new, message)
    assert n0.addresses.first(N1) == Member(N1, "127.0.0.1", nodes.ports[3])


def test_strangers_leave_room_for_the_client_addresses_of_new_members(nodes: Nodes) -> None:
    """Anyone may connect under any name; clients must be sent to a member that is added later all the same."""
    n0 = nodes.start(0, 1)
    for number in range(100):
        n0.transport.learn(NodeId(f"stranger{number}"), "h:1")
    n0.adopt(nodes.configuration(4, 0, 1, 2))

    n0.transport.learn(N2, "h:2")

    assert n0.transport.client_addresses[N2] == "h:2"
    assert len(n0.transport.client_addresses) < 100


def test_a_member_that_was_heard_from_another_address_is_looked_for(nodes: Nodes) -> None:
    """M7: who was cut off from its leader while that moved must ask it before it believes it; others know where."""
    n0, n2 = nodes.start(0, 1, 2), nodes.start(2, 0, 1)
    known = nodes.configuration(3, 0, 1, 2)
    address = replace(known.members[1], port=nodes.ports[3])
    n0.adopt(known)
    n0.reaches(n2, HeartbeatRequest(Term(1)))  # so that it hears no more from it
    moved = nodes.start(1, 0, 2, at=3)
    for node in (moved, n2):
        node.adopt(Configuration((known.members[0], address, known.members[2]), LogIndex(4), Term(1)))

    moved.reaches(n0, HeartbeatRequest(Term(1)))

    def is_reached() -> bool:
        n0.send(N1, HeartbeatRequest(Term(1)))
        return any(one.sender == N0 for one in moved.receiver.requested)

    wait_until(is_reached, "n0 finds n1")


def test_a_configuration_that_is_not_compared_keeps_nobody_apart(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """M7: who is behind must hear those that it does not know. Two groups of one name are kept apart all the same,
    while their members are the configured ones.
    """
    n0, n1, joiner = nodes.start(0, 1), nodes.start(1, 0), nodes.start(2, 0, joins=True)
    other = nodes.start(3, 0)

    n0.reaches(n1)
    joiner.reaches(n0)
    with caplog.at_level(logging.ERROR):
        other.send(N0)
        wait_until(lambda: N0 in other.receiver.lost, "connection_lost")

    assert "members of n3 is n0,n3, of n0 n0,n1: make them equal" in caplog.text


def test_a_leader_that_nobody_configured_is_found_by_asking_a_seed(nodes: Nodes) -> None:
    """M12: n2 was told of n0 alone, and n1 leads. The seed's word comes on a connection that n2 made itself."""
    n0, n1 = nodes.start(0, 1), nodes.start(1, 0)
    for node in (n0, n1):
        node.adopt(nodes.configuration(4, 0, 1, 2))
    joiner = nodes.start(2, 0, joins=True)

    n1.reaches(joiner)
    joiner.reaches(n1, HeartbeatRequest(Term(1)))

    assert joiner.addresses.peers == ()
    assert joiner.addresses.first(N1) == nodes.member(1)


def test_who_waits_to_be_added_asks_at_once_where_the_others_are(nodes: Nodes) -> None:
    """M12: before anybody has said anything to it."""
    n0 = nodes.start(0, 1)
    n0.adopt(nodes.configuration(4, 0, 1))

    joiner = nodes.start(2, 0, joins=True)

    wait_until(lambda: joiner.addresses.first(N1) is not None, "n1's address")


def test_a_member_that_is_behind_finds_a_leader_that_it_has_never_heard_of(nodes: Nodes) -> None:
    """M7: it knows a configuration, and asks when it must speak to somebody else."""
    n0, n1 = nodes.start(0, 1), nodes.start(1, 0)
    n0.adopt(nodes.configuration(4, 0, 1))
    n1.adopt(nodes.configuration(4, 0, 1))
    newer = nodes.start(2, 0, 1)
    for node in (n0, newer):
        node.adopt(nodes.configuration(9, 0, 1, 2))

    n1.reaches(newer, HeartbeatRequest(Term(1)))

    assert n1.addresses.peers == (N0,)
    assert set(n1.addresses.reachable) == {N0, N2}


def test_strangers_take_no_member_s_client_address(nodes: Nodes) -> None:
    """Those that have been heard are kept up to date, however many have come since."""
    transport = nodes.start(0, 1).transport
    transport.learn(N1, "h:1")
    for number in range(1000):
        transport.learn(NodeId(f"x{number}"), "h:9")

    transport.learn(N1, "h:2")
    transport.learn(NodeId("y"), "h:9")

    assert transport.client_addresses[N1] == "h:2"
    assert len(transport.client_addresses) <= 64


def test_strangers_take_no_member_s_place(nodes: Nodes) -> None:
    """Anyone may claim an id, and a thousand of them: those that are known still come in."""
    n0 = nodes.start(0, 1)
    address = "127.0.0.1", n0.transport.port
    with ExitStack() as stack:
        wires = [
            stack.enter_context(PeerWire(address).begin(n0.config, NodeId(f"x{number}"), Purpose.PUSH))
            for number in range(STRANGERS_MAX + 3)
        ]
        wait_until(lambda: sum(wire.has_ended for wire in wires) == 3, "three are hung up on")

        for _ in range(CONNECTIONS_MAX):
            member = stack.enter_context(PeerWire(address).begin(n0.config, N1, Purpose.PUSH))
        member.send(FrameKind.PUSH, COMMIT)
        wait_until(lambda: bool(n0.receiver.received), "the member's push")
