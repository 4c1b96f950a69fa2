"""The broker's remoting on a real port, over a store and a state in memory."""

from __future__ import annotations

import asyncio

from dledger.rpc.bridge import LoopBridge
from rocketstore.broker.remoting.service import RemotingService
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker.harness import Harness


class RemotingHarness(Harness):
    """``dial`` gives a connection."""

    async def _serve(self, bridge: LoopBridge) -> None:
        await super()._serve(bridge)
        self.remoting = RemotingService(self.service.parts)
        self._listening = await asyncio.get_running_loop().create_server(self.remoting.server.protocol, "127.0.0.1", 0)
        self.remoting_port = self._listening.sockets[0].getsockname()[1]

    async def _end(self, grace_s: float | None) -> None:
        self._listening.close()
        await self.remoting.close(grace_s or 0)
        await super()._end(grace_s)

    def dial(self) -> RemotingSocket:
        """A client."""
        return RemotingSocket(self.remoting_port)
