"""``SimpleConsumer``: messages that are acknowledged one by one, by RocketMQ 5's pop.

Popped messages that the application has not asked for yet wait in a buffer. Each is invisible to other consumers. One
that was not asked for in time goes back, and that is no attempt: otherwise a message could become a dead letter that
nobody was ever given.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Final, Self, TypedDict, Unpack

from dledger.access.rules import RETRY_PREFIX
from dledger.errors import ConfigError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from dledger.values import AboveZero, Positive, Range, out_of_range
from rocketstore.client.aio.cluster import Cluster, Heartbeats, at_once
from rocketstore.client.aio.consumer_options import Expression, Topics, wanted_of
from rocketstore.client.aio.errors import (
    OTHER_PROCESS,
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    NotFoundError,
    RefusedError,
    TimedOutError,
    may_repeat,
    refusal_of,
)
from rocketstore.client.aio.received import PoppedMessage, by_broker, read_popped
from rocketstore.message.checks import check_group_name, check_topic
from rocketstore.message.ids import new_client_id
from rocketstore.remoting.codes import POLLING_FULL, POLLING_TIMEOUT, RequestCode
from rocketstore.remoting.groups import ConsumerData, HeartbeatData
from rocketstore.remoting.headers import read_header, write_header
from rocketstore.remoting.pop import (
    AckHeader,
    BatchAckAnswer,
    BatchAckBody,
    ChangeInvisibleAnswer,
    ChangeInvisibleHeader,
    HandleEntry,
    PopHeader,
)
from rocketstore.types import ConsumeType

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dledger.client.shared import ClientSecurity

KEPT_SHARE: Final = 0.5
"""For this share of its time a message waits for the application; then others may have it."""


class PrefetchBuffer:
    """For one event loop. ``invisible_s``: of each message; ``release`` makes one visible again at once."""

    def __init__(self, invisible_s: float, release: Callable[[PoppedMessage], Awaitable[None]]) -> None:
        self._spare_s = invisible_s * (1 - KEPT_SHARE)
        self._release = release
        self._messages: deque[PoppedMessage] = deque()
        self._returns: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, messages: Sequence[PoppedMessage]) -> None:
        """Keep these until they are taken."""
        self._messages.extend(messages)
        self._set_timer()

    def take(self, count: int) -> list[PoppedMessage]:
        """Up to ``count`` messages whose time is not nearly over, the oldest first."""
        self._return_stale()
        return [self._messages.popleft() for _ in range(min(count, len(self._messages)))]

    async def close(self) -> None:
        """Give back all. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        left, self._messages = self._messages, deque()
        await self._give_back(left)
        await asyncio.gather(*self._returns)

    def _set_timer(self) -> None:
        if self._messages and self._timer is None:
            at = self._messages[0].expires_at - self._spare_s
            self._timer = asyncio.get_running_loop().call_at(at, self._due)

    def _due(self) -> None:
        self._timer = None
        self._return_stale()
        self._set_timer()

    def _return_stale(self) -> None:
        loop = asyncio.get_running_loop()
        stale_at = loop.time() + self._spare_s
        stale = [one for one in self._messages if one.expires_at <= stale_at]
        if stale:
            self._messages = deque(one for one in self._messages if one.expires_at > stale_at)
            task = loop.create_task(self._give_back(stale))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    async def _give_back(self, messages: Iterable[PoppedMessage]) -> None:
        async def release(one: PoppedMessage) -> None:
            with suppress(ClientError):  # it comes again when its time is over
                await self._release(one)

        await at_once(map(release, messages))


_log = logging.getLogger(__name__)
RECEIVE_MAX: Final = 32
"""Messages of one answer; RocketMQ's."""
SPARE_S: Final = 3.0
"""How much longer than the broker waits its answer may take before its brokers are asked for their master."""
PAUSE_S: Final = 0.5
"""Before brokers that refused are asked for messages again."""
RENEW_SHARE: Final = 0.6
"""``run`` prolongs the time of a message when this share of it is over."""
SIMPLE_WORKERS: Final = 4

