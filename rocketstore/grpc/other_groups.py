"""The queues that a topic has at other brokers, as the name servers say, for clients that may use those, too.

Clients that ask at one group reach the queues of others directly: their routes name those groups' own addresses. Left
out are brokers that serve no clients over gRPC, such as RocketMQ's own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import AnswerCode, FrameError, RequestError
from dledger.remoting.connection import DisconnectedError, TooManyCallsError
from dledger.remoting.frame import Frame
from rocketstore.broker.topics import SeenTopic
from rocketstore.remoting.bodies.routes import TopicRouteData
from rocketstore.remoting.codes import MemberCode, RequestCode
from rocketstore.remoting.headers import RouteHeader, write_header

KEPT_S: Final = 10.0
"""How long a route is good for; clients ask every 30 s."""
ASK_S_MAX: Final = 1.0
"""How long a name server, or a broker, may take: a route without it is better than none."""
TOPICS_MAX: Final = 4096
BROKERS_MAX: Final = 64
"""Of one topic's route."""
ADDRESS: Final = "grpcAddress"
_FAILURES: Final = (UnreachableError, DisconnectedError, TooManyCallsError, FrameError, TimeoutError)


class OtherPlace(NamedTuple):
    """A topic at another broker, and where that serves clients over gRPC."""

    topic: SeenTopic
    broker: str
    addresses: tuple[str, ...]


class OtherGroups:
    """On the loop."""

    def __init__(
        self, own_name: str, name_servers: Sequence[str], to_name_servers: RemotingClient, to_brokers: RemotingClient
    ) -> None:
        self._own_name = own_name
        self._name_servers = name_servers
        self._to_name_servers = to_name_servers
        self._to_brokers = to_brokers
        self._routes: OrderedDict[str, tuple[float, asyncio.Task[tuple[OtherPlace, ...]]]] = OrderedDict()
        self._where: dict[str, tuple[float, str]] = {}  # by a broker's address

    async def close(self) -> None:
        """Ask nobody any more."""
        tasks = [task for _, task in self._routes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def places(self, topic: str) -> tuple[OtherPlace, ...]:
        """Where else the topic is, as far as that can be found out soon."""
        if not self._name_servers:
            return ()
        loop = asyncio.get_running_loop()
        known = self._routes.get(topic)
        if known is None or (known[0] < loop.time() - KEPT_S and known[1].done()):
            self._routes.pop(topic, None)
            if len(self._routes) >= TOPICS_MAX:
                _, (_, oldest) = self._routes.popitem(last=False)
                oldest.cancel()
            known = self._routes[topic] = loop.time(), loop.create_task(self._ask(topic))
        try:
            return await asyncio.shield(known[1])
        except asyncio.CancelledError:
            if known[1].cancelled():  # it was pushed out by many other topics
                return ()
            raise

    async def _ask(self, topic: str) -> tuple[OtherPlace, ...]:
        route = await self._route(topic)
        if route is None:
            return ()
        addresses = {one.broker_name: one.broker_addrs for one in route.broker_datas[:BROKERS_MAX]}
        found: list[OtherPlace] = []
        for one in route.queue_datas[:BROKERS_MAX]:
            if one.broker_name == self._own_name or one.broker_name not in addresses:
                continue
            where = await self._addresses(addresses[one.broker_name])
            if where:
                seen = SeenTopic(topic, one.read_queue_nums, one.write_queue_nums, one.perm)
                found.append(OtherPlace(seen, one.broker_name, where))
        return tuple(found)

    async def _route(self, topic: str) -> TopicRouteData | None:
        """Of the first name server that answers; None: none does, or knows the topic."""
        request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, 0, write_header(RouteHeader(topic)))
        for address in self._name_servers:
            try:
                answer = await self._to_name_servers.call(address, request, ASK_S_MAX)
                return TopicRouteData.decode(answer.body) if answer.code == AnswerCode.SUCCESS else None
            except (*_FAILURES, RequestError):
                continue
        return None

    async def _addresses(self, brokers: Mapping[int, str]) -> tuple[str, ...]:
        found = await asyncio.gather(*(self._address(one) for one in list(brokers.values())[:BROKERS_MAX]))
        return tuple(sorted(filter(None, found)))

    async def _address(self, broker: str) -> str:
        """Where one broker serves clients over gRPC; empty: nowhere, or it does not answer."""
        now = asyncio.get_running_loop().time()
        at, where = self._where.get(broker, (now - KEPT_S, ""))
        if at > now - KEPT_S:
            return where
        try:
            answer = await self._to_brokers.call(broker, Frame(MemberCode.GATEWAY_WHERE, 0), ASK_S_MAX)
            where = answer.fields.get(ADDRESS, "") if answer.code == AnswerCode.SUCCESS else ""
        except _FAILURES:
            where = ""
        if len(self._where) >= TOPICS_MAX:
            self._where.clear()
        self._where[broker] = now, where
        return where
