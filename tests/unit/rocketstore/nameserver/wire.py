"""A running name server, and what to say to it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import LENGTH_BYTES, Frame, cut, encode
from dledger.values import parse_address
from rocketstore.nameserver.server import NameServer
from rocketstore.nameserver.settings import NameServerConfig
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import RegisterBrokerHeader, write_header
from rocketstore.remoting.topics import DataVersion, RegisterBrokerBody, TopicConfigData, TopicConfigTable

TIMEOUT_S = 120.0


class Caller:
    """One connection."""

    def __init__(self, address: str, host: str = "127.0.0.1") -> None:
        """``host``: the address to come from, any of 127.0.0.0/8."""
        self.socket = socket.create_connection(parse_address(address), TIMEOUT_S, source_address=(host, 0))

    def send(self, data: bytes) -> Frame:
        """The answer to some bytes."""
        self.socket.sendall(data)
        return self.receive()

    def receive(self) -> Frame:
        """The next frame. Raises ``EOFError``."""
        data = self._exactly(LENGTH_BYTES)
        data += self._exactly(int.from_bytes(data, "big"))
        (frame,), _ = cut(data)
        return frame

    def ask(self, code: RequestCode, body: bytes = b"", /, **fields: str) -> Frame:
        """The answer to a request."""
        answer = self.send(encode(Frame(code, 7, fields, body)))
        assert answer.opaque == 7
        return answer

    def json(self, code: RequestCode, **fields: str) -> Any:  # noqa: ANN401  # whatever JSON holds
        """The body of a successful answer."""
        answer = self.ask(code, **fields)
        assert answer.code == AnswerCode.SUCCESS, answer.remark
        return json.loads(answer.body)

    def register(self, broker_id: int, address: str, **more: Any) -> Frame:  # noqa: ANN401  # as below
        """The answer to a registration."""
        self.send_registration(broker_id, address, **more)
        return self.receive()

    def send_registration(
        self,
        broker_id: int,
        address: str,
        *,
        name: str = "g",
        cluster: str = "c",
        term: int = -1,
        version: int = 1,
        topics: tuple[str, ...] = ("T",),
        queues: int = 4,
        compressed: bool = False,
        complete: bool = False,
    ) -> None:
        """Register a broker."""
        table = {topic: TopicConfigData(topic, queues, queues) for topic in topics}
        body = RegisterBrokerBody(TopicConfigTable(DataVersion(version), table))
        header = RegisterBrokerHeader(
            name,
            address,
            cluster,
            f"ha-{address}",
            broker_id,
            compressed,
            dledger_term=term,
            dledger_all_topics=complete,
        )
        data = body.encode_compressed() if compressed else body.encode()
        self.socket.sendall(encode(Frame(RequestCode.REGISTER_BROKER, 7, write_header(header), data)))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data


@contextmanager
def running(config: NameServerConfig) -> Iterator[NameServer]:
    """A name server meanwhile."""
    server = NameServer(config)
    try:
        yield server.start()
    finally:
        server.stop()


@contextmanager
def calling(server: NameServer, host: str = "127.0.0.1") -> Iterator[Caller]:
    """A connection meanwhile, from this address."""
    caller = Caller(server.address, host)
    with caller.socket:
        yield caller


def config_in(directory: Path, **settings: Any) -> NameServerConfig:  # noqa: ANN401  # of whatever type each has
    """On a free port."""
    return NameServerConfig(listen_port=0, kv_config_path=directory / "kv" / "kvConfig.json", **settings)
