"""Heartbeats: how brokers know this client, so that they can ask it about transactions or tell it about its group.

RocketMQ's clients send one every 30 s to each broker; a broker forgets a client that is silent for two minutes, or
whose connection has ended. So a broker also gets one as soon as it becomes known or its connection was lost. Brokers
are looked up as often, as RocketMQ's clients look up routes (``pollNameServerInterval``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.connections import ATTEMPT_S_MAX
from rocketstore.client.aio.errors import ClientError, RefusedError
from rocketstore.remoting.bodies.clients import HeartbeatData
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import UnregisterClientHeader

_log = logging.getLogger(__name__)
INTERVAL_S: Final = 30.0
"""RocketMQ's ``heartbeatBrokerInterval``."""
LOOK_S: Final = 1.0
"""How often it is checked whether there are brokers that have not had one."""
LEAVE_S_MAX: Final = 1.0
"""How long one broker may take to note that this client leaves."""


class Heartbeats:
    """Sends ``make()`` to the master of every known broker, and with ``to_copies`` to the others, too.

    ``make`` returns the groups that this client belongs to now. Use it on the cluster's loop.
    """

    def __init__(self, cluster: Cluster, make: Callable[[], HeartbeatData], *, to_copies: bool = False) -> None:
        self._cluster = cluster
        self._make = make
        self._to_copies = to_copies
        self._sent_at: dict[str, float] = {}
        self._errors: dict[str, ClientError] = {}
        self._task: asyncio.Task[None] | None = None
        self._changes = 0  # of groups, and lost connections: a heartbeat from before one does not count
        self._wanted = asyncio.Event()
        self._turn = asyncio.Lock()
        self._looked_at = float("-inf")

    @property
    def known_at(self) -> frozenset[str]:
        """The addresses of the brokers that know this client."""
        return frozenset(self._sent_at)

    def error(self, address: str) -> ClientError | None:
        """Why a broker does not know this client, if it refused to."""
        return self._errors.get(address)

    def start(self) -> None:
        """Begin. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="rocketmq-heartbeats")

    def lost(self, address: str) -> None:
        """The connection to a broker has ended, and with it what it knew of this client."""
        self._sent_at.pop(address, None)
        self._changes += 1
        self._wanted.set()

    def soon(self) -> None:
        """Tell all brokers: the groups of this client have changed."""
        self._sent_at.clear()
        self._changes += 1
        self._wanted.set()

    async def send_now(self) -> None:
        """Tell every broker that has not heard of this client for a while; returns once all have answered."""
        async with self._turn:
            now = asyncio.get_running_loop().time()
            addresses = self._addresses()
            for gone in self._sent_at.keys() - addresses:
                del self._sent_at[gone]
            due = [one for one in addresses if now - self._sent_at.get(one, float("-inf")) >= INTERVAL_S]
            if due:
                body = self._make().encode()
                await asyncio.gather(*(self._send(one, body) for one in due))

    async def stop(self) -> None:
        """End, and tell the brokers that know this client that it leaves its groups. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        data = self._make()
        left = [UnregisterClientHeader(data.client_id, one.group_name) for one in data.producer_data_set]
        left += [UnregisterClientHeader(data.client_id, "", one.group_name) for one in data.consumer_data_set]
        await asyncio.gather(*(self._leave(address, one) for address in self._sent_at for one in left))
        self._sent_at.clear()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _addresses(self) -> set[str]:
        brokers = self._cluster.routes.brokers
        if self._to_copies:
            return {address for one in brokers for address in one.readable}
        return {one.master for one in brokers if one.master}

    async def _run(self) -> None:
        while True:
            self._wanted.clear()
            try:
                await self._look_for_masters()
                await self.send_now()
            except Exception:  # noqa: BLE001  # without this task brokers would forget this client
                _log.exception("heartbeats cannot be sent; retrying")
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(LOOK_S / 20)  # a broker that hangs up again and again

    async def _look_for_masters(self) -> None:
        """A client that asks for nothing would not hear of another master, which does not know it."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= INTERVAL_S:
            with suppress(ClientError):  # nobody answers: again soon
                await self._cluster.routes.find_brokers()
                self._looked_at = now

    async def _send(self, address: str, body: bytes) -> None:
        sent_at, changes = asyncio.get_running_loop().time(), self._changes
        try:
            await self._cluster.connections.ask(address, RequestCode.HEART_BEAT, None, body, timeout_s=ATTEMPT_S_MAX)
        except ClientError as error:
            if isinstance(error, RefusedError) and str(error) != str(self._errors.get(address)):
                _log.warning("a broker refuses this client's heartbeat: %s", error)
            self._errors[address] = error
        else:
            self._errors.pop(address, None)
            if changes == self._changes:
                self._sent_at[address] = sent_at

    async def _leave(self, address: str, header: UnregisterClientHeader) -> None:
        try:
            await self._cluster.connections.ask(address, RequestCode.UNREGISTER_CLIENT, header, timeout_s=LEAVE_S_MAX)
        except ClientError as error:
            _log.info("%s was not told that this client leaves: %s", address, error)
