"""A permission that is withdrawn ends what it allowed. Which method needs which: ``test_privileges``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import grpc
import pytest

from dledger.access import guard
from dledger.access.guard import AccessGuard
from dledger.access.rules import parse_rules
from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.errors import DLedgerError
from dledger.rpc import options
from dledger.rpc.clients import codec, group_codec
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.clients.group_codec import Query
from dledger.types import NO_INDEX, LogIndex, QueryAnswer
from tests.support import grpc_log
from tests.support.fake_node import FakeNode, client_server
from tests.support.grpc_client import CHANNEL_OPTIONS
from tests.support.waiting import wait_until

RULES = """\
accounts:
- accessKey: caller
  secretKey: caller-secret
  whiteRemoteAddress: 127.0.0.1
  topicPerms:
  - default={}
"""
KEY = ((guard.ACCESS_KEY, "caller"),)
"""Its address is trusted, so that no signature is needed."""
DENIED = grpc.StatusCode.PERMISSION_DENIED


class SilentNode(FakeNode):
    """Answers no query."""

    def submit_query(
        self,
        request: bytes,
        done: Callable[[QueryAnswer | DLedgerError], None],
        *,
        linearizable: bool = True,
        after: LogIndex = NO_INDEX,
        wait_ms: int = 0,
    ) -> None:
        self.queries.append((request, linearizable, after, wait_ms))


@contextmanager
def served(permission: str, node: FakeNode | None = None) -> Iterator[tuple[grpc.Channel, Callable[[str], object]]]:
    """A node with one account, that has ``permission`` on its log; and what changes the rules."""
    guard = AccessGuard(parse_rules(RULES.format(permission)), name="n0", clock=Clock())
    server = client_server(ServerConfig(client_port=0), node or FakeNode(), guard)
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", CHANNEL_OPTIONS) as channel:
            yield channel, lambda text: server.bridge.post(lambda: guard.apply(parse_rules(text)))
    finally:
        server.close()


def stream_of(channel: grpc.Channel, name: str) -> grpc.StreamStreamMultiCallable[bytes, bytes]:
    """A method, called as if both sides were streams."""
    path = options.method(options.LOG_SERVICE, name)
    return channel.stream_stream(path, request_serializer=None, response_deserializer=None)


def test_an_open_append_stream_ends_with_the_permission() -> None:
    """Without another request: what would come next is not stored."""
    with served("PUB") as (channel, change):
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        call = stream_of(channel, "AppendStream")(iter(requests.get, None), 10, KEY)
        requests.put(grpc_log.encode_append(codec.Append("default", [b"x"])))
        next(iter(call))

        change(RULES.format("SUB"))
        with pytest.raises(grpc.RpcError) as ended:
            next(iter(call))

        requests.put(None)
        assert ended.value.code() is DENIED


@pytest.mark.parametrize(("before", "after"), [("SUB", "PUB"), ("caller-secret", "another-secret")])
def test_a_query_that_waits_ends_with_the_permission_or_the_key(before: str, after: str) -> None:
    """It waits for up to 15 s, and what it would be told then is not for this caller any more."""
    node, rules = SilentNode(), RULES.format("SUB")
    with served("SUB", node) as (channel, change):
        body = group_codec.encode_query(Query("default", b"", ReadMode.COMMITTED, LogIndex(0), wait_ms=15_000))
        query = channel.unary_unary(options.method(options.LOG_SERVICE, "Query"), bytes, bytes)
        waiting = query.future(body, metadata=KEY, timeout=60)
        wait_until(lambda: bool(node.queries), "the query waits")

        change(rules.replace(before, after))

        with pytest.raises(grpc.RpcError) as ended:
            waiting.result()
        assert ended.value.code() is DENIED
