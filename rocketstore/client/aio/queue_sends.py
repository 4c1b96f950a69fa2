"""Sends messages by RocketMQ's own requests: in batches, many requests at a time, in order within each queue.

A message goes to the queue of its sharding key, or to the next in turn at a broker that works (``QueueSelector``).
Messages for one queue (a sharding key, or a given queue) wait for each other: a queue has one request in progress, and
later messages go in the next one, so that neither a retry nor a broker's threads can change their order.
Messages for any queue are spread over the queues in turn. A message that was certainly not stored is sent again until
its deadline, elsewhere if it may go anywhere; one that may be stored is not, unless duplicates are allowed.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

from dledger.remoting.codes import RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.cluster import PAUSE_S, PAUSE_S_MAX, Cluster
from rocketstore.client.aio.connections import ATTEMPT_S_MAX
from rocketstore.client.aio.errors import (
    STORED,
    BadAnswerError,
    BrokerUnreachableError,
    ClientError,
    ForbiddenError,
    MessageRefusedError,
    NoQueueError,
    NotFoundError,
    SendResult,
    TimedOutError,
    may_repeat,
    may_send_elsewhere,
    may_send_twice,
    refusal_of_send,
)
from rocketstore.client.aio.outgoing import (
    CREATED_QUEUES,
    CREATING_TOPIC,
    OutgoingMessage,
    PendingMessages,
    PipelineLimits,
    fit_together,
    queue_number_of_key,
    request_of,
)
from rocketstore.client.aio.routes import ROUTES_MAX, RouteCache, RoutedBroker, TopicRoute
from rocketstore.message.message import SYS_FLAG_PREPARED
from rocketstore.remoting.headers import SendAnswer, read_header
from rocketstore.remoting.topics import MessageQueue

AVOIDED_S: Final = 5.0
"""How long a broker that failed gets no messages that may go to another."""
RUN_MAX: Final = 32
"""Messages in a row for one queue, of those that may go to any."""
ELSEWHERE_MAX: Final = 3
"""How many brokers one message is offered to before a pause; RocketMQ's ``retryTimesWhenSendFailed`` of 2."""
_TURNS: Final = 1 << 16
OnFailure: TypeAlias = Callable[[str, ClientError], object]
"""Is told of each request that failed, repeated or not: the broker's name, and why."""


