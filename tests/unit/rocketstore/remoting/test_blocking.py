"""The client without an event loop: what happens when it is closed by another thread, or cannot connect."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import pytest

from rocketstore.remoting.blocking import BlockingRemotingClient
from rocketstore.remoting.client import UnreachableError
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.frame import Frame


def test_closing_during_a_connect_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails, and so does the next."""
    client, made = BlockingRemotingClient(), list[socket.socket]()
    connect = socket.create_connection

    def connect_and_close(*arguments: Any, **more: Any) -> socket.socket:  # noqa: ANN401  # as the real one takes
        made.append(connect(*arguments, **more))
        client.close()
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", connect_and_close)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for _ in range(2):
            with pytest.raises(UnreachableError, match="closed"):
                client.call(address, Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, 0), 5.0)
    assert [one.fileno() for one in made] == [-1]


def test_why_nobody_is_reached_is_said_in_words() -> None:
    """Without the system's number of the error."""
    with closing(BlockingRemotingClient()) as client, socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        server.close()
        with pytest.raises(UnreachableError) as refused:
            client.call(address, Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, 0), 5.0)
    assert str(refused.value) == f"cannot connect to {address}: Connection refused"
