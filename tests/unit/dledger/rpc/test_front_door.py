"""A port with several protocols: told apart, taken over or relayed, and bounded, on real sockets."""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import logging
import os
import select
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from dledger.errors import ConfigError
from dledger.rpc import loops
from dledger.rpc.bridge import LoopThread
from dledger.rpc.clients.aio_server import add_methods, aio_server
from dledger.rpc.front_door import LOOK_BYTES_MAX, DoorLimits, FrontDoor, Look, Take, Verdict
from dledger.rpc.listening import listen, stop_serving
from dledger.rpc.private_socket import PrivateSocket
from dledger.rpc.relay import CHUNK_BYTES, ENDED_MAX, NAMES, PeerNames, peer_of
from tests.support.waiting import wait_until

TIMEOUT_S = 30
MIB = 1 << 20


class Port:
    """A front door on a loop of its own. What begins with R is relayed, with T taken over, with C closed."""

    def __init__(self, relay_to: str = "/nobody", limits: DoorLimits | None = None, look: Look | None = None) -> None:
        self.looked: list[bytes] = []
        self.taken: list[socket.socket] = []
        self.loop = LoopThread("front-door-test")
        self.bridge = self.loop.start()
        self.door = FrontDoor("test's", look or self.look, relay_to, limits or DoorLimits(8, 16, TIMEOUT_S))
        listening = listen("127.0.0.1", 0, "test's")
        self.address: tuple[str, int] = listening[0].getsockname()
        self.bridge.post(lambda: self.door.open(listening))

    def look(self, head: bytes) -> Verdict | Take | int:
        self.looked.append(head)
        if len(head) < 4:
            return 4
        if head.startswith(b"T"):
            return self.take
        return Verdict.RELAY if head.startswith(b"R") else Verdict.CLOSE

    async def take(self, link: socket.socket) -> None:
        self.taken.append(link)

    def connect(self, data: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
        link = socket.create_connection(self.address, timeout=TIMEOUT_S, source_address=(host, 0))
        link.sendall(data)
        return link

    def close(self) -> None:
        self.bridge.run(self.door.close())
        self.loop.stop()
        for link in self.taken:
            link.close()


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[socket.socket]:
    """What is relayed to."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "inner"))
        listening.listen(64)
        listening.settimeout(TIMEOUT_S)
        yield listening


@pytest.fixture
def port(upstream: socket.socket) -> Iterator[Port]:
    with closing(Port(upstream.getsockname())) as made:
        yield made


@contextmanager
def relayed(port: Port, upstream: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client and the server that it is relayed to."""
    with port.connect(b"Rest") as outer, upstream.accept()[0] as inner:
        inner.settimeout(TIMEOUT_S)
        assert exactly(inner, 4) == b"Rest"
        yield outer, inner


def exactly(link: socket.socket, count: int) -> bytes:
    """So many bytes, fewer only if the other side hung up."""
    received = b""
    while len(received) < count and (part := link.recv(count - len(received))):
        received += part
    return received


def has_ended(link: socket.socket) -> bool:
    """Whether the other side hung up, without a reset."""
    ready, _, _ = select.select([link], [], [], 0)
    return bool(ready) and link.recv(1) == b""


def grpc_name(inner: socket.socket) -> str:
    """What a gRPC server would call the other side."""
    return f"unix-abstract:{inner.getpeername()[1:].decode()}"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- sorting ---------------------------------------------------------------------------------------------------------


def test_who_takes_a_connection_over_finds_all_its_bytes(port: Port) -> None:
    """In however many pieces they come; and what is asked for is not asked for again."""
    with port.connect(b"T") as link:
        for number, byte in enumerate((b"h", b"i", b"s")):
            assert len(port.taken) == 0, number
            link.sendall(byte)
        wait_until(lambda: len(port.taken) == 1, "it is taken over")
        (taken,) = port.taken
        link.sendall(b"!")
        taken.settimeout(TIMEOUT_S)
        assert exactly(taken, 5) == b"This!"
        assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    assert port.looked == [b"", b"This"], "nobody is woken for less than it takes"


def test_who_is_closed_or_leaves_early_costs_nothing_in_the_end(port: Port) -> None:
    """Half of its first bytes and the end of it; others at once."""
    before = descriptors()
    with port.connect(b"Close me, and more than was looked at") as refused:
        wait_until(lambda: has_ended(refused), "it is hung up on", TIMEOUT_S)
    with port.connect(b"Th") as gone:
        gone.shutdown(socket.SHUT_WR)
        wait_until(lambda: has_ended(gone), "it is hung up on", TIMEOUT_S)
    wait_until(lambda: descriptors() <= before, "all is closed", TIMEOUT_S)


@pytest.mark.parametrize("said", [b"", b"T", b"Thi"])
def test_who_does_not_say_what_it_is_is_ended(said: bytes) -> None:
    """Nothing, a byte, all but one."""
    with closing(Port(limits=DoorLimits(8, 16, 0.2))) as port, port.connect(said) as silent:
        wait_until(lambda: has_ended(silent), "it is hung up on", TIMEOUT_S)


def test_what_takes_longer_than_may_be_looked_at_is_closed() -> None:
    """Whoever wants a megabyte to say what it is does not get it."""
    with closing(Port(look=lambda head: len(head) + MIB)) as port, port.connect(b"x") as link:
        wait_until(lambda: has_ended(link), "it is hung up on", TIMEOUT_S)


def test_as_many_first_bytes_as_may_be_are_there_at_once() -> None:
    """However small the pieces in which the machine would tell of them."""
    found: list[int] = []

    def look(head: bytes) -> Verdict | int:
        if len(head) < LOOK_BYTES_MAX:
            return LOOK_BYTES_MAX
        found.append(len(head))
        return Verdict.CLOSE

    with closing(Port(look=look)) as port, port.connect() as link:
        for _ in range(17):
            link.sendall(bytes(1024))
        wait_until(lambda: found == [LOOK_BYTES_MAX], "they are all seen", TIMEOUT_S)


def test_one_hosts_silent_connections_make_room_for_its_own_only(port: Port) -> None:
    """The oldest of whoever has most of them goes first; those of others stay."""
    with ExitStack() as stack:
        other = stack.enter_context(port.connect(b"T", host="127.0.0.2"))
        many = [stack.enter_context(port.connect()) for _ in range(60)]
        wait_until(lambda: sum(map(has_ended, many)) >= 60 - 16, "the surplus to be hung up on", TIMEOUT_S)

        other.sendall(b"his")
        wait_until(lambda: len(port.taken) == 1, "the other one is served", TIMEOUT_S)


def test_a_taker_counts_as_unknown_until_it_has_it() -> None:
    """It is cancelled when the time is over, with what it had begun its own to end."""
    ended = threading.Event()

    async def take(link: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            link.close()
            ended.set()

    with (
        closing(Port(limits=DoorLimits(8, 16, 0.2), look=lambda head: take if head else 1)) as port,
        port.connect(b"x"),
    ):
        assert ended.wait(TIMEOUT_S)


def test_a_taker_that_fails_is_told_of_and_others_are_served(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that comes on a connection ends the port."""

    def look(head: bytes) -> Verdict | int:
        if head == b"x":
            raise RuntimeError("nobody thought of this")
        return Verdict.CLOSE if head else 1

    with closing(Port(look=look)) as port, caplog.at_level(logging.ERROR):
        for data in (b"x", b"y"):
            with port.connect(data) as link:
                wait_until(lambda link=link: has_ended(link), "it is hung up on", TIMEOUT_S)  # type: ignore[misc]
    assert [one.getMessage() for one in caplog.records] == ["a connection to the test's port was lost"]


def test_a_port_without_descriptors_looks_away_for_a_while(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not spin, and goes on when there are some."""
    attempts: list[int] = []
    accept = socket.socket.accept

    def starved(listening: socket.socket) -> object:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", starved)
    with port.connect(b"This"):
        wait_until(lambda: len(port.taken) == 1, "it is served all the same", TIMEOUT_S)
    assert len(attempts) <= 4


def test_an_address_that_is_taken_is_told() -> None:
    """In the words of every other port."""
    (taken,) = listen("127.0.0.1", 0, "first")
    with taken, pytest.raises(ConfigError, match=r"cannot listen on the second address 127\.0\.0\.1"):
        listen("127.0.0.1", taken.getsockname()[1], "second")


# --- relaying --------------------------------------------------------------------------------------------------------


def test_what_is_relayed_arrives_both_ways_unchanged(port: Port, upstream: socket.socket) -> None:
    """More than fits into any buffer on the way, both ways at once."""
    data = os.urandom(8 * MIB)
    with relayed(port, upstream) as (outer, inner):
        found: dict[str, bytes] = {}

        def read(name: str, link: socket.socket) -> None:
            digest, count = hashlib.sha256(), 0
            while count < len(data) and (part := link.recv(100_000)):
                digest.update(part)
                count += len(part)
            found[name] = digest.digest()

        threads = [
            threading.Thread(target=read, args=("in", inner)),
            threading.Thread(target=read, args=("out", outer)),
            threading.Thread(target=outer.sendall, args=(data,)),
            threading.Thread(target=inner.sendall, args=(data,)),
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    whole = hashlib.sha256(data).digest()
    assert found == {"in": whole, "out": whole}


def test_a_client_that_has_said_all_still_gets_its_answer(port: Port, upstream: socket.socket) -> None:
    """Its end is passed on; the server's end is the end, with everything that it said before."""
    with relayed(port, upstream) as (outer, inner):
        outer.sendall(b"question")
        outer.shutdown(socket.SHUT_WR)
        assert exactly(inner, 8) == b"question"
        answer = os.urandom(MIB)

        def say() -> None:
            inner.sendall(answer)
            inner.close()

        thread = threading.Thread(target=say)
        thread.start()
        assert exactly(outer, MIB) == answer
        assert outer.recv(1) == b""
        thread.join()
        wait_until(lambda: not port.door._relays, "nothing is left of it", TIMEOUT_S)


def test_a_side_that_is_gone_ends_the_other(port: Port, upstream: socket.socket) -> None:
    """Also one that leaves with a reset."""
    before = descriptors()
    with relayed(port, upstream) as (outer, inner):
        inner.close()
        wait_until(lambda: has_ended(outer), "the client is hung up on", TIMEOUT_S)
    with relayed(port, upstream) as (outer, inner):
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        outer.close()
        assert inner.recv(1) == b""
    wait_until(lambda: descriptors() <= before, "all is closed", TIMEOUT_S)


@pytest.mark.parametrize(("who", "size"), [("client", 1), ("client", CHUNK_BYTES // 4), ("server", CHUNK_BYTES + 1)])
def test_a_reset_after_the_last_bytes_ends_the_other_side(
    port: Port, upstream: socket.socket, who: str, size: int
) -> None:
    """Also if the loop learns of both at once; what was sent before arrives."""
    before = descriptors()
    with relayed(port, upstream) as (outer, inner):
        leaver, stayer = (outer, inner) if who == "client" else (inner, outer)
        outer.sendall(b"unread, which makes a reset of the server's end")
        select.select([inner], [], [], TIMEOUT_S)
        if who == "client":
            inner.recv(100)

        def leave() -> None:
            leaver.setblocking(False)
            assert leaver.send(bytes(size)) == size
            leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            leaver.close()

        port.bridge.post(leave)

        assert exactly(stayer, size + 1) == bytes(size)
    wait_until(lambda: not port.door._relays and descriptors() <= before, "all is closed", TIMEOUT_S)


@pytest.mark.parametrize("slow", ["server", "client"])
def test_a_side_that_takes_nothing_holds_the_other_back(port: Port, upstream: socket.socket, slow: str) -> None:
    """Nothing is read that nobody takes: the sender stalls, and what lies here is one piece."""
    with relayed(port, upstream) as (outer, inner):
        sender, taker = (outer, inner) if slow == "server" else (inner, outer)
        (one,) = port.door._relays
        lane = one._inward if slow == "server" else one._outward
        sender.setblocking(False)
        sent = 0
        data = bytes(MIB)

        def stalls() -> bool:
            nonlocal sent
            try:
                while True:
                    sent += sender.send(data)
            except BlockingIOError:
                return bool(lane._left)

        wait_until(stalls, "the sender stalls", TIMEOUT_S)
        wait_until(lambda: stalls() and not select.select([], [sender], [], 0.2)[1], "for good", TIMEOUT_S)
        assert 0 < len(lane._left) <= CHUNK_BYTES
        taker.settimeout(TIMEOUT_S)
        while sent:
            sent -= len(taker.recv(min(sent, MIB)))


def test_a_server_that_is_gone_or_busy_is_no_loss(tmp_path: Path) -> None:
    """A client is hung up on; while the server has no place for one more, it waits."""
    with closing(Port(str(tmp_path / "nothing"))) as port, port.connect(b"Rest") as link:
        wait_until(lambda: has_ended(link), "it is hung up on", TIMEOUT_S)
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(tmp_path / "busy"))
        busy.listen(0)
        busy.settimeout(TIMEOUT_S)
        with closing(Port(busy.getsockname())) as port, ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(port.connect(b"Rest"))
            for _ in range(4):
                inner = stack.enter_context(busy.accept()[0])
                assert exactly(inner, 4) == b"Rest"


def test_of_too_many_relayed_the_longest_silent_goes(port: Port, upstream: socket.socket) -> None:
    """One that speaks stays, however old it is."""
    with ExitStack() as stack:
        pairs = [stack.enter_context(relayed(port, upstream)) for _ in range(8)]
        outer, inner = pairs[0]
        outer.sendall(b"still here")
        assert inner.recv(100) == b"still here"
        stack.enter_context(relayed(port, upstream))
        wait_until(lambda: has_ended(pairs[1][0]), "the silent one is ended", TIMEOUT_S)
        outer.sendall(b"and again")
        assert inner.recv(100) == b"and again"


def test_closing_ends_whatever_is_under_way(upstream: socket.socket) -> None:
    """Silent, half sorted, relayed: none is left, nor a descriptor or a name."""
    before = descriptors()
    port = Port(upstream.getsockname())
    with ExitStack() as stack:
        links = [stack.enter_context(port.connect(said)) for said in (b"", b"T", b"Th")]
        outer, inner = stack.enter_context(relayed(port, upstream))
        name = grpc_name(inner)
        assert name in NAMES._peers
        wait_until(lambda: len(port.door._tasks) == 3, "all have come", TIMEOUT_S)
        port.close()
        for link in (*links, outer):
            wait_until(lambda link=link: has_ended(link), "it is hung up on", TIMEOUT_S)  # type: ignore[misc]
    wait_until(lambda: descriptors() <= before, "all is closed", TIMEOUT_S)
    assert name not in NAMES._peers


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_that_is_nobodys_stays_what_it_is() -> None:
    """It is no address, so no white list means it."""
    names = PeerNames()
    assert names.peer("unix-abstract:00000") == "unix-abstract:00000"
    assert peer_of("unix:/tmp/somebody") == "unix:/tmp/somebody"
    assert peer_of("ipv4:10.0.0.1:5") == "ipv4:10.0.0.1:5"


def test_names_of_connections_that_ended_are_known_for_a_while_and_given_again() -> None:
    """A call that was under way is its client's to the end; a name that is used again is the new one's."""
    names = PeerNames()
    for number in range(3 * ENDED_MAX):
        names.add(f"unix-abstract:{number:05x}", f"ipv4:10.0.0.1:{number}")
        names.end(f"unix-abstract:{number:05x}")
    last = 3 * ENDED_MAX - 1
    assert len(names) == ENDED_MAX
    assert names.peer(f"unix-abstract:{last:05x}") == f"ipv4:10.0.0.1:{last}"
    names.add(f"unix-abstract:{last:05x}", "ipv4:10.0.0.2:1")
    assert names.peer(f"unix-abstract:{last:05x}") == "ipv4:10.0.0.2:1"


def test_a_thousand_clients_are_known_by_their_names(upstream: socket.socket) -> None:
    """Each by its own; and when they are gone no more is kept than may be."""
    names: set[str] = set()
    with closing(Port(upstream.getsockname(), DoorLimits(2000, 256, TIMEOUT_S))) as port:
        with ExitStack() as stack:
            for _ in range(1000):
                outer = stack.enter_context(port.connect(b"Rest"))
                inner = stack.enter_context(upstream.accept()[0])
                assert exactly(inner, 4) == b"Rest"
                names.add(grpc_name(inner))
                host, its_port = outer.getsockname()
                assert peer_of(grpc_name(inner)) == f"ipv4:{host}:{its_port}"
            assert len(names) == 1000
        wait_until(lambda: not names.intersection(NAMES._peers), "all are gone", TIMEOUT_S)
    assert len(NAMES._ended) <= ENDED_MAX


@asynccontextmanager
async def grpc_behind(host: str, directory: Path) -> AsyncIterator[int]:
    """A gRPC server that answers with what it knows of its caller."""

    async def whoami(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return peer_of(context.peer()).encode()

    server = aio_server((), 10)
    add_methods(server, "test.Peers", {"WhoAmI": grpc.unary_unary_rpc_method_handler(whoami)})
    private = PrivateSocket(server.add_insecure_port, directory)
    await server.start()
    door = FrontDoor("test's", lambda head: Verdict.RELAY if head else 1, private.path, DoorLimits(8))
    listening = listen(host, 0, "test's")
    door.open(listening)
    try:
        yield listening[0].getsockname()[1]
    finally:
        await server.stop(None)
        await door.close()
        private.close()


@pytest.mark.parametrize(
    ("listened", "dialled", "told"),
    [("127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:"), ("::", "127.0.0.1", "ipv4:127.0.0.1:"), ("::1", "[::1]", "ipv6:[")],
)
def test_a_grpc_server_learns_who_its_client_is(tmp_path: Path, listened: str, dialled: str, told: str) -> None:
    """As if it had connected directly; IPv4 in IPv6 is told as IPv4."""

    async def ask() -> None:
        async with grpc_behind(listened, tmp_path) as port, grpc.aio.insecure_channel(f"{dialled}:{port}") as channel:
            call = channel.unary_unary("/test.Peers/WhoAmI", request_serializer=None, response_deserializer=None)
            answer: bytes = await call(b"", timeout=TIMEOUT_S)
            assert answer.decode().startswith(told)
            assert int(answer.decode().rpartition(":")[2])

    loops.run(ask())


@pytest.mark.parametrize("turns", range(6))
def test_a_server_that_stops_loses_no_connection_that_it_has_accepted(turns: int) -> None:
    """Each is known to a protocol, or was never accepted, however many turns of the loop ago it came."""
    made: list[asyncio.BaseTransport] = []

    class Known(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Known, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname(), TIMEOUT_S) as link:
            for _ in range(turns):
                await asyncio.sleep(0)
            await stop_serving(server)
            known = list(made)
            for one in known:
                one.close()
            link.setblocking(False)
            with suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(link, 1) == b""
            assert made == known, "none came later"

    with warnings.catch_warnings(record=True) as lost:
        warnings.simplefilter("always", ResourceWarning)
        loops.run(asyncio.wait_for(main(), TIMEOUT_S))
        gc.collect()
    assert [str(one.message) for one in lost] == []