class QueueSelector:
    """Chooses queues; it remembers which brokers failed lately."""

    def __init__(self, routes: RouteCache, on_failure: OnFailure | None = None) -> None:
        self._routes = routes
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        # Not always the first queue: many short-lived producers would fill it, and leave the others empty.
        self._turn = random.randrange(_TURNS)
        self._avoided: dict[str, float] = {}  # until when, by broker name
        self._used: dict[str, TopicRoute] = {}  # the last one by which a topic's messages were placed

    def avoid(self, broker: str) -> None:
        """Prefer other brokers for a while: this one failed, or took too long."""
        self._avoided[broker] = self._loop.time() + AVOIDED_S

    def note_failure(self, broker: str, failure: ClientError) -> None:
        """A request to this broker failed, repeated or not."""
        self.avoid(broker)
        if self._on_failure is not None:
            self._on_failure(broker, failure)

    def works_again(self, broker: str) -> None:
        """It has taken a message."""
        self._avoided.pop(broker, None)

    def next(self, route: TopicRoute, tried: Collection[str] = ()) -> MessageQueue:
        """The next queue in turn, at a broker with a master and without a recent failure, if there is one.

        ``tried``: names of brokers that the message was offered to already. Raises ``ForbiddenError`` if the topic
        cannot be written.
        """
        queues = _writable(route)
        self._turn += 1
        chosen = queues[self._turn % len(queues)]
        if not self._avoided and not tried and self._has_master(chosen.broker_name):
            return chosen
        now = self._loop.time()
        self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        others = [one for one in queues if one.broker_name not in tried] or queues
        sound = [one for one in others if self._is_sound(one.broker_name)]
        usable = sound or others
        return usable[self._turn % len(usable)]

    def spread(self, route: TopicRoute, messages: Sequence[OutgoingMessage]) -> None:
        """Give messages for any queue one each: all queues in turn, and few in a row the same one.

        A batch then has several messages of a queue, and a small block is spread over as many queues as it can be.
        Raises ``ForbiddenError``.
        """
        run = min(RUN_MAX, -(-len(messages) // len(_writable(route)))) or 1
        for start in range(0, len(messages), run):
            some = messages[start : start + run]
            queue = self.next(route, some[0].tried)  # one that was offered elsewhere comes alone
            for one in some:
                one.queue = queue

    def choose(self, route: TopicRoute, message: OutgoingMessage) -> MessageQueue:
        """The queue of a message by its key or its caller's choice, else the next one. Raises ``RefusedError``."""
        if message.key is not None:
            return self.of_key(route, message.key)
        return self.next(route) if message.wanted is None else self.named(route, message.wanted)

    def of_key(self, route: TopicRoute, key: str) -> MessageQueue:
        """The queue of a sharding key: always the same while the topic's queues are.

        So it may be at a broker that has no master now. Raises ``ForbiddenError``.
        """
        queues = _writable(route) and route.writable
        return queues[queue_number_of_key(key, len(queues))]

    def named(self, route: TopicRoute, queue: MessageQueue | int) -> MessageQueue:
        """A queue given by number, if that is enough, or by broker and number. Raises ``NoQueueError``."""
        if isinstance(queue, MessageQueue):
            if queue in route.writable:
                return queue
            raise NoQueueError(f"topic {route.topic} has no writable queue {queue.queue_id} at {queue.broker_name}")
        found = [one for one in route.writable if one.queue_id == queue]
        if len(found) == 1:
            return found[0]
        if not found:
            raise NoQueueError(f"topic {route.topic} has no writable queue {queue}")
        names = ", ".join(one.broker_name for one in found)
        raise NoQueueError(f"topic {route.topic} has a queue {queue} at each of {names}: give a MessageQueue")

    def has_lost_queues(self, route: TopicRoute) -> bool:
        """Whether a queue is missing in this route that its topic had at the last call."""
        before = self._used.pop(route.topic, route)
        self._used[route.topic] = route
        if len(self._used) > ROUTES_MAX:
            self._used.pop(next(iter(self._used)))
        return before is not route and not set(before.writable) <= set(route.writable)

    def route(self, topic: str) -> TopicRoute | None:
        """The route, or that of a topic that the first message creates; None: it is not known at once."""
        route = self._routes.at_once(topic)
        if route is None:
            default = self._routes.at_once(CREATING_TOPIC)
            route = None if default is None else creating_route(topic, default)
        return route

    def is_elsewhere_left(self, topic: str, tried: Sequence[str]) -> bool:
        """Whether there is another broker to offer a message to, before a pause."""
        if len(set(tried)) >= ELSEWHERE_MAX:
            return False
        route = self.route(topic)
        return route is not None and any(one.is_writable and one.broker not in tried for one in route.parts)

    def _has_master(self, name: str) -> bool:
        broker = self._routes.broker(name)
        return broker is not None and bool(broker.master)

    def _is_sound(self, name: str) -> bool:
        return name not in self._avoided and self._has_master(name)


def no_queues_yet(topic: str) -> NotFoundError:
    """The error for a key, or a number, of a queue of a topic that the first message creates."""
    return NotFoundError(
        f"topic {topic} does not exist, so neither a key nor a number can choose one of its queues: create it first"
    )


def creating_route(topic: str, default: TopicRoute) -> TopicRoute:
    """The route of a topic that does not exist yet, by that of the topic that others are created from."""
    parts = tuple(
        one.__class__(one.broker, one.read_queues, min(one.write_queues, CREATED_QUEUES), one.permission)
        for one in default.parts
    )
    return TopicRoute(topic, parts)


def _writable(route: TopicRoute) -> Sequence[MessageQueue]:
    if not route.in_turn:
        raise ForbiddenError(f"topic {route.topic} does not allow writes")
    return route.in_turn


FREE_REQUESTS_MAX: Final = 12
"""Requests in progress for messages of one topic that may go to any queue."""
_ELSEWHERE_ONLY: Final = (ForbiddenError, NotFoundError)
"""Refusals that the same broker would repeat."""


class _Waiting:
    """The messages for one queue, or for any queue of a topic, that are not sent yet, in order."""

    __slots__ = ("failed", "in_progress", "is_listed", "messages", "queue", "topic")

    def __init__(self, topic: str, queue: MessageQueue | None) -> None:
        self.topic = topic
        self.queue = queue
        self.messages: deque[OutgoingMessage] = deque()
        self.in_progress = 0
        """Requests."""
        self.failed = False
        """Whether the last request did not get through in time. While they do, those that wait have time."""
        self.is_listed = False
        """Whether it is among those that may be sent."""

    @property
    def in_progress_max(self) -> int:
        return 1 if self.queue is not None else FREE_REQUESTS_MAX


class QueueSends:
    """``group`` is the producer group that requests name."""

    def __init__(
        self,
        cluster: Cluster,
        selector: QueueSelector,
        pending: PendingMessages,
        group: str,
        limits: PipelineLimits,
        place_anew: Callable[[Sequence[OutgoingMessage], ClientError], None],
        *,
        allow_duplicates: bool,
    ) -> None:
        """``place_anew`` chooses other queues for messages whose own are gone."""
        self._cluster = cluster
        self._selector = selector
        self._pending = pending
        self._group = group
        self._limits = limits
        self._place_anew = place_anew
        self._allow_duplicates = allow_duplicates
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[tuple[str, MessageQueue | None], _Waiting] = {}
        self._ready: deque[_Waiting] = deque()
        self._is_scheduled = False
        self._requests = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, messages: Sequence[OutgoingMessage]) -> None:
        """Have messages wait for their turn, with others for their queue, or for any queue of their topic."""
        queue: MessageQueue | None = None
        waiting: _Waiting | None = None
        for message in messages:
            topic = message.message.topic
            if waiting is None or message.queue != queue or topic != waiting.topic:
                queue = message.queue
                waiting = self._waiting.get((topic, queue))
                if waiting is None:
                    waiting = self._waiting[topic, queue] = _Waiting(topic, queue)
            waiting.messages.append(message)
            if not waiting.is_listed:
                self._list(waiting)

    async def close(self) -> None:
        """End requests in progress: their messages may be stored; those that wait are not sent. Idempotent."""
        for waiting in self._waiting.values():  # first: the end of a request begins the next one
            waiting.messages.clear()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._waiting.clear()
        self._ready.clear()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _list(self, waiting: _Waiting) -> None:
        """Send from it soon, if it has not enough requests in progress."""
        if not waiting.is_listed and waiting.messages and waiting.in_progress < waiting.in_progress_max:
            waiting.is_listed = True
            self._ready.append(waiting)
        self._schedule()

    def _schedule(self) -> None:
        if self._ready and not self._is_scheduled and self._requests < self._limits.requests_max:
            self._is_scheduled = True
            self._loop.call_soon(self._send_ready)

    def _send_ready(self) -> None:
        """Begin as many requests as may be in progress."""
        begun = 0
        while self._ready and self._requests + begun < self._limits.requests_max:
            waiting = self._ready.popleft()
            waiting.is_listed = False
            batch = self._next_batch(waiting)
            if batch:
                waiting.in_progress += 1
                begun += 1
                task = self._loop.create_task(self._send(waiting, batch))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._go_on(waiting)
        self._is_scheduled = False
        if begun:  # they count from their first step on, those that have a master
            self._schedule()

    def _go_on(self, waiting: _Waiting) -> None:
        if waiting.messages or waiting.in_progress:
            self._list(waiting)
        else:
            self._waiting.pop((waiting.topic, waiting.queue), None)

    def _next_batch(self, waiting: _Waiting) -> list[OutgoingMessage]:
        """The next messages that may go together, without those whose callers gave up."""
        messages, limits = waiting.messages, self._limits
        batch: list[OutgoingMessage] = []
        size, until = 0, self._loop.time() + self._cluster.timeout_s
        while messages and len(batch) < limits.batch_messages_max:
            one = messages[0]
            if one.future is None or one.future.done():
                self._pending.drop((messages.popleft(),))
                continue
            size += one.size
            if batch and (size > limits.batch_bytes_max or not fit_together(batch[0], one)):
                break
            batch.append(messages.popleft())
            if not waiting.failed and one.deadline < until:
                one.deadline = until
            if one.alone:
                break
        return batch

    async def _send(self, waiting: _Waiting, batch: list[OutgoingMessage]) -> None:
        """Try until each message of the batch has an outcome, or waits in the queue again."""
        try:
            await self._try(waiting, batch)
        except asyncio.CancelledError:  # the pipeline is closed at once
            self._pending.fail(batch, TimedOutError("the producer was closed before an answer came"))
            raise
        finally:
            waiting.in_progress -= 1
            self._go_on(waiting)

    async def _try(self, waiting: _Waiting, batch: list[OutgoingMessage]) -> None:
        tried: list[str] = []
        failure: ClientError | None = None
        pause_s = PAUSE_S
        while batch := in_time(self._pending, batch, failure):
            queue = waiting.queue
            try:
                queue = queue or self._next_queue(waiting.topic, batch, tried)
                failure = self._settle(batch, queue, await self._ask(batch, queue))
            except ClientError as error:
                failure = error
            if failure is None:
                waiting.failed = False
                return
            if self._wait_again(waiting, batch, failure):
                return
            if queue is not None:
                tried.append(queue.broker_name)
                self._note(waiting.topic, queue.broker_name, failure)
            if not self._may_repeat(batch, failure):
                break
            if waiting.queue is None and queue is not None and self._selector.is_elsewhere_left(waiting.topic, tried):
                continue
            if isinstance(failure, _ELSEWHERE_ONLY):
                break
            tried.clear()
            await self._pause(waiting.topic, pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        waiting.failed = failure is None or may_repeat(failure, harmless=True)
        if batch:
            late = TimedOutError("the message was not sent in time", outcome="not_applied")
            self._pending.fail(batch, failure or late)

    def _wait_again(self, waiting: _Waiting, batch: list[OutgoingMessage], failure: ClientError) -> bool:
        """Whether they do: each alone, because one of them is to blame, or all for other queues."""
        if isinstance(failure, MessageRefusedError) and len(batch) > 1:
            for message in reversed(batch):
                message.alone = True
                waiting.messages.appendleft(message)
            return True
        if isinstance(failure, NoQueueError):
            if waiting.queue is not None:
                batch = [*batch, *waiting.messages]
                waiting.messages.clear()
            self._place_anew(batch, failure)
            return True
        return False

    def _next_queue(self, topic: str, batch: list[OutgoingMessage], tried: list[str]) -> MessageQueue:
        """The queue whose turn it is, also if that was found before. Raises ``ClientError``."""
        first, batch[0].first = batch[0].first, None
        if first is not None:
            return first
        route = self._selector.route(topic)
        if route is None:  # there was one: the brokers are gone, perhaps for a moment
            raise BrokerUnreachableError(f"topic {topic} has no route any more: its brokers are not registered")
        return self._selector.next(route, tried)

    async def _pause(self, topic: str, pause_s: float) -> None:
        """Before the next attempt: it needs the route as it is then."""
        await asyncio.sleep(pause_s)
        try:
            async with asyncio.timeout(PAUSE_S_MAX):
                await self._cluster.routes.refresh(topic)
        except (ClientError, TimeoutError):  # the attempt says what is the matter
            pass

    async def _ask(self, batch: list[OutgoingMessage], queue: MessageQueue) -> tuple[Frame, str]:
        """The answer of the queue's master, and its address. Raises ``ClientError``."""
        broker = self._cluster.routes.broker(queue.broker_name)
        if broker is None or not broker.master:
            raise BrokerUnreachableError(f"brokers {queue.broker_name} have no master now")
        request = request_of(batch, queue, self._group)
        deadline = max(one.deadline for one in batch)
        self._requests += 1
        try:
            await self._reach(broker, deadline - self._loop.time())
            timeout_s = deadline - self._loop.time()
            return await self._cluster.connections.call(broker.master, request, timeout_s), broker.master
        finally:
            self._requests -= 1
            self._schedule()

    async def _reach(self, broker: RoutedBroker, timeout_s: float) -> None:
        """Connect to its master. Raises ``BrokerUnreachableError``, as soon as others have another one."""
        connections = self._cluster.connections
        if connections.connection_number(broker.master):
            return
        connecting = connections.connect(broker.master, min(timeout_s, ATTEMPT_S_MAX))
        if await self._cluster.unless_replaced(broker.name, broker.master, connecting) is None:
            raise BrokerUnreachableError(f"{broker.master} is silent, and not the master of {broker.name} any more")

    def _settle(
        self, batch: list[OutgoingMessage], queue: MessageQueue, answered: tuple[Frame, str]
    ) -> ClientError | None:
        """Give each message its result; or return why they are not stored, or may be."""
        answer, address = answered
        status = STORED.get(answer.code)
        if status is None:
            return refusal_of_send(answer, address)
        try:
            stored = read_header(SendAnswer, answer.fields)
        except RequestError as error:
            return BadAnswerError(f"{address} answered to a message: {error}")
        self._selector.works_again(queue.broker_name)
        self._cluster.routes.now_exists(queue.topic)
        ids = stored.msg_id.split(",")
        ids += [""] * (len(batch) - len(ids))
        topic, broker, number = queue.topic, queue.broker_name, stored.queue_id
        results = [
            SendResult(topic, broker, number, offset, message.unique_key, offset_id, status, stored.recall_handle)
            for offset, message, offset_id in zip(range(stored.queue_offset, 1 << 63), batch, ids, strict=False)
        ]
        self._pending.settle(batch, results)
        return None

    def _may_repeat(self, batch: list[OutgoingMessage], failure: ClientError) -> bool:
        """Whether the batch may be sent again."""
        if may_send_elsewhere(failure):
            return True
        if not (self._allow_duplicates and may_send_twice(failure)):
            return False
        if any(one.sys_flag & SYS_FLAG_PREPARED for one in batch):
            return False  # a transaction that begins twice ends once, and a check would commit it again
        for message in batch:
            message.doubtful = failure
        return True

    def _note(self, topic: str, broker: str, failure: ClientError) -> None:
        """Something does not work there: look the route up, and spare that broker."""
        self._cluster.routes.doubt(topic)
        if not isinstance(failure, MessageRefusedError):
            self._selector.note_failure(broker, failure)


def in_time(
    pending: PendingMessages, batch: list[OutgoingMessage], failure: ClientError | None
) -> list[OutgoingMessage]:
    """Those whose deadline has not passed; the others fail."""
    now = asyncio.get_running_loop().time()
    late = [one for one in batch if one.deadline <= now]
    if not late:
        return batch
    why = failure or TimedOutError("the message could not be sent in time", outcome="not_applied")
    pending.fail(late, why)
    return [one for one in batch if one.deadline > now]
