"""From which addresses a request may say that a member of the group has passed it on."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Final

from dledger.values import host_of
from rocketstore.broker.mastership import Mastership
from rocketstore.broker.readers import ReadThreads

_log = logging.getLogger(__name__)
LOOK_UP_INTERVAL_S: Final = 10.0
"""How often the members' names are looked up."""


class MemberHosts:
    """On the loop, of a broker that is a member of a group."""

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
