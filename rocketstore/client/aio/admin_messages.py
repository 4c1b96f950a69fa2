"""Single messages, and pages of them: of a queue, or of a topic by time, from the newest backwards or the oldest on.

Brokers have no request for messages by time. So the next message of each queue is pulled, and the queues are merged by
the times at which these were stored; from a queue whose turn it was, further ones are pulled, each time more than
before.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from typing import Final, NamedTuple, Protocol

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.client.aio.admin_requests import (
    AdminRequests,
    DelayLevelStatus,
    QueuePart,
    QueueRange,
    TimedMessages,
    Traced,
    body_of,
    broker_of,
    decoded,
    header_of,
    list_timed,
    parsed_id,
    recall,
    settings_of,
)
from rocketstore.client.aio.cluster import at_once
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, Deadline
from rocketstore.client.aio.consumer_options import ALL, Expression, Sql
from rocketstore.client.aio.errors import (
    BrokerFailedError,
    ClientError,
    ForbiddenError,
    MessageRefusedError,
    NotFoundError,
    refusal_of,
)
from rocketstore.client.aio.received import plain_body, split_pulled
from rocketstore.message.message import DelayLevels, HostAddress, Message
from rocketstore.message.trace import TRACE_TOPIC, ConsumedTrace, EndedTrace, ReceivedTrace, SentTrace, decode_traces
from rocketstore.remoting.codes import RequestCode as Code
from rocketstore.remoting.groups import DelayOffsetTable, TopicOffset, TopicStatsTable
from rocketstore.remoting.headers import (
    PullAnswer,
    PullHeader,
    QueryMessageHeader,
    ResumeCheckHeader,
    SendBackHeader,
    TopicHeader,
    ViewMessageHeader,
    write_header,
)
from rocketstore.remoting.topics import MessageQueue
from rocketstore.types import SCHEDULE_TOPIC

PAGE_MAX: Final = 100
"""Messages of one page."""
PAGE_BYTES_MAX: Final = 1 << 20
"""Of one page, unless its first message alone is larger."""
PULLED_BYTES_MAX: Final = 32 << 20
"""Of all messages that are pulled for one page: a topic may have a thousand queues with a large message in each."""
EMPTY_PULLS_MAX: Final = 100
"""Pulls for one page that find no message, where some were removed."""
_GROWTH: Final = 4
_PULLED_MAX: Final = 1024
"""Messages, or places that may have some, looked at with one request."""

Pull = Callable[[MessageQueue, int, int], Awaitable[tuple[list[Message], int]]]
"""Messages of a queue from an offset on, at most so many, and the offset for the next pull: see ``Admin.messages``."""


class Page(NamedTuple):
    """Some of a topic's messages in the wanted order, and where each queue goes on; empty if nothing is left."""

    messages: list[Message]
    ends: dict[MessageQueue, int]


class Budget:
    """The bytes and the empty pulls that a page may still take."""

    def __init__(self) -> None:
        self.bytes_left = PULLED_BYTES_MAX
        self.empty_pulls_left = EMPTY_PULLS_MAX

    @property
    def is_spent(self) -> bool:
        """Whether the page ends here."""
        return self.bytes_left <= 0 or self.empty_pulls_left <= 0


