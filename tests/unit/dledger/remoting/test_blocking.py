"""The client without an event loop: what happens when it is closed by another thread, or cannot connect."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from typing import Any

import pytest

from dledger.remoting.blocking import BlockingRemotingClient
from dledger.remoting.client import UnreachableError
from dledger.remoting.frame import ANSWER_HEADER_BYTES_MAX, HEADER_BYTES_MAX, Frame, encode
from rocketstore.remoting.codes import RequestCode


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


@pytest.mark.parametrize("size", [HEADER_BYTES_MAX + 1, ANSWER_HEADER_BYTES_MAX // 2])
def test_an_answer_may_have_a_longer_header_than_a_request(size: int) -> None:
    """The ids of the messages of a large batch are in one: what the other client accepts, this one does, too."""
    answer = Frame(0, 1, {"msgId": "m" * size}, flag=1)
    with closing(BlockingRemotingClient()) as client, socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.recv(1 << 16)
                accepted.sendall(encode(answer))
                accepted.recv(1)

        serving = threading.Thread(target=serve)
        serving.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert client.call(address, Frame(RequestCode.SEND_BATCH_MESSAGE, 0), 30.0).fields == answer.fields
    serving.join(30.0)
    assert not serving.is_alive()
