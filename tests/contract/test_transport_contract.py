"""What every ``Transport`` does, over TCP on loopback and in memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import pytest

from dledger.config import Member, ReplicationConfig, ServerConfig, StoreConfig
from dledger.core.messages import (
    Envelope,
    HeartbeatRequest,
    Message,
    PushAppend,
    PushCommit,
    PushKind,
    PushResponse,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
)
from dledger.errors import InvalidRequestError, ResponseCode
from dledger.rpc.peers.transport import PeerTransport
from dledger.rpc.ports import Receiver
from dledger.types import NO_ENTRY, EntryId, EntryRun, LogIndex, NodeId, Position, Term
from dledger_cli.local.group import free_ports
from tests.sim_store.memory_transport import MemoryNetwork, MemoryTransport
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
KIB = 1024
_WIDE = ReplicationConfig(inflight_pushes_max=64, handler_queue_pushes_max=64)


class AnyTransport(Protocol):
    @property
    def client_addresses(self) -> Mapping[NodeId, str]: ...
    def start(self, receiver: Receiver) -> None: ...
    def send(self, envelope: Envelope) -> None: ...
    def dropped(self, peer: NodeId) -> int: ...
    def close(self) -> None: ...


@dataclass
class Node:
    """One transport with its receiver."""

    config: ServerConfig
    transport: AnyTransport
    receiver: RecordingReceiver

    def send(self, target: NodeId, message: Message) -> None:
        config = self.config
        self.transport.send(Envelope(config.effective_cluster_id, config.group, config.node_id, target, message))


@dataclass
class Group:
    """Makes nodes and closes them."""

    make_transport: Callable[[ServerConfig, str], AnyTransport]
    config: ServerConfig
    nodes: list[Node] = field(default_factory=list)

    def start(self, node_id: NodeId, **changes: object) -> Node:
        config = replace(self.config, node_id=node_id, **changes)  # type: ignore[arg-type]  # fields by name
        client_address = f"{node_id}.example:1"
        receiver = RecordingReceiver(client_address)
        node = Node(config, self.make_transport(config, client_address), receiver)
        node.transport.start(receiver)
        self.nodes.append(node)
        return node


@pytest.fixture(params=["network", "memory"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    before = set(threading.enumerate())
    network = MemoryNetwork()

    def make(config: ServerConfig, client_address: str) -> AnyTransport:
        if request.param == "network":
            return PeerTransport(config, client_address=client_address)
        return MemoryTransport(network, config, client_address=client_address)

    ports = free_ports(3)
    members = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(ports))
    made = Group(make, ServerConfig(members=members, client_port=0, cluster_id="c", replication=_WIDE))
    yield made
    for node in made.nodes:
        node.transport.close()
        node.transport.close()  # idempotent
    # gRPC's own threads end a moment after its calls do.
    wait_until(lambda: set(threading.enumerate()) <= before, "all threads joined")


def commit(index: int) -> PushCommit:
    return PushCommit(Term(1), 0, LogIndex(index))


def run_of(size: int) -> PushAppend:
    run = EntryRun(NO_ENTRY, 0, LogIndex(0), LogIndex(0), Position(0), b"x" * size)
    return PushAppend(Term(1), 0, LogIndex(-1), run)


def push_response(index: int) -> PushResponse:
    at = LogIndex(index)
    return PushResponse(Term(1), 0, PushKind.APPEND, ResponseCode.SUCCESS, at, at, at, NO_ENTRY, 7)


def test_transport_answers_a_vote_through_receive(group: Group) -> None:
    """A request is answered by the peer's ``request``; the answer arrives at ``receive``, addressed back."""
    asking, asked = group.start(N0), group.start(N1)

    def ask_and_look() -> bool:  # again: the first connection may have been tried before it listened
        asking.send(N1, VoteRequest(Term(3), EntryId(Term(2), LogIndex(5)), pre_vote=True))
        return bool(asking.receiver.received)

    wait_until(ask_and_look, "the vote's answer")
    assert asked.receiver.requested[0].message == VoteRequest(Term(3), EntryId(Term(2), LogIndex(5)), pre_vote=True)
    answer = asking.receiver.received[0]
    assert (answer.sender, answer.target) == (N1, N0)
    assert answer.message == VoteResponse(Term(3), granted=True)


