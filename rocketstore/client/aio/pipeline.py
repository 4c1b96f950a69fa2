"""Sends messages: in batches, many requests at a time, in order within each queue, with an outcome for each.

Messages for one queue (a sharding key, or a given queue) wait for each other: a queue has one request in progress, and
what comes meanwhile goes in the next one, so that neither a retry nor a broker's threads can change their order.
Messages for any queue are spread over the queues in turn. A message that was certainly not stored is sent again until
its deadline, elsewhere if it may go anywhere; one that may be stored is not, unless duplicates are allowed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Final, Literal

from dledger.records import record
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.client.aio.cluster import PAUSE_S, PAUSE_S_MAX, Cluster
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    ForbiddenError,
    MessageRefusedError,
    NotFoundError,
    RequestNotKnownError,
    SendQueueFullError,
    TimedOutError,
    may_repeat,
    may_send_elsewhere,
    may_send_twice,
    refusal_of,
)
from rocketstore.client.aio.numbered import NumberedSender, OnFailure, numbers_messages
from rocketstore.client.aio.outgoing import CREATING_TOPIC, OutcomeFuture, OutgoingMessage, fit_together, request_of
from rocketstore.client.aio.queue_selection import QueueSelector, creating_route
from rocketstore.client.aio.results import STORED, SendResult
from rocketstore.client.aio.routes import TopicRoute, no_such_topic
from rocketstore.message.message import SYS_FLAG_PREPARED
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.headers import SendAnswer, read_header

_log = logging.getLogger(__name__)
ELSEWHERE_MAX: Final = 3
"""How many brokers one message is offered to before a pause; RocketMQ's ``retryTimesWhenSendFailed`` of 2."""
FREE_REQUESTS_MAX: Final = 12
"""Requests in progress for messages of one topic that may go to any queue."""
_UNKNOWN: Final = object()
_ELSEWHERE_ONLY: Final = (ForbiddenError, NotFoundError)
"""Refusals that the same broker would repeat."""


@record(frozen=True, slots=True)
class PipelineLimits:
    """What a producer may keep, and send at once."""

    pending_bytes_max: int = 32 * 1024 * 1024
    pending_messages_max: int = 65_536
    batch_bytes_max: int = 768 * 1024
    batch_messages_max: int = 1024
    requests_max: int = 64
    """In progress, of all queues together."""


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


