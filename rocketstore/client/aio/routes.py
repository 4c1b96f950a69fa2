"""Where topics are: which brokers have queues of a topic, and which of them are masters now.

Routes come from name servers, or from the brokers of one group, by the same request. A route is used for 30 s; an old
one stays in use while nobody can be asked. At most one request per topic is in progress, which all callers share.

Name servers do not know each other, and a restarted one is empty for half a minute; a broker may be gone, or a deposed
master that does not know it yet. So the last one that answered is asked first, and the next one as well if it does not
answer within a fifth of a second, or does not know the topic (``RouteServers``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

from dledger.records import record
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, BrokerConnections, GroupAddresses
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerUnreachableError,
    ClientError,
    NotFoundError,
    RefusedError,
    RequestNotKnownError,
    refusal_of,
)
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import RouteHeader, write_header
from rocketstore.remoting.topics import (
    MASTER_ID,
    BrokerData,
    ClusterInfo,
    MessageQueue,
    QueueData,
    TopicList,
    TopicRouteData,
)

PERMISSION_READ: Final = 4
PERMISSION_WRITE: Final = 2
REFRESH_S: Final = 30.0
"""RocketMQ's ``pollNameServerInterval``: an older route is looked up again."""
SEARCH_S_MIN: Final = 0.025
"""The pause between the first two of several lookups of all brokers, which grows to half a second: after the end of a
master the others have a new one within a tenth of a second.
"""
UNKNOWN_REFRESH_S: Final = 0.5
"""How often a topic without a route, or a route in which something fails, is looked up."""
MISSING_S: Final = 30.0
"""How long brokers stay in a route that name servers no longer know: those that were restarted know them again once the
brokers have registered, RocketMQ's every 30 s. Otherwise keys would change their queues meanwhile.
"""
ROUTES_MAX: Final = 4096
"""Cached routes; the one looked up longest ago goes first."""
BROKERS_MAX: Final = 1024
"""Broker names that are remembered."""
QUEUES_MAX: Final = 65_536
"""Queues of a topic, at all brokers together: anybody may have registered any number."""


@record(frozen=True, slots=True)
class RoutedBroker:
    """The brokers of one name: a master and its copies."""

    cluster: str
    name: str
    addresses: Mapping[int, str]
    """By broker id; ``MASTER_ID`` is missing while there is no master."""

    @property
    def master(self) -> str:
        """The master's address, or empty."""
        return self.addresses.get(MASTER_ID, "")

    @property
    def readable(self) -> tuple[str, ...]:
        """All addresses, the master's first."""
        return tuple(dict.fromkeys(address for _, address in sorted(self.addresses.items())))


@record(frozen=True, slots=True)
class TopicQueues:
    """A topic's queues at the brokers of one name, and RocketMQ's permission bits (4 read, 2 write)."""

    broker: str
    read_queues: int
    write_queues: int
    permission: int

    @property
    def is_readable(self) -> bool:
        """Whether consumers may read from it."""
        return bool(self.permission & PERMISSION_READ) and self.read_queues > 0

    @property
    def is_writable(self) -> bool:
        """Whether producers may send to it."""
        return bool(self.permission & PERMISSION_WRITE) and self.write_queues > 0


@dataclass(frozen=True)
class TopicRoute:
    """Where a topic is: ``parts`` by the brokers' names."""

    topic: str
    parts: tuple[TopicQueues, ...]

    @cached_property
    def writable(self) -> tuple[MessageQueue, ...]:
        """The queues that can be written, by broker and number: the order in which a sharding key chooses."""
        return tuple(
            MessageQueue(self.topic, one.broker, queue)
            for one in self.parts
            if one.is_writable
            for queue in range(one.write_queues)
        )

    @cached_property
    def in_turn(self) -> tuple[MessageQueue, ...]:
        """The same, the brokers in alternation: the order in which messages without a key are spread."""
        return tuple(sorted(self.writable, key=lambda one: (one.queue_id, one.broker_name)))

    @cached_property
    def readable(self) -> tuple[MessageQueue, ...]:
        """The queues that can be read, by broker and number."""
        return tuple(
            MessageQueue(self.topic, one.broker, queue)
            for one in self.parts
            if one.is_readable
            for queue in range(one.read_queues)
        )


