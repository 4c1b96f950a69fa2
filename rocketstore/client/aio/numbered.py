"""Numbered sends: messages that a broker of this project recognizes if they are sent again: each is stored once.

For each broker name there is one numbered producer: its messages go to the master in one sequence, many requests at a
time, and are sent again under the same numbers whatever became of a request (``dledger.sending.window`` decides). So an
unknown outcome remains only for a message without an answer by its deadline. The requests are 20100 and 20101 of
docs/protocol.md, which a broker announces in its first answer. ``NamedSends``: under one name of the application's.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, TypeAlias

from dledger.errors import DLedgerError, InvalidRequestError, OutOfOrderSequenceError, UnknownProducerError
from dledger.remoting.codes import RequestError
from dledger.remoting.frame import Frame
from dledger.sending.aio import AsyncLinks, AsyncSender, OnAnswer, OnEnd
from dledger.sending.batch import AllStored, Answer, OutgoingBatch, ProducerNumbering, WindowRules, new_producer_name
from dledger.sending.window import Window, WindowOptions
from rocketstore.client.aio.admin_requests import handle_of
from rocketstore.client.aio.cluster import PAUSE_S, Cluster, numbers_messages
from rocketstore.client.aio.connections import ATTEMPT_S_MAX, Deadline
from rocketstore.client.aio.errors import (
    NO_OFFSET,
    STORED,
    BadAnswerError,
    BrokerBusyError,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    MessageRefusedError,
    NoQueueError,
    NotFoundError,
    NumberOutOfOrderError,
    ProducerForgottenError,
    RefusedError,
    RequestNotKnownError,
    SendResult,
    SendStatus,
    TimedOutError,
    may_repeat,
    refusal_of,
)
from rocketstore.client.aio.outgoing import CREATING_TOPIC, OutgoingMessage, PendingMessages, PipelineLimits, identify
from rocketstore.client.aio.queue_sends import OnFailure, QueueSelector, no_queues_yet
from rocketstore.client.aio.routes import RoutedBroker, TopicRoute, no_such_topic
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import HostAddress
from rocketstore.remoting.codes import OwnCode
from rocketstore.remoting.extensions import (
    MESSAGES_MAX,
    StoredRow,
    decode_next,
    decode_stored,
    encode_message,
    encode_name,
    encode_numbered,
)
from rocketstore.remoting.topics import MessageQueue
from rocketstore.types import PutMessageStatus

SEARCH_PAUSE_S: Final = 0.01
"""Between two attempts to reach a master, besides the pauses of the lookup."""
ANSWER_S_MAX: Final = 60.0
"""How long a request is waited for; its messages have an outcome before, but the numbers behind it depend on it."""
REQUESTS_MAX: Final = 12
"""In progress to one broker."""
NUMBERED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of messages that are numbered and have no outcome yet. Those behind them wait."""
BATCH_MESSAGES: Final = 1024
ONLY_OURS: Final = "as only brokers of this project do"
_Batch: TypeAlias = OutgoingBatch[OutgoingMessage, SendResult]
Settle: TypeAlias = Callable[[str, Sequence[OutgoingMessage], Sequence[SendResult | ClientError]], None]
"""Gives messages for a broker name their outcomes."""
_BUSY: Final = frozenset({PutMessageStatus.TOO_MANY_PRODUCERS, PutMessageStatus.OS_PAGECACHE_BUSY})
"""Statuses that pass, although RocketMQ's code for them is that of any failure."""


def _behind(failure: ClientError) -> NumberOutOfOrderError:
    """The error of messages behind one that was not stored, under numbers of the application."""
    if isinstance(failure, NumberOutOfOrderError):
        return failure
    why = f"an earlier message was not stored ({failure}): call next_number() and go on from there"
    return NumberOutOfOrderError(why, outcome="not_applied")


