"""Which members serve clients over gRPC, where, and which have not answered for a while.

A route names the addresses that the client asked at. One that leads to a member that is down is left out, so that a
client whose connection was lost opens its stream of commands at another one; if all are down, none is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import AnswerCode, FrameError
from dledger.remoting.connection import DisconnectedError, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import Frame
from dledger.values import address_text, parse_address
from rocketstore.broker.broker import Broker
from rocketstore.remoting.codes import MemberCode

_log = logging.getLogger(__name__)
ASK_INTERVAL_S: Final = 2.0
ASK_S_MAX: Final = 1.5
SILENT_S_MAX: Final = 10.0
"""A member that has not answered for this long is down."""
ADDRESS: Final = "grpcAddress"


class _Seen(NamedTuple):
    """A member that has answered once: where it serves, by its name and by its IP address, and when it last did."""

    address: str
    all_addresses: frozenset[str]
    at: float


class Presence:
    """On the loop."""

    def __init__(self, broker: Broker, client: RemotingClient) -> None:
        self._broker = broker
        self._client = client
        self._seen: dict[str, _Seen] = {}  # by node id
        self._task: asyncio.Task[None] | None = None
        self._now = asyncio.get_running_loop().time
        self.own_address: Callable[[], str] = str
        """Where this member serves clients over gRPC; empty: nowhere."""

    def start(self) -> None:
        """Ask the members of a group from now on."""
        if self._broker.store.log.is_replicated:
            self._task = asyncio.get_running_loop().create_task(self._ask_for_ever())

    async def close(self) -> None:
        """Ask nobody any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def serving(self) -> dict[str, str]:
        """The addresses of members that serve, by node id."""
        now = self._now()
        found = {node: one.address for node, one in self._seen.items() if not self._is_silent(node, one, now)}
        own = self.own_address()
        return found | ({self._broker.config.node_id: own} if own else {})

    def down(self) -> frozenset[str]:
        """The addresses of members that do not serve any more, in every form."""
        now = self._now()
        silent = [one.all_addresses for node, one in self._seen.items() if self._is_silent(node, one, now)]
        return frozenset[str]().union(*silent) - {self.own_address()}

    def _is_silent(self, node: str, one: _Seen, now: float) -> bool:
        return now - one.at > SILENT_S_MAX or node not in self._broker.mastership.view().members

    async def answer(self, _: RemotingConnection, frame: Frame) -> Frame:
        """GATEWAY_WHERE: another member asks."""
        return frame.answer(fields={ADDRESS: self.own_address()})

    async def _ask_for_ever(self) -> None:
        while True:
            try:
                await self._ask_all()
            except Exception:  # noqa: BLE001  # what was known stays; without this task it would never change again
                _log.exception("the group's members cannot be asked where they serve RocketMQ 5's clients; retrying")
            await asyncio.sleep(ASK_INTERVAL_S)

    async def _ask_all(self) -> None:
        members, own = self._broker.mastership.view().members, self._broker.config.node_id
        others = {node: address for node, address in members.items() if address and node != own}
        await asyncio.gather(*(self._ask(node, address) for node, address in others.items()))

    async def _ask(self, node: str, address: str) -> None:
        try:
            async with asyncio.timeout(ASK_S_MAX):
                connection = await self._client.connection(address, ASK_S_MAX)
                answer = await connection.call(Frame(MemberCode.GATEWAY_WHERE, 0), ASK_S_MAX)
        except (UnreachableError, DisconnectedError, TooManyCallsError, FrameError, TimeoutError):
            return
        where = answer.fields.get(ADDRESS, "")
        if answer.code != AnswerCode.SUCCESS or not where:
            return
        port = parse_address(where)[1]
        forms = frozenset({where, address_text(connection.place.host, port)})
        self._seen[node] = _Seen(where, forms, self._now())
