"""What one client may take up of a real server: each limit is reached, and the group does not even notice."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from dledger.remoting.codes import AnswerCode
from dledger.rpc import options
from dledger.rpc.clients import codec
from dledger_cli.local.group import HOST
from rocketstore.client.aio.queue_reader import SUBSCRIPTION, SUSPEND
from rocketstore.remoting.codes import RequestCode
from tests.integration.access_harness import ALICE, ROOT, SecuredBrokers, SecuredGroup, unharmed
from tests.integration.conftest import Adopt
from tests.support.grpc_client import open_channel
from tests.support.http2 import ENHANCE_YOUR_CALM, GOAWAY, PING, PREFACE, Http2Link, frame
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.signed_calls import SignedCalls
from tests.support.waiting import wait_until

METADATA = options.method(options.LOG_SERVICE, "Metadata")
ASK = codec.encode_metadata_request("default")
MakeGroup = Callable[..., SecuredGroup]


@pytest.fixture
def make(adopt: Adopt, tmp_path: Path) -> MakeGroup:
    """Three nodes with these settings that have a leader."""

    def start(**settings: object) -> SecuredGroup:
        made = adopt(SecuredGroup(tmp_path / "group", settings={name: str(value) for name, value in settings.items()}))
        made.start_all()
        made.leader()
        return made

    return start


def port_of(group: SecuredGroup) -> int:
    return group.nodes[group.leader()].grpc_port


def test_connections_beyond_the_limit_are_hung_up_on(make: MakeGroup) -> None:
    """``connections_max``, of which one address has its part: the idle ones go, and others may come."""
    group = make(connections_max=20)
    port = port_of(group)
    with unharmed(group), ExitStack() as links:
        opened = [links.enter_context(Http2Link(HOST, port)) for _ in range(40)]
        for one in opened:
            one.begin()

        wait_until(lambda: sum(not one.is_closed() for one in opened) <= 15, "those beyond the part are hung up on")
        assert any(not one.is_closed() for one in opened)
        assert _is_served(port)


def _is_served(port: int) -> bool:
    with Http2Link(HOST, port) as link:
        return link.begin() and link.recv() is not None


@pytest.mark.parametrize("said", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half a preface", "no settings"])
def test_who_says_nothing_is_hung_up_on(make: MakeGroup, said: bytes) -> None:
    """A client that does not say HTTP/2 within 5 seconds holds no connection."""
    group = make()
    port = port_of(group)
    with unharmed(group), ExitStack() as links:
        began = time.monotonic()
        idlers = [links.enter_context(Http2Link(HOST, port, timeout_s=60)) for _ in range(10)]
        for one in idlers:
            one.send(said)
        for one in idlers:
            one.frames()
        took_s = time.monotonic() - began

    assert took_s > 4.5, "not before"


def test_idle_connections_are_closed(make: MakeGroup) -> None:
    """``connection_idle_ms_max``: politely, so that a client connects again with its next call."""
    group = make(connection_idle_ms_max=1000)
    port = port_of(group)
    with (
        unharmed(group),
        Http2Link(HOST, port, timeout_s=60) as link,
        open_channel(f"{HOST}:{port}", ALICE) as channel,
    ):
        ask = channel.unary_unary(METADATA, None, None)
        before = codec.decode_metadata(ask(ASK, timeout=60))
        link.begin()
        frames = link.frames()
        after = codec.decode_metadata(ask(ASK, timeout=60))

    assert [one.payload[8:] for one in frames if one.kind == GOAWAY][-1] == b"connection idle"
    assert after.node_id == before.node_id


def test_pinging_too_often_ends_the_connection(make: MakeGroup) -> None:
    """More often than every 5 seconds: ENHANCE_YOUR_CALM."""
    group = make()
    port = port_of(group)
    with unharmed(group), Http2Link(HOST, port) as link:
        link.begin()
        link.recv()
        for number in range(50):
            if not link.send(frame(PING, number.to_bytes(8, "big"))):
                break
        frames = link.frames()

    assert ENHANCE_YOUR_CALM in [one.goaway_code for one in frames if one.kind == GOAWAY]


def test_metadata_beyond_the_limit_is_refused(make: MakeGroup) -> None:
    """16 KiB, and the signature more than allowed."""
    group = make()
    address = group.nodes[group.leader()].grpc_address
    with unharmed(group), SignedCalls(address, "alice", "alice-secret") as calls:
        calls.meet(METADATA, ASK)
        signed = calls.metadata(METADATA, ASK)
        large = calls.call(METADATA, ASK, (*signed, ("padding", "x" * 16_384)))
        small = calls.call(METADATA, ASK, signed)

    assert large.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert small.code is grpc.StatusCode.OK


def test_streams_beyond_the_limit_of_a_connection_wait(make: MakeGroup) -> None:
    """``connection_calls_max``: they begin when others end; another connection has its own."""
    group = make(connection_calls_max=3)
    address = group.nodes[group.leader()].grpc_address
    with unharmed(group), ExitStack() as opened:
        crowded, other = (open_channel(address, ALICE) for _ in range(2))
        opened.callback(crowded.close)
        opened.callback(other.close)
        ask, ask_elsewhere = (channel.unary_unary(METADATA, None, None) for channel in (crowded, other))
        ask(ASK, timeout=60)
        watches = [_watch(crowded) for _ in range(3)]
        for one in watches:
            next(iter(one))

        with pytest.raises(grpc.RpcError) as late:
            ask(ASK, timeout=1)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert ask_elsewhere(ASK, timeout=60)
        watches.pop().cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
        assert ask(ASK, timeout=60)


def test_an_account_cannot_take_all_streams(make: MakeGroup) -> None:
    """``account_share_percent`` of ``client_streams_max``: the rest is for others."""
    group = make(client_streams_max=12, account_share_percent=50)
    leader = group.nodes[group.leader()].grpc_address
    with unharmed(group), ExitStack() as opened:
        alice, root = (open_channel(leader, who) for who in (ALICE, ROOT))
        opened.callback(alice.close)
        opened.callback(root.close)
        for channel in (alice, root):  # a stream cannot learn for whom to sign
            channel.unary_unary(METADATA, None, None)(ASK, timeout=60)
        watches = [_watch(alice) for _ in range(6)]
        for one in watches:
            next(iter(one))

        with pytest.raises(grpc.RpcError) as refused:
            next(iter(_watch(alice)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "alice has 6 open watch streams, the limit per " in (refused.value.details() or "")
        assert next(iter(_watch(root)))


def _watch(channel: grpc.Channel) -> grpc.CallIterator[bytes]:
    method = options.method(options.LOG_SERVICE, "WatchRole")
    return channel.unary_stream(method, None, None)(codec.encode_watch_role("default"), timeout=30)


def test_an_account_cannot_take_all_waiting_pulls(adopt: Adopt, tmp_path: Path) -> None:
    """``account_share_percent`` of ``pulls_waiting_max``: the rest is for others."""
    settings = {"pulls_waiting_max": "4", "account_share_percent": "50"}
    brokers = adopt(SecuredBrokers(tmp_path / "brokers", settings=settings))
    brokers.start_all()
    master = brokers.nodes[brokers.master()]
    brokers.create_topic("orders", 2)
    brokers.create_topic("paid", 2)
    flags = SUBSCRIPTION | SUSPEND
    wait = pull_fields("billing", "orders", queueId=1, sysFlag=flags, subscription="*", suspendTimeoutMillis=20_000)
    with unharmed(brokers), ExitStack() as opened:
        clients = []
        for who in (ALICE, ROOT):
            client = opened.enter_context(RemotingSocket(master.client_port))
            client.key = who.access_key, who.secret_key
            clients.append(client)
            for _ in range(2):
                client.begin(RequestCode.PULL_MESSAGE, wait)
        with brokers.admin() as root:
            wait_until(lambda: root.status(master.client_address).table["pullsWaiting"] == "4", "two of each wait")

        refused = clients[0].ask(RequestCode.PULL_MESSAGE, wait)
    assert refused.code == AnswerCode.SYSTEM_BUSY
    assert "alice has 2 waiting pulls" in refused.remark