def test_transport_delivers_take_leadership_without_an_answer(group: Group) -> None:
    """``TakeLeadership`` is one-way."""
    leader, target = group.start(N0), group.start(N1)

    leader.send(N1, TakeLeadership(Term(4)))

    wait_until(lambda: target.receiver.messages() == [TakeLeadership(Term(4))], "TakeLeadership")


def test_transport_keeps_the_order_of_pushes_and_of_their_answers(group: Group) -> None:
    """One stream, in order, both ways."""
    leader, follower = group.start(N0), group.start(N1)

    for index in range(100):
        leader.send(N1, commit(index))
    wait_until(lambda: len(follower.receiver.received) == 100, "all pushes")
    for index in range(100):
        follower.send(N0, push_response(index))
    wait_until(lambda: len(leader.receiver.received) == 100, "all answers")

    assert follower.receiver.messages() == [commit(index) for index in range(100)]
    assert leader.receiver.messages() == [push_response(index) for index in range(100)]


def test_transport_carries_a_large_run(group: Group) -> None:
    """A full push arrives byte for byte."""
    leader, follower = group.start(N0), group.start(N1)

    leader.send(N1, run_of(KIB * KIB))

    wait_until(lambda: follower.receiver.messages() == [run_of(KIB * KIB)], "the run")


def test_transport_drops_an_answer_without_a_stream(group: Group) -> None:
    """A push response goes out only on the stream that its target opened."""
    leader, follower = group.start(N0), group.start(N1)

    follower.send(N0, push_response(1))
    leader.send(N1, commit(1))
    wait_until(lambda: bool(follower.receiver.received), "a push")
    follower.send(N0, push_response(2))
    wait_until(lambda: bool(leader.receiver.received), "an answer")

    assert leader.receiver.messages() == [push_response(2)]


def test_transport_drops_what_is_for_a_dead_peer_and_says_so(group: Group) -> None:
    """``send`` neither blocks nor raises; a push that is lost is told as a lost connection."""
    leader = group.start(N0)

    leader.send(N1, commit(1))
    leader.send(N1, HeartbeatRequest(Term(1)))

    wait_until(lambda: N1 in leader.receiver.lost, "connection_lost")
    wait_until(lambda: leader.transport.dropped(N1) >= 2 or bool(leader.receiver.lost), "drops are counted")


def test_transport_reconnects_to_a_peer_that_comes_back(group: Group) -> None:
    """Each push after the loss tries again; what arrives is new, never what was lost."""
    leader, follower = group.start(N0), group.start(N1)
    leader.send(N1, commit(0))
    wait_until(lambda: bool(follower.receiver.received), "the first push")

    follower.transport.close()
    wait_until(lambda: leader.receiver.lost == [N1], "connection_lost")
    restarted = group.start(N1)
    index = iter(range(1, 1_000_000))

    def arrives() -> bool:
        leader.send(N1, commit(next(index)))
        return bool(restarted.receiver.received)

    wait_until(arrives, "a push after the restart")
    restarted.send(N0, push_response(9))
    wait_until(lambda: leader.receiver.push_responses() == [push_response(9)], "an answer after the restart")


def test_transport_learns_client_addresses(group: Group) -> None:
    """From heartbeats and from the handshake, on both sides."""
    leader, follower, other = group.start(N0), group.start(N1), group.start(N2)

    leader.send(N1, HeartbeatRequest(Term(1), client_address="n0.example:1"))
    leader.send(N2, commit(0))

    wait_until(lambda: leader.transport.client_addresses == {N1: "n1.example:1", N2: "n2.example:1"}, "the leader's")
    told = (follower.transport.client_addresses, other.transport.client_addresses)
    wait_until(lambda: [one.get(N0) for one in told] == ["n0.example:1"] * 2, "the followers'")


