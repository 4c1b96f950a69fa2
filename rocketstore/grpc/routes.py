"""QueryRoute: the queues of a topic, and where a client shall make its calls.

Clients that ask at one group reach the queues of others directly: their routes name those groups' own addresses, as the
name servers say. Left out are brokers that serve no clients over gRPC, such as RocketMQ's own.

A route names the addresses that the client asked at. One that leads to a member that is down is left out, so that a
client whose connection was lost opens its stream of commands at another one; if all are down, none is left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from dledger.access.addresses import parse_address as parse_ip
from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.codes import AnswerCode, FrameError, RequestError
from dledger.remoting.connection import DisconnectedError, RemotingConnection, TooManyCallsError
from dledger.remoting.frame import Frame
from dledger.values import address_text, parse_address
from rocketstore.broker.broker import Broker
from rocketstore.broker.topics import SeenTopic
from rocketstore.broker_config import PERMISSION_READ, PERMISSION_WRITE
from rocketstore.grpc.calls import OK, GatewayCall, RejectedError, name_of
from rocketstore.message.checks import check_client_topic
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.remoting.codes import MemberCode, RequestCode
from rocketstore.remoting.headers import RouteHeader, write_header
from rocketstore.remoting.topics import TopicRouteData
from rocketstore.types import MessageType

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


MASTER_ID: Final = 0
"""Clients send to brokers of this number only; whichever member they reach passes on what is the leader's."""
ALL_TYPES: Final = (pb.NORMAL, pb.FIFO, pb.DELAY, pb.TRANSACTION, pb.PRIORITY)
_TYPES: Final = {
    MessageType.NORMAL: (pb.NORMAL,),
    MessageType.FIFO: (pb.FIFO,),
    MessageType.DELAY: (pb.DELAY,),
    MessageType.TRANSACTION: (pb.TRANSACTION,),
    MessageType.PRIORITY: (pb.PRIORITY,),
}
ADDRESSES_MAX: Final = 64
"""Of one access point."""
HOST_CHARS_MAX: Final = 255
"""A route names its hosts once for each queue."""


class RouteCalls:
    """On the loop."""

    def __init__(self, broker: Broker, points: AccessPoints, others: OtherGroups | None = None) -> None:
        self._broker = broker
        self._points = points
        self._others = others

    async def query(self, _: GatewayCall, request: pbs.QueryRouteRequest) -> pbs.QueryRouteResponse:
        """QueryRoute. A topic that a send would create has the route that it would have then."""
        answer = pbs.QueryRouteResponse(status=OK)
        for topic, broker in await self.places(name_of(request.topic), request.endpoints):
            answer.message_queues.extend(self.queues(topic, broker))
        return answer

    async def places(self, name: str, endpoints: pb.Endpoints) -> list[tuple[SeenTopic, pb.Broker]]:
        """Where a topic is: here, and at other groups. Raises ``RejectedError``, ``Refusal``."""
        others = () if self._others is None or check_client_topic(name) else await self._others.places(name)
        found: list[tuple[SeenTopic, pb.Broker]] = [
            (one.topic, pb.Broker(name=one.broker, id=MASTER_ID, endpoints=endpoints_of(one.addresses)))
            for one in others
        ]
        if not others or self._broker.topics.seen(name) is not None:
            found.insert(0, (self.topic(name), self.broker(endpoints)))
        return found

    def topic(self, name: str) -> SeenTopic:
        """A topic as clients see it. Raises ``RejectedError``, ``Refusal``.

        Only the leader knows that there is none; elsewhere the call is passed on to it.
        """
        if problem := check_client_topic(name):
            raise RejectedError(pb.ILLEGAL_TOPIC, problem)
        topics, config = self._broker.topics, self._broker.config
        found = topics.seen(name)
        if found is not None:
            return found
        if not config.auto_create_topic_enable or not self._broker.mastership.is_master:
            self._broker.mastership.require_caught_up()
            raise RejectedError(pb.TOPIC_NOT_FOUND, f"topic {name} does not exist: create it first")
        queues = config.default_topic_queue_nums
        return SeenTopic(name, queues, queues, config.broker_permission)

    def broker(self, endpoints: pb.Endpoints) -> pb.Broker:
        """This broker, which is all members of its group, for a client that knows it by these addresses."""
        return pb.Broker(name=self._broker.config.name, id=MASTER_ID, endpoints=self._points.of(endpoints))

    def queues(self, topic: SeenTopic, broker: pb.Broker) -> list[pb.MessageQueue]:
        return [self.queue(topic, queue_id, broker) for queue_id in range(max(topic.read_queues, topic.write_queues))]

    def queue(self, topic: SeenTopic, queue_id: int, broker: pb.Broker) -> pb.MessageQueue:
        """One queue; -1 stands for any."""
        reads = bool(topic.permission & PERMISSION_READ) and queue_id < topic.read_queues
        writes = bool(topic.permission & PERMISSION_WRITE) and queue_id < topic.write_queues
        permission = {
            (True, True): pb.READ_WRITE,
            (True, False): pb.READ,
            (False, True): pb.WRITE,
            (False, False): pb.NONE,
        }[reads, writes]
        return pb.MessageQueue(
            topic=pb.Resource(name=topic.name),
            id=queue_id,
            permission=permission,
            broker=broker,
            accept_message_types=_TYPES.get(topic.message_type, ALL_TYPES),
        )


