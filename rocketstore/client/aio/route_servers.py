"""Asks name servers, or the brokers of a group, where topics and brokers are.

Name servers do not know each other, and a restarted one is empty for half a minute; a broker may be gone, or a deposed
master that does not know it yet. So the last one that answered is asked first, and the next one as well if it does not
answer within a fifth of a second, or does not know the topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, BrokerConnections
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerUnreachableError,
    ClientError,
    RefusedError,
    RequestNotKnownError,
    refusal_of,
)
from rocketstore.client.aio.group_addresses import GroupAddresses
from rocketstore.remoting.bodies.routes import MASTER_ID, BrokerData, ClusterInfo, TopicList, TopicRouteData
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.headers import RouteHeader, write_header

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
