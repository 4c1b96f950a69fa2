"""The client without an event loop: what happens when it is closed by another thread, or cannot connect."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger.remoting.blocking import BlockingRemotingClient
from dledger.remoting.client import UnreachableError
from dledger.remoting.connection import DisconnectedError
from dledger.remoting.frame import ANSWER_HEADER_BYTES_MAX, HEADER_BYTES_MAX, Frame, encode
from dledger.values import parse_address
from rocketstore.remoting.codes import RequestCode
from tests.unit.rocketstore.nameserver.wire import config_in, running

TIMEOUT_S = 30.0


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


def test_a_blocking_client_says_what_may_have_been_done() -> None:
    """Not sent, ended and not answered are three different things; and then it connects anew."""
    request = Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0)
    with socket.create_server(("127.0.0.1", 0)) as listening, closing(BlockingRemotingClient()) as frames:
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        def serve() -> None:
            ended, _ = listening.accept()
            ended.close()
            silent, _ = listening.accept()
            third, _ = listening.accept()
            with silent, third:
                third.recv(1)
                third.sendall(b"".join(encode(Frame(0, opaque, flag=1, body=b"%d" % opaque)) for opaque in (2, 3)))
                while third.recv(1 << 16):
                    pass

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(DisconnectedError):
            frames.call(address, request, TIMEOUT_S)
        with pytest.raises(TimeoutError, match="did not answer in time"):
            frames.call(address, request, 0.05)
        assert frames.call(address, request, TIMEOUT_S).body == b"3"  # 2 came too late
        for nowhere in ("127.0.0.1:1", "nowhere"):
            with pytest.raises(UnreachableError, match="cannot connect"):
                frames.call(nowhere, request, TIMEOUT_S)
        frames.close()
        serving.join(TIMEOUT_S)
        assert not serving.is_alive()
        with pytest.raises(UnreachableError, match="closed"):
            frames.call(address, request, TIMEOUT_S)


def test_a_blocking_client_that_is_closed_ends_what_is_under_way() -> None:
    """Whoever waits is told at once."""
    with socket.create_server(("127.0.0.1", 0)) as listening, closing(BlockingRemotingClient()) as frames:
        found: list[Exception] = []

        def ask() -> None:
            try:
                frames.call(f"127.0.0.1:{listening.getsockname()[1]}", Frame(1, 0), TIMEOUT_S)
            except DisconnectedError as error:
                found.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        accepted, _ = listening.accept()
        with accepted:
            accepted.recv(1)
            frames.close()
            asking.join(TIMEOUT_S)
        assert len(found) == 1


def test_a_blocking_client_wants_tls_or_not_at_all(tmp_path: Path) -> None:
    """A server without TLS is no connection for it, and nothing is said to it."""
    with (
        running(config_in(tmp_path)) as server,
        closing(BlockingRemotingClient(tls=ssl.create_default_context)) as frames,
        pytest.raises(UnreachableError, match="cannot connect"),
    ):
        frames.call(server.address, Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0), TIMEOUT_S)


def test_a_connection_that_the_other_side_closed_is_not_used_again(tmp_path: Path) -> None:
    """As name servers do with idle ones, and when they are restarted: the next request finds out before it is sent."""
    config, request = config_in(tmp_path), Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0)
    with closing(BlockingRemotingClient()) as frames:
        with running(config) as server:
            frames.call(server.address, request, TIMEOUT_S)
        for _ in range(2):
            with pytest.raises(UnreachableError, match="cannot connect"):
                frames.call(server.address, request, TIMEOUT_S)
        with running(replace(config, listen_port=parse_address(server.address)[1])):
            assert frames.call(server.address, request, TIMEOUT_S).code == 0
