"""Any requests at any port, in any order: typed answers, and what was acknowledged is there afterwards as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.client import DLedgerClient
from dledger.pb import client_pb2
from dledger.rpc.peers.codec import PROTOCOL_VERSION
from dledger.types import LogIndex
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.server import BrokerServer
from rocketstore.types import BrokerRole, GetMessageStatus
from tests.fuzz.brokers import CONFIGS
from tests.fuzz.peer_frames import visit, visits
from tests.fuzz.requests import Player, Port, Step, nothing_escapes, nothing_piles_up, steps
from tests.fuzz.shapes import fuzzed
from tests.support.running_group import RunningGroup
from tests.support.waiting import wait_until

_T = TypeVar("_T")

SERVES_S = 120.0
NUMBERS = (0, 1, 2, 5, -1, 1 << 20, (1 << 31) - 1, (1 << 63) - 1)
LOG_NAMES = {
    "group": ("default", "G"),
    "producer": ("p", "q", ""),
    "sequence": NUMBERS,
    "first_index": NUMBERS,
    "target": ("n0", "n1", ""),
    "bodies": (b"", b"body", b"x" * 5000),
    **dict.fromkeys(("count", "max_bytes", "from_position", "end_position", "block_bytes", "chunk_bytes"), NUMBERS),
}
PEER_NAMES = {
    "cluster_id": ("default",),
    "group": ("default",),
    "sender": ("n1", "n2", "n0", "n9"),
    "target": ("n0", "n0", "n1"),
    "term": (1, 2, 3, 0, -1),
    "epoch": (0, 1, 2),
    "members": ("n0-127.0.0.1:1",),
    "protocol_version": (PROTOCOL_VERSION,),
    "purpose": (1, 2, 3, 4),
    **dict.fromkeys(("index", "previous_index", "conflict_index", "position", "commit_index"), NUMBERS),
    **dict.fromkeys(("first_index", "last_index", "indexes", "read_sequence", "repeats"), NUMBERS),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerServer]:
    """One for all examples, the only member of its group; its own topic is deleted by nobody."""
    server = BrokerServer(CONFIGS["alone"](tmp_path_factory.mktemp("broker"))).start()
    try:
        wait_until(lambda: server.store.role is not BrokerRole.SLAVE, "it is master", SERVES_S)
        yield server
    finally:
        server.stop()


def _check_messages(broker: BrokerServer, sent: list[bytes]) -> None:
    """One more is taken, and all are in their queue as they were sent."""
    body = b"own message %d" % len(sent)
    result = broker.store.put(Message("Own", body, 0, {"KEYS": "k"}))
    assert result.ok, result
    sent.append(body)
    assert broker.store.wait_dispatched(SERVES_S)
    found: list[bytes] = []
    while (result_ := broker.store.get("Own", 0, len(found), max_count=64)).status is GetMessageStatus.FOUND:
        found += [decode_record(record).body for record in result_.records]
    assert found == sent


def test_whatever_is_asked_of_a_broker_it_serves_on(broker: BrokerServer) -> None:
    """The log's service, and bytes that are none, over several connections at once."""
    port = Port(f"127.0.0.1:{broker.grpc_port}", (client_pb2.DESCRIPTOR,))
    sent: list[bytes] = []
    end = broker.store.max_offset("Own", 0)
    assert end == 0

    @fuzzed(25)
    @given(steps(port, LOG_NAMES))
    def run(sequence: list[Step]) -> None:
        player = Player(port)
        try:
            player.play(sequence)
        finally:
            player.close()
        _check_messages(broker, sent)

    with nothing_escapes(), nothing_piles_up():
        run()
    assert broker.fatal is None


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    """Three members."""
    made = RunningGroup(tmp_path_factory.mktemp("group"))
    try:
        made.wait_for_leader()
        yield made
    finally:
        made.stop()


def test_whatever_is_asked_of_nodes_they_serve_on(group: RunningGroup) -> None:
    """At the port of clients."""
    port = Port(f"127.0.0.1:{group.nodes[0].grpc_port}", (client_pb2.DESCRIPTOR,))

    def play(sequence: list[Step]) -> None:
        player = Player(port)
        try:
            player.play(sequence)
        finally:
            player.close()

    _appends_go_on(group, steps(port, LOG_NAMES), play)


def test_whatever_is_said_to_members_they_serve_on(group: RunningGroup) -> None:
    """At the peer port, where anybody may speak in a member's name without TLS."""
    config = group.nodes[0].config
    address = config.self_member.host, config.self_member.port

    _appends_go_on(group, visits(config, PEER_NAMES), partial(visit, address))


def _appends_go_on(group: RunningGroup, sequences: st.SearchStrategy[_T], play: Callable[[_T], None]) -> None:
    """While the sequences are played: what is appended is there, no member fails, nothing piles up."""
    own: dict[LogIndex, bytes] = {}

    @fuzzed(12)
    @given(sequences)
    def run(sequence: _T) -> None:
        play(sequence)
        body = b"own entry %d" % len(own)
        own[client.append(body, timeout_s=SERVES_S).index] = body
        for index, expected in list(own.items())[-20:]:
            assert [entry.body for entry in client.read(index, count=1, timeout_s=SERVES_S)] == [expected]

    with DLedgerClient([one.client_address for one in group.nodes], timeout_s=SERVES_S) as client:
        client.append(b"so that it is connected")
        with nothing_escapes(), nothing_piles_up():
            run()
        for index, expected in own.items():
            assert [entry.body for entry in client.read(index, count=1, timeout_s=SERVES_S)] == [expected]
    assert all(one.fatal is None for one in group.nodes)
