"""Requests for what is not there, of any bytes: each is refused, and the port serves on."""

from __future__ import annotations

import pytest

from dledger.client import DLedgerClient
from dledger.config import ConnectionLimits
from dledger.types import LogIndex
from tests.support.http2 import HEADERS, Http2Link, call_frames, frame
from tests.unit.rpc.test_connections import serving

RST_STREAM = 3
PATH = "/dledger.v1.LogService/Nothing"


def refusal(link: Http2Link) -> bytes:
    """The headers with which a call ends."""
    while (found := link.recv()) is not None and found.kind != HEADERS:
        pass
    assert found is not None, "the connection was closed"
    return found.payload


@pytest.mark.parametrize(
    "path", [PATH.encode(), b"/\xf2\x83b,\xad" + PATH.encode()[6:], b"\xff" * len(PATH), b"\0" * len(PATH)]
)
def test_a_request_for_anything_ends_itself_alone(path: bytes) -> None:
    """gRPC's own server ends, with all calls of everybody, at a path that is no UTF-8."""
    with serving(ConnectionLimits()) as (node, server), DLedgerClient(server.address, timeout_s=30) as client:
        client.append(b"before")
        for _ in range(10):
            with Http2Link("127.0.0.1", server.port) as link:
                link.begin()
                link.send(call_frames(1, PATH, b"").replace(PATH.encode(), path))
                assert b"there is no such method" in refusal(link)

        client.append(b"after")
        with DLedgerClient(server.address, timeout_s=30) as other:
            assert len(other.read(LogIndex(0), count=2)) == 2
    assert node.bodies() == [b"before", b"after"]


def test_requests_for_nothing_that_are_given_up_at_once_end_themselves_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Before they are answered, and while the server stops; nobody logs an error for them."""
    cancel = (8).to_bytes(4, "big")
    with serving(ConnectionLimits()) as (_, server):
        for _ in range(20):
            with Http2Link("127.0.0.1", server.port) as link:
                link.begin()
                for stream in range(1, 41, 2):
                    link.send(call_frames(stream, PATH, b"") + frame(RST_STREAM, cancel, stream=stream))
        with DLedgerClient(server.address, timeout_s=30) as client:
            client.append(b"after")
        with Http2Link("127.0.0.1", server.port) as link:
            link.begin()
            for stream in range(1, 201, 2):
                link.send(call_frames(stream, PATH, b""))
            server.close()
    assert [one for one in caplog.records if one.levelname in {"ERROR", "CRITICAL"}] == []
