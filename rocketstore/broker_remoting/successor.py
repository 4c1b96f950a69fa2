"""An old master that comes back asks whether it has a successor, before it takes messages and then every half minute.

The name servers say who is registered as master of its name, and that broker says how often the log has changed its
master. RocketMQ's old master takes the route over by registering, and messages sent to it from then on are in no other
log. One that cannot find out serves: a master must start without its name servers. So does one that hears of a
successor which does not prove that it has this log (``rocketstore.ha.proof``): anybody may register under its name.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Final, Protocol

from dledger.errors import CorruptLogError, DiskError
from dledger.remoting.client import RemotingClient
from dledger.remoting.codes import FrameError
from dledger.remoting.frame import Frame
from dledger.rpc.loops import Report, supervise
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting.registration import FAILURES
from rocketstore.ha.proof import PROOF, PROVE, ReadableLog, challenge, is_empty, possible_ends
from rocketstore.remoting.bodies.ha import HaFacts
from rocketstore.remoting.bodies.routes import MASTER_ID, ClusterInfo, KVTable
from rocketstore.remoting.bodies.runtime import RuntimeInfo
from rocketstore.remoting.codes import RequestCode

_LOG: Final = logging.getLogger("rocketstore")
TIMEOUT_S: Final = 1.0
PROOF_TIMEOUT_S: Final = 5.0
"""For all questions about the log together."""
INTERVAL_S: Final = 30.0


class WatchedMaster(Protocol):
    """This broker, as far as it may have a successor: see ``ha.service``."""

    @property
    def epoch(self) -> int:
        """How often its log has changed its master; 0 before it has begun."""

    @property
    def log(self) -> ReadableLog:
        """The log that a successor must have."""

    def superseded(self, why: str) -> None:
        """There is one."""

    def suspected(self, why: str) -> None:
        """Some broker says that it is one, and does not prove it."""


class SuccessorWatch:
    """On the loop of the broker's clients, until ``close``."""

    def __init__(
        self,
        config: BrokerConfig,
        address: Callable[[], str],
        master: WatchedMaster,
        to_brokers: RemotingClient,
        to_name_servers: RemotingClient,
    ) -> None:
        """``address``: this broker's. The clients are closed with it."""
        self._config = config
        self._address = address
        self._master = master
        self._to_brokers = to_brokers
        self._to_name_servers = to_name_servers
        self._task: asyncio.Task[None] | None = None
        self._told = ""
        self.found = False
        """Whether there is one. It stays so: messages that this broker took before are not in its log."""

    def start(self, report: Report) -> None:
        """Look regularly; ``report`` is told if that ends by itself."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        supervise(self._task, report)

    async def close(self) -> None:
        """End. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._to_brokers.close()
        await self._to_name_servers.close()

    async def look(self) -> None:
        """Ask all name servers, at the same time."""
        await asyncio.gather(*(self._look_at(one) for one in self._config.name_servers))

    async def _run(self) -> None:
        while not self.found:
            await asyncio.sleep(INTERVAL_S)
            await self.look()
        await asyncio.get_running_loop().create_future()

    async def _look_at(self, name_server: str) -> None:
        try:
            asked = Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0)
            answer = await self._to_name_servers.call(name_server, asked, TIMEOUT_S)
            known = None if answer.code else ClusterInfo.decode(answer.body).broker_addr_table.get(self._config.name)
            master = "" if known is None else known.broker_addrs.get(MASTER_ID, "")
            if not master or master == self._address():
                return
            asked = Frame(RequestCode.GET_BROKER_RUNTIME_INFO, 0)
            answer = await self._to_brokers.call(master, asked, TIMEOUT_S)
            facts = None if answer.code else RuntimeInfo.decode(answer.body).ha
            epoch = max(1, self._master.epoch)  # it begins with 1
            if facts is None or facts.is_slave or facts.epoch <= epoch:
                return
            proves = await self._proves(master, facts)
        except (*FAILURES, FrameError, CorruptLogError, DiskError) as error:
            _LOG.info("cannot find out by %s whether there is a later master: %s", name_server, error)
            return
        says = f"{master} has been promoted meanwhile (epoch {facts.epoch}, here {epoch})"
        if proves:
            self.found = True
            self._master.superseded(
                f"{says}. Stop this broker, look at what only it holds, and start it as slave (brokerRole=SLAVE)"
            )
        else:
            told = f"{says}, as it says, but does not prove that it has this broker's log: find out who registered it"
            if told != self._told:
                self._told = told
                _LOG.warning("%s", told)
            self._master.suspected(told)

    async def _proves(self, master: str, facts: HaFacts) -> bool:
        """Whether that broker has a block of this log from before it took over. An empty log has nothing to lose."""
        log = self._master.log
        if is_empty(log):
            return True
        async with asyncio.timeout(PROOF_TIMEOUT_S):
            for end in possible_ends(log, facts.begin):
                wanted = await asyncio.to_thread(challenge, log, end)
                if wanted is None:
                    continue
                asked = Frame(RequestCode.GET_BROKER_RUNTIME_INFO, 0, {PROVE: wanted.text})
                answer = await self._to_brokers.call(master, asked, TIMEOUT_S)
                said = "" if answer.code else KVTable.decode(answer.body).table.get(PROOF, "")
                if hmac.compare_digest(said.encode(), wanted.digest.encode()):
                    return True
        return False