class RouteSource(Protocol):
    """Answers two of RocketMQ's requests. Both raise ``ClientError``."""

    async def route(self, topic: str) -> TopicRouteData | None:
        """GET_ROUTEINFO_BY_TOPIC; None for a topic that does not exist."""

    async def clusters(self) -> ClusterInfo:
        """GET_BROKER_CLUSTER_INFO."""

    def distrust(self) -> None:
        """Ask another server first next time: what the last one said does not work."""


@record(frozen=True, slots=True)
class _Known:
    route: TopicRoute | None
    asked_at: float
    until: float
    failure: ClientError | None = None
    missing: Mapping[str, float] | None = None
    """Brokers in the route that name servers do not know any more, and since when."""


class RouteCache:
    """Routes by topic, and brokers by name, as the latest answers had them."""

    def __init__(self, source: RouteSource) -> None:
        self._source = source
        self._known: dict[str, _Known] = {}
        self._asking: dict[str, asyncio.Task[_Known]] = {}
        self._brokers: dict[str, RoutedBroker] = {}
        self._asking_brokers: asyncio.Task[None] | None = None
        self._brokers_asked_at = float("-inf")
        self._brokers_pause_s = SEARCH_S_MIN
        self._brokers_found_at = float("-inf")

    # -- routes --------------------------------------------------------------------------------------------------------

    def at_once(self, topic: str) -> TopicRoute | None:
        """The route if it is cached and not too old. One that is gets looked up again meanwhile, and stays in use."""
        known = self._known.get(topic)
        if known is None or known.route is None:
            return None
        if _now() >= known.until:
            self._ask(topic)
        return known.route

    async def find(self, topic: str) -> TopicRoute | None:
        """The route; None if nobody knows the topic. Raises the lookup's error if nothing is cached."""
        route = self.at_once(topic)
        if route is not None:
            return route
        known = self._known.get(topic)
        if known is None or _now() >= known.until:
            known = await asyncio.shield(self._ask(topic))
        if known.failure is not None:
            raise known.failure
        return known.route

    async def refresh(self, topic: str) -> TopicRoute | None:
        """The route as it is now, looked up at most every half second. Raises as ``find``."""
        known = self._known.get(topic)
        if known is not None:
            pause_s = known.asked_at + UNKNOWN_REFRESH_S - _now()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
        known = await asyncio.shield(self._ask(topic))
        if known.route is None and known.failure is not None:
            raise known.failure
        return known.route

    def doubt(self, topic: str) -> None:
        """Look the route up soon: something in it does not work."""
        known = self._known.get(topic)
        if known is None or known.until <= known.asked_at + UNKNOWN_REFRESH_S:
            return
        self._source.distrust()
        until = known.asked_at + UNKNOWN_REFRESH_S
        self._known[topic] = _Known(known.route, known.asked_at, until, known.failure, known.missing)

    def now_exists(self, topic: str) -> None:
        """Look a topic up when it is next needed that nobody knew before: a message has created it."""
        known = self._known.get(topic)
        if known is not None and known.route is None:
            del self._known[topic]

    def missing(self, topic: str) -> frozenset[str]:
        """The names of brokers in the route that name servers do not know any more."""
        known = self._known.get(topic)
        return frozenset() if known is None or known.missing is None else frozenset(known.missing)

    # -- brokers -------------------------------------------------------------------------------------------------------

    def broker(self, name: str) -> RoutedBroker | None:
        """The brokers of a name, as far as some answer had them."""
        return self._brokers.get(name)

    @property
    def brokers(self) -> tuple[RoutedBroker, ...]:
        """All that some answer had, by name."""
        return tuple(one for _, one in sorted(self._brokers.items()))

    async def find_brokers(self) -> None:
        """Look up all brokers, unless that was done within the last half second. Raises ``ClientError``."""
        if _now() >= self._brokers_found_at + UNKNOWN_REFRESH_S:
            await self.refresh_brokers()

    async def refresh_brokers(self) -> None:
        """Look up all brokers; again and again, after growing pauses of up to half a second. Raises ``ClientError``."""
        if self._asking_brokers is None:
            self._asking_brokers = asyncio.get_running_loop().create_task(self._ask_brokers())
            self._asking_brokers.add_done_callback(self._asked_brokers)
        await asyncio.shield(self._asking_brokers)

    def close(self) -> None:
        """End lookups in progress. Idempotent."""
        for task in (*self._asking.values(), *([self._asking_brokers] if self._asking_brokers else [])):
            task.cancel()

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _ask_brokers(self) -> None:
        since_s = _now() - self._brokers_asked_at
        pause_s = min(self._brokers_pause_s, UNKNOWN_REFRESH_S) - since_s
        self._brokers_pause_s = SEARCH_S_MIN if since_s > 2 * UNKNOWN_REFRESH_S else 2 * self._brokers_pause_s
        if pause_s > 0:
            self._source.distrust()
            await asyncio.sleep(pause_s)
        self._brokers_asked_at = _now()
        info = await self._source.clusters()
        self._brokers_found_at = _now()
        self._learn(info.broker_addr_table.values())

    def _asked_brokers(self, task: asyncio.Task[None]) -> None:
        self._asking_brokers = None
        if not task.cancelled():
            task.exception()  # those who wait have it, if anybody does

    def _ask(self, topic: str) -> asyncio.Task[_Known]:
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._asking[topic] = asyncio.get_running_loop().create_task(
                self._look_up(topic, self._known.get(topic))
            )
            asking.add_done_callback(lambda _: self._asking.pop(topic, None))
        return asking

    async def _look_up(self, topic: str, before: _Known | None) -> _Known:
        asked_at = _now()
        known = await self._looked_up(topic, before, asked_at)
        self._known.pop(topic, None)
        self._known[topic] = known
        if len(self._known) > ROUTES_MAX:
            self._known.pop(next(iter(self._known)))
        return known

    async def _looked_up(self, topic: str, before: _Known | None, asked_at: float) -> _Known:
        route_before = None if before is None else before.route
        try:
            data = await self._source.route(topic)
        except ClientError as error:
            if route_before is not None:
                return _Known(route_before, asked_at, asked_at + UNKNOWN_REFRESH_S, error)
            return _Known(None, asked_at, asked_at + UNKNOWN_REFRESH_S, error)
        found = () if data is None else parts_of(data)
        if data is not None:
            self._learn(data.broker_datas)
        missing = _missing(found, before, asked_at)
        if data is None and not missing:
            return _Known(None, asked_at, asked_at + UNKNOWN_REFRESH_S)
        kept = () if route_before is None else (one for one in route_before.parts if one.broker in missing)
        parts = tuple(sorted((*found, *kept), key=lambda one: one.broker))
        route = TopicRoute(topic, parts)
        if route_before == route:
            route = route_before  # with its queues
        doubtful = missing or any(not self._has_master(one.broker) for one in parts)
        return _Known(route, asked_at, asked_at + (UNKNOWN_REFRESH_S if doubtful else REFRESH_S), missing=missing)

    def _has_master(self, name: str) -> bool:
        broker = self._brokers.get(name)
        return broker is not None and bool(broker.master)

    def _learn(self, brokers: Iterable[BrokerData]) -> None:
        for one in brokers:
            if one.broker_addrs:
                self._brokers.pop(one.broker_name, None)
                self._brokers[one.broker_name] = RoutedBroker(one.cluster, one.broker_name, dict(one.broker_addrs))
                if len(self._brokers) > BROKERS_MAX:
                    self._brokers.pop(next(iter(self._brokers)))


