"""The gateway on a real port, over a store and a state in memory, and a client that speaks its protocol."""

from __future__ import annotations

import asyncio

from dledger.access.quota import Limits, Quotas
from dledger.remoting.client import RemotingClient
from dledger.rpc import options
from dledger.rpc.clients.connections import Connections
from dledger.rpc.clients.grpc_server import GrpcServer
from dledger.rpc.listening import stop_serving
from dledger.rpc.loops import LoopBridge
from rocketstore.broker.mastership import GroupView
from rocketstore.broker_remoting.service import RemotingService
from rocketstore.grpc.service import SERVICE, GatewayService
from rocketstore.pb.pool import POOL
from tests.support.gateway_client import (
    CommandsOfServer,
    GatewayClient,
    consumer_settings,
    endpoints,
    message,
    producer_settings,
)
from tests.unit.rocketstore.broker.harness import Harness

__all__ = [
    "CommandsOfServer",
    "GatewayClient",
    "GatewayHarness",
    "consumer_settings",
    "endpoints",
    "message",
    "producer_settings",
]


class GatewayHarness(Harness):
    """``dial`` gives a client."""

    member_host = "127.0.0.1"
    """Where the group's members are."""

    async def _serve(self, bridge: LoopBridge) -> None:
        self.view = GroupView("LEADER", 3, "n0", f"{self.member_host}:1", {"n0": f"{self.member_host}:1"})
        await super()._serve(bridge)
        self.broker.storage.transactions.start()
        limits = self.config.limits
        connections = Connections("test-connections", limits, share_percent=self.config.access.account_share_percent)
        bytes_max = options.request_bytes_for(self.config.store.max_message_size)
        server_options = options.server_options(limits, bytes_max, 1000)
        quotas = Quotas(Limits(1000, 1 << 20, 100), owner_percent=50)
        self.server = GrpcServer(connections, server_options, 1000, quotas, "streams_max")
        self.client = RemotingClient()
        self.gateway = GatewayService(self.broker, connections, self.client)
        calls = self.gateway.member_calls()
        self.remoting = RemotingService(self.broker, self.client, member_calls=calls)
        self._listening = await asyncio.get_running_loop().create_server(self.remoting.server.protocol, "127.0.0.1", 0)
        self.remoting_port = self._listening.sockets[0].getsockname()[1]
        self.server.add(SERVICE, self.gateway.grpc_methods(), POOL)
        await self.server.start("127.0.0.1", 0, None, describes_itself=True)

    async def _end(self, grace_s: float | None) -> None:
        self.broker.stop_waiting()
        await stop_serving(self._listening)
        await self.remoting.close(grace_s or 0)
        await self.server.stop(grace_s or 0)
        await self.gateway.close()
        await self.client.close()
        self.broker.storage.transactions.stop()
        await super()._end(grace_s)

    def dial(self, client_id: str = "client-1", **headers: str) -> GatewayClient:
        """A client with this id, and further metadata."""
        return GatewayClient(f"127.0.0.1:{self.server.port}", client_id, headers)
