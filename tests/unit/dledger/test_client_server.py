"""The logs of several groups at one client port and one port of gRPC: each request names its group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import grpc
import pytest

from dledger.client import DLedgerClient
from dledger.config import ServerConfig
from dledger.errors import DLedgerError, IdentityError
from dledger.host import GROUP_METADATA, ClientServer, ServedLog
from dledger.monitoring import Conditions
from dledger.remoting import log_codec
from dledger.remoting.log_codec import JavaCode, LogCode, error_of
from dledger.rpc import options
from dledger.rpc.clients import codec as messages
from dledger.rpc.clients.codec import Append
from dledger.types import LogIndex
from tests.support import grpc_log
from tests.support.fake_node import FakeNode
from tests.support.remoting import RemotingSocket

_UNKNOWN = "this node serves the groups 'a', 'b', not 'c'"
_UNNAMED = "this node serves the groups 'a', 'b': name one of them"


class Served(NamedTuple):
    """Two groups' nodes and the server in front of them."""

    nodes: dict[str, FakeNode]
    server: ClientServer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@pytest.fixture
def served() -> Iterator[Served]:
    """The groups a and b."""
    nodes = {group: FakeNode(group=group) for group in "ab"}
    logs = [
        ServedLog(ServerConfig(group=group, client_port=0), node, Conditions(group)) for group, node in nodes.items()
    ]
    with closing(ClientServer(logs)) as server:
        server.start()
        yield Served(nodes, server)


def _path(name: str) -> str:
    return options.method(options.LOG_SERVICE, name)


def test_clients_of_ours_reach_the_group_that_they_name(served: Served) -> None:
    """Appends, reads, status: two logs behind one address have nothing to do with each other."""
    for number, group in enumerate("ab", start=1):
        with closing(DLedgerClient([served.address], group=group, timeout_s=60)) as client:
            for _ in range(number):
                client.append(f"of {group}".encode())
            assert [entry.body for entry in client.read(0, count=1)] == [f"of {group}".encode()]
            assert client.metadata().group == group

    assert [len(served.nodes[group].entries) for group in "ab"] == [1, 2]


@pytest.mark.parametrize(("group", "told"), [("c", _UNKNOWN), ("", _UNNAMED)])
@pytest.mark.parametrize("code", [LogCode.APPEND, LogCode.READ, LogCode.PRODUCER, LogCode.FETCH])
def test_a_request_for_no_group_of_here_is_told_which_there_are(
    served: Served, code: LogCode, group: str, told: str
) -> None:
    """Nobody finds a wrong name otherwise; nothing is done with such a request."""
    body = {
        LogCode.APPEND: log_codec.encode_append(log_codec.UNORDERED, Append(group, (b"x",))),
        LogCode.READ: log_codec.encode_read(messages.Read(group, LogIndex(0)), 0),
        LogCode.PRODUCER: messages.encode_producer_request(group, "p"),
        LogCode.FETCH: grpc_log.encode_read(messages.Read(group, LogIndex(0))),  # its group is the same field
    }[code]
    with RemotingSocket(served.server.port) as client:
        error = error_of(client.ask(code, body=body), "the node")

    assert isinstance(error, IdentityError)
    assert told in str(error)
    assert not any(node.entries for node in served.nodes.values())


def test_dledgers_own_requests_reach_their_group_too(served: Served) -> None:
    """Java's client names its group in every request."""
    with RemotingSocket(served.server.port) as client:
        for group in "bab":
            body = json.dumps({"group": group, "remoteId": "n0", "body": "eA=="}).encode()
            assert json.loads(client.ask(JavaCode.APPEND, body=body).body)["code"] == 200
        wrong = json.dumps({"group": "c", "remoteId": "n0"}).encode()
        refused = json.loads(client.ask(JavaCode.METADATA, body=wrong).body)

    assert [len(served.nodes[group].entries) for group in "ab"] == [1, 2]
    assert refused["code"] != 200


def test_calls_of_grpc_reach_the_group_that_they_name(served: Served) -> None:
    """Unary calls and streams of answers."""
    with grpc.insecure_channel(f"127.0.0.1:{served.server.grpc_port}") as channel:
        append = channel.unary_unary(_path("Append"), request_serializer=None, response_deserializer=None)
        for group in "bab":
            _, outcome = grpc_log.decode_appended(append(grpc_log.encode_append(Append(group, (b"x",))), timeout=60))
            assert not isinstance(outcome, DLedgerError)
        _, refused = grpc_log.decode_appended(append(grpc_log.encode_append(Append("c", (b"x",))), timeout=60))
        watch = channel.unary_stream(_path("WatchRole"), request_serializer=None, response_deserializer=None)
        first = next(iter(watch(messages.encode_watch_role("b"), timeout=60)))

    assert [len(served.nodes[group].entries) for group in "ab"] == [1, 2]
    assert isinstance(refused, IdentityError)
    assert _UNKNOWN in str(refused)
    assert first


def test_a_stream_of_grpc_appends_names_its_group_before_its_first_request(served: Served) -> None:
    """It is admitted before; a request for another group is refused on it, and one without a group cannot begin."""
    with grpc.insecure_channel(f"127.0.0.1:{served.server.grpc_port}") as channel:
        stream = channel.stream_stream(_path("AppendStream"), request_serializer=None, response_deserializer=None)
        requests = [grpc_log.encode_append(Append(group, (b"x",))) for group in "ba"]
        answers = list(stream(iter(requests), metadata=((GROUP_METADATA, "b"),), timeout=60))
        with pytest.raises(grpc.RpcError) as unnamed:
            list(stream(iter(requests), timeout=60))

    appended, refused = (grpc_log.decode_appended(answer)[1] for answer in answers)
    assert not isinstance(appended, DLedgerError)
    assert isinstance(refused, IdentityError)
    assert "this stream is for group 'b', not 'a'" in str(refused)
    assert unnamed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert GROUP_METADATA in str(unnamed.value.details())
    assert [len(served.nodes[group].entries) for group in "ab"] == [0, 1]


def test_a_request_that_names_no_group_is_for_the_only_one() -> None:
    """Most processes have one."""
    node = FakeNode(group="a")
    log = ServedLog(ServerConfig(group="a", client_port=0), node, Conditions("n0"))
    with closing(ClientServer([log])) as server:
        server.start()
        with RemotingSocket(server.port) as client:
            answer = client.ask(LogCode.APPEND, body=log_codec.encode_append(log_codec.UNORDERED, Append("", (b"x",))))

    assert answer.code == 0
    assert len(node.entries) == 1
