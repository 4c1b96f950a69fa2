"""Which permission each method of the log needs: one that is not held refuses it, also on streams that are open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import grpc
import pytest

from dledger.access import signing
from dledger.access.guard import AccessGuard
from dledger.access.rules import parse_rules
from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.rpc import options
from dledger.rpc.clients import codec
from dledger.rpc.clients.server import ClientServer
from tests.support.fake_node import FakeNode

RULES = """\
accounts:
- accessKey: caller
  secretKey: caller-secret
  whiteRemoteAddress: 127.0.0.1
  topicPerms:
  - default={}
"""
KEY = ((signing.ACCESS_KEY, "caller"),)
"""Its address is trusted, so that no signature is needed."""
DENIED = grpc.StatusCode.PERMISSION_DENIED
NEEDED = {
    "Append": "PUB",
    "AppendStream": "PUB",
    "Producer": "PUB",
    "Read": "SUB",
    "Follow": "SUB",
    "FetchLog": "SUB",
    "Locate": "SUB",
    "BlockDigests": "SUB",
    "TransferLeadership": "admin",
    "Metadata": "",
    "WatchRole": "",
}


@contextmanager
def served(permission: str) -> Iterator[tuple[grpc.Channel, Callable[[str], object]]]:
    """A node with one account, that has ``permission`` on its log; and what changes the rules."""
    guard = AccessGuard(parse_rules(RULES.format(permission)), name="n0", clock=Clock())
    server = ClientServer(ServerConfig(client_port=0), FakeNode(), guard)
    server.start()
    try:
        with grpc.insecure_channel(server.address, options.client_channel_options()) as channel:
            loop = server._loop
            assert loop is not None
            yield channel, lambda text: loop.call_soon_threadsafe(guard.apply, parse_rules(text))
    finally:
        server.close()


def stream_of(channel: grpc.Channel, name: str) -> grpc.StreamStreamMultiCallable[bytes, bytes]:
    """A method, called as if both sides were streams."""
    path = options.method(options.LOG_SERVICE, name)
    return channel.stream_stream(path, request_serializer=None, response_deserializer=None)


def refusal_of(channel: grpc.Channel, name: str) -> grpc.StatusCode | None:
    """With what a call that has no valid request is refused; None if it is answered."""
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    requests.put(b"")
    call = stream_of(channel, name)(iter(requests.get, None), 10, KEY)
    try:
        next(iter(call))
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    finally:
        requests.put(None)
        call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped
    return None


@pytest.mark.parametrize("permission", ["DENY", "PUB", "SUB", "PUB|SUB"])
def test_each_method_needs_its_permission_and_no_other(permission: str) -> None:
    """Writers do not read, readers do not write, and neither moves the leadership."""
    with served(permission) as (channel, _):
        refused = {name for name in NEEDED if refusal_of(channel, name) is DENIED}

    assert refused == {name for name, needed in NEEDED.items() if needed and needed not in permission.split("|")}


def test_an_open_append_stream_ends_with_the_permission() -> None:
    """Without another request: what would come next is not stored."""
    with served("PUB") as (channel, change):
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        call = stream_of(channel, "AppendStream")(iter(requests.get, None), 10, KEY)
        requests.put(codec.encode_append(codec.Append("default", [b"x"])))
        next(iter(call))

        change(RULES.format("SUB"))
        with pytest.raises(grpc.RpcError) as ended:
            next(iter(call))

        requests.put(None)
        assert ended.value.code() is DENIED
