"""QueryRoute: the queues of a topic, and where a client shall make its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dledger.access.addresses import parse_address as parse_ip
from dledger.values import address_text, parse_address
from rocketstore.broker.broker import Broker
from rocketstore.broker.topics import SeenTopic
from rocketstore.broker_config import PERMISSION_READ, PERMISSION_WRITE
from rocketstore.grpc.calls import GatewayCall, name_of
from rocketstore.grpc.codes import OK, RejectedError
from rocketstore.grpc.other_groups import OtherGroups
from rocketstore.message.checks import check_client_topic
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.types import MessageType

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
