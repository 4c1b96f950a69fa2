"""The broker's remoting on a real port, over a store and a state in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from dledger.remoting.client import RemotingClient
from dledger.remoting.frame import Frame
from dledger.rpc.listening import stop_serving
from dledger.rpc.loops import LoopBridge
from rocketstore.broker_remoting.service import RemotingService
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker.harness import Harness
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN


class RemotingHarness(Harness):
    """``dial`` gives a connection."""

    member_host = "192.0.2.1"
    """Where the group's members are: no name, whose look-up may take seconds; and not where the clients are."""
    announced: list[list[str]]
    """The topics there were, each time that name servers were to be told."""

    async def _serve(self, bridge: LoopBridge) -> None:
        await super()._serve(bridge)
        self.broker.storage.transactions.start()
        self.announced = []
        here = f"{self.member_host}:1"
        self.view = replace(self.view, leader_address=here, members={"n0": here})
        self.client = RemotingClient()
        self.remoting = RemotingService(self.broker, self.client, self._announce)
        self._listening = await asyncio.get_running_loop().create_server(self.remoting.server.protocol, "127.0.0.1", 0)
        self.remoting_port = self._listening.sockets[0].getsockname()[1]

    async def _announce(self) -> None:
        self.announced.append(sorted(self.state.table))

    async def _end(self, grace_s: float | None) -> None:
        self.broker.stop_waiting()
        await stop_serving(self._listening)
        await self.remoting.close(grace_s or 0)
        await self.client.close()
        self.broker.storage.transactions.stop()
        await super()._end(grace_s)

    def dial(self, key: tuple[str, str] | None = None, host: str = "127.0.0.1") -> RemotingSocket:
        """A client at this address; with a key it signs what it asks."""
        client = RemotingSocket(self.remoting_port, host=host)
        client.key = key
        return client


def captured(client: RemotingSocket, name: str, **fields: object) -> Frame:
    """The answer to a captured request, with some of its fields changed."""
    frame = GOLDEN[name].frame
    return client.ask(frame.code, {**frame.fields, **fields}, frame.body)
