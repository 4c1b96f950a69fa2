"""The proxy network carries bytes, holds them back one way or both, delays them and ends connections."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from dledger.types import NodeId
from dledger_cli.local.tcp_proxy import ProxyNetwork

A, B = NodeId("a"), NodeId("b")
SILENCE_S = 0.2


class EchoServer:
    """Sends back what it gets, on one connection after another."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                try:
                    while data := connection.recv(1000):
                        if data == b"quit":
                            return
                        connection.sendall(data)
                except OSError:
                    continue

    def close(self) -> None:
        with closing(socket.create_connection(self.address)) as last:
            last.sendall(b"quit")
            self._thread.join(60)
        self._listener.close()


@pytest.fixture
def network() -> Iterator[ProxyNetwork]:
    """Two nodes, both echoing."""
    with (
        closing(EchoServer()) as one,
        closing(EchoServer()) as other,
        ProxyNetwork({A: one.address, B: other.address}) as made,
    ):
        yield made


def connect(network: ProxyNetwork) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", network.port(A, B)))
    link.settimeout(5)
    return link


def is_silent(link: socket.socket) -> bool:
    link.settimeout(SILENCE_S)
    try:
        link.recv(1)
    except TimeoutError:
        return True
    finally:
        link.settimeout(5)
    return False


def is_ended(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except ConnectionError:
        return True


def test_bytes_pass(network: ProxyNetwork) -> None:
    """Both ways, unchanged."""
    with closing(connect(network)) as link:
        link.sendall(b"hello")

        assert link.recv(10) == b"hello"


@pytest.mark.parametrize(("source", "target"), [(A, B), (B, A)], ids=["requests", "answers"])
def test_a_blocked_way_is_silent_and_delivers_after_the_heal(
    network: ProxyNetwork, source: NodeId, target: NodeId
) -> None:
    """One direction suffices to silence an echo; nothing is lost on the way, as with TCP."""
    with closing(connect(network)) as link:
        link.sendall(b"first")
        assert link.recv(10) == b"first"

        network.block(source, target)
        link.sendall(b"second")
        assert is_silent(link)
        network.heal(source, target)

        assert link.recv(10) == b"second"


def test_a_new_connection_into_a_partition_is_a_black_hole(network: ProxyNetwork) -> None:
    """It is accepted and silent until the heal."""
    network.partition([A])
    with closing(connect(network)) as link:
        link.sendall(b"x")

        assert is_silent(link)

        network.heal_all()
        assert link.recv(1) == b"x"


def test_delay_holds_every_chunk(network: ProxyNetwork) -> None:
    """The answer takes at least the delay of its way."""
    network.delay(B, A, 0.15)
    with closing(connect(network)) as link:
        began = time.monotonic()
        link.sendall(b"x")

        assert link.recv(1) == b"x"
        assert time.monotonic() - began >= 0.15


def test_cut_ends_connections(network: ProxyNetwork) -> None:
    """Both ends see it at once; a new connection works."""
    with closing(connect(network)) as link:
        link.sendall(b"x")
        assert link.recv(1) == b"x"

        network.cut()

        assert is_ended(link)
    with closing(connect(network)) as link:
        link.sendall(b"y")
        assert link.recv(1) == b"y"


def test_connections_of_one_way_are_cut_alone(network: ProxyNetwork) -> None:
    """Those that one node made to another one; the other way round nothing is noticed."""
    with closing(connect(network)) as link:
        link.sendall(b"x")
        assert link.recv(1) == b"x"

        network.cut(B, A)
        link.sendall(b"y")
        assert link.recv(1) == b"y"
        network.cut(A, B)

        assert is_ended(link)


@pytest.mark.parametrize("turns", range(6))
def test_closing_ends_whoever_is_just_connecting(network: ProxyNetwork, turns: int) -> None:
    """However many turns of the loop ago it was accepted: no socket is lost, to be found by whoever comes later."""

    async def close_meanwhile() -> socket.socket:
        link = connect(network)
        for _ in range(turns):
            await asyncio.sleep(0)
        await network._shut_down()
        return link

    with network._run(close_meanwhile()) as link:
        assert is_ended(link)