class NumberedSender:
    """The numbered producer of one broker name. ``settle`` is called with messages and their outcomes.

    ``name``: that of an application's producer, which has given its messages their numbers.
    """

    def __init__(
        self,
        cluster: Cluster,
        broker: str,
        timeout_s: float,
        limits: PipelineLimits,
        settle: Settle,
        note_failure: OnFailure,
        name: str = "",
    ) -> None:
        self._cluster = cluster
        self.broker: Final = broker
        self._settle = settle
        self._note_failure = note_failure
        self._loop = asyncio.get_running_loop()
        self._added: deque[OutgoingMessage] = deque()
        self._is_scheduled = False
        self._failure: ClientError | None = None
        """Why the last request did not get through in time. While they do, those that wait have time."""
        rules: WindowRules[OutgoingMessage, SendResult] = WindowRules(
            is_retried=may_repeat,
            bad_answer=BadAnswerError,
            is_final=lambda error: isinstance(error, BadAnswerError),
            unknown=TimedOutError,
        )
        options = WindowOptions(
            linger_ms=0.0,
            batch_bytes=limits.batch_bytes_max,
            batch_items=min(limits.batch_messages_max, MESSAGES_MAX),
            pending_bytes_max=NUMBERED_BYTES_MAX,
            inflight_requests_max=REQUESTS_MAX,
            inflight_items_max=1 << 16,
            timeout_ms=timeout_s * 1000.0,
        )
        links = AsyncLinks(self._connect, self._find_master, self._failed)
        self._window: Window[OutgoingMessage, SendResult] = Window(options, rules, ProducerNumbering(name))
        self._name = name
        self._sender = AsyncSender(links, self._window, f"messages for {broker}")

    def add(self, messages: Sequence[OutgoingMessage]) -> None:
        """Send messages, whose queues are chosen."""
        self._added.extend(messages)
        if not self._is_scheduled:  # otherwise these come after others
            self._send_added()

    async def close(self) -> None:
        """End; pending messages get an outcome. Idempotent."""
        await self._sender.abandon(TimedOutError("the producer was closed", outcome="not_applied"))
        self._send_added()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _send_added(self) -> None:
        """Number as many as may be on their way."""
        self._is_scheduled = False
        while self._added and not self._window.is_full:
            messages, payloads = self._next()
            if not messages:
                continue
            number = messages[0].number if self._name else None
            try:
                self._window.check_number(number)
                spans = self._sender.add_many_at_once(payloads, messages, sequence=number)
            except DLedgerError as error:  # it is closed, or numbers are missing
                self._settle(self.broker, messages, [_own(error)] * len(messages))
                continue
            for batch, first, _ in spans:
                if not first:
                    batch.when_done(partial(self._done, batch))

    def _next(self) -> tuple[list[OutgoingMessage], list[bytes]]:
        """The next messages, without those that have no more time, and those whose callers gave up."""
        now, failure = self._loop.time(), self._failure
        taken: list[OutgoingMessage] = []
        payloads: list[bytes] = []
        added = self._added
        while added and len(taken) < BATCH_MESSAGES:
            if taken and self._name and added[0].number != taken[-1].number + 1:
                break
            message = added.popleft()
            future, queue, sent = message.future, message.queue, message.message
            problem: ClientError
            if future is None or future.done():
                problem = TimedOutError("nobody waits for it", outcome="not_applied")
            elif failure is not None and now > message.deadline:
                problem = failure
            else:
                assert queue is not None, "it was placed"
                properties = message.properties.encode()
                try:
                    payload = encode_message(
                        sent.topic, queue.queue_id, sent.flag, message.sys_flag, message.born_ms, properties, sent.body
                    )
                except ValueError as error:
                    problem = MessageRefusedError(f"cannot send the message: {error}")
                else:
                    taken.append(message)
                    payloads.append(payload)
                    continue
            self._settle(self.broker, (message,), (problem,))
        return taken, payloads

    def _done(self, batch: _Batch) -> None:
        outcomes = batch.outcomes
        if isinstance(outcomes, tuple):  # all of one answer
            self._failure = None
            self._settle(self.broker, batch.items, outcomes)
        else:
            own = [_own(one) for one in outcomes]
            self._failure = next((one for one in own if isinstance(one, ClientError) and may_repeat(one)), None)
            self._settle(self.broker, batch.items, own)
            failure = next((one for one in own if isinstance(one, ClientError)), None)
            if self._name and failure is not None and self._added:
                left = list(self._added)
                self._added.clear()
                self._settle(self.broker, left, [_behind(failure)] * len(left))
        if self._added and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._send_added)

    def _failed(self, _address: str, error: DLedgerError) -> None:
        if isinstance(error, ClientError) and may_repeat(error, harmless=True):
            self._note_failure(self.broker, error)

    async def _find_master(self) -> str | None:
        return await self._cluster.find_master(self.broker) or None

    async def _connect(
        self,
        timeout_s: float,
        on_answer: OnAnswer[OutgoingMessage, SendResult],
        on_end: OnEnd[OutgoingMessage, SendResult],
    ) -> NumberedStream:
        """A stream to the master. Raises ``ClientError`` if there is none by then: nothing was sent."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        broker = self._cluster.routes.broker(self.broker)
        address = broker.master if broker is not None else ""
        while True:
            failure: ClientError
            try:
                if address:
                    opening = self._opened(address, deadline - loop.time(), on_answer, on_end)
                    if (stream := await self._cluster.unless_replaced(self.broker, address, opening)) is not None:
                        return stream
                    failure = BrokerUnreachableError(f"{address} is silent, and not the master any more")
                else:
                    failure = BrokerUnreachableError(f"brokers {self.broker} have no master now")
            except ClientError as error:
                failure = error
                if not may_repeat(error, harmless=True):
                    raise
            self._note_failure(self.broker, failure)
            if deadline - loop.time() <= PAUSE_S:
                failure.outcome = "not_applied"
                raise failure
            await asyncio.sleep(SEARCH_PAUSE_S)
            address = await self._cluster.find_master(self.broker)

    async def _opened(
        self,
        address: str,
        timeout_s: float,
        on_answer: OnAnswer[OutgoingMessage, SendResult],
        on_end: OnEnd[OutgoingMessage, SendResult],
    ) -> NumberedStream:
        if not await numbers_messages(self._cluster, address):
            raise MessageRefusedError(f"{address} does not number messages any more: make a new producer")
        request = Frame(OwnCode.NEXT_NUMBER, 0, {}, encode_name(new_producer_name()))
        answer = await self._cluster.connections.call(address, request, min(timeout_s, ATTEMPT_S_MAX))
        if answer.code:
            raise refusal_of(answer, address)
        try:
            _, memory = decode_next(answer.body)
        except RequestError as error:
            raise BadAnswerError(f"{address}: {error}", outcome="not_applied") from error
        return NumberedStream(self._cluster, address, memory, on_answer, on_end)


class NumberedStream:
    """Requests to one master, in order, until one of them gets no answer: then the others' outcomes, and the end."""

    def __init__(
        self,
        cluster: Cluster,
        address: str,
        memory: str,
        on_answer: OnAnswer[OutgoingMessage, SendResult],
        on_end: OnEnd[OutgoingMessage, SendResult],
    ) -> None:
        self.address = address
        self.server_memory = memory
        self.broken: DLedgerError | None = None
        self._connections = cluster.connections
        self._on_answer = on_answer
        self._on_end = on_end
        self._requests: set[asyncio.Task[None]] = set()

    def submit(self, batch: _Batch) -> DLedgerError | None:
        """Send the ``sent`` items of a batch; returns why they were not sent, if they were not."""
        if self.broken is not None:
            return BrokerUnreachableError(f"the stream to {self.address} has ended: {self.broken}")
        payloads = [batch.payloads[place] for place in batch.sent]
        messages = [batch.items[place] for place in batch.sent]
        body = encode_numbered(batch.producer, batch.sequence, payloads)
        request = Frame(OwnCode.SEND_NUMBERED, 0, {}, body)
        task = asyncio.get_running_loop().create_task(self._ask(batch, messages, request))
        self._requests.add(task)
        task.add_done_callback(self._ended)
        return None

    async def close(self, why: str = "") -> None:
        """End; every request in progress gets its outcome, with ``why``, before this returns."""
        self._break(BrokerUnreachableError(why or "the stream was closed"))
        requests = tuple(self._requests)
        for task in requests:
            task.cancel()
        if requests:
            await asyncio.wait(requests)
        self._end_once()

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _ask(self, batch: _Batch, messages: Sequence[OutgoingMessage], request: Frame) -> None:
        outcome: Answer[SendResult]
        try:
            answer = await self._connections.call(self.address, request, ANSWER_S_MAX)
            outcome = self._outcome(answer, messages)
        except ClientError as error:
            outcome = error
            self._break(error)
        except asyncio.CancelledError:
            outcome = TimedOutError(f"unknown whether it was stored: {self.broken}")
        self._on_answer(self, batch, outcome)

    def _outcome(self, answer: Frame, messages: Sequence[OutgoingMessage]) -> Answer[SendResult]:
        status = STORED.get(answer.code)
        if status is None:
            return self._refusal(answer, messages)
        try:
            host, rows = decode_stored(answer.body, len(messages))
            id_prefix = offset_message_id(HostAddress(*host), 0)[:-16]
        except (RequestError, InvalidRequestError) as error:
            return BadAnswerError(f"{self.address}: {error}")
        return AllStored(tuple(_results(messages, id_prefix, rows, status)))

    def _refusal(self, answer: Frame, messages: Sequence[OutgoingMessage]) -> Answer[SendResult]:
        """Why none of the messages is stored, or all may be."""
        fields, count = answer.fields, len(messages)
        refusal: DLedgerError = refusal_of(answer, self.address)
        outcome = refusal.outcome
        status = fields.get("status", "")
        if status == PutMessageStatus.OUT_OF_ORDER_SEQUENCE:
            refusal = OutOfOrderSequenceError(str(refusal))
        elif status == PutMessageStatus.UNKNOWN_PRODUCER:
            refusal = UnknownProducerError(str(refusal))
        elif status == PutMessageStatus.QUEUE_NOT_FOUND:
            refusal = NoQueueError(str(refusal), answer_code=answer.code, address=self.address)
        elif status in _BUSY:
            refusal = BrokerBusyError(str(refusal), answer_code=answer.code, address=self.address)
        refusal.outcome = outcome
        blamed = fields.get("message", "")
        if not blamed.isdigit() or int(blamed) >= count or refusal.outcome == "unknown" or count == 1:
            return refusal
        behind = OutOfOrderSequenceError(f"another message of its request was refused: {refusal}")
        to_blame = messages[int(blamed)]
        is_gone = isinstance(refusal, NoQueueError)  # for all that it was chosen for
        return [refusal if one is to_blame or (is_gone and one.queue == to_blame.queue) else behind for one in messages]

    def _break(self, error: DLedgerError) -> None:
        self.broken = self.broken or error

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        if self.broken is not None and not self._requests:
            self._end_once()

    def _end_once(self) -> None:
        on_end, self._on_end = self._on_end, _ignore
        on_end(self)


