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

from dledger.errors import DLedgerError
from dledger.remoting.codes import RequestError
from dledger_cli.console.fleet import Fleet
from dledger_cli.console.sampler import wall_ms
from rocketstore.client import BrokerUnreachableError, ClientError, RefusedError
from rocketstore.client.aio.connections import BrokerConnections
from rocketstore.client.aio.routes import RouteServers
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.runtime import RuntimeInfo

ASKED_PER_S_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class FleetPace:
    """How often an address is asked, and how long it may take to answer."""

    watched_s: float = 2.0
    unwatched_s: float = 10.0
    timeout_s: float = 2.0


class FleetWatcher:
    """Between ``run``'s start and its cancellation, which closes ``connections``. Everything on one loop."""

    def __init__(
        self, fleet: Fleet, name_servers: Sequence[str], connections: BrokerConnections, pace: FleetPace | None = None
    ) -> None:
        self._fleet = fleet
        self._name_servers = tuple(name_servers)
        self._pace = pace or FleetPace()
        self._connections = connections
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._watched = False
        self._nudge = asyncio.Event()

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
            await self._connections.close(at_once=True)

    async def _follow_name_server(self, address: str) -> None:
        names = RouteServers(self._connections, [address], are_name_servers=True, timeout_s=self._pace.timeout_s)
        while True:
            nudge = self._nudge
            try:
                found = await names.clusters()
            except DLedgerError as error:
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
            answer = await self._connections.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, timeout_s=timeout_s)
            info = RuntimeInfo.decode(answer.body)
        except (RefusedError, RequestError) as error:
            fleet.refused(address, _short(address, str(error)), wall_ms())
        except ClientError as error:
            is_unreachable = isinstance(error, BrokerUnreachableError)
            fleet.failed(address, _short(address, str(error)), wall_ms(), unreachable=is_unreachable)
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
    return error.removeprefix(f"cannot connect to {address}: ").removeprefix(f"{address}: ")
