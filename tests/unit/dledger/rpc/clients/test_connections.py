"""Connections of clients on a real port: who is hung up on, and who is not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from dledger.access.quota import TooManyWaitsError
from dledger.config import ConnectionLimits, ServerConfig
from dledger.host import ClientServer
from dledger.rpc import options
from dledger.rpc.clients import codec, connections
from dledger.rpc.clients.connections import Place, links_to, surplus
from dledger.types import LogIndex
from dledger.values import MIB
from tests.support import grpc_log
from tests.support.fake_node import FakeNode, client_server
from tests.support.grpc_client import CHANNEL_OPTIONS
from tests.support.http2 import DATA, Http2Link, call_frames
from tests.support.waiting import wait_until

READ = options.method(options.LOG_SERVICE, "Read")
FOLLOW = options.method(options.LOG_SERVICE, "Follow")
APPEND = options.method(options.LOG_SERVICE, "Append")


@contextmanager
def serving(limits: ConnectionLimits) -> Iterator[tuple[FakeNode, ClientServer]]:
    node = FakeNode()
    server = client_server(ServerConfig(client_port=0, limits=limits), node)
    server.start()
    try:
        yield node, server
    finally:
        server.close()


def ask(server: ClientServer, method: str, request: bytes) -> bytes:
    """A call of one more client."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", CHANNEL_OPTIONS) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            method, request_serializer=None, response_deserializer=None
        )
        return call(request, timeout=60)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        (READ, grpc_log.encode_read(codec.Read("default", LogIndex(0), max_bytes=8 * MIB))),
        (FOLLOW, grpc_log.encode_follow(codec.Read("default", LogIndex(0)))),
    ],
)
def test_what_waits_for_a_reader_is_bounded_and_a_client_that_takes_nothing_is_hung_up_on(
    method: str, request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is read only as far as there is room for answers; others are served meanwhile."""
    limits = ConnectionLimits(call_ms_max=3000, answer_bytes_max=32 * MIB)
    read_bytes: list[int] = []
    with serving(limits) as (node, server), Http2Link("127.0.0.1", server.grpc_port) as link:
        read = node.read

        def counted(first: LogIndex, last: LogIndex, max_bytes: int) -> object:
            entries = read(first, last, max_bytes)
            read_bytes.append(sum(len(one.body) for one in entries))
            return entries

        monkeypatch.setattr(node, "read", counted)
        node.submit_append([bytes(MIB)] * 10, lambda _result: None)
        link.begin(window_bytes=0)
        for number in range(100):
            link.send(call_frames(1 + 2 * number, method, request_))
        wait_until(lambda: sum(read_bytes) >= 13 * MIB, "half of the room is taken")

        answer = grpc_log.decode_read_answer(
            ask(server, READ, grpc_log.encode_read(codec.Read("default", LogIndex(0), 1)))
        )
        assert len(answer.entries) == 1
        wait_until(link.is_closed, "it is hung up on")
        # Half of the room, of 100 asked for, also while its calls end one by one; and what the other one read.
        assert sum(read_bytes) <= 17 * MIB


def test_idle_connections_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one address no more than its share stay; whoever comes anew is served."""
    monkeypatch.setattr(connections, "GRACE_S", 0.1)
    monkeypatch.setattr(connections, "LOOK_INTERVAL_S", 0.1)
    with serving(ConnectionLimits(connections_max=8)) as (node, server), ExitStack() as held:
        links = [held.enter_context(Http2Link("127.0.0.1", server.grpc_port)) for _ in range(14)]
        for link in links:
            link.begin()

        def open_links() -> int:
            return sum(not link.is_closed() for link in links)

        wait_until(lambda: open_links() <= 6, "those beyond the share are hung up on")
        ask(server, APPEND, grpc_log.encode_append(codec.Append("default", [b"x"])))

    assert len(node.entries) == 1


def test_a_connection_with_a_call_outlives_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who works is hung up on last."""
    monkeypatch.setattr(connections, "GRACE_S", 0.1)
    monkeypatch.setattr(connections, "LOOK_INTERVAL_S", 0.1)
    with serving(ConnectionLimits(connections_max=4)) as (_, server), ExitStack() as held:
        busy = held.enter_context(Http2Link("127.0.0.1", server.grpc_port))
        busy.begin()
        watch = options.method(options.LOG_SERVICE, "WatchRole")
        busy.send(call_frames(1, watch, codec.encode_watch_role("default")))
        while (answer := busy.recv()) is not None and answer.kind != DATA:
            pass
        assert answer is not None, "the call is under way"
        idle = [held.enter_context(Http2Link("127.0.0.1", server.grpc_port)) for _ in range(6)]

        wait_until(lambda: sum(one.is_closed() for one in idle) >= 4, "idle ones are hung up on")
        assert not busy.is_closed()


def link(host: str, number: int) -> connections._Link:
    return connections._Link((host, number), inode=number, descriptor=number)


def test_those_of_the_greediest_address_go_first_idle_before_busy_old_before_new() -> None:
    """Whoever has few connections keeps them."""
    greedy = {link("a", number): float(number) for number in range(6)}  # idle, the last for the shortest time
    busy = {link("a", 10 + number): connections.BUSY for number in range(2)}
    modest: dict[connections._Link, float] = {link("b", 20): 0.0}

    gone = surplus(greedy | busy | modest, total_max=6, address_max=5, idle_before=50)

    assert places(gone) == [("a", 0), ("a", 1), ("a", 2)]
    gone = surplus(busy | modest, total_max=100, address_max=1, idle_before=50)
    assert places(gone) == [("a", 11)]


def test_who_works_outlives_newcomers_whatever_the_numbers_of_their_sockets() -> None:
    """Before anybody is idle, too: numbers of sockets are given out by processor, not in order of time."""
    busy = {link("a", 30): connections.BUSY}
    newcomers = {link("a", number): 99.0 for number in (2, 1)}

    gone = surplus(busy | newcomers, total_max=1, address_max=1, idle_before=50)

    assert places(gone) == [("a", 1), ("a", 2)]


def test_the_addresses_of_one_ipv6_network_are_one_address() -> None:
    """A machine usually has a /64, and could use an address per connection."""
    network = {link(f"2001:db8::{number}", number): float(number) for number in range(1, 5)}
    other: dict[connections._Link, float] = {link("2001:db8:0:1::1", 9): 0.0}

    gone = surplus(network | other, total_max=100, address_max=2, idle_before=50)

    assert places(gone) == [("2001:db8::1", 1), ("2001:db8::2", 2)]


def places(links: list[connections._Link]) -> list[Place]:
    return [one.place for one in links]


class Call:
    """A call of one client, as gRPC's context shows it."""

    def __init__(self, port: int = 1) -> None:
        self.port = port
        self.end: Callable[[object], None] = lambda _: None

    def peer(self) -> str:
        return f"ipv4:10.0.0.1:{self.port}"

    def add_done_callback(self, ended: Callable[[object], None]) -> None:
        self.end = ended


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    found = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


def test_a_client_is_hung_up_on_for_its_own_slowness_only(now: list[float]) -> None:
    """The time begins with the first answer that it leaves, whatever else it asks; ours does not count."""
    watched = connections.Connections("test", ConnectionLimits(call_ms_max=5000), share_percent=50)

    def condemned() -> int:
        watched._condemn_untaking()
        return len(watched._condemned)

    with watched.call(Call()):  # type: ignore[arg-type]  # what is used of it
        now[0] += 100
        assert condemned() == 0, "we are at work"
    assert condemned() == 0, "its turn has just begun"
    now[0] += 4
    with watched.call(Call()):  # type: ignore[arg-type]  # what is used of it
        pass
    now[0] += 2
    assert condemned() == 1, "the first answer lies there for six seconds"


def test_an_address_has_a_share_of_all_calls(now: list[float]) -> None:
    """The last of them is taken, the next one is refused until one has ended."""
    watched = connections.Connections("test", ConnectionLimits(), share_percent=50)
    watched._calls_max = 2
    first = Call(1)
    with watched.call(first), watched.call(Call(2)):  # type: ignore[arg-type]  # what is used of it
        with pytest.raises(TooManyWaitsError, match="2 calls in progress"), watched.call(Call(3)):  # type: ignore[arg-type]  # what is used of it
            pass
        first.end(None)
        with watched.call(Call(3)):  # type: ignore[arg-type]  # what is used of it
            pass


def test_who_comes_again_from_a_port_that_was_hung_up_on_is_served(now: list[float]) -> None:
    """Once the calls of the connection before have ended: ports are used again, above all behind a NAT."""
    watched = connections.Connections("test", ConnectionLimits(), share_percent=50)
    first, late = Call(), Call()
    with watched.call(first) as one:  # type: ignore[arg-type]  # what is used of it
        watched._hang_up([connections._Link(one.place, inode=0, descriptor=-1)])
    with watched.call(late) as same:  # type: ignore[arg-type]  # what is used of it
        assert same.hung_up, "gRPC has not ended the calls before yet"
    first.end(None)
    late.end(None)

    with watched.call(Call()) as again:  # type: ignore[arg-type]  # what is used of it
        assert not again.hung_up


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> list[connections._Link]:
    """Who was hung up on."""
    found: list[connections._Link] = []
    monkeypatch.setattr(connections, "_hang_up", found.extend)
    return found


def test_who_came_first_outlives_newcomers(now: list[float], gone: list[connections._Link]) -> None:
    """Whoever opens many connections at once does not push out those that others have."""
    watched = connections.Connections("test", ConnectionLimits(connections_max=2), share_percent=100)
    first = [link("a", 9), link("a", 8)]

    watched._make_room(first)
    now[0] += 0.1
    watched._make_room([link("a", 1), *first])

    assert places(gone) == [("a", 1)]


def test_a_new_connection_is_not_idle_since_the_last_call_of_one_from_the_same_port(
    now: list[float], gone: list[connections._Link]
) -> None:
    """It has had no time for its first call yet."""
    watched = connections.Connections("test", ConnectionLimits(connections_max=1), share_percent=100)
    before = Call(1)
    with watched.call(before):  # type: ignore[arg-type]  # what is used of it
        pass
    before.end(None)
    now[0] += 100
    idle = link("10.0.0.1", 2)
    watched._make_room([idle])
    now[0] += 100

    watched._make_room([idle, link("10.0.0.1", 1)])

    assert places(gone) == [idle.place]


def test_another_sockets_descriptor_is_never_shut() -> None:
    """A number that was used again meanwhile is somebody else's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connections._hang_up([connections._Link(("a", 1), inode=1, descriptor=ours.fileno())])
        ours.sendall(b"still open")
        assert theirs.recv(100) == b"still open"


def test_looking_for_connections_keeps_no_descriptor(tmp_path: Path) -> None:
    """Not even of a socket's file, which is a socket for ``stat`` and none for anything else."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        file = os.open(tmp_path / "socket", os.O_PATH | os.O_CLOEXEC)
        try:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                assert links_to(1) == []
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            os.close(file)
