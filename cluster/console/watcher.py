"""Asks name servers and brokers for a ``Fleet``, by RocketMQ's protocol, which all of them speak.

A task per address, on the console's event loop: a slow one holds up nobody, and is not asked again before it has
answered or its time is up. Together they send at most ``ASKED_PER_S_MAX`` requests per second to brokers; without an
open page, hardly any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cluster.console.fleet import Fleet
from cluster.console.sampler import wall_ms
from dledger.client.security import ClientSecurity
from dledger.errors import ConfigError, DLedgerError
from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.connection import DisconnectedError, TooManyCallsError
from dledger.remoting.errors import RequestError
from rocketstore.client.aio_frames import open_frames
from rocketstore.client.name_server_tls import check_plaintext
from rocketstore.client.runtime import question, read_answer
from rocketstore.nameserver.aio_lookups import AsyncNameServers

ASKED_PER_S_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class FleetPace:
    """How often an address is asked, and how long it may take to answer."""

    watched_s: float = 2.0
    unwatched_s: float = 10.0
    timeout_s: float = 2.0


class FleetWatcher:
    """Between ``run``'s start and its cancellation. Everything on one loop."""

    def __init__(
        self, fleet: Fleet, name_servers: Sequence[str], security: ClientSecurity, pace: FleetPace | None = None
    ) -> None:
        self._fleet = fleet
        self._name_servers = tuple(name_servers)
        self._security = security
        self._pace = pace or FleetPace()
        self._frames = open_frames(name_servers, security)
        self._question = question(security, learned=True)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._watched = False
        self._nudge = asyncio.Event()

    @property
    def frames(self) -> RemotingClient:
        """The connections, for other requests on the same loop."""
        return self._frames

    def watch(self, *, watched: bool) -> None:
        """Set whether a page is open; if so, everybody is asked at once."""
        if watched and not self._watched:
            self._nudge.set()
            self._nudge = asyncio.Event()
        self._watched = watched

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for address in self._name_servers:
                    group.create_task(self._follow_name_server(address))
        finally:
            await self._frames.close(at_once=True)

    async def _follow_name_server(self, address: str) -> None:
        names = AsyncNameServers([address], self._frames, timeout_s=self._pace.timeout_s)
        while True:
            nudge = self._nudge
            try:
                found = await names.clusters()
            except (DLedgerError, TooManyCallsError) as error:
                self._fleet.unheard(
                    address, _short(address, str(error).removeprefix("no name server answered: ")), wall_ms()
                )
            else:
                self._fleet.heard(address, found, wall_ms())
            self._cover()
            await self._pause(self._interval_s(), nudge)

    def _cover(self) -> None:
        """A task for each address, and none for those that were forgotten."""
        group, addresses = self._group, self._fleet.addresses()
        if group is None:
            return
        for address in self._tasks.keys() - set(addresses):
            self._tasks.pop(address).cancel()
        for address in addresses:
            if address not in self._tasks:
                self._tasks[address] = group.create_task(self._follow(address))

    async def _follow(self, address: str) -> None:
        while True:
            nudge = self._nudge
            await self._ask(address)
            await self._pause(max(self._interval_s(), len(self._tasks) / ASKED_PER_S_MAX), nudge)

    async def _ask(self, address: str) -> None:
        fleet, timeout_s = self._fleet, self._pace.timeout_s
        try:
            check_plaintext([address], self._security)
            answer = await self._frames.call(address, self._question, timeout_s)
            info = read_answer(answer, self._security, learned=True)
        except RequestError as error:
            fleet.refused(address, str(error), wall_ms())
        except (UnreachableError, ConfigError) as error:
            fleet.failed(address, _short(address, str(error)), wall_ms(), unreachable=True)
        except (DisconnectedError, TimeoutError, TooManyCallsError) as error:
            fleet.failed(address, str(error) or f"no answer within {timeout_s:g} s", wall_ms(), unreachable=False)
        else:
            fleet.answered(address, info, wall_ms())

    def _interval_s(self) -> float:
        return self._pace.watched_s if self._watched else self._pace.unwatched_s

    async def _pause(self, seconds: float, nudge: asyncio.Event) -> None:
        """Until it is time, or a page has been opened since ``nudge`` was taken."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await nudge.wait()


def _short(address: str, error: str) -> str:
    """Without the address, which stands beside it."""
    return error.removeprefix(f"cannot connect to {address}: ")
