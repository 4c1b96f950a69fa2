"""Host addresses as stored in records."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress
from ipaddress import ip_address
from typing import Final

from dledger.access.addresses import parse_address
from dledger.values import address_text, host_of
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.reading import ReadThreads
from rocketstore.message.message import LOOPBACK, HostAddress

TRIES: Final = 3
PAUSE_S: Final = 1.0
_log = logging.getLogger("rocketstore")
LOOK_UP_INTERVAL_S: Final = 10.0
"""How often the members' names are looked up."""


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


class MemberHosts:
    """From which addresses a request may say that a member of the group has passed it on.

    On the loop, of a broker that is a member of a group.
    """

    def __init__(self, mastership: Mastership, readers: ReadThreads) -> None:
        self._mastership = mastership
        self._readers = readers
        self._task: asyncio.Task[None] | None = None
        self.known: frozenset[str] = frozenset()
        """The members' IP addresses."""

    def start(self) -> None:
        """Look them up from now on. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look_up_members())

    async def close(self) -> None:
        """Look nothing up any more."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _look_up_members(self) -> None:
        while True:
            try:
                self.known = await self._addresses_of_members()
            except Exception:  # noqa: BLE001  # what was known stays; without this task it would never change again
                _log.exception("the addresses of the group's members cannot be looked up; retrying")
            await asyncio.sleep(LOOK_UP_INTERVAL_S)

    async def _addresses_of_members(self) -> frozenset[str]:
        found: set[str] = set()
        for name in {host_of(one) for one in self._mastership.view().members.values() if one}:
            with suppress(OSError, UnicodeError):  # no such name, now or ever
                places = await self._readers.run(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
                found.update(str(place[4][0]) for place in places)
        return frozenset(found)