class SendPipeline:
    """Use it on the cluster's loop. ``group`` is the producer group that requests name."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        limits: PipelineLimits,
        *,
        idempotence: bool | Literal["auto"] = "auto",
        allow_duplicates: bool = False,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._limits = limits
        self._allow_duplicates = allow_duplicates
        self._on_failure = on_failure
        self._idempotence = idempotence
        self._numbered: dict[str, NumberedSender | None] = {}  # by broker name; None: it does not number messages
        self._undecided: dict[str, deque[tuple[OutgoingMessage, MessageQueue]]] = {}
        """Messages for brokers of which it is being found out whether they do."""
        self._loop = asyncio.get_running_loop()
        self.selector: Final = QueueSelector(cluster.routes)
        self._unplaced: dict[str, deque[OutgoingMessage]] = {}  # by topic: its route is being looked up
        self._waiting: dict[tuple[str, MessageQueue | None], _Waiting] = {}
        self._ready: deque[_Waiting] = deque()
        self._is_scheduled = False
        self._requests = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._room: list[asyncio.Future[None]] = []  # who waits for it
        self._is_closing = False
        self._pending: set[OutgoingMessage] = set()  # those without an outcome
        self._flushes: list[tuple[set[OutgoingMessage], asyncio.Future[None]]] = []
        self.pending_bytes = 0

    # -- adding --------------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a message may be added at once."""
        limits = self._limits
        return len(self._pending) < limits.pending_messages_max and self.pending_bytes < limits.pending_bytes_max

    @property
    def pending_messages(self) -> int:
        """Messages without an outcome."""
        return len(self._pending)

    async def wait_for_room(self, timeout_s: float) -> None:
        """Return once a message may be added. Raises ``SendQueueFullError``."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.has_room and not self._is_closing:
                    waiting: asyncio.Future[None] = self._loop.create_future()
                    self._room.append(waiting)
                    await waiting
        except TimeoutError:
            raise SendQueueFullError(
                f"{self.pending_messages} messages with {self.pending_bytes} bytes are not sent yet, and there was no "
                f"room for another one within {timeout_s:g} s"
            ) from None

    def add(self, message: OutgoingMessage, future: OutcomeFuture, timeout_s: float) -> None:
        """Send a message soon; the future gets its outcome within ``timeout_s`` of its turn.

        Raises ``ClientClosedError``.
        """
        if self._is_closing:
            raise ClientClosedError("this producer is closed")
        message.deadline = self._loop.time() + timeout_s
        message.future = future
        self._pending.add(message)
        self.pending_bytes += message.size
        topic = message.message.topic
        unplaced = self._unplaced.get(topic)
        if unplaced is not None:
            unplaced.append(message)
            return
        route = self._cluster.routes.at_once(topic)
        if route is None:
            self._unplaced[topic] = deque((message,))
            self._begin(self._find_route(topic))
        else:
            self._place(message, route)

    async def flush(self) -> None:
        """Return once every message added so far has an outcome."""
        waiting = set(self._pending)
        if waiting:
            done: asyncio.Future[None] = self._loop.create_future()
            flush = (waiting, done)
            self._flushes.append(flush)
            try:
                await done
            finally:
                self._flushes.remove(flush)

    async def close(self, timeout_s: float) -> None:
        """Send what is pending, at most for ``timeout_s``; then what is left fails. Idempotent."""
        self._is_closing = True
        self._let_in()
        try:
            async with asyncio.timeout(timeout_s):
                await self.flush()
        except TimeoutError:
            pass
        if self._pending:
            _log.warning("the producer is closed before %d messages have an outcome", len(self._pending))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sender in self._numbered.values():
            if sender is not None:
                await sender.close()
        for message in tuple(self._pending):
            self._fail(message, ClientClosedError("the producer was closed before the message was sent"))
        self._waiting.clear()
        self._unplaced.clear()
        self._ready.clear()

    # -- placing -------------------------------------------------------------------------------------------------------

    def _place(self, message: OutgoingMessage, route: TopicRoute) -> None:
        """Put a message where it waits for its turn; or let it fail."""
        try:
            if message.key is not None:
                message.queue = self.selector.of_key(route, message.key)
            elif message.wanted is not None:
                message.queue = self.selector.named(route, message.wanted)
        except ClientError as error:
            self._fail(message, error)
            return
        if message.sys_flag & SYS_FLAG_PREPARED or not self._may_be_numbered(route):
            self._wait(message)
            return
        try:
            queue = message.queue or self.selector.next(route, message.tried)
        except ClientError as error:
            self._fail(message, error)
        else:
            self._number(message, queue)

    def _may_be_numbered(self, route: TopicRoute) -> bool:
        """Whether one of the route's brokers numbers messages, or all must."""
        if self._idempotence != "auto":
            return self._idempotence
        numbered = self._numbered
        for one in route.parts:  # noqa: SIM110  # for every message: a generator takes three times as long
            if numbered.get(one.broker, _UNKNOWN) is not None:
                return True
        return False

    def _number(self, message: OutgoingMessage, queue: MessageQueue) -> None:
        """Have a message for this queue numbered if its broker does that, once that is known."""
        name = queue.broker_name
        if name not in self._numbered:
            undecided = self._undecided.get(name)
            if undecided is None:
                undecided = self._undecided[name] = deque()
                self._begin(self._find_out(name))
            undecided.append((message, queue))
            return
        sender = self._numbered[name]
        if sender is not None:
            message.queue = queue
            sender.add(message)
        elif self._idempotence == "auto":
            message.first = queue
            self._wait(message)
        else:
            reason = (
                f"the broker {name} does not number messages, as only brokers of this project do: use "
                'enable_idempotence="auto" or False'
            )
            self._fail(message, RequestNotKnownError(reason))

    async def _find_out(self, name: str) -> None:
        """Whether a broker numbers messages; those that may go to another one do so if it cannot be asked."""
        pause_s = PAUSE_S
        waiting = self._undecided[name]
        while waiting:
            broker = self._cluster.routes.broker(name)
            try:
                self._numbered[name] = await self._sender_for(name, "" if broker is None else broker.master)
                break
            except ClientError as error:
                self._move_undecided(name, waiting, error)
            if waiting:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
                with suppress(ClientError, TimeoutError):  # the next attempt says what is the matter
                    async with asyncio.timeout(PAUSE_S_MAX):
                        await self._cluster.routes.refresh_brokers()
        del self._undecided[name]
        for message, queue in waiting:
            self._number(message, queue)

    async def _sender_for(self, name: str, master: str) -> NumberedSender | None:
        if not master:
            raise BrokerUnreachableError(f"brokers {name} have no master now")
        if not await numbers_messages(self._cluster, master):
            return None
        several = len(self._cluster.routes.brokers) > 1  # then there is time for another one
        timeout_s = self._cluster.timeout_s / (2 if several else 1)
        return NumberedSender(self._cluster, name, timeout_s, self._numbered_done, self._note_failure)

    def _move_undecided(
        self, name: str, waiting: deque[tuple[OutgoingMessage, MessageQueue]], error: ClientError
    ) -> None:
        self.selector.avoid(name)
        error.outcome = "not_applied"
        left = list(waiting)
        waiting.clear()
        for message, queue in left:
            if not self._moved(message, name) and self._in_time([message], error):
                waiting.append((message, queue))

    def _moved(self, message: OutgoingMessage, name: str) -> bool:
        """Offer a message that this broker does not take to another one, if it may go there."""
        topic = message.message.topic
        if not message.is_free or message.deadline <= self._loop.time():
            return False
        message.tried.append(name)
        route = self._route(topic)
        if route is None or not self._is_elsewhere_left(topic, message.tried):
            return False
        message.queue = None
        self._place(message, route)
        return True

    def _numbered_done(self, message: OutgoingMessage, outcome: SendResult | ClientError) -> None:
        """Give a numbered message its outcome, or another try at another broker."""
        if isinstance(outcome, SendResult):
            self.selector.works_again(outcome.broker)
            self._cluster.routes.now_exists(outcome.topic)
            self._succeed(message, outcome)
            return
        self._cluster.routes.doubt(message.message.topic)
        queue = message.queue
        if queue is not None and may_send_elsewhere(outcome) and self._moved(message, queue.broker_name):
            self.selector.avoid(queue.broker_name)
        else:
            self._fail(message, outcome)

    def _wait(self, message: OutgoingMessage) -> None:
        """Have a message wait for its turn, with others for its queue, or for any queue of its topic."""
        key = message.message.topic, message.queue
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting(*key)
        waiting.messages.append(message)
        self._list(waiting)

    async def _find_route(self, topic: str) -> None:
        """Place the messages of a topic without a known route, once it is known or they have no more time."""
        route: TopicRoute | None = None
        failure: ClientError | None = None
        pause_s = PAUSE_S
        unplaced = self._unplaced[topic]
        while True:
            try:
                route, failure = await self._cluster.routes.find(topic), None
                if route is None:
                    await self._cluster.routes.find(CREATING_TOPIC)
            except ClientError as error:
                failure = error
            if failure is None or not may_repeat(failure, harmless=True):
                break
            left = self._in_time(list(unplaced), failure)
            unplaced.clear()
            unplaced.extend(left)
            if not unplaced:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        del self._unplaced[topic]
        found = route or self._route(topic)
        for message in unplaced:
            if failure is not None:
                self._fail(message, failure)
            elif found is None:
                self._fail(message, no_such_topic(topic, by_name_servers=self._cluster.by_name_servers))
            elif route is None and (message.key is not None or message.wanted is not None):
                reason = f"topic {topic} does not exist, so neither a key nor a number can choose one of its queues"
                self._fail(message, NotFoundError(reason))
            else:
                self._place(message, found)

    def _known_route(self, topic: str) -> TopicRoute:
        route = self._route(topic)
        if route is None:  # there was one: the brokers are gone, perhaps for a moment
            raise BrokerUnreachableError(f"topic {topic} has no route any more: its brokers are not registered")
        return route

    def _route(self, topic: str) -> TopicRoute | None:
        """The route, or that of a topic that the first message creates."""
        route = self._cluster.routes.at_once(topic)
        if route is None:
            default = self._cluster.routes.at_once(CREATING_TOPIC)
            route = None if default is None else creating_route(topic, default)
        return route

    # -- sending -------------------------------------------------------------------------------------------------------

    def _list(self, waiting: _Waiting) -> None:
        """Send from it soon, if it has not enough requests in progress."""
        if not waiting.is_listed and waiting.messages and waiting.in_progress < waiting.in_progress_max:
            waiting.is_listed = True
            self._ready.append(waiting)
        if self._ready and not self._is_scheduled and self._requests < self._limits.requests_max:
            self._is_scheduled = True
            self._loop.call_soon(self._send_ready)

    def _send_ready(self) -> None:
        """Begin as many requests as may be in progress."""
        self._is_scheduled = False
        begun = 0
        while self._ready and self._requests + begun < self._limits.requests_max:
            waiting = self._ready.popleft()
            waiting.is_listed = False
            batch = self._next_batch(waiting)
            if batch:
                waiting.in_progress += 1
                begun += 1
                self._begin(self._send(waiting, batch))
            self._go_on(waiting)

    def _go_on(self, waiting: _Waiting) -> None:
        if waiting.messages or waiting.in_progress:
            self._list(waiting)
        else:
            self._waiting.pop((waiting.topic, waiting.queue), None)

    def _next_batch(self, waiting: _Waiting) -> list[OutgoingMessage]:
        """The next messages that may go together, without those whose callers gave up."""
        messages, limits = waiting.messages, self._limits
        batch: list[OutgoingMessage] = []
        size, now = 0, self._loop.time()
        while messages and len(batch) < limits.batch_messages_max:
            one = messages[0]
            if one.future is None or one.future.done():
                self._done(messages.popleft())
                continue
            size += one.size
            if batch and (size > limits.batch_bytes_max or not fit_together(batch[0], one)):
                break
            batch.append(messages.popleft())
            if not waiting.failed:
                one.deadline = max(one.deadline, now + self._cluster.timeout_s)
            if one.alone:
                break
        return batch

    async def _send(self, waiting: _Waiting, batch: list[OutgoingMessage]) -> None:
        """Try until each message of the batch has an outcome, or waits in the queue again."""
        try:
            await self._try(waiting, batch)
        except asyncio.CancelledError:  # the pipeline is closed at once
            for message in batch:
                self._fail(message, TimedOutError("the producer was closed before an answer came"))
            raise
        finally:
            waiting.in_progress -= 1
            self._go_on(waiting)

    async def _try(self, waiting: _Waiting, batch: list[OutgoingMessage]) -> None:
        tried: list[str] = []
        failure: ClientError | None = None
        pause_s = PAUSE_S
        while batch := self._in_time(batch, failure):
            queue = waiting.queue
            try:
                queue = queue or self._next_queue(waiting.topic, batch, tried)
                failure = self._settle(batch, queue, await self._ask(batch, queue))
            except ClientError as error:
                failure = error
            if failure is None:
                waiting.failed = False
                return
            if isinstance(failure, MessageRefusedError) and len(batch) > 1:  # one of them is to blame
                for message in reversed(batch):
                    message.alone = True
                    waiting.messages.appendleft(message)
                return
            if queue is not None:
                tried.append(queue.broker_name)
                self._note(waiting.topic, queue.broker_name, failure)
            if not self._may_repeat(batch, failure):
                break
            if waiting.queue is None and queue is not None and self._is_elsewhere_left(waiting.topic, tried):
                continue
            if isinstance(failure, _ELSEWHERE_ONLY):
                break
            tried.clear()
            await self._pause(waiting.topic, pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        waiting.failed = failure is None or may_repeat(failure, harmless=True)
        for message in batch:
            self._fail(message, failure or TimedOutError("the message was not sent in time", outcome="not_applied"))

    def _next_queue(self, topic: str, batch: list[OutgoingMessage], tried: list[str]) -> MessageQueue:
        """The queue whose turn it is, also if that was found before. Raises ``ClientError``."""
        first, batch[0].first = batch[0].first, None
        return first or self.selector.next(self._known_route(topic), tried)

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
        timeout_s = batch[-1].deadline - self._loop.time()
        self._requests += 1
        try:
            return await self._cluster.connections.call(broker.master, request, timeout_s), broker.master
        finally:
            self._requests -= 1

    def _settle(
        self, batch: list[OutgoingMessage], queue: MessageQueue, answered: tuple[Frame, str]
    ) -> ClientError | None:
        """Give each message its result; or return why they are not stored, or may be."""
        answer, address = answered
        status = STORED.get(answer.code)
        if status is None:
            return refusal_of(answer, address)
        try:
            stored = read_header(SendAnswer, answer.fields)
        except RequestError as error:
            return BadAnswerError(f"{address} answered to a message: {error}")
        self.selector.works_again(queue.broker_name)
        self._cluster.routes.now_exists(queue.topic)
        ids = stored.msg_id.split(",")
        for place, message in enumerate(batch):
            result = SendResult(
                queue.topic,
                queue.broker_name,
                stored.queue_id,
                stored.queue_offset + place,
                message.unique_key,
                ids[place] if place < len(ids) else "",
                status,
            )
            self._succeed(message, result)
        return None

    def _may_repeat(self, batch: list[OutgoingMessage], failure: ClientError) -> bool:
        """Whether the batch may be sent again."""
        if may_send_elsewhere(failure):
            return True
        if not (self._allow_duplicates and may_send_twice(failure)):
            return False
        for message in batch:
            message.doubtful = failure
        return True

    def _note(self, topic: str, broker: str, failure: ClientError) -> None:
        """Something does not work there: look the route up, and spare that broker."""
        self._cluster.routes.doubt(topic)
        if not isinstance(failure, MessageRefusedError):
            self._note_failure(broker, failure)

    def _note_failure(self, broker: str, failure: ClientError) -> None:
        self.selector.avoid(broker)
        if self._on_failure is not None:
            self._on_failure(broker, failure)

    def _is_elsewhere_left(self, topic: str, tried: list[str]) -> bool:
        if len(set(tried)) >= ELSEWHERE_MAX:
            return False
        route = self._route(topic)
        return route is not None and any(one.is_writable and one.broker not in tried for one in route.parts)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _in_time(self, batch: list[OutgoingMessage], failure: ClientError | None) -> list[OutgoingMessage]:
        """Those whose deadline has not passed; the others fail."""
        now = self._loop.time()
        if batch[0].deadline > now:  # the oldest
            return batch
        left: list[OutgoingMessage] = []
        for message in batch:
            if message.deadline > now:
                left.append(message)
            else:
                late = TimedOutError("the message could not be sent in time", outcome="not_applied")
                self._fail(message, failure or late)
        return left

    def _fail(self, message: OutgoingMessage, error: ClientError) -> None:
        self._done(message)
        if message.future is not None:
            with suppress(asyncio.InvalidStateError, InvalidStateError):  # its caller gave up
                message.future.set_exception(message.doubtful or error)

    def _succeed(self, message: OutgoingMessage, result: SendResult) -> None:
        self._done(message)
        if message.future is not None:
            with suppress(asyncio.InvalidStateError, InvalidStateError):  # its caller gave up
                message.future.set_result(result)

    def _done(self, message: OutgoingMessage) -> None:
        """It is not pending any more."""
        if message in self._pending:
            self._pending.discard(message)
            self.pending_bytes -= message.size
            for waiting, done in self._flushes:
                waiting.discard(message)
                if not waiting and not done.done():
                    done.set_result(None)
            if self._room and self.has_room:
                self._let_in()

    def _let_in(self) -> None:
        """Let everybody look who waits for room."""
        room, self._room = self._room, []
        for waiting in room:
            if not waiting.done():
                waiting.set_result(None)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
