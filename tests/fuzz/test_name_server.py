"""Any requests to a name server, in any order: each is answered, and only what is foreseen goes wrong."""

from __future__ import annotations

import asyncio
import logging
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue

from hypothesis import given
from hypothesis import strategies as st

from dledger.remoting.frame import LENGTH_BYTES, Frame, cut, encode
from dledger.remoting.server import RemotingServer, ServerLimits
from dledger.rpc import loops
from rocketstore.nameserver.service import NameService
from rocketstore.nameserver.tables import KvConfig, RouteTables
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import DataVersion, RegisterBrokerBody, TopicConfigData, TopicConfigTable
from tests.support.memory_disk import new_directory
from tests.unit.rocketstore.nameserver.support import LIMITS
from tests.unit.rocketstore.nameserver.wire import config_in

_BODY = RegisterBrokerBody(TopicConfigTable(DataVersion(1), {"T": TopicConfigData("T"), "U": TopicConfigData("U")}))
_CODES = [code for code in RequestCode if code >= 100]
_NUMBERS = st.sampled_from(["0", "1", "2", "-1", "-2", "9" * 19, "x", ""])
_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "brokerName": st.sampled_from(["g", "h", "", "\x00", "x" * 300]),
        "brokerAddr": st.sampled_from(["a:1", "b:1", "c:1", "[::1]:5", "a:b", ""]),
        "clusterName": st.sampled_from(["c", "d", ""]),
        "haServerAddr": st.sampled_from(["a:2", ""]),
        "brokerId": _NUMBERS,
        "bodyCrc32": st.sampled_from(["0", "0", "7"]),
        "compressed": st.sampled_from(["false", "true"]),
        "dledgerTerm": _NUMBERS,
        "topic": st.sampled_from(["T", "U", ""]),
        "acceptStandardJsonOnly": st.sampled_from(["true", ""]),
        "cluster": st.sampled_from(["c", "x"]),
        "namespace": st.sampled_from(["n", "ORDER_TOPIC_CONFIG"]),
        "key": st.sampled_from(["T", "k"]),
        "value": st.sampled_from(["v", "g:4"]),
    },
)
_BODIES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"{}",
            b"[]",
            _BODY.encode(),
            _BODY.encode_compressed(),
            DataVersion(1).encode(),
            b"orderMessageEnable=true",
            b"\\u12",
        ]
    ),
    st.binary(max_size=40),
)
_REQUESTS = st.lists(
    st.builds(
        lambda code, fields, body, version: Frame(code, 1, fields, body, version=version),
        st.sampled_from(_CODES),
        _FIELDS,
        _BODIES,
        st.sampled_from([36, 37, 317, 409]),
    ),
    min_size=1,
    max_size=30,
)


class _Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 5) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything is taken at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        """Nothing is open."""

    def close(self) -> None:
        """Nothing is open."""


async def _play(requests: list[Frame], directory: Path) -> int:
    """How many answers came."""
    tables = RouteTables(LIMITS)
    config = config_in(directory)
    kv = KvConfig(config.kv_config_path, entries_max=5, bytes_max=2000)
    service = NameService(config, tables, kv)
    server = RemotingServer("name server", service.handlers(), ServerLimits(9, 9, 99, 99, 30.0, *[1 << 25] * 4))
    wire, connection = _Wire(), server.protocol()
    connection.connection_made(wire)
    for request in requests:
        connection.data_received(encode(request))
    await server.close(30.0)
    frames, end = cut(wire.written)
    assert len(wire.written) - end < LENGTH_BYTES
    service.expire()
    assert tables.sizes() == (0, 0, 0, 0), "the connection has ended"
    service.close()
    return len(frames)


@given(requests=_REQUESTS)
def test_every_request_is_answered_and_nothing_unforeseen_happens(requests: list[Frame]) -> None:
    """Errors are answers; what is logged as an error would be one of the code."""
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = QueueHandler(records)
    handler.setLevel(logging.ERROR)
    logger = logging.getLogger("rocketstore")
    logger.addHandler(handler)
    try:
        answered = loops.run(_play(requests, new_directory("nameserver")))
    finally:
        logger.removeHandler(handler)

    assert records.empty(), records.get().getMessage()
    assert answered == len(requests)
