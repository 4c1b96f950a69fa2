"""Host addresses of records."""

from __future__ import annotations

import pytest

from rocketstore.broker.hosts import peer_host, resolve
from rocketstore.message.message import LOOPBACK, HostAddress

V6_LOOPBACK = b"\0" * 15 + b"\1"


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:10.1.2.3:4711", HostAddress(b"\x0a\1\2\3", 4711)),
        ("ipv6:[::1]:4711", HostAddress(V6_LOOPBACK, 4711)),
        ("ipv6:%5B::1%5D:4711", HostAddress(V6_LOOPBACK, 4711)),
        ("ipv6:[::ffff:10.1.2.3]:4711", HostAddress(b"\x0a\1\2\3", 4711)),
        ("unix:/tmp/socket", LOOPBACK),
        ("ipv4:nonsense:1", LOOPBACK),
        ("", LOOPBACK),
    ],
)
def test_whom_grpc_names_is_an_address(peer: str, expected: HostAddress) -> None:
    """IPv4 in IPv6 is stored as IPv4; what is no address counts as local."""
    assert peer_host(peer) == expected


def test_a_name_is_resolved_for_records() -> None:
    """Numbers are taken as they are; a name that leads nowhere counts as local."""
    assert resolve("127.0.0.1", 5) == HostAddress(b"\x7f\0\0\1", 5)
    assert resolve("::1", 5) == HostAddress(V6_LOOPBACK, 5)
    assert resolve("localhost", 5) == HostAddress(b"\x7f\0\0\1", 5)
    assert resolve("no.such.host.invalid", 5) == HostAddress(b"\x7f\0\0\1", 5)
