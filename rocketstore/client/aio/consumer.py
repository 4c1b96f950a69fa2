"""``Consumer``: messages of some topics, shared with the other members of a group or read alone."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from dledger.errors import ConfigError, DLedgerError
from rocketstore.client.aio.assignment import Assignment, Delivery, DeliveryQueue
from rocketstore.client.aio.broker_session import Subscriptions, check_conditions, warn_of_others
from rocketstore.client.aio.cluster import Cluster, Heartbeats
from rocketstore.client.aio.consumer_options import ConsumerOptions, ConsumerSettings, Expression, Topics, wanted_of
from rocketstore.client.aio.errors import (
    OTHER_PROCESS,
    ClientClosedError,
    ClientError,
    NotFoundError,
    UnreadableBodyError,
    may_repeat,
)
from rocketstore.client.aio.offsets import BrokerOffsets, LocalOffsets, OffsetStore, Start, StartOffsets
from rocketstore.client.aio.producer import Producer, ProducerOptions
from rocketstore.client.aio.rebalancer import Assign, ConsumerRequests, Rebalancer
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.client.aio.routes import TopicRoute
from rocketstore.client.aio.tracing import (
    TRACE_CLOSE_S,
    TRACE_LIMITS,
    ConsumeSpans,
    ConsumeTraces,
    OpenTelemetry,
    TraceWriter,
)
from rocketstore.message.checks import check_group_name, check_topic
from rocketstore.message.ids import new_client_id, offset_message_id
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumerData, HeartbeatData
from rocketstore.remoting.headers import SendBackHeader
from rocketstore.remoting.topics import MessageQueue
from rocketstore.types import ConsumeFromWhere, MessageModel

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity
    from dledger.remoting.connection import RemotingConnection
    from dledger.remoting.frame import Frame

_log = logging.getLogger(__name__)
ORDERED_PAUSE_S: Final = 1.0
"""Before a message that failed in order is tried again."""
AGAIN_S_MIN: Final = 10.0
"""The pause before a message that cannot be sent back is tried again here; each further one is three times as long."""
AGAIN_S_MAX: Final = 60.0
"""The longest such pause, and the one before a message that this installation cannot read is looked at again."""
RETRIES: Final = 16
"""How often such a message is tried if only the group's settings, which brokers have, say how often: 16 by default."""
LATE_S: Final = 10.0
"""How long a message may be in use before it is logged that it holds up its queue's position,"""
LATE_AGAIN_S: Final = 60.0
"""and how often that is logged at most."""
LOOK_S: Final = 1.0
"""How often it is looked which messages take too long, and sent back again what no broker took."""
REPORTED_MAX: Final = 1000
WORKERS: Final = 4

Handler = Callable[[ConsumedMessage], Awaitable[object]]
BatchHandler = Callable[[Sequence[ConsumedMessage]], Awaitable[object]]


