"""White lists of remote addresses in RocketMQ's notation, and CIDR."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_SEGMENT: Final = re.compile(r"\*|\d{1,3}(-\d{1,3})?|\{\d{1,3}(,\d{1,3})*\}")
_SEGMENTS: Final = 4
_HOST_BITS: Final = 64
"""Of an IPv6 address: the network of one customer, or machine."""


@dataclass(frozen=True, slots=True)
class AddressPattern:
    """``10.0.0.1``, ``10.0.*.*``, ``10.0.0.1-20``, ``10.0.0.{1,7}``, ``10.0.0.0/8``, ``fd00::/8``, ``*``."""

    text: str
    network: _Network | None = None
    octets: tuple[frozenset[int], ...] = ()

    def matches(self, address: Address) -> bool:
        """Whether it includes this address."""
        if self.network is not None:
            return address.version == self.network.version and address in self.network
        if not self.octets:
            return True
        return isinstance(address, ipaddress.IPv4Address) and all(
            octet in allowed for octet, allowed in zip(address.packed, self.octets, strict=True)
        )


def parse_patterns(text: str) -> tuple[AddressPattern, ...]:
    """One pattern or several, separated by commas. Raises ``ValueError``."""
    parts = re.split(r"[,;](?![^{]*\})", text)
    return tuple(_parse(part.strip()) for part in parts if part.strip())


def _parse(text: str) -> AddressPattern:
    if text in ("*", "*.*.*.*"):
        return AddressPattern(text)
    try:
        return AddressPattern(text, network=ipaddress.ip_network(text))
    except ValueError:
        pass
    segments = text.split(".")
    if len(segments) != _SEGMENTS or not all(_SEGMENT.fullmatch(one) for one in segments):
        raise ValueError(
            f"invalid address {text!r}: use 10.0.0.1, 10.0.0.*, 10.0.0.1-20, 10.0.0.{{1,7}}, 10.0.0.0/24 or fd00::/8"
        )
    return AddressPattern(text, octets=tuple(_octets(one, text) for one in segments))


def _octets(segment: str, text: str) -> frozenset[int]:
    if segment == "*":
        return frozenset(range(256))
    first, dash, last = segment.partition("-")
    numbers = range(int(first), int(last) + 1) if dash else [int(one) for one in segment.strip("{}").split(",")]
    if not numbers or max(numbers) > 255:
        raise ValueError(f"invalid address {text!r}: bad part {segment}")
    return frozenset(numbers)


def any_matches(patterns: Iterable[AddressPattern], address: Address | None) -> bool:
    """Whether one of them includes this address; none includes an unknown one."""
    return address is not None and any(pattern.matches(address) for pattern in patterns)


def address_of(peer: str) -> Address | None:
    """The address in gRPC's name of a peer: ``ipv4:127.0.0.1:4711``, ``ipv6:[::1]:4711``; None for anything else."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    if kind not in ("ipv4", "ipv6"):
        return None
    try:
        return parse_address(host)
    except ValueError:
        return None


def parse_address(text: str) -> Address:
    """An address without its zone; an IPv4 address written as IPv6 is returned as IPv4. Raises ``ValueError``."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def peer_text(peer: str) -> str:
    """gRPC's name of a peer for people."""
    kind, _, rest = unquote(peer).partition(":")
    return rest if kind in ("ipv4", "ipv6") else unquote(peer)


def host_of(peer: str) -> str:
    """The address in gRPC's name of a peer as text, without the port; for a Unix socket its kind."""
    address = address_of(peer)
    return str(address) if address is not None else peer.partition(":")[0]


def place_of(peer: str) -> tuple[str, int]:
    """The address and the port in gRPC's name of a peer; port 0 if there is none."""
    port = peer.rpartition(":")[2]
    return host_of(peer), int(port) if port.isdigit() else 0


def plain_host(host: str) -> str:
    """A socket's address in the form of ``host_of``."""
    return str(parse_address(host))


def counted_host(host: str) -> str:
    """The name of this host for limits per host: of an IPv6 address its /64, all of which one machine may use.

    Anything else is its own name: an IPv4 address, or what stands in the place of one.
    """
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((parse_address(host), _HOST_BITS), strict=False))
    except ValueError:
        return host
