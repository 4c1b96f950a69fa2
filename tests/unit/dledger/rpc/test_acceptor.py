"""A port on real sockets: who does not say what it is costs little, for a short time, and nobody else anything."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from dledger.errors import ConfigError
from dledger.rpc.listening import Acceptor, Arrival, Identify, listen
from dledger.rpc.loops import LoopThread
from tests.support.waiting import wait_until

TIMEOUT_S = 120.0
UNKNOWN_MAX = 16


class Port:
    """An acceptor on a loop of its own. What begins with T is taken over; anything else is not."""

    def __init__(self, identify: Identify | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.taken: list[socket.socket] = []
        self.loop = LoopThread("acceptor-test")
        self.bridge = self.loop.start()
        self.acceptor = Acceptor("test's", identify or self.identify, timeout_s, UNKNOWN_MAX)
        listening = listen("127.0.0.1", 0, "test's")
        self.address: tuple[str, int] = listening[0].getsockname()
        self.bridge.post(lambda: self.acceptor.open(listening))

    async def identify(self, arrival: Arrival) -> None:
        if (await asyncio.get_running_loop().sock_recv(arrival.link, 1)) == b"T":
            self.taken.append(arrival.take())

    def connect(self, data: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
        link = socket.create_connection(self.address, timeout=TIMEOUT_S, source_address=(host, 0))
        link.sendall(data)
        return link

    def close(self) -> None:
        self.bridge.run(self.acceptor.close())
        self.loop.stop()
        for link in self.taken:
            link.close()


@pytest.fixture
def port() -> Iterator[Port]:
    with closing(Port()) as made:
        yield made


def has_ended(link: socket.socket) -> bool:
    """Whether the other side hung up, without a reset."""
    ready, _, _ = select.select([link], [], [], 0)
    return bool(ready) and link.recv(1) == b""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_who_is_taken_over_stays_when_the_port_closes(port: Port) -> None:
    """Its new owner ends it, and only the new owner."""
    with port.connect(b"This") as link:
        wait_until(lambda: len(port.taken) == 1, "it is taken over")
        port.bridge.run(port.acceptor.close())
        port.taken[0].sendall(b"!")
        assert link.recv(1) == b"!"


def test_who_is_refused_or_leaves_early_costs_nothing_in_the_end(port: Port) -> None:
    """Its end is no reset, whatever else it has sent."""
    before = descriptors()
    with port.connect(b"Close me, and more than was looked at") as refused:
        wait_until(lambda: has_ended(refused), "it is hung up on", TIMEOUT_S)
    with port.connect() as gone:
        gone.shutdown(socket.SHUT_WR)
        wait_until(lambda: has_ended(gone), "it is hung up on", TIMEOUT_S)
    wait_until(lambda: descriptors() <= before, "all is closed", TIMEOUT_S)


def test_who_does_not_say_what_it_is_is_ended() -> None:
    """Within the time that it has."""
    with closing(Port(timeout_s=0.2)) as port, port.connect() as silent:
        wait_until(lambda: has_ended(silent), "it is hung up on", TIMEOUT_S)


def test_one_hosts_silent_connections_make_room_for_its_own_only(port: Port) -> None:
    """The oldest of whoever has most of them goes first; those of others stay."""
    with ExitStack() as stack:
        other = stack.enter_context(port.connect(host="127.0.0.2"))
        many = [stack.enter_context(port.connect()) for _ in range(60)]
        wait_until(lambda: sum(map(has_ended, many)) >= 60 - UNKNOWN_MAX, "the surplus to be hung up on", TIMEOUT_S)

        other.sendall(b"T")
        wait_until(lambda: len(port.taken) == 1, "the other one is served", TIMEOUT_S)


def test_an_owner_is_told_when_its_time_is_over() -> None:
    """What it has begun with the connection is its own to end."""
    ended = threading.Event()

    async def identify(arrival: Arrival) -> None:
        link = arrival.take()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            link.close()
            ended.set()

    with closing(Port(identify, timeout_s=0.2)) as port, port.connect():
        assert ended.wait(TIMEOUT_S)


@pytest.mark.parametrize("error", [RuntimeError("nobody thought of this"), OSError("not connected"), EOFError()])
def test_a_failure_ends_its_connection_only(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged unless the client has left, and leaves no socket."""
    failed: list[socket.socket] = []

    async def identify(arrival: Arrival) -> None:
        failed.append(arrival.link)
        raise error

    with closing(Port(identify)) as port, caplog.at_level(logging.ERROR):
        for _ in range(2):
            with port.connect() as link:
                wait_until(lambda link=link: has_ended(link), "it is hung up on", TIMEOUT_S)  # type: ignore[misc]
    assert [one.fileno() for one in failed] == [-1, -1]
    lines = ["a connection to the test's port was lost"] * 2 if isinstance(error, RuntimeError) else []
    assert [one.getMessage() for one in caplog.records] == lines


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


def test_closing_ends_whatever_is_under_way() -> None:
    """None is left, nor a descriptor; and nobody can connect."""
    before = descriptors()
    port = Port()
    with ExitStack() as stack:
        links = [stack.enter_context(port.connect()) for _ in range(3)]
        wait_until(lambda: len(port.acceptor._tasks) == 3, "all have come", TIMEOUT_S)
        port.close()
        for link in links:
            wait_until(lambda link=link: has_ended(link), "it is hung up on", TIMEOUT_S)  # type: ignore[misc]
    with pytest.raises(ConnectionRefusedError):
        port.connect()
    wait_until(lambda: descriptors() <= before, "all is closed", TIMEOUT_S)


def test_an_address_that_is_taken_is_told() -> None:
    """In the words of every other port."""
    (taken,) = listen("127.0.0.1", 0, "first")
    with taken, pytest.raises(ConfigError, match=r"cannot listen on the second address 127\.0\.0\.1"):
        listen("127.0.0.1", taken.getsockname()[1], "second")