class Consumer:
    """``poll`` or iterate, or ``run`` a handler.

    Give either ``name_servers``, or the ``addresses`` of the brokers of one group. ``topics``: names, or by name tag
    expressions ``"new || paid"`` or conditions ``Sql("amount > 10")``. Consumers of the same ``group`` divide the
    queues of their topics among themselves, together with RocketMQ's clients, and anew whenever one joins or leaves;
    all must subscribe to the same. With ``assign`` it reads all queues, or those given, whatever others read; with an
    empty group it commits nothing.

    Delivery is at least once: an offset is committed when all messages before it are done, so nothing is skipped.
    Messages come again if they were not committed when their queue changed hands: those in use when a member joins or
    leaves, and those of the last ``commit_s`` when one is killed. With ``poll`` and iteration, the next call says that
    the messages of the one before are done; ``run`` says so when its handler returns, and sends a message back if it
    raises: the message comes again later, each time later, and goes to ``%DLQ%group`` in the end.

    It belongs to the event loop on which it is started. Raises ``ConfigError`` for arguments that do not fit.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str | None = None,
        *,
        name_servers: Sequence[str] | str | None = None,
        group: str = "",
        topics: Topics,
        assign: Assign | None = None,
        security: ClientSecurity | None = None,
        options: ConsumerOptions | None = None,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self.group: Final = group
        self.client_id: Final = new_client_id()
        self.options: Final = options or ConsumerOptions(**settings)
        self._assign = assign
        self._subscriptions = Subscriptions(group, self.client_id, wanted_of(topics), self.options)
        self._given = (addresses, name_servers, security)
        if problems := self._problems():
            raise ConfigError(problems)
        self._process = os.getpid()
        self._running: _Running | None = None
        self._starting: asyncio.Lock | None = None
        self._is_closed = False
        self._closing: tuple[_Running, asyncio.Task[None]] | None = None
        self._in_hand: list[Delivery] = []
        self._paused: set[MessageQueue] = set()

    def _problems(self) -> list[str]:
        options, problems = self.options, []
        if not self.group and self._assign is None:
            problems.append("a consumer needs a group, or assign= to read alone")
        if not self.group and options.broadcast:
            problems.append("broadcast needs a group, which brokers know its consumers by")
        if self._assign is not None and (options.broadcast or options.ordered):
            problems.append("assign does not go together with ordered or broadcast")
        if self.group and (problem := check_group_name(self.group)):
            problems.append(problem)
        if not self._subscriptions.expressions:
            problems.append("topics names no topic")
        for topic, expression in self._subscriptions.expressions.items():
            if problem := check_topic(topic):
                problems.append(problem)
            try:
                Expression.of(expression)
            except ConfigError as error:
                problems += error.problems
        return problems

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._in_hand.clear()  # the messages returned last may not be done
        try:
            await self.close()
        except (DLedgerError, OSError) as failure:
            if error is None:
                raise
            _log.warning("cannot commit the offsets of group %s: %s", self.group, failure)

    # -- messages ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, join the group, and return when this consumer knows its queues, which may be none. Idempotent.

        Calls that need it start it. Raises ``NotFoundError`` for a topic or an assigned queue that does not exist, and
        what keeps it from joining. Some brokers may be unavailable: their queues follow.
        """
        await self._started()

    async def poll(self, max_messages: int = 1024, timeout_s: float = 1.0) -> list[ConsumedMessage]:
        """Up to ``max_messages`` of one queue, at least one unless none arrives within ``timeout_s``.

        Messages of earlier polls count as done. Raises ``OffsetOutOfRangeError`` if that was asked for, at every call
        until ``seek`` moves elsewhere, and ``ForbiddenError`` if nothing has arrived and a queue may not be read: its
        key was revoked, say. The queue is asked for again every second, so that a later call returns messages.
        """
        running = await self._started()
        self._finish_in_hand(running)
        delivery = await running.deliveries.receive(max_messages, timeout_s)
        if delivery is None:
            self._check_open()
            running.deliveries.check_permitted()
            return []
        self._in_hand.append(delivery)
        return list(delivery.messages)

    def __aiter__(self) -> AsyncIterator[ConsumedMessage]:
        """Every message until the consumer is closed, waiting for more. Requesting the next completes the last."""
        return self._messages()

    async def _messages(self) -> AsyncIterator[ConsumedMessage]:
        while True:
            try:
                messages = await self.poll(1)
            except ClientClosedError:
                if self._is_closed:
                    return
                raise
            for one in messages:
                yield one

    async def take_singly(self, max_messages: int, done: Sequence[Delivery] = ()) -> list[Delivery]:
        """Up to ``max_messages`` one by one, for a facade: each is done when it is passed as ``done`` or to
        ``finish``.

        Waits for the first one. Raises ``ClientClosedError``.
        """
        running = await self._started()
        running.finish_all(done)
        taken: list[Delivery] = []
        while not taken:
            self._check_open()
            first = await running.deliveries.receive(1, LOOK_S)
            if first is None:
                running.deliveries.check_permitted()
            while first is not None:
                first.is_reported = True  # it may wait long for its turn
                taken.append(first)
                first = running.deliveries.at_once(1) if len(taken) < max_messages else None
        return taken

    async def return_unused(self, deliveries: Sequence[Delivery]) -> None:
        """They were not looked at: hand them out again."""
        running = await self._started()
        for one in deliveries:
            if running.deliveries.claim(one):
                running.deliveries.deliver_again(one, 0.0, counts=False)

    async def finish(self, done: Sequence[Delivery]) -> None:
        """These are done."""
        (await self._started()).finish_all(done)

    def _finish_in_hand(self, running: _Running) -> None:
        done, self._in_hand = self._in_hand, []
        running.finish_all(done)

    async def run(self, handler: Handler, *, workers: int = WORKERS) -> None:
        """Call ``handler`` with each message, ``workers`` at a time, until the consumer is closed.

        When it returns, the message is done. If it raises anything, or is cancelled by itself, that is logged and the
        message is sent back. If this call is cancelled, messages in use come again without counting as tried.
        """

        async def handle(messages: Sequence[ConsumedMessage]) -> object:
            return await handler(messages[0])

        await self._run(handle, workers, 1)

    async def run_batches(self, handler: BatchHandler, *, workers: int = WORKERS, batch_max: int = 100) -> None:
        """As ``run``, but with up to ``batch_max`` messages of one queue at a time, which are done or fail together."""
        await self._run(handler, workers, batch_max)

    async def _run(self, handler: BatchHandler, workers: int, batch_max: int) -> None:
        if not callable(handler):
            raise TypeError(f"a handler must be callable, not {handler!r}")
        if workers < 1 or batch_max < 1:
            raise ConfigError(["workers and batch_max must be at least 1"])
        running = await self._started()
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(running.work(handler, batch_max), name=f"consumer worker {number}")

    # -- offsets -------------------------------------------------------------------------------------------------------

    async def commit(self, done: Sequence[Delivery] = ()) -> None:
        """Commit what is done, messages returned by ``poll`` included; then raise the first error, if there was one."""
        running = await self._started()
        running.finish_all(done)
        self._finish_in_hand(running)
        await running.rebalancer.commit()

    async def seek(self, queue: MessageQueue, to: Start | int) -> None:
        """Continue in a queue at an offset, or at its ``"first"`` or after its ``"last"`` message.

        The next commit may then go back. Raises ``NotFoundError`` for a queue that this consumer does not have.
        """
        running = await self._started()
        assignment = running.assignment(queue)
        if isinstance(to, str):
            found = await StartOffsets(running.cluster, None, to).offsets_at([queue], to)
            if queue not in found:
                raise NotFoundError(f"queue {queue.queue_id} of {queue.topic} does not exist any more")
            to = found[queue]
        elif to < 0:
            raise ConfigError([f"negative offset: {to}"])
        running.deliveries.go_to(assignment, to)
        assignment.may_rewind = True

    async def seek_to_time(self, time_ms: int, *queues: MessageQueue) -> None:
        """Continue in these queues, or all, at the first message stored at a time (ms since 1970) or later."""
        running = await self._started()
        if not isinstance(time_ms, int):
            raise TypeError(f"the time, in ms since 1970, comes first, and then the queues: not {time_ms!r}")
        chosen = [running.assignment(one).queue for one in queues] or list(running.deliveries.assignments)
        for queue, offset in (await StartOffsets(running.cluster, None, time_ms).offsets_at(chosen, time_ms)).items():
            await self.seek(queue, offset)

    def pause(self, *queues: MessageQueue) -> None:
        """Hand out nothing of these queues, or of all, until ``resume``; they stay this consumer's."""
        self._set_paused(queues, is_paused=True)

    def resume(self, *queues: MessageQueue) -> None:
        """Hand out messages of these queues, or of all, again."""
        self._set_paused(queues, is_paused=False)

    def _set_paused(self, queues: Sequence[MessageQueue], *, is_paused: bool) -> None:
        self._check_place()
        if self._running is None:
            raise ClientClosedError("the consumer has not been started, or is closed")
        deliveries = self._running.deliveries
        for queue in queues or tuple(deliveries.assignments):
            self._running.assignment(queue).is_paused = is_paused
        deliveries.changed()

    @property
    def queues(self) -> list[MessageQueue]:
        """The queues that this consumer has now."""
        held = () if self._running is None else self._running.deliveries.assignments
        return sorted(held, key=lambda one: (one.topic, one.broker_name, one.queue_id))

    def positions(self) -> dict[MessageQueue, int]:
        """For each queue that it has, the offset of the next message to hand out."""
        held = {} if self._running is None else self._running.deliveries.assignments
        return {queue: one.position for queue, one in held.items()}

    def lag(self) -> dict[MessageQueue, int]:
        """For each queue of this consumer, how many messages follow those that are all done; -1: unknown."""
        if self._running is None:
            return {}
        lags = {queue: -1 for one in self._running.rebalancer.sessions.values() for queue in one.planned}
        return lags | {queue: one.lag for queue, one in self._running.deliveries.assignments.items()}

    @property
    def skipped(self) -> int:
        """How many offsets were skipped because their messages no longer exist."""
        held = {} if self._running is None else self._running.deliveries.assignments
        return sum(one.reader.skipped for one in held.values())

    async def retry(self, message: ConsumedMessage, delay_level: int = 0) -> None:
        """The message failed: deliver it again later (1 to 18: after that delay; 0: later each time; -1: never).

        For messages of ``poll`` and iteration; those that ``poll`` returned together stay in use. Returns when the
        broker has it. Raises ``ClientError`` if it does not take it, and ``ConfigError`` for a consumer that is no
        member of a group.
        """
        running = await self._started()
        if self._assign is not None or self.options.broadcast:
            raise ConfigError(["retry is for members of a group: with assign or broadcast nobody would get it again"])
        await running.send_back(message, delay_level)

    async def close(self) -> None:
        """Wait for running handlers, commit what is done, and leave the group. Raises if the commit failed. Idempotent.

        Messages returned by ``poll`` count as done. If this call is cancelled, closing goes on, and another call waits
        for its end.
        """
        caller = asyncio.current_task()
        if not self._is_closed:
            self._check_place()
            self._is_closed = True
            running, self._running = self._running, None
            if running is None:
                return
            self._finish_in_hand(running)
            closing = asyncio.get_running_loop().create_task(running.close(called_by=caller), name="consumer closing")
            self._closing = running, closing
        elif self._closing is None or self._closing[0].is_handler(caller):
            return  # closing waits for the handlers
        await asyncio.shield(self._closing[1])

    async def _started(self) -> _Running:
        self._check_place()
        if self._running is not None:
            self._running.cluster.check()
            return self._running
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            self._check_open()
            running = self._running
            if running is None:
                addresses, name_servers, security = self._given
                running = _Running(addresses, name_servers, security, self._subscriptions, self._assign)
                try:
                    await running.start()
                except BaseException:
                    await running.abandon()
                    raise
                self._running = running
        if self._is_closed:  # meanwhile
            self._running = None
            await running.close()
        self._check_open()
        return running

    def _check_place(self) -> None:
        """Raises ``ClientClosedError`` in a forked child, and on another loop."""
        if os.getpid() != self._process:
            raise ClientClosedError(OTHER_PROCESS)
        if self._running is not None:
            self._running.cluster.check_place()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosedError("the consumer is closed")