class QueueSpan:
    """The messages of a queue from offset ``low`` to before ``high``, taken from one of the ends."""

    def __init__(self, queue: MessageQueue, low: int, high: int, *, oldest_first: bool) -> None:
        self.queue = queue
        self.low = low
        self.high = max(high, low)
        self._oldest_first = oldest_first
        self._ahead: list[Message] = []
        """Pulled and not taken, the next one last."""
        self._wanted = 1

    @property
    def end(self) -> int:
        """Where the next page goes on."""
        return self.low if self._oldest_first else self.high

    @property
    def next(self) -> Message | None:
        """The next message, once ``fill`` has pulled it."""
        return self._ahead[-1] if self._ahead else None

    @property
    def rank(self) -> int:
        """By the time of ``next``: the lowest of all queues comes first."""
        time_ms = self._ahead[-1].store_timestamp
        return time_ms if self._oldest_first else -time_ms

    def take(self) -> Message:
        """``next``, which is behind the end then."""
        found = self._ahead.pop()
        if self._oldest_first:
            self.low = found.queue_offset + 1
        else:
            self.high = found.queue_offset
        return found

    async def fill(self, pull: Pull, budget: Budget) -> None:
        """Have ``next``. Without it after this, nothing is left, or the budget is spent."""
        while not self._ahead and self.low < self.high and not budget.is_spent:
            begin = self.low if self._oldest_first else max(self.high - self._wanted, self.low)
            found, at = await self._pull(pull, budget, begin)
            if self._oldest_first:
                self._ahead = found[::-1]
                self.low = self.low if found else min(at, self.high)
            elif at >= self.high:  # else the newest of them have yet to be pulled
                self._ahead = found
                self.high = self.high if found else begin
            budget.empty_pulls_left -= not found
            largest = max((one.size for one in found), default=1)
            self._wanted = max(1, min(_GROWTH * self._wanted, _PULLED_MAX, PAGE_BYTES_MAX // max(largest, 1)))

    async def _pull(self, pull: Pull, budget: Budget, begin: int) -> tuple[list[Message], int]:
        """Messages from ``begin`` on, and up to where it was looked: to the end, unless they come oldest first."""
        found: list[Message] = []
        at = begin
        while at < self.high and not budget.is_spent and not (found and self._oldest_first):
            count = self._wanted if self._oldest_first else self.high - at
            some, following = await pull(self.queue, at, count)
            inside = [one for one in some if at <= one.queue_offset < self.high]
            budget.bytes_left -= sum(one.size for one in inside)
            found += inside
            if following <= at:  # nothing there
                return found, self.high
            at = following
        return found, at


async def read_page(spans: Sequence[QueueSpan], pull: Pull, count: int) -> Page:
    """The next ``count`` messages of all spans.

    Of equally old messages, that of the first queue comes first; those of one queue by offset, whatever their times.
    Raises ``MessageRefusedError`` if the next ones of all queues are too large to be compared.
    """
    budget, room = Budget(), PAGE_BYTES_MAX
    await at_once(one.fill(pull, budget) for one in spans)
    waiting = [(one.rank, place) for place, one in enumerate(spans) if one.next is not None]
    heapq.heapify(waiting)
    messages: list[Message] = []
    is_whole = all(one.next is not None or one.low >= one.high for one in spans)
    if not is_whole and budget.bytes_left <= 0:
        raise MessageRefusedError(
            f"the next messages of {len(spans)} queues have more than {PULLED_BYTES_MAX >> 20} MiB: choose one queue"
        )
    while waiting and is_whole and len(messages) < count:
        _, place = waiting[0]
        span = spans[place]
        message = span.take()
        messages.append(message)
        room -= message.size
        await span.fill(pull, budget)
        if span.next is not None:
            heapq.heapreplace(waiting, (span.rank, place))
        else:
            heapq.heappop(waiting)
            is_whole = span.low >= span.high
        following = spans[waiting[0][1]].next if waiting else None
        if following is not None and following.size > room:
            break
    left = any(one.low < one.high for one in spans)
    return Page(messages, {one.queue: one.end for one in spans} if left else {})


def span_of(
    queue: MessageQueue, low: int, high: int, ends: Mapping[MessageQueue, int], *, oldest_first: bool
) -> QueueSpan:
    """The rest of a queue after a page with these ``ends``; all of it without any.

    A queue that was made after that page has nothing that is older.
    """
    if ends and oldest_first:
        low = max(low, min(ends.get(queue, low), high))
    elif ends:
        high = max(low, min(ends.get(queue, low), high))
    return QueueSpan(queue, low, high, oldest_first=oldest_first)


QUERIED_MAX: Final = 64
"""Messages of one query by key, from each broker."""
FOREVER_MS: Final = (1 << 63) - 1
_TOOLS_GROUP: Final = "TOOLS_CONSUMER"
"""The group in whose name RocketMQ's tools read; every broker has it."""
_SUBSCRIPTION_FLAG: Final = 0x4
"""Of a pull: it brings its own subscription."""
_UNIQUE_QUERY: Final = "_UNIQUE_KEY_QUERY"
_NOTHING_THERE: Final = frozenset(
    {AnswerCode.PULL_NOT_FOUND, AnswerCode.PULL_RETRY_IMMEDIATELY, AnswerCode.PULL_OFFSET_MOVED}
)
_LevelPull = Callable[[int, int, int], Awaitable[list[Message]]]
"""Messages of a level, from an offset on, at most so many."""


class MessageAdmin(AdminRequests):
    """The part of ``Admin`` that is about messages."""

    async def message_by_id(self, offset_id: str, broker: str = "") -> Message:
        """The message with this id (``SendResult.offset_id``). Raises ``NotFoundError``.

        ``broker``: the one to ask; otherwise the one whose address the id names.
        """
        host, offset = parsed_id(offset_id)
        deadline = self._deadline()
        broker = broker or broker_of(host, await self._named("", deadline))
        header = ViewMessageHeader(offset)
        try:
            answer = await self._cluster.ask_reader(broker, Code.VIEW_MESSAGE_BY_ID, header, deadline=deadline)
        except BrokerFailedError as error:  # RocketMQ has no other code for it
            raise NotFoundError(f"no message with id {offset_id}: {error}") from error
        message = next(iter(decoded(answer.body)), None)
        if message is None or message.store_host != host:
            raise NotFoundError(f"no message with id {offset_id}")
        return message

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 32,
        begin_ms: int = 0,
        end_ms: int = FOREVER_MS,
        unique: bool = False,
        broker: str = "",
    ) -> list[Message]:
        """Messages with this key stored between two times, oldest first. Raises ``NotFoundError`` for no such topic.

        ``unique``: with this ``message_id``, which their producer gave them.
        """
        deadline = self._deadline()
        header = QueryMessageHeader(topic, key, min(max_messages, QUERIED_MAX), begin_ms, end_ms)
        request = Frame(Code.QUERY_MESSAGE, 0, write_header(header) | {_UNIQUE_QUERY: str(unique).lower()})
        route = await self._cluster.route(topic, deadline)
        found: list[Message] = []
        for name in [one.broker for one in route.parts if broker in ("", one.broker)]:
            answer = await self._call_reader(name, request, deadline)
            if answer.code == AnswerCode.SUCCESS:
                found += decoded(answer.body)
            elif answer.code != AnswerCode.QUERY_NOT_FOUND:
                raise refusal_of(answer, name)
        found = [one for one in found if (one.unique_key == key if unique else key in one.keys)]  # not only its hash
        return sorted(found, key=lambda one: one.store_timestamp)[:max_messages]

    async def trace(self, message_id: str, *, topic: str = TRACE_TOPIC, begin_ms: int = 0) -> list[Traced]:
        """The way of the message with this id (``message_id``, that of its producer), by time, as clients with
        ``trace=True`` and RocketMQ's have written it. Raises ``NotFoundError`` where nobody has.
        """
        found = await self.messages_by_key(topic, message_id, max_messages=QUERIED_MAX, begin_ms=begin_ms)
        return steps_of(message_id, found)

    async def messages(
        self, queue: MessageQueue, offset: int, *, max_messages: int = 32, expression: str | Sql = "*"
    ) -> tuple[list[Message], int]:
        """Messages of a queue from ``offset`` on, for no group, and the offset for the next call.

        No messages and the same offset: there is nothing more. ``expression``: only messages with these tags
        (``A || B``), or that fulfil a condition (``Sql``). Raises ``ConfigError`` for a wrong one.
        """
        return await self._messages(queue, offset, max_messages, Expression.of(expression), self._deadline())

    async def read_at(
        self, address: str, topic: str, queue_id: int, offset: int, *, max_messages: int = 1000
    ) -> QueuePart:
        """The part of a queue at one broker from ``offset`` on, whatever its role: to compare copies.

        Waits until it knows what is committed. Raises ``NotFoundError`` for a topic that it does not know.
        """
        deadline = self._deadline()
        request = _pull(topic, queue_id, offset, max_messages)

        async def attempt() -> Frame:
            timeout_s = min(ATTEMPT_S_MAX, deadline.remaining_s)
            answer = await self._cluster.connections.call(address, request, timeout_s)
            if answer.code != AnswerCode.SUCCESS and answer.code not in _NOTHING_THERE:
                raise refusal_of(answer, address)
            return answer

        answer = await self._cluster.repeat(attempt, deadline, harmless=True)
        told = header_of(PullAnswer, answer)
        records = answer.body if answer.code == AnswerCode.SUCCESS else b""
        messages = split_pulled(records, MessageQueue(topic, "", queue_id))
        return QueuePart(tuple(messages), told.next_begin_offset, told.min_offset, told.max_offset)

    async def newest(
        self,
        topic: str,
        ends: Mapping[MessageQueue, int] | None = None,
        *,
        max_messages: int = 32,
        queue: MessageQueue | None = None,
        stored: tuple[int, int] = (0, 0),
        oldest_first: bool = False,
    ) -> Page:
        """A topic's messages from the newest one backwards, or from the oldest one on: a page of at most 100 and 1 MiB.

        Across its queues, or of one, as far as they may be read; of those ``stored`` at the first time or later, and
        before the second one (0: no limit). ``ends`` of a page give the page after it. Raises ``NotFoundError``,
        ``ForbiddenError`` if the topic may not be read, and ``MessageRefusedError`` for a ``max_messages`` over 100.
        """
        if not 0 < max_messages <= PAGE_MAX:
            raise MessageRefusedError(f"max_messages is {max_messages}: a page has 1 to {PAGE_MAX} messages")
        deadline = self._deadline()
        readable = frozenset((await self._cluster.route(topic, deadline)).readable)
        if not readable:
            raise ForbiddenError(f"topic {topic} does not allow reads")
        if queue is not None and queue not in readable:
            raise NotFoundError(f"topic {topic} has no queue {queue.queue_id} that can be read")
        there = await self._ranges(topic, deadline) if queue is None else [await self._range_of(queue, deadline)]
        spans = await at_once(
            self._span(one, ends or {}, stored, deadline, oldest_first=oldest_first)
            for one in there
            if one.queue in readable
        )

        async def pull(one: MessageQueue, offset: int, count: int) -> tuple[list[Message], int]:
            return await self._messages(one, offset, count, ALL, deadline)

        return await read_page(spans, pull, max_messages)

    async def delayed(
        self, level: int = 0, offset: int = -1, *, max_messages: int = 32, broker: str = ""
    ) -> tuple[list[DelayLevelStatus], list[Message]]:
        """Every delay level of a broker, and messages that wait at one, from ``offset`` on (-1: the next ones).

        They are as stored: the topic and queue that they are for are properties. Needs an administrator's account.
        Raises ``NotFoundError`` for a level that the broker does not have.
        """
        deadline = self._deadline()
        name = (await self._cluster.broker(broker, deadline)).name
        ask = partial(self._cluster.ask_reader, name, deadline=deadline)

        async def pull(number: int, first: int, count: int) -> list[Message]:
            queue = MessageQueue(SCHEDULE_TOPIC, name, number - 1)
            return (await self._messages(queue, first, count, ALL, deadline))[0]

        levels = await read_levels(name, ask, pull)
        if not 0 <= level <= len(levels):
            raise NotFoundError(f"there is no delay level {level}: use 1 to {len(levels)}, or 0 for no messages")
        if not level or (first := max(levels[level - 1].next_offset, offset)) >= levels[level - 1].end_offset:
            return levels, []
        return levels, await pull(level, first, max_messages)

    async def timed(
        self,
        topic: str = "",
        key: str = "",
        from_ms: int = 0,
        from_offset: int = 0,
        *,
        max_messages: int = 32,
        broker: str = "",
    ) -> TimedMessages:
        """Messages that wait at a broker for a time of their own, by due time, from ``from_ms`` on.

        ``topic``, ``key``: only those for this topic, with this key or message id. There may be more: the result says
        from where on (``from_ms``, ``from_offset``). Needs an administrator's account.
        """
        return await list_timed(
            self._cluster, broker, topic, key, (from_ms, from_offset), max_messages, self._deadline()
        )

    async def recall(self, handle: str) -> str:
        """Have a message that waits for its time not delivered: see ``Producer.recall``."""
        return await recall(self._cluster, handle, "", self._deadline())

    async def send_back(
        self, group: str, topic: str, position: int, *, delay_level: int, retries_max: int, broker: str = ""
    ) -> None:
        """Have the message of ``topic`` at this ``position`` of a broker's log (``Message.offset``) delivered to a
        group again after a delay.

        One that was delivered ``retries_max`` times goes to the group's dead letters. An answer that got lost may lead
        to a second copy. Raises ``NotFoundError``.
        """
        header = SendBackHeader(position, group, delay_level, origin_topic=topic, max_reconsume_times=retries_max)
        await self._cluster.ask_master(
            broker, Code.CONSUMER_SEND_MSG_BACK, header, deadline=self._deadline(), harmless=False
        )

    async def resume_transaction(self, offset_id: str, broker: str = "") -> None:
        """Begin a transaction again that was given up: its producers are asked again what became of it.

        ``offset_id`` is that of its message in the topic TRANS_CHECK_MAX_TIME_TOPIC. Raises ``NotFoundError`` for any
        other message, and for one that was resumed before.
        """
        host, _ = parsed_id(offset_id)
        deadline = self._deadline()
        broker = broker or broker_of(host, await self._named("", deadline))
        header, code = ResumeCheckHeader(offset_id), Code.RESUME_CHECK_HALF_MESSAGE
        try:
            await self._cluster.ask_master(broker, code, header, deadline=deadline, harmless=False)
        except BrokerFailedError as error:  # RocketMQ has no other code for it
            raise NotFoundError(f"no transaction that was given up has the id {offset_id}: {error}") from error

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _call_reader(self, broker: str, request: Frame, deadline: Deadline) -> Frame:
        """The answer of a broker's master, or without one of a copy, whatever its code."""
        addresses = (await self._cluster.broker(broker, deadline)).readable
        failure: ClientError | None = None
        for address in addresses:
            timeout_s = min(ATTEMPT_S_MAX, deadline.remaining_s)
            try:
                return await self._cluster.connections.call(address, request, timeout_s)
            except ClientError as error:
                failure = error
        raise failure or NotFoundError(f"brokers {broker} have no address now")

    async def _messages(
        self, queue: MessageQueue, offset: int, count: int, wanted: Expression, deadline: Deadline
    ) -> tuple[list[Message], int]:
        request = _pull(queue.topic, queue.queue_id, offset, count, wanted)
        answer = await self._call_reader(queue.broker_name, request, deadline)
        more = answer.code == AnswerCode.SUCCESS
        if not more and answer.code not in _NOTHING_THERE:
            raise refusal_of(answer, queue.broker_name)
        next_offset = header_of(PullAnswer, answer).next_begin_offset
        found = decoded(answer.body) if more else []
        return [one for one in found if wanted.takes(one.tags)], next_offset

    async def _span(
        self,
        there: QueueRange,
        ends: Mapping[MessageQueue, int],
        stored: tuple[int, int],
        deadline: Deadline,
        *,
        oldest_first: bool,
    ) -> QueueSpan:
        """The messages of a queue that are still to come."""
        low, high = there.min_offset, there.max_offset
        since_ms, before_ms = stored
        if since_ms and low < high:
            low = max(low, await self._offset_at(there.queue, since_ms, deadline))
        if before_ms and low < high:
            high = min(high, await self._offset_at(there.queue, before_ms, deadline))
        return span_of(there.queue, min(low, high), high, ends, oldest_first=oldest_first)


def _pull(topic: str, queue_id: int, offset: int, count: int, wanted: Expression = ALL) -> Frame:
    header = PullHeader(
        _TOOLS_GROUP, topic, queue_id, offset, count, _SUBSCRIPTION_FLAG, 0, 0, 0, wanted.text, wanted.kind
    )
    return Frame(Code.PULL_MESSAGE, 0, write_header(header))


def steps_of(message_id: str, messages: Iterable[Message]) -> list[Traced]:
    """The events of it in these messages of traces, by time. A client's address is the one that sent the trace."""
    steps: list[Traced] = []
    begun: dict[str, Traced] = {}
    ended: dict[str, ConsumedTrace] = {}
    for message in messages:
        body, _ = plain_body(message)
        host = _text(message.born_host)
        for one in decode_traces(body):
            if one.message_id != message_id:
                continue
            match one:
                case SentTrace():
                    steps.append(Traced("sent", one.time_ms, one.cost_ms, one.ok, one.group, host, one.store_host))
                case EndedTrace():
                    steps.append(Traced("ended", one.time_ms, -1, True, one.group, host, one.state))
                case ReceivedTrace():
                    begun[one.request_id] = Traced(
                        "consumed", one.time_ms, -1, True, one.group, host, retries=one.retries
                    )
                case ConsumedTrace():
                    ended[one.request_id] = one
                    if one.request_id not in begun:  # as long as its begin is not read, or was never written
                        began_ms = max(one.time_ms - one.cost_ms, 0)
                        begun[one.request_id] = Traced("consumed", began_ms, -1, True, one.group, host)
    for request_id, step in begun.items():
        end = ended.get(request_id)
        steps.append(step if end is None else replace(step, cost_ms=end.cost_ms, ok=end.ok))
    return sorted(steps, key=lambda one: one.time_ms)


def _text(host: HostAddress) -> str:
    return str(ip_address(host.ip))


class Ask(Protocol):
    """A request to the broker, and its successful answer."""

    def __call__(self, code: int, header: TopicHeader | None = None) -> Awaitable[Frame]: ...


async def read_levels(broker: str, ask: Ask, pull: _LevelPull) -> list[DelayLevelStatus]:
    """Every level, with the time when its next message is due. Raises ``ClientError``."""
    settings, delivered, stats = await asyncio.gather(
        ask(Code.GET_BROKER_CONFIG),
        ask(Code.GET_ALL_DELAY_OFFSET),
        ask(Code.GET_TOPIC_STATS_INFO, TopicHeader(SCHEDULE_TOPIC)),
    )
    delays = DelayLevels.parse(settings_of(settings, broker)["messageDelayLevel"])
    offsets = body_of(DelayOffsetTable, delivered, broker).offset_table
    ends = {one.queue_id: of for one, of in body_of(TopicStatsTable, stats, broker).offset_table.items()}

    async def status(level: int) -> DelayLevelStatus:
        end = ends.get(level - 1, TopicOffset())
        following = min(max(offsets.get(level, 0), end.min_offset, 0), end.max_offset)
        waiting = await pull(level, following, 1) if following < end.max_offset else []
        due_ms = delays.due_ms(level, waiting[0].store_timestamp) if waiting else -1
        return DelayLevelStatus(level, delays.delay_ms(level), following, end.max_offset, due_ms)

    return await asyncio.gather(*map(status, range(1, delays.level_max + 1)))
