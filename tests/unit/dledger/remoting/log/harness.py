"""A node without a group, served to clients; and one connection to it that speaks remoting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from dledger.access.guard import AccessGuard
from dledger.config import ServerConfig
from dledger.errors import DLedgerError
from dledger.host import ClientServer
from dledger.remoting import log_codec
from dledger.remoting.frame import Frame
from dledger.remoting.log_codec import LogCode, error_of
from dledger.rpc.clients.codec import Append, Read, ReadAnswer, ReadMode
from dledger.types import AppendedBatch, LogIndex, ProducerBatch
from tests.support.fake_node import FakeNode, client_server
from tests.support.remoting import RemotingSocket

GROUP: Final = "default"


class Served(NamedTuple):
    """A node and the server in front of it."""

    node: FakeNode
    server: ClientServer

    def dial(self, host: str = "127.0.0.1", key: tuple[str, str] | None = None) -> RemotingSocket:
        """A connection; it signs with ``key``."""
        client = RemotingSocket(self.server.port, host=host)
        client.key = key
        return client


@contextmanager
def served(
    config: ServerConfig | None = None, node: FakeNode | None = None, guard: AccessGuard | None = None
) -> Iterator[Served]:
    """Serve a node, by default one that leads."""
    node = node or FakeNode()
    server = client_server(config or ServerConfig(client_port=0), node, guard)
    server.start()
    try:
        yield Served(node, server)
    finally:
        server.close()


def append_body(
    *bodies: bytes, stream: int = log_codec.UNORDERED, producer: ProducerBatch | None = None, group: str = GROUP
) -> bytes:
    """The body of an append."""
    return log_codec.encode_append(stream, Append(group, bodies, producer=producer))


def appended(answer: Frame) -> AppendedBatch:
    """What an answer to an append says. Raises the error that it tells of."""
    return log_codec.decode_appended(succeeded(answer))


def append(client: RemotingSocket, *bodies: bytes, stream: int = log_codec.UNORDERED) -> AppendedBatch:
    """Append, and wait for the answer."""
    return appended(client.ask(LogCode.APPEND, body=append_body(*bodies, stream=stream)))


def read_body(
    first: int, count: int = 0, *, mode: ReadMode = ReadMode.COMMITTED, wait_ms: int = 0, max_bytes: int = 0
) -> bytes:
    """The body of a read."""
    return log_codec.encode_read(Read(GROUP, LogIndex(first), count, max_bytes, mode), wait_ms)


def read(client: RemotingSocket, first: int, count: int = 0, mode: ReadMode = ReadMode.COMMITTED) -> ReadAnswer:
    """Read, and wait for the answer."""
    return log_codec.decode_read_answer(succeeded(client.ask(LogCode.READ, body=read_body(first, count, mode=mode))))


def succeeded(answer: Frame) -> bytes:
    """The body of an answer. Raises the error that it tells of instead."""
    if answer.code:
        raise error_of(answer, "the node")
    return answer.body


def error_in(answer: Frame) -> DLedgerError:
    """The error that an answer tells of."""
    assert answer.code
    return error_of(answer, "the node")