class AccessPoints:
    """The addresses in routes: the client's own access point, in its order, as a client names a connection by them.

    On the loop. ``members``: the addresses for gRPC of members that serve; ``down``: of those that do not.
    """

    def __init__(self, members: Callable[[], Mapping[str, str]], down: Callable[[], frozenset[str]]) -> None:
        self._members = members
        self._down = down

    def of(self, given: pb.Endpoints) -> pb.Endpoints:
        """Where a client shall make its calls: at its own addresses, without members that are down; without any
        address of its own, at all members. Any member serves any call, and the order does not change with the leader:
        each change costs a client its connections. Raises ``RejectedError``.
        """
        if not given.addresses:
            return endpoints_of(sorted(self._members().values()))
        addresses = given.addresses[:ADDRESSES_MAX]
        if any(len(one.host) > HOST_CHARS_MAX for one in addresses):
            why = f"a host in the request's endpoints has more than {HOST_CHARS_MAX} characters"
            raise RejectedError(pb.ILLEGAL_ACCESS_POINT, why)
        down = self._down()
        kept = [one for one in addresses if address_text(one.host, one.port) not in down]
        return pb.Endpoints(scheme=given.scheme, addresses=kept or addresses)


def endpoints_of(addresses: Iterable[str]) -> pb.Endpoints:
    """These addresses (``host:port``); of names only the first, because some clients take one name and no more."""
    places = [parse_address(one) for one in addresses][:ADDRESSES_MAX]
    found = pb.Endpoints(scheme=pb.IPv4 if not places else scheme_of(places[0][0]))
    alike = [(host, port) for host, port in places if scheme_of(host) == found.scheme]
    for host, port in alike[:1] if found.scheme == pb.DOMAIN_NAME else alike:
        found.addresses.add(host=host, port=port)
    return found


def scheme_of(host: str) -> pb.AddressScheme:
    """Whether it is an address of version 4 or 6, or a name."""
    try:
        return pb.IPv4 if parse_ip(host).version == 4 else pb.IPv6
    except ValueError:
        return pb.DOMAIN_NAME


_log = logging.getLogger(__name__)
ASK_INTERVAL_S: Final = 2.0
_MEMBER_ANSWER_S_MAX: Final = 1.5
SILENT_S_MAX: Final = 10.0
"""A member that has not answered for this long is down."""


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
            async with asyncio.timeout(_MEMBER_ANSWER_S_MAX):
                connection = await self._client.connection(address, _MEMBER_ANSWER_S_MAX)
                answer = await connection.call(Frame(MemberCode.GATEWAY_WHERE, 0), _MEMBER_ANSWER_S_MAX)
        except (UnreachableError, DisconnectedError, TooManyCallsError, FrameError, TimeoutError):
            return
        where = answer.fields.get(ADDRESS, "")
        if answer.code != AnswerCode.SUCCESS or not where:
            return
        port = parse_address(where)[1]
        forms = frozenset({where, address_text(connection.place.host, port)})
        self._seen[node] = _Seen(where, forms, self._now())
