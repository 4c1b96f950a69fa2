"""How ``Admin`` asks brokers and name servers: one of them, all, or those that have a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Literal, TypeVar

from dledger.errors import ConfigError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.admin_answers import body_of, header_of
from rocketstore.client.aio.admin_records import QueueRange
from rocketstore.client.aio.cluster import Cluster, at_once
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, Deadline
from rocketstore.client.aio.errors import ForbiddenError, NotFoundError
from rocketstore.client.aio.routes import RoutedBroker
from rocketstore.remoting.body import Body
from rocketstore.remoting.codes import RequestCode as Code
from rocketstore.remoting.groups import TopicStatsTable
from rocketstore.remoting.headers import OffsetAnswer, OffsetByTimeHeader, QueueHeader, TopicHeader
from rocketstore.remoting.topics import MessageQueue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Start = Literal["first", "last"] | int
"""Where to begin: the first message, after the last one, or the first one stored at a time (ms since 1970) or later.

RocketMQ 4's brokers answer a time with the nearest message, also an older one.
"""
_B = TypeVar("_B", bound=Body)
_T = TypeVar("_T")


class AdminRequests:
    """The requests that its parts make."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def _deadline(self) -> Deadline:
        self._cluster.check()
        return self._cluster.deadline()

    async def _named(self, name: str, deadline: Deadline) -> tuple[RoutedBroker, ...]:
        """The brokers of a name; all for an empty one."""
        cluster = self._cluster
        if name:
            return (await cluster.broker(name, deadline),)
        return await cluster.repeat(lambda: cluster.brokers(deadline), deadline, harmless=True)

    async def _ask(
        self,
        address: str,
        code: int,
        deadline: Deadline,
        header: DataclassInstance | None = None,
        body: bytes = b"",
    ) -> Frame:
        """The successful answer of the server at this address."""
        timeout_s = min(ATTEMPT_S_MAX, deadline.remaining_s)
        return await self._cluster.connections.ask(address, code, header, body, timeout_s=timeout_s)

    async def _change(
        self,
        broker: str,
        code: int,
        header: DataclassInstance | None,
        body: bytes = b"",
        *,
        deadline: Deadline | None = None,
    ) -> None:
        """At the masters of all brokers, or of one name. If some fail, the others are changed all the same."""
        deadline = deadline or self._deadline()
        names = [one.name for one in await self._named(broker, deadline)]
        asked = (self._cluster.ask_master(one, code, header, body, deadline=deadline) for one in names)
        await all_of(await asyncio.gather(*asked, return_exceptions=True))

    async def _at_name_servers(self, code: int, header: DataclassInstance) -> None:
        if not self._cluster.by_name_servers:
            raise ConfigError(["this is a request to name servers: give name_servers=…"])
        deadline = self._deadline()
        asked = (self._ask(one, code, deadline, header) for one in self._cluster.given)
        await all_of(await asyncio.gather(*asked, return_exceptions=True))

    async def _read_all(self, broker: str, code: int, kind: type[_B], deadline: Deadline) -> dict[str, _B]:
        """The body of each broker's answer, by name."""
        names = [one.name for one in await self._named(broker, deadline)]
        answers = await asyncio.gather(*(self._cluster.ask_reader(one, code, deadline=deadline) for one in names))
        return {name: body_of(kind, answer, name) for name, answer in zip(names, answers, strict=True)}

    async def _of_topic(self, topic: str, code: int, kind: type[_B], deadline: Deadline) -> dict[str, _B]:
        """The body of the answer of each broker that has a topic. Raises ``NotFoundError``."""
        names = [one.broker for one in (await self._cluster.route(topic, deadline)).parts]
        header = TopicHeader(topic)
        asked = (self._cluster.ask_reader(one, code, header, deadline=deadline) for one in names)
        answers = await asyncio.gather(*asked)
        return {name: body_of(kind, answer, name) for name, answer in zip(names, answers, strict=True)}

    async def _offset_at(self, queue: MessageQueue, start: Start, deadline: Deadline) -> int:
        header: DataclassInstance = QueueHeader(queue.topic, queue.queue_id)
        code = Code.GET_MAX_OFFSET if start == "last" else Code.GET_MIN_OFFSET
        if isinstance(start, int):
            header, code = OffsetByTimeHeader(queue.topic, queue.queue_id, start), Code.SEARCH_OFFSET_BY_TIMESTAMP
        answer = await self._cluster.ask_reader(queue.broker_name, code, header, deadline=deadline)
        return max(header_of(OffsetAnswer, answer).offset, 0)

    async def _ranges(self, topic: str, deadline: Deadline) -> list[QueueRange]:
        found = {
            queue: QueueRange(queue, one.min_offset, one.max_offset, one.last_update_timestamp)
            for table in (await self._of_topic(topic, Code.GET_TOPIC_STATS_INFO, TopicStatsTable, deadline)).values()
            for queue, one in table.offset_table.items()
        }
        # Brokers tell of those that may be written.
        others = [one for one in (await self._cluster.route(topic, deadline)).readable if one not in found]
        for one in await at_once(self._range_of(queue, deadline) for queue in others):
            found[one.queue] = one
        return sorted(found.values(), key=lambda one: (one.queue.broker_name, one.queue.queue_id))

    async def _range_of(self, queue: MessageQueue, deadline: Deadline) -> QueueRange:
        first, last = await self._offset_at(queue, "first", deadline), await self._offset_at(queue, "last", deadline)
        return QueueRange(queue, first, max(first, last), 0)


async def those_there(names: Iterable[str], ask: Callable[[str], Awaitable[_T]]) -> dict[str, _T]:
    """The answers by name, without those that do not exist or are not this account's."""

    async def found(name: str) -> _T | None:
        try:
            return await ask(name)
        except (NotFoundError, ForbiddenError):
            return None

    asked = dict.fromkeys(names)
    answers = await at_once(map(found, asked))
    return {name: one for name, one in zip(asked, answers, strict=True) if one is not None}


async def all_of(outcomes: Iterable[object]) -> None:
    """Raise the first error among what several requests came to."""
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
