"""Connections that ask nothing: they neither stay nor keep anybody out."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest

from dledger_cli.console import server
from dledger_cli.console.server import ConsoleServer
from tests.unit.dledger_cli.console.support import request


def connect(console: ConsoleServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", console.port), timeout=60)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /healthz HT",
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\ntoken=",
    ],
    ids=["nothing", "half a head", "half a second head", "half a body"],
)
def test_half_a_request_is_hung_up_on(console: ConsoleServer, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """After some seconds, also if a byte comes now and then."""
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.5)
    with closing(connect(console)) as link:
        link.sendall(said)
        link.settimeout(0.3)
        for _ in range(60):
            try:
                link.sendall(b"x" if said else b"")
                if link.recv(4096) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    pytest.fail("it was never hung up on")


def test_those_that_ask_nothing_keep_nobody_out(console: ConsoleServer) -> None:
    """More of them than there is room for: the oldest go."""
    with ExitStack() as held:
        silent = [held.enter_context(closing(connect(console))) for _ in range(server.CONNECTIONS_MAX + 20)]
        assert request(f"{console.url}healthz").status == 200
        assert has_ended(silent[0])


def has_ended(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except ConnectionError:
        return True