def _ignore(_stream: object) -> None:
    """It was told already."""


def _results(
    messages: Sequence[OutgoingMessage], id_prefix: str, rows: Iterable[StoredRow], status: SendStatus
) -> Iterator[SendResult]:
    """``id_prefix`` is that of all messages' offset ids, which name the broker's host."""
    for message, (offset, queue_id, queue_offset, _) in zip(messages, rows, strict=True):
        queue = message.queue
        assert queue is not None, "it was placed"
        if offset < 0:  # an earlier request has stored it, and the broker does not remember where
            queue_id, queue_offset, offset_id = queue.queue_id, NO_OFFSET, ""
        else:
            offset_id = f"{id_prefix}{offset:016X}"
        handle = handle_of(message, queue.broker_name, queue_offset) if message.alone else ""
        yield SendResult(
            queue.topic, queue.broker_name, queue_id, queue_offset, message.unique_key, offset_id, status, handle
        )


def _own(outcome: SendResult | DLedgerError | None) -> SendResult | ClientError:
    """An outcome of the window as one of this client."""
    if isinstance(outcome, SendResult | ClientError):
        return outcome
    if outcome is None:
        return TimedOutError("the message has no outcome")
    if isinstance(outcome, OutOfOrderSequenceError):
        return NumberOutOfOrderError(f"{outcome}: call next_number() and go on from there", outcome=outcome.outcome)
    if isinstance(outcome, UnknownProducerError):
        return ProducerForgottenError(f"{outcome}: begin at 0, under a new name", outcome=outcome.outcome)
    if outcome.outcome == "unknown":
        return TimedOutError(str(outcome))
    cause = outcome.__cause__
    if isinstance(cause, RefusedError) and may_repeat(cause):  # it refused until there was no time left
        return type(cause)(str(outcome), answer_code=cause.answer_code, address=cause.address, outcome=outcome.outcome)
    return BrokerUnreachableError(str(outcome))


