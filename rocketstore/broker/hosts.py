"""Host addresses as stored in records."""

from __future__ import annotations

import logging
import socket
import time
from ipaddress import ip_address
from typing import Final

from dledger.access.addresses import parse_address
from dledger.values import address_text
from rocketstore.message.message import LOOPBACK, HostAddress

TRIES: Final = 3
PAUSE_S: Final = 1.0
_log = logging.getLogger("rocketstore")


def host_address(host: str, port: int) -> HostAddress:
    """A client's address, given as text; loopback if it is not an IP address."""
    try:
        return HostAddress(parse_address(host).packed, port)
    except ValueError:
        return LOOPBACK


def host_text(host: HostAddress) -> str:
    """``host:port``."""
    return address_text(str(ip_address(host.ip)), host.port)


def resolve(host: str, port: int) -> HostAddress:
    """The store host for records: the name's first address; loopback if it has none, with a warning."""
    try:
        return HostAddress(parse_address(host).packed, port)
    except ValueError:
        pass
    for left in reversed(range(TRIES)):  # a name server may not be up yet when a machine or a container starts
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except OSError as error:
            if left:
                time.sleep(PAUSE_S)
                continue
            _log.warning(
                "this broker's own name %s cannot be resolved (%s): until the next start, message ids and records name "
                "127.0.0.1. Set brokerIP1 to an IP address, or to a name that this machine can resolve",
                host, error,
            )  # fmt: skip
            return HostAddress(LOOPBACK.ip, port)
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return HostAddress(parse_address(str(found[0][4][0])).packed, port)
