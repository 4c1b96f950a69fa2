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
from dledger.rpc import options
from dledger.rpc.clients import codec
from tests.support import grpc_log
from tests.support.fake_node import FakeNode, client_server
from tests.support.grpc_client import CHANNEL_OPTIONS

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


@contextmanager
def served(permission: str) -> Iterator[tuple[grpc.Channel, Callable[[str], object]]]:
    """A node with one account, that has ``permission`` on its log; and what changes the rules."""
    guard = AccessGuard(parse_rules(RULES.format(permission)), name="n0", clock=Clock())
    server = client_server(ServerConfig(client_port=0), FakeNode(), guard)
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
