"""Tells the name servers about this broker: at the start, every half a minute, and at once when something changes.

A master registers as broker id 0 only once it takes writes, and with the Raft term in which it does: a name server of
ours then knows a deposed one from its successor. RocketMQ's own ignores the term.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from rocketstore.broker.parts import BrokerParts
from rocketstore.broker.remoting.topic_table import TopicTable
from rocketstore.remoting.bodies.routes import ClusterInfo
from rocketstore.remoting.bodies.topics import RegisterBrokerBody, body_crc32
from rocketstore.remoting.client import RemotingClient, UnreachableError
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.connection import DisconnectedError, TooManyCallsError
from rocketstore.remoting.errors import RequestError
from rocketstore.remoting.frame import Frame
from rocketstore.remoting.headers import BrokerHeader, RegisterBrokerHeader, write_header
from rocketstore.types import BrokerRole

_LOG: Final = logging.getLogger("rocketstore")
TERM_FIELD: Final = "dledgerTerm"
"""Ours, in REGISTER_BROKER: the Raft term in which the broker has its id."""
FAILURES: Final = (UnreachableError, DisconnectedError, TooManyCallsError, TimeoutError, RequestError)
ANNOUNCE_S_MAX: Final = 1.0
"""How long who changed a topic waits for the name servers."""
UNREGISTER_TIMEOUT_S: Final = 2.0
TOPICS_INTERVAL_S: Final = 1.0
"""How often it is looked whether a topic has changed."""
RETRY_S: Final = 1.0
"""After a registration that failed somewhere."""
MASTER_ID: Final = 0
HA_PORT_OFFSET: Final = 1
"""From ``listenPort`` to the port of classic replication."""


class NameServerRegistration:
    """On the loop. ``wake`` when the role, the topics or their permissions change."""

    def __init__(self, parts: BrokerParts, client: RemotingClient, address: str, ha_address: str) -> None:
        config = parts.config
        self._parts = parts
        self._client = client
        self._address = address
        self._ha_address = ha_address
        self._name_servers = config.name_servers
        self._wanted = asyncio.Event()
        self._announced: list[asyncio.Future[None]] = []  # wait for a round that begins after they did
        self._topics = TopicTable(parts)
        self._reached: dict[str, str] = {}  # name server to the last failure, empty if there was none
        self._topic_changes = -1
        self._rounds: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, if there are name servers."""
        if self._name_servers and self._rounds is None:
            self._parts.topics.news.listen(self.wake)
            self._rounds = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """Register at once."""
        self._wanted.set()

    async def announce(self) -> None:
        """Register at once. Returns when all name servers have been told, or have failed, or after a second."""
        if self._rounds is None:
            return
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._announced.append(told)
        self.wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_S_MAX):
                await told

    async def close(self) -> None:
        """Take this broker's address back from the name servers that have it in its place, and end. Idempotent."""
        rounds, self._rounds = self._rounds, None
        if rounds is None:
            return
        rounds.cancel()
        await asyncio.gather(rounds, return_exceptions=True)
        await asyncio.gather(*(self._unregister(one) for one in self._name_servers))

    def failures(self) -> dict[str, str]:
        """Name servers that could not be told, and why."""
        return {address: reason for address, reason in self._reached.items() if reason}

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        config = self._parts.config
        while True:
            self._wanted.clear()
            waiting, self._announced = self._announced, []
            try:
                all_well = await self._register()
            finally:
                for told in waiting:
                    if not told.done():  # else nobody waits any more
                        told.set_result(None)
            with suppress(TimeoutError):
                async with asyncio.timeout(config.register_name_server_period / 1000 if all_well else RETRY_S):
                    await self._changed()

    async def _changed(self) -> None:
        """Return once somebody wants it, or a topic has changed."""
        state, known = self._parts.state, self._topic_changes
        while state.topic_changes == known and not self._wanted.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(TOPICS_INTERVAL_S):
                    await self._wanted.wait()

    async def _register(self) -> bool:
        request = self._request()
        done = await asyncio.gather(*(self._tell(one, request) for one in self._name_servers))
        return all(done)

    def _request(self) -> Frame:
        config, view, store = self._parts.config, self._parts.view(), self._parts.store
        self._topic_changes = self._parts.state.topic_changes
        body = RegisterBrokerBody(self._topics.now()).encode()
        header = RegisterBrokerHeader(
            config.name,
            self._address,
            config.cluster_name,
            self._ha_address,
            config.slave_id if store.role is BrokerRole.SLAVE else MASTER_ID,
            body_crc32=body_crc32(body),
        )
        fields = write_header(header)
        if store.log.is_replicated:
            fields[TERM_FIELD] = str(view.term)
        return Frame(RequestCode.REGISTER_BROKER, 0, fields, body)

    async def _tell(self, name_server: str, request: Frame) -> bool:
        """Register at one. Whether it knows now."""
        timeout_s = self._parts.config.register_broker_timeout_mills / 1000
        try:
            answer = await self._client.call(name_server, request, timeout_s)
            if answer.code:
                raise RequestError(f"it answered {answer.code}: {answer.remark}")
            failure = ""
        except FAILURES as error:
            failure = str(error) or f"no answer within {timeout_s:g} s"
        before = self._reached.get(name_server)
        if failure and failure != before:
            _LOG.warning("cannot register with the name server %s: %s", name_server, failure)
        elif not failure and before != "":
            _LOG.info("registered with the name server %s", name_server)
        self._reached[name_server] = failure
        return not failure

    async def _unregister(self, name_server: str) -> None:
        """Not by id alone: RocketMQ's name servers remove whatever address has the id, also the next master's."""
        config = self._parts.config
        try:
            asked = Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0)
            answer = await self._client.call(name_server, asked, UNREGISTER_TIMEOUT_S)
            if answer.code:
                return
            known = ClusterInfo.decode(answer.body).broker_addr_table.get(config.name)
            for place in () if known is None else _places_of(self._address, known.broker_addrs):
                header = BrokerHeader(config.name, self._address, config.cluster_name, place)
                leaving = Frame(RequestCode.UNREGISTER_BROKER, 0, write_header(header))
                await self._client.call(name_server, leaving, UNREGISTER_TIMEOUT_S)
        except FAILURES as error:
            _LOG.info("cannot unregister from the name server %s, it forgets us in 2 minutes: %s", name_server, error)


def _places_of(address: str, places: Mapping[int, str]) -> list[int]:
    """Broker ids under which an address is registered."""
    return [place for place, one in places.items() if one == address]