def test_transport_refuses_another_cluster(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """Neither pushes nor votes of another cluster are delivered, and the log says why (reliability trap 31)."""
    stranger, node = group.start(N0, cluster_id="other"), group.start(N1)

    _assert_refused(stranger, node, caplog, "for cluster 'other' reached 'n1' of cluster 'c'")


def test_transport_refuses_another_group(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """As above, for the group."""
    stranger, node = group.start(N0, group="g2"), group.start(N1)

    _assert_refused(stranger, node, caplog, "for group 'g2' reached 'n1' of group 'default'")


def test_transport_refuses_a_message_for_another_node(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """A member list that swaps two addresses is found out."""
    n0, n1, n2 = group.config.members
    swapped = (n0, replace(n1, port=n2.port), replace(n2, port=n1.port))
    confused, reached = group.start(N0, members=swapped), group.start(N2)

    _assert_refused(confused, reached, caplog, "for node 'n1' reached 'n2'")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"store": StoreConfig(segment_bytes=64 * KIB)}, "segment_bytes of n0 is 65536, of n1"),
        ({"store": StoreConfig(max_entry_bytes=64 * KIB)}, "max_entry_bytes of n0 is 65536, of n1"),
    ],
)
def test_transport_never_pushes_to_a_peer_with_other_limits(
    group: Group, caplog: pytest.LogCaptureFixture, changes: dict[str, object], reason: str
) -> None:
    """The handshake compares what must be equal for replicas to be byte-identical."""
    leader, follower = group.start(N0, **changes), group.start(N1)

    with caplog.at_level(logging.ERROR):
        leader.send(N1, commit(0))
        wait_until(lambda: N1 in leader.receiver.lost, "connection_lost")

    assert follower.receiver.received == []
    assert reason in caplog.text


def test_transport_never_pushes_to_a_peer_with_other_members(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """Two nodes that count majorities differently must not replicate."""
    leader, follower = group.start(N0, members=group.config.members[:2]), group.start(N1)

    with caplog.at_level(logging.ERROR):
        leader.send(N1, commit(0))
        wait_until(lambda: N1 in leader.receiver.lost, "connection_lost")

    assert follower.receiver.received == []
    assert "members of n0 is n0,n1, of n1 n0,n1,n2" in caplog.text


def test_transport_refuses_an_oversize_push(group: Group) -> None:
    """What no correct leader sends is not even read; the connection is reported lost, smaller pushes go on."""
    small = ReplicationConfig(push_bytes_max=KIB)
    store = StoreConfig(max_entry_bytes=KIB)
    leader, follower = group.start(N0, replication=small, store=store), group.start(N1, replication=small, store=store)

    leader.send(N1, run_of(KIB * KIB))

    wait_until(lambda: N1 in leader.receiver.lost, "connection_lost")
    assert follower.receiver.received == []


def test_transport_breaks_the_stream_that_the_receiver_refuses(group: Group) -> None:
    """A receiver's ``InvalidRequestError`` (damaged bytes, say) ends the stream."""
    leader, follower = group.start(N0), group.start(N1)
    leader.send(N1, commit(0))
    wait_until(lambda: bool(follower.receiver.received), "a push")

    follower.receiver.refusal = InvalidRequestError("bodyCrc differs")
    leader.send(N1, commit(1))

    wait_until(lambda: leader.receiver.lost == [N1], "connection_lost")


def test_transport_delivers_pushes_while_a_vote_waits_for_its_disk(group: Group) -> None:
    """``request`` may wait for the hard state; nothing else waits for it (reliability trap 33)."""
    asking, asked = group.start(N0), group.start(N1)
    asked.receiver.release.clear()

    def ask_and_look() -> bool:  # again: the first connection may have been tried before it listened
        asking.send(N1, VoteRequest(Term(1), NO_ENTRY))
        return bool(asked.receiver.requested)

    wait_until(ask_and_look, "the vote to wait")
    asking.send(N1, commit(0))
    wait_until(lambda: bool(asked.receiver.received), "a push meanwhile")
    asked.receiver.release.set()

    wait_until(lambda: bool(asking.receiver.received), "the vote's answer")


def _assert_refused(sender: Node, reached: Node, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    with caplog.at_level(logging.ERROR):
        sender.send(N1, VoteRequest(Term(1), NO_ENTRY))
        sender.send(N1, commit(0))
        wait_until(lambda: N1 in sender.receiver.lost, "connection_lost")
        wait_until(lambda: reason in caplog.text, f"a log line with {reason!r}")
    assert reached.receiver.requested == []
    assert reached.receiver.received == []
    assert sender.receiver.received == []
    logged = [record for record in caplog.records if reason in record.getMessage()]
    assert len(logged) == 1  # once per distinct reason
