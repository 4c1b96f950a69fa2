"""What one call and one account may take up of the client service, on a real port."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from dledger.access.guard import AccessControl
from dledger.client import ClientSecurity, DLedgerClient
from dledger.clock import Clock
from dledger.config import AccessConfig, ConnectionLimits, ReplicationConfig, ServerConfig
from dledger.errors import ConfigError, PendingFullError
from dledger.host import ClientServer
from dledger.rpc import options
from dledger.rpc.clients import codec
from tests.support import grpc_log
from tests.support.fake_node import FakeNode, client_server
from tests.support.signed_calls import SignedCalls
from tests.support.waiting import wait_until

PRODUCER = options.method(options.LOG_SERVICE, "Producer")
APPEND = options.method(options.LOG_SERVICE, "Append")
ALICE = ClientSecurity(access_key="alice", secret_key="alice-secret")
BOB = ClientSecurity(access_key="bob", secret_key="bob-secret")
RULES = """\
accounts:
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - default=PUB|SUB
- accessKey: bob
  secretKey: bob-secret
  topicPerms:
  - default=PUB|SUB
"""


def body(count: int = 1) -> bytes:
    return grpc_log.encode_append(codec.Append("default", [b"x"] * count))


@contextmanager
def served(config: ServerConfig) -> Iterator[tuple[FakeNode, ClientServer]]:
    node = FakeNode(hold=True)
    access = AccessControl.of(config.access, name="n0", clock=Clock())
    server = client_server(config, node, None if access is None else access.guard)
    server.start()
    try:
        yield node, server
    finally:
        server.close()


@contextmanager
def serving(config: ServerConfig) -> Iterator[tuple[FakeNode, str]]:
    """A node, and its address of gRPC."""
    with served(config) as (node, server):
        yield node, f"127.0.0.1:{server.grpc_port}"


def test_a_call_without_a_deadline_is_given_one() -> None:
    """``call_ms_max``: it ends with DEADLINE_EXCEEDED; a client says then that the outcome is unknown."""
    config = ServerConfig(client_port=0, limits=ConnectionLimits(call_ms_max=300))
    with serving(config) as (node, address), SignedCalls(address) as calls:
        began = time.monotonic()
        answer = calls.call(APPEND, body(), timeout_s=None)

        assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "the call exceeded 300 ms (call_ms_max)" in answer.details
        assert time.monotonic() - began > 0.2
        assert len(node.held) == 1


def test_a_longer_deadline_is_cut_and_a_shorter_one_holds() -> None:
    """The client's own time is its own affair below the limit."""
    limits = [ServerConfig(client_port=0, limits=ConnectionLimits(call_ms_max=limit_ms)) for limit_ms in (500, 60_000)]
    with serving(limits[0]) as (_, address), SignedCalls(address) as calls:
        longer = calls.call(APPEND, body(), timeout_s=60)
    with serving(limits[1]) as (_, address), SignedCalls(address) as calls:
        shorter = calls.call(APPEND, body(), timeout_s=0.05)

    assert "call_ms_max" in longer.details
    assert shorter.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "call_ms_max" not in shorter.details


@pytest.mark.parametrize(("share_percent", "calls"), [(100, 6), (60, 3)])
def test_calls_beyond_what_the_server_takes_are_refused(
    share_percent: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients' calls, from what may be pending and the streams, and an address' part; those under way go on."""
    config = ServerConfig(
        client_port=0,
        client_streams_max=1,
        replication=ReplicationConfig(pending_entries_max=1),
        access=AccessConfig(account_share_percent=share_percent),
    )
    held: list[Callable[[int], None]] = []
    with serving(config) as (node, address), grpc.insecure_channel(address) as channel:
        monkeypatch.setattr(node, "submit_producer", lambda _name, done: held.append(done))
        ask = channel.unary_unary(PRODUCER, request_serializer=None, response_deserializer=None)
        question = codec.encode_producer_request("default", "p")
        asked = []
        for number in range(1, calls + 1):  # one by one: gRPC refuses a burst that its loop does not keep up with
            asked.append(ask.future(question, timeout=60))
            wait_until(lambda number=number: len(held) == number, "it is under way")  # type: ignore[misc]

        with pytest.raises(grpc.RpcError) as refused:
            ask(question, timeout=60)

        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for done in held:
            done(1)
        assert [codec.decode_producer_answer(one.result(60)) for one in asked] == [1] * calls


@contextmanager
def shared(tmp_path: Path, *, entries: int) -> Iterator[tuple[FakeNode, ClientServer]]:
    """A guarded server of which one account may have half of ``entries`` pending."""
    file = tmp_path / "plain_acl.yml"
    file.touch(0o600)
    file.write_text(RULES)
    config = ServerConfig(
        client_port=0,
        access=AccessConfig(acl_enable=True, acl_file=file, account_share_percent=50),
        replication=ReplicationConfig(pending_entries_max=entries),
    )
    with served(config) as found:
        yield found


def test_an_account_cannot_have_everything_pending(tmp_path: Path) -> None:
    """Single appends beyond its share are refused, safe to repeat; others are taken; what is answered makes room."""
    with (
        shared(tmp_path, entries=8) as (node, server),
        SignedCalls(f"127.0.0.1:{server.grpc_port}", "alice", "alice-secret") as alice,
        DLedgerClient(server.address, security=BOB) as bob,
    ):
        alice.meet(APPEND, body())
        many = body(4)
        stream_free = grpc.insecure_channel(alice.address)
        pending = stream_free.unary_unary(APPEND, None, None).future(many, metadata=alice.metadata(APPEND, many))
        wait_until(lambda: len(node.held) == 1, "four entries are pending")

        refused = grpc_log.decode_appended(alice.call(APPEND, body(), alice.metadata(APPEND, body())).data)[1]
        assert isinstance(refused, PendingFullError)
        assert refused.outcome == "not_applied"
        assert "alice has 4 entries" in str(refused)

        node.hold = False
        assert bob.append(b"bob's")
        node.release()
        pending.result(60)
        wait_until(lambda: alice.call(APPEND, body(), alice.metadata(APPEND, body())).data != b"", "alice may again")
        answer = grpc_log.decode_appended(alice.call(APPEND, body(), alice.metadata(APPEND, body())).data)[1]
        assert not isinstance(answer, PendingFullError)
        stream_free.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("connections_max", 0),
        ("connection_calls_max", 0),
        ("connection_idle_ms_max", 10),
        ("handshake_ms_max", 10),
        ("header_bytes_max", 10),
        ("call_ms_max", 10),
        ("ping_interval_ms_min", 10),
    ],
)
def test_limits_have_bounds(name: str, value: int) -> None:
    """A limit that lets nothing through is a mistake."""
    config = ServerConfig(limits=ConnectionLimits(**{name: value}))

    with pytest.raises(ConfigError, match=rf"{name}={value} must be between \d+( KiB)? and \d+( MiB)?"):
        config.check()
