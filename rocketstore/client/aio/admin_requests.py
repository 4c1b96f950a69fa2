"""Requests of ``Admin`` to brokers and name servers: one of them, all, or those that have a topic; and their answers.

First the records that ``Admin`` takes and returns; then how answers become such records: that raises
``BadAnswerError`` unless it says so. ``TimedMessages`` recalls timed messages and lists those that wait at a broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from dledger import properties
from dledger.errors import ConfigError, InvalidRequestError
from dledger.remoting.codes import RequestError
from dledger.remoting.frame import Frame
from dledger.values import address_text
from rocketstore.client.aio.cluster import Cluster, at_once
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, Deadline
from rocketstore.client.aio.errors import BadAnswerError, ForbiddenError, NotFoundError
from rocketstore.client.aio.outgoing import OutgoingMessage
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.client.aio.routes import PERMISSION_READ, PERMISSION_WRITE, RoutedBroker
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.message.message import PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS, HostAddress, Message
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.message.timed import RecallHandle, WrongHandleError, decode_handle
from rocketstore.remoting.body import Body
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import TimedMessagesBody
from rocketstore.remoting.groups import ClientConnection, TopicStatsTable
from rocketstore.remoting.headers import (
    ListTimedHeader,
    OffsetAnswer,
    OffsetByTimeHeader,
    QueueHeader,
    RecallHeader,
    TopicHeader,
    read_header,
)
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.remoting.topics import MessageQueue
from rocketstore.state.attributes import RetryPolicy
from rocketstore.types import ConsumeFromWhere, MessageModel, RequestMode

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_B = TypeVar("_B", bound=Body)
_H = TypeVar("_H", bound="DataclassInstance")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A broker's runtime information; ``table`` is the whole of it, by RocketMQ's names."""

    address: str
    runtime: RuntimeInfo
    table: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic at one broker: its numbers of queues, and RocketMQ's permission bits (4 read, 2 write).

    ``broker`` is the broker's name; to put a topic at all of them, leave it empty. ``message_type``: the type of
    messages that it takes, by RocketMQ 5's names (NORMAL, FIFO, DELAY, TRANSACTION, PRIORITY; UNSPECIFIED or MIXED:
    any); empty: any, and when a topic is put, as it is. ``retention``: how long its messages can be read (``36h``);
    empty: as long as the log has them, and when a topic is put, as it is; ``"log"`` removes one.
    """

    name: str
    read_queues: int = 4
    write_queues: int = 4
    permission: int = PERMISSION_READ | PERMISSION_WRITE
    broker: str = ""
    message_type: str = ""
    retention: str = ""


@dataclass(frozen=True, slots=True)
class Traced:
    """One step of a message's way: ``sent``, ``consumed`` (``failed`` where ``ok`` is false), or ``ended`` of its
    transaction.

    ``time_ms``: when it began; ``cost_ms``: how long it took, -1 while it is not over, or nobody has said so. ``host``
    is the client's address, ``group`` its group. ``detail``: the broker's address, or what became of a transaction.
    """

    step: str
    time_ms: int
    cost_ms: int
    ok: bool
    group: str
    host: str
    detail: str = ""
    retries: int = 0


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The settings of a consumer group at one broker; to put it at all of them, leave ``broker`` empty.

    ``retries_max``: how often a message is delivered again before it goes to the dead letters. Settings that are None
    stay as they are; a new group has the defaults.
    """

    name: str
    retries_max: int | None = None
    is_enabled: bool | None = None
    may_broadcast: bool | None = None
    broker: str = ""
    is_ordered: bool | None = None
    """Whether RocketMQ 5's clients get the messages of a queue in order, however many share it."""
    retry_delays: RetryPolicy | Literal["levels"] | None = None
    """How long a message that could not be consumed waits, for RocketMQ 5's clients; ``levels``: the broker's delay
    levels from the third on.
    """