Handler = Callable[[PoppedMessage], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class SimpleOptions:
    """How a simple consumer works. ``SimpleConsumer`` takes these as keyword arguments.

    ``invisible_s``: for how long a message that was received stays invisible to the group's other consumers.
    ``wait_s``: how long brokers wait for messages. ``start``: where a group that is new to a topic begins, ``"last"``
    or ``"first"``. ``retry_s``: after which time ``run`` lets a message that failed come again. ``timeout_s``: for
    every other request.
    """

    invisible_s: Annotated[float, Range(1, 12 * 3600)] = 60.0
    wait_s: Annotated[float, Range(0, 30)] = 15.0
    start: str = "last"
    retry_s: Annotated[float, Range(0, 12 * 3600)] = 10.0
    timeout_s: AboveZero = 5.0
    pending_messages_max: Positive = 1024

    def __post_init__(self) -> None:
        problems = out_of_range(self)
        if self.start not in ("first", "last"):
            problems.append(f"start must be 'first' or 'last', not {self.start!r}")
        if problems:
            raise ConfigError(problems)


class SimpleSettings(TypedDict, total=False):
    """The fields of ``SimpleOptions``, for type checkers."""

    invisible_s: float
    wait_s: float
    start: str
    retry_s: float
    timeout_s: float
    pending_messages_max: int


class SimpleConsumer:
    """``receive`` and ``ack``, iterate, or ``run`` a handler.

    Arguments as those of ``Consumer``. Any number of consumers of a ``group`` share the messages of each queue, also
    more than there are queues: a message that one has received is invisible to the others for ``invisible_s``, and
    comes again after that time if it was not acknowledged: with one more attempt, and after those that the group
    permits it is a dead letter (``%DLQ%group``). An acknowledgement is of one message, and survives the failure of a
    broker; there is no order.

    A group is consumed either in this way or by ``Consumer`` and RocketMQ's pulling ones: a broker refuses the other.

    It belongs to the event loop on which it is started. Raises ``ConfigError`` for arguments that do not fit.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str | None = None,
        *,
        name_servers: Sequence[str] | str | None = None,
        group: str,
        topics: Topics,
        security: ClientSecurity | None = None,
        options: SimpleOptions | None = None,
        **settings: Unpack[SimpleSettings],
    ) -> None:
        self.group: Final = group
        self.client_id: Final = new_client_id()
        self.options: Final = options or SimpleOptions(**settings)
        wanted = wanted_of(topics)
        problems = [problem for problem in (check_group_name(group), *map(check_topic, wanted)) if problem]
        if not wanted:
            problems.append("topics names no topic")
        if problems:
            raise ConfigError(problems)
        self._wanted = {topic: Expression.of(one) for topic, one in wanted.items()}
        self._cluster = Cluster(addresses, name_servers, timeout_s=self.options.timeout_s, security=security)
        self._process = os.getpid()
        self._heartbeats = Heartbeats(self._cluster, self._heartbeat)
        self._asked: dict[tuple[str, str], asyncio.Task[None]] = {}  # by topic and broker
        self._refused_until: dict[tuple[str, str], float] = {}
        self._prefetched = PrefetchBuffer(self.options.invisible_s, self._release)
        self._last: list[PoppedMessage] = []
        self._workers: set[asyncio.Task[None]] = set()
        self._is_started = False
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect. Idempotent; calls that need it start it. Raises ``NotFoundError`` for an unknown topic."""
        self._check()
        if not self._is_started:
            deadline = self._cluster.deadline()
            await at_once(self._cluster.route(one, deadline) for one in self._wanted)
            self._heartbeats.start()
            self._is_started = True

    # -- messages ------------------------------------------------------------------------------------------------------

    async def receive(self, max_messages: int = RECEIVE_MAX, wait_s: float | None = None) -> list[PoppedMessage]:
        """Up to ``max_messages``, at least one unless none arrives within ``wait_s`` (``SimpleOptions.wait_s``).

        Each is this consumer's until its time is over (``PoppedMessage.expires_at``). Raises ``ForbiddenError`` and
        other refusals of brokers if none has messages.
        """
        await self.start()
        loop = asyncio.get_running_loop()
        end = loop.time() + (self.options.wait_s if wait_s is None else wait_s)
        refusal: ClientError | None = None
        while not (found := self._prefetched.take(max_messages)):
            await self._ask_all(min(max_messages, RECEIVE_MAX), max(0.0, end - loop.time()))
            pending = set(self._asked.values())
            if pending:
                await asyncio.wait(pending, timeout=max(end - loop.time() + SPARE_S, 0), return_when="FIRST_COMPLETED")
            refusal = self._take_in() or refusal
            if self._prefetched:
                continue
            self._check()
            if loop.time() >= end:
                if refusal is not None and isinstance(refusal, RefusedError) and not may_repeat(refusal):
                    raise refusal
                return []
            if refusal is not None or not pending:
                await asyncio.sleep(min(PAUSE_S, max(end - loop.time(), 0)))
        return found

    def __aiter__(self) -> AsyncIterator[PoppedMessage]:
        """Every message until the consumer is closed, waiting for more. Requesting the next acknowledges the last."""
        return self._messages()

    async def _messages(self) -> AsyncIterator[PoppedMessage]:
        while True:
            try:
                found = await self.receive(1)
            except ClientClosedError:
                if self._is_closed:
                    return
                raise
            for one in found:
                self._last = [one]
                yield one
                self._last = []
                with suppress(NotFoundError):  # it took too long, and comes again
                    await self.ack(one)

    async def ack(self, *messages: PoppedMessage) -> None:
        """These are done: when this returns, the group never gets them again, whatever fails.

        Raises ``NotFoundError`` if one was acknowledged before, or its time is over and it was delivered again; the
        others are acknowledged then. With the outcome ``"unknown"``, this call itself may have acknowledged it, but the
        answer did not arrive. After other errors acknowledging the same once more is right.
        """
        await self.start()
        await self._ack_all(messages)

    async def change_invisible(self, message: PoppedMessage, seconds: float, *, is_attempt: bool = True) -> None:
        """Keep a message longer, or (0) give it back now; ``is_attempt``: whether this delivery counts as one.

        Raises ``NotFoundError`` as ``ack``.
        """
        await self.start()
        await self._change(message, seconds, is_attempt=is_attempt)

    async def _change(self, message: PoppedMessage, seconds: float, *, is_attempt: bool) -> None:
        point = message.point
        duration_ms = round(seconds * 1000)
        header = ChangeInvisibleHeader(
            self.group, self._topic_of(message), point.queue_id, str(point), point.offset, duration_ms, not is_attempt
        )
        now = asyncio.get_running_loop().time()
        code = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
        frame = await self._ask(message, code, header)
        answer = read_header(ChangeInvisibleAnswer, frame.fields)
        message.point = point._replace(
            start=point.offset,
            pop_time=answer.pop_time,
            invisible_time=answer.invisible_time,
            revive=answer.revive_qid,
            rest=answer.handle,
        )
        message.received_at = now

    async def run(self, handler: Handler, *, workers: int = SIMPLE_WORKERS) -> None:
        """Call ``handler`` with each message, ``workers`` at a time, until the consumer is closed.

        When it returns, the message is acknowledged. If it raises, that is logged, and the message comes again after
        ``retry_s``. While it works, the message stays invisible to others.
        """
        if not callable(handler):
            raise TypeError(f"a handler must be callable, not {handler!r}")
        if workers < 1:
            raise ConfigError(["workers must be at least 1"])
        await self.start()
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                task = group.create_task(self._work(handler), name=f"simple consumer worker {number}")
                self._workers.add(task)
                task.add_done_callback(self._workers.discard)

    async def _work(self, handler: Handler) -> None:
        while True:
            try:
                found = await self.receive(1)
            except ClientClosedError:
                if self._is_closed:
                    return
                raise
            except ClientError as error:
                if not may_repeat(error, harmless=True):
                    raise
                await asyncio.sleep(PAUSE_S)
                continue
            for one in found:
                await self._handle(handler, one)

    async def _handle(self, handler: Handler, message: PoppedMessage) -> None:
        renewing = asyncio.get_running_loop().create_task(self._renew(message))
        try:
            await handler(message)
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001  # of the application: the message comes again
            _log.warning("group %s: the handler failed, for %r", self.group, message, exc_info=True)
            await _end(renewing)
            with suppress(ClientError):
                await self.change_invisible(message, self.options.retry_s)
            return
        finally:
            renewing.cancel()
        await _end(renewing)
        try:
            await self.ack(message)
        except ClientError as error:
            _log.warning("group %s: %r is done, but comes again: %s", self.group, message, error)

    async def _renew(self, message: PoppedMessage) -> None:
        """Prolong the time of a message that is being handled."""
        while True:
            await asyncio.sleep(self.options.invisible_s * RENEW_SHARE)
            try:
                await self.change_invisible(message, self.options.invisible_s)
            except NotFoundError as error:
                _log.warning("group %s: %r comes again while it is handled: %s", self.group, message, error)
                return
            except ClientError as error:
                _log.info("group %s: the time of %r is not prolonged: %s", self.group, message, error)

    async def close(self) -> None:
        """Wait for handlers, give back what was not handed out, and leave the group. Idempotent.

        Received messages that were not acknowledged come again when their time is over.
        """
        if self._is_closed:
            return
        self._is_closed = True
        current = asyncio.current_task()
        for task in self._asked.values():
            task.cancel()
        if self._asked:
            await asyncio.gather(*self._asked.values(), return_exceptions=True)
        workers = {one for one in self._workers if one is not current}
        if workers:
            await asyncio.wait(workers)
        await self._prefetched.close()
        try:
            await self._heartbeats.stop()
        finally:
            await self._cluster.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise ClientClosedError(OTHER_PROCESS)
        if self._is_closed:
            raise ClientClosedError("the consumer is closed")
        self._cluster.check()

    async def _release(self, message: PoppedMessage) -> None:
        await self._change(message, 0.0, is_attempt=False)

    async def _ask_all(self, max_messages: int, wait_s: float) -> None:
        """Ask all brokers that are not being asked."""
        loop, deadline = asyncio.get_running_loop(), self._cluster.deadline()
        for topic in self._wanted:
            route = await self._cluster.route(topic, deadline)
            for name in {one.broker for one in route.parts if one.is_readable}:
                key = topic, name
                if key not in self._asked and self._refused_until.get(key, 0.0) <= loop.time():
                    self._asked[key] = loop.create_task(self._pop(topic, name, max_messages, wait_s))

    def _take_in(self) -> ClientError | None:
        """Forget what has been answered; returns the last error."""
        failure: ClientError | None = None
        for key, task in list(self._asked.items()):
            if not task.done():
                continue
            del self._asked[key]
            if task.cancelled():
                continue
            error = task.exception()
            if isinstance(error, ClientError):
                failure = error
                self._refused_until[key] = asyncio.get_running_loop().time() + PAUSE_S
            elif error is not None:
                raise error
        return failure

    async def _pop(self, topic: str, name: str, max_messages: int, wait_s: float) -> None:
        """Prefetch from one broker."""
        options, wanted = self.options, self._wanted[topic]
        broker = await self._cluster.broker(name, self._cluster.deadline())
        if not broker.master:
            await self._cluster.routes.refresh_brokers()
            raise BrokerUnreachableError(f"brokers {name} have no master now")
        header = PopHeader(
            self.group,
            topic,
            -1,
            max_messages,
            round(options.invisible_s * 1000),
            round(wait_s * 1000),
            init_mode=0 if options.start == "first" else 1,
            exp_type=wanted.kind,
            exp=wanted.text,
        )
        request = Frame(RequestCode.POP_MESSAGE, 0, write_header(header))
        try:
            asked_at = asyncio.get_running_loop().time()
            answer = await self._answer(name, broker.master, request, wait_s)
            if answer.code in (AnswerCode.PULL_NOT_FOUND, POLLING_FULL, POLLING_TIMEOUT):
                return
            if answer.code != AnswerCode.SUCCESS:
                raise refusal_of(answer, broker.master)
        except ClientError as error:
            if may_repeat(error, harmless=True):
                await self._cluster.routes.refresh_brokers()
            raise
        latest = min(asyncio.get_running_loop().time(), asked_at + wait_s)  # the broker waits no longer than that
        found = read_popped(answer.fields, answer.body, topic, name, latest)
        others = [one for one in found if not wanted.takes(one.tags)]  # brokers compare only hashes
        self._prefetched.put([one for one in found if one not in others] if others else found)
        if others:
            await self._ack_all(others)

    async def _answer(self, name: str, master: str, request: Frame, wait_s: float) -> Frame:
        """The answer, even a late one: until their time is over, nobody else can get its messages.

        Given up if another broker is the master by then, or after the client's ``timeout_s`` more.
        """
        call = asyncio.ensure_future(
            self._cluster.connections.call(master, request, wait_s + SPARE_S + self.options.timeout_s)
        )
        try:
            await asyncio.wait({call}, timeout=wait_s + SPARE_S)
            while not call.done():
                with suppress(ClientError):
                    await self._cluster.routes.refresh_brokers()
                known = self._cluster.routes.broker(name)
                if known is not None and known.master not in ("", master):
                    raise TimedOutError(f"{master} did not answer, and is no longer the master of {name}")
                await asyncio.wait({call}, timeout=PAUSE_S)
            return call.result()
        finally:
            call.cancel()

    async def _ack_all(self, messages: Sequence[PoppedMessage]) -> None:
        for name, some in by_broker(messages).items():
            broker = await self._cluster.broker(name, self._cluster.deadline())
            if self._cluster.connections.protocol_version(broker.master) and all(one.point.rest for one in some):
                await self._ack_together(name, some)
            else:
                await at_once(self._ack(one) for one in some)

    async def _ack(self, message: PoppedMessage) -> None:
        point = message.point
        header = AckHeader(self.group, self._topic_of(message), point.queue_id, str(point), point.offset)
        await self._ask(message, RequestCode.ACK_MESSAGE, header)

    async def _ack_together(self, name: str, messages: Sequence[PoppedMessage]) -> None:
        """In one request, which brokers of this project know."""
        handles: dict[str, list[PoppedMessage]] = {}
        for one in messages:
            handles.setdefault(one.topic, []).append(one)
        entries = tuple(
            HandleEntry(self.group, topic, tuple(one.point.rest for one in some)) for topic, some in handles.items()
        )
        asked = [one for some in handles.values() for one in some]

        def check(answer: Frame) -> None:
            valid = BatchAckAnswer.decode(answer.body).valid
            late = [one for one, is_valid in zip(asked, valid, strict=False) if not is_valid]
            if late:
                raise NotFoundError(
                    f"{len(late)} of {len(asked)} messages were acknowledged before, or their time is over and they "
                    f"were delivered again, such as {late[0]!r}"
                )

        await self._cluster.ask_master(
            name,
            RequestCode.BATCH_ACK_MESSAGE,
            body=BatchAckBody((), entries).encode(),
            deadline=self._cluster.deadline(),
            check=check,
        )

    async def _ask(self, message: PoppedMessage, code: RequestCode, header: DataclassInstance) -> Frame:
        """The answer of the brokers that the message is of; of a master found anew after each change."""
        name = message.queue.broker_name
        return await self._cluster.ask_master(name, code, header, deadline=self._cluster.deadline())

    def _topic_of(self, message: PoppedMessage) -> str:
        """As RocketMQ's brokers want it: of a message that comes again, the retry topic's name."""
        return f"{RETRY_PREFIX}{self.group}_{message.topic}" if message.point.is_retry else message.topic

    def _heartbeat(self) -> HeartbeatData:
        subscribed = tuple(one.subscription(topic) for topic, one in self._wanted.items())
        data = ConsumerData(self.group, ConsumeType.CONSUME_ACTIVELY, subscription_data_set=subscribed)
        return HeartbeatData(self.client_id, (), (data,))


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