class _Running:
    """A started consumer: everything that belongs to the event loop."""

    def __init__(
        self,
        addresses: Sequence[str] | str | None,
        name_servers: Sequence[str] | str | None,
        security: ClientSecurity | None,
        subscriptions: Subscriptions,
        assign: Assign | None,
    ) -> None:
        options = subscriptions.options
        self._subscriptions = subscriptions
        self._options = options
        self._assign = assign
        self.cluster = Cluster(
            addresses,
            name_servers,
            timeout_s=options.timeout_s,
            security=security,
            requests=self._requested,
            lost=self._lost,
        )
        self.deliveries = DeliveryQueue(
            deliveries_max=1 if options.ordered else options.pending_messages_max,
            bytes_max=options.pending_bytes_max,
            span_max=options.pending_span_max,
        )
        self._traces: TraceWriter | None = None
        if options.trace:
            trace_options = ProducerOptions(close_timeout_s=TRACE_CLOSE_S, limits=TRACE_LIMITS)
            self._traces = TraceWriter(
                lambda: Producer(addresses, name_servers=name_servers, security=security, options=trace_options)
            )
            self.deliveries.observers += (ConsumeTraces(subscriptions.group, subscriptions.client_id, self._traces),)
        self._spans: ConsumeSpans | None = None
        if options.spans:
            self._spans = ConsumeSpans(OpenTelemetry(), subscriptions.group)
            self.deliveries.observers += (self._spans,)
        self._heartbeats = Heartbeats(self.cluster, self._heartbeat) if assign is None else None
        self.rebalancer = Rebalancer(
            self.cluster,
            subscriptions,
            self.deliveries,
            self._store(),
            assign=assign,
            heartbeats=self._heartbeats,
        )
        self._requests = ConsumerRequests(subscriptions, self.deliveries, self.rebalancer)
        self._returning: deque[tuple[Delivery, int]] = deque()  # what no broker has taken back yet
        self._reported: set[str] = set()  # errors that were logged already
        self._late_reported_at = float("-inf")
        self._keeper: asyncio.Task[None] | None = None
        self._handlers: set[asyncio.Task[BaseException | None]] = set()

    def _store(self) -> OffsetStore | None:
        if not self._subscriptions.group:
            return None
        if self._options.broadcast:
            return LocalOffsets(self._options.offsets_file)
        return BrokerOffsets(self.cluster, self._subscriptions.group)

    async def start(self) -> None:
        deadline = self.cluster.deadline()
        names: set[str] = set()
        for topic in self._subscriptions.expressions:
            route = await self.cluster.route(topic, deadline)
            if missing := _missing(self._assign, route):
                raise NotFoundError(f"topic {topic} has no queues {missing} that can be read")
            names.update(one.broker for one in route.parts)
        await check_conditions(self.cluster, self._subscriptions)
        if self._heartbeats is not None:
            if not self._options.broadcast:
                await warn_of_others(self.cluster, self._subscriptions, names)
            self._heartbeats.start()
        self.rebalancer.start()
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="consumer keeper")
        await self.rebalancer.wait_settled(self.cluster.deadline())

    async def abandon(self) -> None:
        """End after a failed start: nothing was handed out."""
        try:
            await self.close()
        except (DLedgerError, OSError) as error:
            _log.info("group %s: %s", self._subscriptions.group, error)

    def is_handler(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a handler is running as this task."""
        return task in self._handlers

    async def close(self, called_by: asyncio.Task[Any] | None = None) -> None:
        """``called_by``: the task that waits for this, which may be a handler's."""
        self.deliveries.close()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if running := {one for one in self._handlers if one is not called_by}:
            await asyncio.wait(running)
        try:
            await self.rebalancer.close()
        finally:
            if self._heartbeats is not None:
                await self._heartbeats.stop()
            if self._traces is not None:
                await self._traces.close()
            await self.cluster.close()

    def assignment(self, queue: MessageQueue) -> Assignment:
        """Raises ``NotFoundError``."""
        if not isinstance(queue, MessageQueue):
            raise TypeError(f"a queue is a MessageQueue, such as those of Consumer.queues, not {queue!r}")
        found = self.deliveries.assignments.get(queue)
        if found is None:
            raise NotFoundError(f"queue {queue.queue_id} of {queue.topic} is not assigned to this consumer")
        return found

    # -- what brokers want ---------------------------------------------------------------------------------------------

    def _heartbeat(self) -> HeartbeatData:
        options = self._options
        subscriptions = self._subscriptions
        version = time.time_ns() // 1_000_000
        subscribed = tuple(
            subscriptions.wanted(topic).subscription(topic, version) for topic in subscriptions.expressions
        )
        where = (
            ConsumeFromWhere.CONSUME_FROM_TIMESTAMP
            if isinstance(options.start, int)
            else ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
            if options.start == "first"
            else ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
        )
        data = ConsumerData(
            self._subscriptions.group,
            message_model=MessageModel.BROADCASTING if options.broadcast else MessageModel.CLUSTERING,
            consume_from_where=where,
            subscription_data_set=subscribed,
        )
        return HeartbeatData(self._subscriptions.client_id, (), (data,))

    def _requested(self, connection: RemotingConnection, request: Frame) -> None:
        self._requests.take(connection, request)

    def _lost(self, address: str) -> None:
        if self._heartbeats is not None:
            self._heartbeats.lost(address)

    # -- handlers ------------------------------------------------------------------------------------------------------

    async def work(self, handler: BatchHandler, batch_max: int) -> None:
        """Handle messages until the consumer is closed."""
        while not self.deliveries.is_closed:
            delivery = await self.deliveries.receive(batch_max, LOOK_S)
            if delivery is not None:
                delivery.may_expire = not self._options.ordered
                await self._handle(handler, delivery)

    async def _handle(self, handler: BatchHandler, delivery: Delivery) -> None:
        async def handled() -> BaseException | None:
            try:
                with nullcontext() if self._spans is None else self._spans.current(delivery):
                    await handler(delivery.messages)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001  # also SystemExit, which a task would pass on to the loop
                return error
            return None

        task = asyncio.get_running_loop().create_task(handled(), name="message handler")
        self._handlers.add(task)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # of this worker
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.result() is None:
                self.finish_all([delivery])  # it was done all the same
            elif self.deliveries.claim(delivery):
                self.deliveries.deliver_again(delivery, 0.0, counts=False)
            raise
        finally:
            self._handlers.discard(task)
        error = asyncio.CancelledError("the handler was cancelled") if task.cancelled() else task.result()
        if not self.deliveries.claim(delivery):
            return  # it took too long, and was sent back
        if error is None:
            self.finish(delivery)
        elif isinstance(error, UnreadableBodyError):  # sending it back would make it no more readable
            self._report(f"{delivery!r} and others like it are kept until they can be read: {error}")
            self.deliveries.deliver_again(delivery, AGAIN_S_MAX, counts=False)
        else:
            _log.warning("group %s: the handler failed, for %r", self._subscriptions.group, delivery, exc_info=error)
            await self._failed(delivery)

    def finish(self, delivery: Delivery) -> None:
        """The claimed delivery is done."""
        self.deliveries.finish(delivery)
        session = self.rebalancer.session_of(delivery.assignment.queue)
        if session is not None:
            session.message_done()

    def finish_all(self, deliveries: Iterable[Delivery]) -> None:
        """Those of them about which nothing was decided are done."""
        for one in deliveries:
            if self.deliveries.claim(one):
                self.finish(one)

    async def _failed(self, delivery: Delivery, delay_level: int = 0) -> None:
        """The claimed delivery failed."""
        self.deliveries.ended(delivery, ok=False)
        options = self._options
        if options.broadcast or self._assign is not None:
            _log.warning(
                "group %s: %r failed; without a group that shares its queues it is delivered only once",
                self._subscriptions.group,
                delivery,
            )
            self.finish(delivery)
        elif options.ordered:
            if options.retries_max is None or delivery.messages[0].attempts < options.retries_max:
                self.deliveries.deliver_again(delivery, ORDERED_PAUSE_S)
            else:
                await self._put_back(delivery, -1)
        else:
            await self._put_back(delivery, delay_level)

    async def _put_back(self, delivery: Delivery, delay_level: int) -> None:
        if self.rebalancer.session_of(delivery.assignment.queue) is None:
            return  # its brokers are being left: it stays in use, so that the last commit is not behind it
        level = -1 if self._has_had_its_tries(delivery) else delay_level
        try:
            if not delivery.in_flight.is_abandoned:
                for one in delivery.messages:
                    await self.send_back(one, level)
        except ClientError as error:
            if delivery.in_flight.is_abandoned:
                self.finish(delivery)  # it comes again anyway
            elif may_repeat(error, harmless=True) or isinstance(error, NotFoundError):  # no room for the retry topic
                self._report(f"{delivery!r} is not taken back, and is sent back again until it is: {error}")
                self._returning.append((delivery, delay_level))
            else:
                self._try_here(delivery, delay_level, error)
        else:
            self.finish(delivery)

    async def send_back(self, message: ConsumedMessage, delay_level: int) -> None:
        """CONSUMER_SEND_MSG_BACK. Raises ``ClientError``."""
        whole, limit = message.decode(), self._options.retries_max
        header = SendBackHeader(
            whole.offset,
            self._subscriptions.group,
            delay_level,
            offset_message_id(whole.store_host, whole.offset),
            whole.topic,
            max_reconsume_times=-1 if limit is None else limit,
        )
        await self.cluster.ask_master(
            message.queue.broker_name,
            RequestCode.CONSUMER_SEND_MSG_BACK,
            header,
            deadline=self.cluster.deadline(),
        )

    def _has_had_its_tries(self, delivery: Delivery) -> bool:
        """Whether it was tried here as often as allowed. Those that were sent back are the brokers' to count."""
        limit = self._options.retries_max
        return delivery.tries_here > 0 and (
            delivery.tries_here >= RETRIES if limit is None else delivery.messages[0].attempts >= limit
        )

    def _try_here(self, delivery: Delivery, delay_level: int, error: ClientError) -> None:
        """No broker will ever accept it back: the handler gets it again here, but not without end."""
        if delay_level < 0 or self._options.retries_max == 0 or self._has_had_its_tries(delivery):
            _log.error(
                "group %s: %r is given up after %d attempts: it is neither retried nor a dead letter, because it is "
                "refused: %s",
                self._subscriptions.group,
                delivery,
                delivery.messages[0].attempts + 1,
                error,
            )
            self.finish(delivery)
            return
        pause_s = min(AGAIN_S_MIN * 3.0**delivery.tries_here, AGAIN_S_MAX)
        _log.warning(
            "group %s: %r is not taken back, and is tried again here in %g s: %s",
            self._subscriptions.group,
            delivery,
            pause_s,
            error,
        )
        self.deliveries.deliver_again(delivery, pause_s)

    def _report(self, problem: str) -> None:
        """Log an error once, not for every message that meets it."""
        key = problem.partition(": ")[2] or problem
        if key not in self._reported and len(self._reported) < REPORTED_MAX:
            self._reported.add(key)
            _log.error("group %s: %s", self._subscriptions.group, problem)

    # -- what takes long -----------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                for _ in range(len(self._returning)):
                    await self._put_back(*self._returning.popleft())
                await self._look_for_late_ones()
            except Exception:  # noqa: BLE001  # as in the handlers
                _log.exception("group %s: cannot look after its messages, unexpectedly", self._subscriptions.group)

    async def _look_for_late_ones(self) -> None:
        options, now = self._options, asyncio.get_running_loop().time()
        for one in self.deliveries.overdue(now - min(LATE_S, options.consume_timeout_s)):
            in_use_s = now - one.since
            holds_up = one.first == one.in_flight.done
            if holds_up and not one.is_reported and now >= self._late_reported_at + LATE_AGAIN_S:
                one.is_reported, self._late_reported_at = True, now
                _log.warning(
                    "group %s: %r has been in use for %.0f s; the group's position stays before it",
                    self._subscriptions.group,
                    one,
                    in_use_s,
                )
            if in_use_s >= options.consume_timeout_s and one.may_expire and self.deliveries.claim(one):
                _log.warning(
                    "group %s: %r is sent back, because it is not done after %.0f s (consume_timeout_s)",
                    self._subscriptions.group,
                    one,
                    in_use_s,
                )
                await self._failed(one)


def _missing(assign: Assign | None, route: TopicRoute) -> list[int]:
    """The numbers of assigned queues that cannot be read."""
    numbers = {one.queue_id for one in route.readable}
    return sorted(
        one if isinstance(one, int) else one.queue_id
        for one in (() if assign is None or assign == "all" else assign)
        if (one not in numbers if isinstance(one, int) else one.topic == route.topic and one not in route.readable)
    )