class NamedSends:
    """The messages under one name, on the loop: their queues, at the brokers of one name, and the sender of them."""

    def __init__(
        self, cluster: Cluster, selector: QueueSelector, pending: PendingMessages, name: str, broker: str
    ) -> None:
        self.timeout_s: Final = cluster.timeout_s
        self._cluster = cluster
        self._selector = selector
        self._pending = pending
        self._name = name
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._sender: NumberedSender | None = None
        self._added: deque[OutgoingMessage] = deque()
        self._is_scheduled = False
        self._has_failed = False  # since the next number was asked for
        self._finding: asyncio.Task[None] | None = None  # the broker, or a route
        self._here: tuple[TopicRoute | None, TopicRoute | None] = (None, None)  # a route, and its part of this broker

    def add(self, message: OutgoingMessage) -> None:
        """Send a message, together with others of this turn of the loop."""
        self._take((message,))
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._go_on)

    def add_all(self, messages: Sequence[OutgoingMessage]) -> None:
        """Send messages at once."""
        self._take(messages)
        self._go_on()

    async def next_number(self) -> int:
        """See ``NumberedProducer``."""
        await self._pending.flush()
        if self._has_failed and self._sender is not None:
            # Its last requests may still be under way: whatever becomes of them, it expects the numbers behind them.
            sender, self._sender = self._sender, None
            await sender.close()
        self._has_failed = False
        deadline = self._cluster.deadline()

        async def attempt() -> int:
            broker = await self._find_broker(deadline)
            ask, timeout_s = self._cluster.connections.ask, min(ATTEMPT_S_MAX, deadline.remaining_s)
            name = encode_name(self._name)
            answer = await ask(broker.master, OwnCode.NEXT_NUMBER, None, name, timeout_s=timeout_s)
            try:
                return decode_next(answer.body)[0]
            except RequestError as error:
                raise BadAnswerError(f"{broker.master}: {error}", outcome="not_applied") from error

        return await self._cluster.repeat(attempt, deadline, harmless=True)

    async def close(self) -> None:
        """End at once; what was not sent fails. Idempotent."""
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)
        if self._sender is not None:
            await self._sender.close()
        self._give_up(ClientClosedError("the numbered producer was closed", outcome="not_applied"))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _take(self, messages: Sequence[OutgoingMessage]) -> None:
        deadline = self._loop.time() + self.timeout_s
        for message in messages:
            message.deadline = deadline
        identify(messages, time.time_ns() // 1_000_000)
        self._pending.add(messages)
        self._added.extend(messages)

    def _go_on(self) -> None:
        """Place messages, in order, as long as their routes are known."""
        self._is_scheduled = False
        if self._finding is not None:
            return
        placed: list[OutgoingMessage] = []
        failure: ClientError | None = None
        while self._added and failure is None:
            message = self._added[0]
            route = self._cluster.routes.at_once(message.message.topic)
            if route is None or self._sender is None:
                self._finding = self._loop.create_task(self._find(message.message.topic))
                break
            try:
                message.queue = self._queue(route, message)
            except ClientError as error:
                failure = error
            else:
                placed.append(self._added.popleft())
        if placed and self._sender is not None:
            self._sender.add(placed)
        if failure is not None:
            self._give_up(failure)

    async def _find(self, topic: str) -> None:
        """The broker, and the route of a topic; then go on."""
        deadline = self._cluster.deadline()
        placed: list[OutgoingMessage] = []
        failure: ClientError | None = None
        try:
            route = await self._cluster.repeat(lambda: self._found(topic, deadline), deadline, harmless=True)
            exists = self._cluster.routes.at_once(topic) is not None
            while self._added and self._added[0].message.topic == topic:
                message = self._added[0]
                if not (exists or message.is_free):
                    raise no_queues_yet(topic)
                message.queue = self._queue(route, message)
                placed.append(self._added.popleft())
        except ClientError as error:
            error.outcome = "not_applied"
            failure = error
        finally:
            self._finding = None
        if placed and self._sender is not None:
            self._sender.add(placed)
        if failure is not None:
            self._give_up(failure)
        self._go_on()

    async def _found(self, topic: str, deadline: Deadline) -> TopicRoute:
        routes = self._cluster.routes
        if self._sender is None:
            broker = await self._find_broker(deadline)
            self._sender = NumberedSender(
                self._cluster,
                broker.name,
                self.timeout_s,
                self._pending.limits,
                self._settle,
                self._selector.note_failure,
                self._name,
            )
        if await routes.find(topic) is None:
            await routes.find(CREATING_TOPIC)
        route = self._selector.route(topic)
        if route is None:
            raise no_such_topic(topic, by_name_servers=self._cluster.by_name_servers)
        return route

    async def _find_broker(self, deadline: Deadline) -> RoutedBroker:
        """The brokers of the name, with a master. Raises ``RequestNotKnownError`` if it does not number messages."""
        broker = await self._cluster.broker(self._broker, deadline)
        if not broker.master:
            raise BrokerUnreachableError(f"brokers {broker.name} have no master now")
        if not await numbers_messages(self._cluster, broker.master):
            raise RequestNotKnownError(f"the broker {broker.name} does not number messages, {ONLY_OURS}")
        return broker

    def _queue(self, route: TopicRoute, message: OutgoingMessage) -> MessageQueue:
        """The message's queue, at this broker. Raises ``ClientError``."""
        assert self._sender is not None, "the broker was found"
        known, here = self._here
        if here is None or known is not route:
            parts = tuple(one for one in route.parts if one.broker == self._sender.broker)
            if not parts:
                raise NotFoundError(f"brokers {self._sender.broker} have no queues of topic {route.topic}")
            here = TopicRoute(route.topic, parts)
            self._here = (route, here)
        return self._selector.choose(here, message)

    def _settle(
        self, _broker: str, messages: Sequence[OutgoingMessage], outcomes: Sequence[SendResult | ClientError]
    ) -> None:
        self._pending.settle(messages, outcomes)
        failure = next((one for one in outcomes if isinstance(one, ClientError)), None)
        for topic in {one.message.topic for one in messages}:
            if failure is None:
                self._cluster.routes.now_exists(topic)
            else:
                self._cluster.routes.doubt(topic)
        if failure is not None:
            self._has_failed = True
            self._give_up(_behind(failure))

    def _give_up(self, failure: ClientError) -> None:
        """Fail the messages that wait behind a missing number."""
        messages = list(self._added)
        self._added.clear()
        if messages:
            self._pending.settle(messages, [failure, *[_behind(failure)] * (len(messages) - 1)])