def _now() -> float:
    return asyncio.get_running_loop().time()


def parts_of(data: TopicRouteData) -> tuple[TopicQueues, ...]:
    """A topic's queues by broker, without brokers that have no address, or more queues than there can be."""
    addressed = {one.broker_name for one in data.broker_datas if one.broker_addrs}
    found = (
        TopicQueues(one.broker_name, one.read_queue_nums, one.write_queue_nums, one.perm)
        for one in _possible(data.queue_datas)
        if one.broker_name in addressed
    )
    return tuple(sorted({one.broker: one for one in found}.values(), key=lambda one: one.broker))


def _possible(queues: Sequence[QueueData]) -> Iterable[QueueData]:
    """Without those that have the most queues, if there are too many in all."""
    left = QUEUES_MAX
    for one in sorted(queues, key=lambda one: max(one.read_queue_nums, one.write_queue_nums)):
        count = max(one.read_queue_nums, one.write_queue_nums)
        if min(one.read_queue_nums, one.write_queue_nums) >= 0 and count <= left:
            left -= count
            yield one


def _missing(found: Sequence[TopicQueues], before: _Known | None, now: float) -> dict[str, float]:
    """The brokers of the route before that are not in this one, without those that have not been for too long."""
    if before is None or before.route is None:
        return {}
    here = {one.broker for one in found}
    since = dict(before.missing or {})
    gone = {one.broker: since.get(one.broker, now) for one in before.route.parts if one.broker not in here}
    return {name: at for name, at in gone.items() if now - at < MISSING_S}


