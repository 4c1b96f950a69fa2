"""The addresses of a group's brokers: those that a client was given, and those that brokers tell.

A broker tells the address that is right inside its own network. Outside, behind published ports, nobody may know it:
there the given addresses are the ones to use. So each of them is asked who answers there, once for each connection,
because another broker may answer at the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from dledger.records import record
from dledger.remoting.codes import RequestError
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, BrokerConnections
from rocketstore.client.aio.errors import ClientError
from rocketstore.remoting.bodies.routes import BrokerData
from rocketstore.remoting.bodies.runtime import RuntimeInfo
from rocketstore.remoting.codes import RequestCode

WAIT_S: Final = 2.0
"""How long a route waits at most for brokers to identify themselves; later answers count for the next route."""
KNOWN_WAIT_S: Final = 0.2
"""The same if all have done so before, over other connections: a silent one was probably there."""
LEARNT_MAX: Final = 32
"""Addresses of other brokers that are asked for routes, besides those given."""


@record(frozen=True, slots=True)
class _Answer:
    """The answer at an address over one connection: the address that the broker there tells, or nothing."""

    told: str
    connection: int


class GroupAddresses:
    """On the loop of its first use."""

    def __init__(self, connections: BrokerConnections, given: Sequence[str]) -> None:
        self._connections = connections
        self._given = tuple(given)
        self._learnt: tuple[str, ...] = ()
        self._answers: dict[str, _Answer] = {}  # by given address
        self._asking: dict[str, asyncio.Task[None]] = {}  # by given address

    @property
    def known(self) -> tuple[str, ...]:
        """All addresses to ask for routes, those that were given first."""
        return tuple(dict.fromkeys((*self._given, *self._learnt)))

    async def reachable(self, brokers: Sequence[BrokerData]) -> tuple[BrokerData, ...]:
        """The brokers of a route at the addresses to use: the given one of each that answers at one, else its own.

        A broker alone in its group, as long as no other is known, is the one at the only given address.
        """
        told = dict.fromkeys(address for one in brokers for address in one.broker_addrs.values() if address)
        unknown = [one for one in told if one not in self._given]
        spare = [one for one in self._given if one not in told]
        found: Mapping[str, str] = {}
        if len(told) == len(self._given) == len(unknown) == 1 and not self._learnt:
            found = {unknown[0]: self._given[0]}
        elif unknown and spare:
            found = await self._found(spare, unknown)
        used = [found.get(one, one) for one in told]
        if len(told) > 1:  # one that knows only itself may have been cut off from its group
            self._learnt = tuple(sorted(used))[:LEARNT_MAX]
        return tuple(
            BrokerData(
                one.cluster,
                one.broker_name,
                {number: found.get(address, address) for number, address in one.broker_addrs.items()},
            )
            for one in brokers
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _found(self, spare: Sequence[str], unknown: Sequence[str]) -> dict[str, str]:
        """By the address that a broker tells, the given one at which it answers."""
        await self._ask(spare, unknown)
        said = {one: self._answers[one].told for one in spare if one in self._answers}
        found = {told: given for given, told in said.items() if told in unknown}
        mute = [given for given, told in said.items() if not told]
        return found | _by_port(mute, [one for one in unknown if one not in found])

    async def _ask(self, addresses: Sequence[str], unknown: Collection[str]) -> None:
        """Ask those that have not said yet who they are, until all that are ``unknown`` are found, or time is up."""
        loop = asyncio.get_running_loop()
        for address in addresses:
            if address not in self._asking and not self._is_known(address):
                self._asking[address] = loop.create_task(self._ask_one(address))
        until = loop.time() + (KNOWN_WAIT_S if all(one in self._answers for one in addresses) else WAIT_S)
        while asked := [self._asking[one] for one in addresses if one in self._asking]:
            found = {self._answers[one].told for one in addresses if one in self._answers and one not in self._asking}
            if found.issuperset(unknown) or loop.time() >= until:
                return
            await asyncio.wait(asked, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)

    def _is_known(self, address: str) -> bool:
        known = self._answers.get(address)
        return known is not None and known.connection == self._connections.connection_number(address)

    async def _ask_one(self, address: str) -> None:
        try:
            code = RequestCode.GET_BROKER_RUNTIME_INFO
            answer = await self._connections.ask(address, code, timeout_s=ATTEMPT_S_MAX)
            info = RuntimeInfo.decode(answer.body)
            told = dict(info.members).get(info.node, "")
            self._answers[address] = _Answer(told, self._connections.connection_number(address))
        except (ClientError, RequestError):  # the broker that was there before may be there again
            pass
        finally:
            del self._asking[address]


def _by_port(given: Collection[str], told: Collection[str]) -> dict[str, str]:
    """By each address told, the given one with the same port, if no two have the same."""
    by_port = {one.rpartition(":")[2]: one for one in given}
    needed = {one.rpartition(":")[2] for one in told}
    if len(by_port) < len(given) or len(needed) < len(told):
        return {}
    return {one: by_port[port] for one in told if (port := one.rpartition(":")[2]) in by_port}
