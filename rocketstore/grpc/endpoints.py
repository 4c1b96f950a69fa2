"""The addresses in routes: the client's own access point, in its order, as a client names a connection by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dledger.access.addresses import parse_address as parse_ip
from dledger.values import address_text, parse_address
from rocketstore.grpc.codes import RejectedError
from rocketstore.pb import definition_pb2 as pb

ADDRESSES_MAX: Final = 64
"""Of one access point."""
HOST_CHARS_MAX: Final = 255
"""A route names its hosts once for each queue."""


class AccessPoints:
    """On the loop. ``members``: the addresses for gRPC of members that serve; ``down``: of those that do not."""

    def __init__(self, members: Callable[[], Mapping[str, str]], down: Callable[[], frozenset[str]]) -> None:
        self._members = members
        self._down = down

    def of(self, given: pb.Endpoints) -> pb.Endpoints:
        """Where a client shall make its calls: at its own addresses, without members that are down; without any
        address of its own, at all members. Any member serves any call, and the order does not change with the leader:
        each change costs a client its connections. Raises ``RejectedError``.
        """
        if not given.addresses:
            return endpoints_of(sorted(self._members().values()))
        addresses = given.addresses[:ADDRESSES_MAX]
        if any(len(one.host) > HOST_CHARS_MAX for one in addresses):
            why = f"a host in the request's endpoints has more than {HOST_CHARS_MAX} characters"
            raise RejectedError(pb.ILLEGAL_ACCESS_POINT, why)
        down = self._down()
        kept = [one for one in addresses if address_text(one.host, one.port) not in down]
        return pb.Endpoints(scheme=given.scheme, addresses=kept or addresses)


def endpoints_of(addresses: Iterable[str]) -> pb.Endpoints:
    """These addresses (``host:port``); of names only the first, because some clients take one name and no more."""
    places = [parse_address(one) for one in addresses][:ADDRESSES_MAX]
    found = pb.Endpoints(scheme=pb.IPv4 if not places else scheme_of(places[0][0]))
    alike = [(host, port) for host, port in places if scheme_of(host) == found.scheme]
    for host, port in alike[:1] if found.scheme == pb.DOMAIN_NAME else alike:
        found.addresses.add(host=host, port=port)
    return found


def scheme_of(host: str) -> pb.AddressScheme:
    """Whether it is an address of version 4 or 6, or a name."""
    try:
        return pb.IPv4 if parse_ip(host).version == 4 else pb.IPv6
    except ValueError:
        return pb.DOMAIN_NAME