def no_such_topic(topic: str, *, by_name_servers: bool) -> NotFoundError:
    """The error for a topic without a route."""
    who = "no name server has a route to it" if by_name_servers else "no broker of the group has it"
    return NotFoundError(
        f"topic {topic} does not exist: {who}; create it (dledger topic create, in Python Admin.put_topic), or check "
        "its name"
    )


HEDGE_S: Final = 0.2
"""How long a server may take before the next one is asked, too."""
_NO_ROUTES: Final = (
    "does not tell where its topics are, as Apache RocketMQ's brokers do not: give the addresses of name servers "
    "(--namesrv; in Python name_servers=…)"
)
_NO_BROKER: Final = (
    "is a node of a bare log (dledger serve), which has no topics: start brokers (dledger broker), or use what a "
    "log has (dledger append, dledger tail; in Python dledger.client)"
)
_NAME_SERVERS_REMARK: Final = "No topic route info in name server"
"""How RocketMQ's name servers, and ours, begin to say that they do not know a topic."""


class RouteServers:
    """``RouteSource`` over connections. ``are_name_servers``: otherwise brokers, which tell of their own group."""

    def __init__(
        self, connections: BrokerConnections, addresses: Sequence[str], *, are_name_servers: bool, timeout_s: float
    ) -> None:
        self._connections = connections
        self._given = tuple(addresses)
        self._are_name_servers = are_name_servers
        self._timeout_s = min(timeout_s, ATTEMPT_S_MAX)
        self._group = None if are_name_servers else GroupAddresses(connections, self._given)
        self._first = ""
        """The address that answered last."""

    async def route(self, topic: str) -> TopicRouteData | None:
        """GET_ROUTEINFO_BY_TOPIC; None for a topic that does not exist. Raises ``ClientError``."""
        request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, 0, write_header(RouteHeader(topic, True)))
        answer = await self._ask(request)
        if answer is None:
            return None
        try:
            data = TopicRouteData.decode(answer.body or b"{}")
        except RequestError as error:
            raise BadAnswerError(f"route of topic {topic}: {error}") from error
        return TopicRouteData(data.queue_datas, await self._reachable(data.broker_datas), {}, data.order_topic_conf)

    async def clusters(self) -> ClusterInfo:
        """GET_BROKER_CLUSTER_INFO. Raises ``ClientError``."""
        answer = await self._ask(Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 0))
        try:
            info = ClusterInfo.decode(answer.body if answer is not None and answer.body else b"{}")
        except RequestError as error:
            raise BadAnswerError(f"list of brokers: {error}") from error
        if not self._are_name_servers and not info.broker_addr_table:  # a broker knows itself
            raise _is_a_name_server(self._first)
        brokers = await self._reachable(tuple(info.broker_addr_table.values()))
        return ClusterInfo({one.broker_name: one for one in brokers}, info.cluster_addr_table)

    async def topics(self) -> tuple[str, ...]:
        """GET_ALL_TOPIC_LIST_FROM_NAMESERVER, of name servers: all names. Raises ``ClientError``."""
        answer = await self._ask(Frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, 0))
        try:
            return TopicList.decode(answer.body if answer is not None and answer.body else b"{}").topic_list
        except RequestError as error:
            raise BadAnswerError(f"list of topics: {error}") from error

    def distrust(self) -> None:
        """Ask another server first next time."""
        addresses = self._addresses()
        at = addresses.index(self._first) if self._first in addresses else -1
        self._first = addresses[(at + 1) % len(addresses)]

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _reachable(self, brokers: Sequence[BrokerData]) -> tuple[BrokerData, ...]:
        """The brokers by the addresses to use.

        A server that knows of no master may be cut off from those that have elected one: another server is asked next
        time.
        """
        if not all(MASTER_ID in one.broker_addrs for one in brokers):
            self.distrust()
        return tuple(brokers) if self._group is None else await self._group.reachable(brokers)

    def _addresses(self) -> tuple[str, ...]:
        return self._given if self._group is None else self._group.known

    async def _ask(self, request: Frame) -> Frame | None:
        """The first successful answer; None if the topic is unknown to all that answer. Raises ``ClientError``."""
        addresses = self._addresses()
        first = addresses.index(self._first) if self._first in addresses else 0
        waiting = [*addresses[first:], *addresses[:first]]
        asking: dict[asyncio.Task[Frame], str] = {}
        failures: list[ClientError] = []
        is_unknown = False
        try:
            while waiting or asking:
                if waiting:
                    address = waiting.pop(0)
                    call = self._connections.call(address, request, self._timeout_s)
                    asking[asyncio.get_running_loop().create_task(call)] = address
                patience_s = HEDGE_S if waiting else None
                done, _ = await asyncio.wait(asking, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    address = asking.pop(task)
                    answer = self._read(address, task, failures)
                    if answer is not None and answer.code == AnswerCode.SUCCESS:
                        self._first = address
                        return answer
                    is_unknown = is_unknown or answer is not None
        finally:
            for task in asking:
                task.cancel()
        if is_unknown:
            return None
        raise self._failure(failures)

    def _read(self, address: str, task: asyncio.Task[Frame], failures: list[ClientError]) -> Frame | None:
        """A successful answer, or that the topic does not exist; None for anything else, which is noted."""
        try:
            answer = task.result()
        except ClientError as error:
            failures.append(error)
            return None
        is_unknown = answer.code == AnswerCode.TOPIC_NOT_EXIST
        if is_unknown and not self._are_name_servers and answer.remark.startswith(_NAME_SERVERS_REMARK):
            failures.append(_is_a_name_server(address))
            return None
        if answer.code in (AnswerCode.SUCCESS, AnswerCode.TOPIC_NOT_EXIST):
            return answer
        if answer.code == AnswerCode.REQUEST_CODE_NOT_SUPPORTED and not self._are_name_servers:
            why = _NO_BROKER if self._connections.protocol_version(address) else _NO_ROUTES
            failures.append(RequestNotKnownError(f"{address} {why}", answer_code=answer.code, address=address))
        else:
            refusal = refusal_of(answer, address)
            refusal.outcome = "not_applied"
            failures.append(refusal)
        return None

    def _failure(self, failures: Sequence[ClientError]) -> ClientError:
        """A server that said no is more telling than those that said nothing."""
        for one in failures:
            if isinstance(one, RefusedError):
                return one
        reasons = "; ".join(dict.fromkeys(map(str, failures)))
        who = "name server" if self._are_name_servers else "broker"
        return BrokerUnreachableError(f"no {who} answered: {reasons}")


def _is_a_name_server(address: str) -> RequestNotKnownError:
    return RequestNotKnownError(
        f"{address} is a name server, not a broker: give it with --namesrv (in Python name_servers=…)", address=address
    )
