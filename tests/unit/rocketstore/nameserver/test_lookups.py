"""Asking name servers: one after the other, remembered for a while."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.remoting.blocking import BlockingRemotingClient
from dledger.remoting.client import UnreachableError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import DisconnectedError
from dledger.remoting.frame import Frame, encode
from dledger.values import parse_address
from rocketstore.nameserver.errors import NameServerError
from rocketstore.nameserver.lookups import ROUTES_MAX, NameServers
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.codes import RequestCode
from tests.unit.rocketstore.nameserver.wire import TIMEOUT_S, calling, config_in, running

ROUTE = b'{"brokerDatas":[],"queueDatas":[]}'


class _Frames:
    """Answers from a list; an exception is raised."""

    def __init__(self, **answers: Sequence[Frame | Exception]) -> None:
        self.answers = {address: list(some) for address, some in answers.items()}
        self.asked: list[str] = []

    def call(self, address: str, request: Frame, timeout_s: float) -> Frame:
        """The next answer of an address; the last one for ever."""
        self.asked.append(address)
        answers = self.answers[address]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found


def _answer(code: int = 0, body: bytes = ROUTE) -> Frame:
    return Frame(code, 0, body=body, remark="because")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[NameServer, NameServer]]:
    """Two, of which the second has a broker."""
    with (
        running(config_in(tmp_path / "a")) as first,
        running(config_in(tmp_path / "b")) as second,
        calling(second) as broker,
    ):
        broker.register(0, "a:1")
        yield first, second


def test_threads_find_what_one_of_them_knows(pair: tuple[NameServer, NameServer]) -> None:
    """The one that was restarted knows nothing yet; one that is down is passed over."""
    first, second = pair
    with socket.socket() as unused, closing(BlockingRemotingClient()) as frames:
        unused.bind(("127.0.0.1", 0))
        down = f"127.0.0.1:{unused.getsockname()[1]}"
        found = NameServers([down, first.address, second.address], frames)

        route = found.route("T")
        assert route is not None
        assert dict(route.broker_datas[0].broker_addrs) == {0: "a:1"}
        assert found.route("U") is None
        assert list(found.clusters().broker_addr_table) == ["g"]
        assert found.topics() == ("T",)
        with pytest.raises(NameServerError, match="cannot connect"):
            NameServers([down], frames).clusters()


def test_a_route_is_remembered_and_asked_for_again_when_it_is_to_be_refreshed() -> None:
    """Of the name server that knew it."""
    frames = _Frames(a=[UnreachableError("down")], b=[_answer()])
    found = NameServers(["a", "b"], frames)

    assert found.route("T") is found.route("T")
    assert frames.asked == ["a", "b"]
    found.route("T", refresh=True)
    assert frames.asked == ["a", "b", "b"]
    NameServers(["b"], frames, refresh_s=0).route("T")
    again = NameServers(["b"], frames, refresh_s=0)
    again.route("T")
    again.route("T")
    assert frames.asked.count("b") == 5


def test_what_was_known_counts_while_nobody_answers() -> None:
    """Brokers go on without name servers, and so do their clients; a topic that is gone is forgotten."""
    frames = _Frames(a=[_answer(), DisconnectedError("gone"), _answer(AnswerCode.TOPIC_NOT_EXIST), TimeoutError()])
    found = NameServers(["a"], frames, refresh_s=0)

    known = found.route("T")
    assert known is not None
    assert found.route("T") is known
    assert found.route("T") is None
    with pytest.raises(NameServerError, match="a did not answer within 3 s"):
        found.route("T")


@pytest.mark.parametrize("answer", [_answer(body=b"{"), _answer(AnswerCode.SYSTEM_ERROR)])
def test_what_cannot_be_used_is_an_error(answer: Frame) -> None:
    """With the reason."""
    found = NameServers(["a"], _Frames(a=[answer]))
    asks: tuple[Callable[[], object], ...] = (lambda: found.route("T"), found.clusters, found.topics)
    for ask in asks:
        with pytest.raises(NameServerError, match=r"malformed|code 1: because"):
            ask()
    with pytest.raises(ValueError, match="no name server"):
        NameServers([], _Frames())


def test_a_remark_is_told_without_the_space_that_rocketmq_begins_it_with() -> None:
    """As in `` broker not exist``."""
    frames = _Frames(a=[Frame(1, 0, remark=" not there")])

    with pytest.raises(NameServerError, match="a answered with code 1: not there"):
        NameServers(["a"], frames, timeout_s=1.0).clusters()


def test_a_broker_in_the_place_of_a_name_server_is_told_apart() -> None:
    """It speaks the same protocol, and does not know the request."""
    frames = _Frames(a=[Frame(3, 0, remark=" request type 106 not supported")])

    with pytest.raises(NameServerError, match="a is not a name server but perhaps a broker: request type 106"):
        NameServers(["a"], frames, timeout_s=1.0).clusters()


def test_not_every_route_is_remembered() -> None:
    """The oldest goes."""
    frames = _Frames(a=[_answer()])
    found = NameServers(["a"], frames)
    for number in range(ROUTES_MAX + 1):
        found.route(str(number))

    found.route("1")
    assert len(frames.asked) == ROUTES_MAX + 1
    found.route("0")
    assert len(frames.asked) == ROUTES_MAX + 2


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


def test_a_connection_that_the_other_side_closed_is_not_used_again(tmp_path: Path) -> None:
    """As name servers do with idle ones, and when they are restarted: the next request finds out before it is sent."""
    config = config_in(tmp_path)
    with closing(BlockingRemotingClient()) as frames:
        with running(config) as server:
            known = NameServers([server.address], frames)
            known.clusters()
        for _ in range(2):
            with pytest.raises(NameServerError, match="cannot connect"):
                known.clusters()
        with running(replace(config, listen_port=parse_address(server.address)[1])):
            assert known.topics() == ()


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


def test_a_blocking_client_wants_tls_or_not_at_all(pair: tuple[NameServer, NameServer]) -> None:
    """A server without TLS is no connection for it, and nothing is said to it."""
    with (
        closing(BlockingRemotingClient(tls=ssl.create_default_context)) as frames,
        pytest.raises(UnreachableError, match="cannot connect"),
    ):
        frames.call(pair[0].address, Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0), TIMEOUT_S)