@dataclass(frozen=True, slots=True)
class ConsumeMode:
    """How a group's consumers get a topic's messages if they leave the division of queues to the brokers, as clients of
    RocketMQ 5 do with ``clientRebalance=false``; to set it at all brokers, leave ``broker`` empty.

    ``share_queues``: who pops shares its queues with so many others; 0: everyone pops from all queues.
    """

    topic: str
    group: str
    mode: RequestMode
    share_queues: int = 0
    broker: str = ""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The consumers of a group that are online; ``topics`` are their subscriptions, by topic."""

    clients: tuple[ClientConnection, ...]
    topics: Mapping[str, str]
    model: MessageModel
    begins: ConsumeFromWhere


@dataclass(frozen=True, slots=True)
class QueueRange:
    """One queue's first offset and its end, and the store time of its newest message (ms since 1970; 0: not known)."""

    queue: MessageQueue
    min_offset: int
    max_offset: int
    last_update_ms: int


@dataclass(frozen=True, slots=True)
class QueuePart:
    """Messages of one broker's copy of a queue, the offset for the next call, and the copy's first offset and end."""

    messages: tuple[ConsumedMessage, ...]
    next_offset: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """A group's progress in one queue. ``last_ms``: when the last message that it consumed was stored."""

    queue: MessageQueue
    committed: int
    max_offset: int
    last_ms: int

    @property
    def lag(self) -> int:
        """The number of messages still to be consumed."""
        return max(self.max_offset - max(self.committed, 0), 0)


@dataclass(frozen=True, slots=True)
class DelayLevelStatus:
    """Messages that wait at one delay level of a broker: those from ``next_offset`` to before ``end_offset``.

    ``next_due_ms`` (since 1970) is when the next one is due; -1 if none waits.
    """

    level: int
    delay_ms: int
    next_offset: int
    end_offset: int
    next_due_ms: int


def decoded(records: bytes) -> list[Message]:
    """The messages of an answer, whose records follow each other. Raises ``BadAnswerError``."""
    found: list[Message] = []
    at = 0
    while at < len(records):
        size = int.from_bytes(records[at : at + 4], "big")
        if size < 4 or at + size > len(records):
            raise BadAnswerError(f"a broker answered with a record of {size} bytes at {at} of {len(records)}")
        try:
            found.append(decode_record(records[at : at + size]))
        except CorruptRecordError as error:
            raise BadAnswerError(f"a broker answered with an invalid record: {error}") from error
        at += size
    return found


def settings_of(answer: Frame, whose: str) -> dict[str, str]:
    """The settings of a broker by name."""
    try:
        return {one.key: one.value for one in properties.parse(answer.body.decode())}
    except (ConfigError, UnicodeDecodeError) as error:
        raise BadAnswerError(f"{whose} answered with settings that cannot be read: {error}") from error


def body_of(kind: type[_B], answer: Frame, whose: str) -> _B:
    try:
        return kind.decode(answer.body or b"{}")
    except RequestError as error:
        raise BadAnswerError(f"{whose} answered with a {kind.__name__} that cannot be read: {error}") from error


def header_of(kind: type[_H], answer: Frame) -> _H:
    try:
        return read_header(kind, answer.fields)
    except RequestError as error:
        raise BadAnswerError(f"an answer cannot be read: {error}") from error


def parsed_id(offset_id: str) -> tuple[HostAddress, int]:
    """The broker's address and the position in its log. Raises ``NotFoundError`` for a text that is no such id."""
    try:
        return parse_offset_message_id(offset_id)
    except InvalidRequestError as error:
        raise NotFoundError(str(error)) from error


def broker_of(host: HostAddress, brokers: Sequence[RoutedBroker]) -> str:
    """The name of the brokers with an address; or of the only ones, which may be reached at another one.

    Raises ``NotFoundError``.
    """
    address = address_text(str(ip_address(host.ip)), host.port)
    for one in brokers:
        if address in one.addresses.values():
            return one.name
    if len(brokers) == 1:
        return brokers[0].name
    raise NotFoundError(f"the id names the broker {address}, which none of these is")


