"""Host addresses as records hold them."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import unquote

from rocketstore.message.message import LOOPBACK, HostAddress


def peer_host(peer: str) -> HostAddress:
    """Whom gRPC says we talk to: ``ipv4:127.0.0.1:4711``, ``ipv6:[::1]:4711``; loopback if it is something else."""
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return LOOPBACK
    return host_address(host.strip("[]"), int(port))


def host_address(host: str, port: int) -> HostAddress:
    """A client's address, given as text; loopback if it is no IP address."""
    try:
        return HostAddress(_packed(host.partition("%")[0]), port)
    except ValueError:
        return LOOPBACK


def resolve(host: str, port: int) -> HostAddress:
    """The address that goes into records as the store's: a name's first address, loopback for one that has none."""
    try:
        return HostAddress(_packed(host), port)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return HostAddress(LOOPBACK.ip, port)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return HostAddress(_packed(str(found[0][4][0]).partition("%")[0]), port)


def _packed(host: str) -> bytes:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).packed