Start = Literal["first", "last"] | int
"""Where to begin: the first message, after the last one, or the first one stored at a time (ms since 1970) or later.

RocketMQ 4's brokers answer a time with the nearest message, also an older one.
"""


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
        code = RequestCode.GET_MAX_OFFSET if start == "last" else RequestCode.GET_MIN_OFFSET
        if isinstance(start, int):
            header = OffsetByTimeHeader(queue.topic, queue.queue_id, start)
            code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        answer = await self._cluster.ask_reader(queue.broker_name, code, header, deadline=deadline)
        return max(header_of(OffsetAnswer, answer).offset, 0)

    async def _ranges(self, topic: str, deadline: Deadline) -> list[QueueRange]:
        tables = await self._of_topic(topic, RequestCode.GET_TOPIC_STATS_INFO, TopicStatsTable, deadline)
        found = {
            queue: QueueRange(queue, one.min_offset, one.max_offset, one.last_update_timestamp)
            for table in tables.values()
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


PAGE: Final = 128


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """A message that waits for its time. ``due_ms`` and ``born_ms`` are Unix times (ms), ``size`` is in bytes."""

    topic: str
    queue: int
    due_ms: int
    message_id: str
    keys: str
    tags: str
    size: int
    born_ms: int
    recall_handle: str


@dataclass(frozen=True, slots=True)
class TimedMessages:
    """A part of the messages that wait at a broker, by due time.

    ``next_ms``, ``next_offset``: where the next part begins; -1: this is the last one. ``open``: how many wait in all;
    ``late``: how many should have been delivered more than a second ago; ``next_due_ms``: when the first of all is due,
    or -1.
    """

    broker: str
    messages: list[TimedMessage]
    next_ms: int
    next_offset: int
    open: int
    late: int
    next_due_ms: int


def handle_of(message: OutgoingMessage, broker: str, queue_offset: int) -> str:
    """The recall handle of a message that was stored there; empty if it does not wait for a time."""
    found = message.message.properties
    text = found.get(PROPERTY_TIMER_DELIVER_MS, "")
    due_ms = int(text) if text.isdigit() else 0
    if text := found.get(PROPERTY_TIMER_DELAY_MS, ""):
        due_ms = message.born_ms + int(text)
    if due_ms <= message.born_ms or queue_offset < 0:
        return ""
    return RecallHandle(message.message.topic, broker, due_ms, message.unique_key, queue_offset).encode()


async def recall(cluster: Cluster, handle: str, group: str, deadline: Deadline) -> str:
    """Have a timed message not delivered; returns its id. Raises ``ValueError`` and ``ClientError``."""
    try:
        found = decode_handle(handle)
    except WrongHandleError as error:
        raise ValueError(f"{error}: pass the recall_handle of a send's result") from error
    header = RecallHeader(found.topic, handle, group)
    await cluster.ask_master(found.broker, RequestCode.RECALL_MESSAGE, header, deadline=deadline, harmless=False)
    return found.message_id


async def list_timed(
    cluster: Cluster, broker: str, topic: str, key: str, begin: tuple[int, int], count: int, deadline: Deadline
) -> TimedMessages:
    """Messages that wait at a broker's master, from a time and place on. Raises ``ClientError``."""
    name = (await cluster.broker(broker, deadline)).name
    header = ListTimedHeader(topic, key, *begin, min(count, PAGE))
    answer = await cluster.ask_master(name, OwnCode.LIST_TIMED, header, deadline=deadline)
    body = body_of(TimedMessagesBody, answer, name)
    messages = [
        TimedMessage(
            one.topic, one.queue_id, one.due_ms, one.message_id, one.keys, one.tags, one.size, one.born_ms, one.handle
        )
        for one in body.messages
    ]
    next_ = (body.next_ms, body.next_offset)
    return TimedMessages(name, messages, *next_, body.open, body.late, body.next_due_ms)
