"""``Producer``: sends messages to the masters of a topic's brokers; ``NumberedProducer``: under numbers of the
application, so that a program that goes on after a crash stores none of them twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

from dledger.core.noop_payload import check_name
from dledger.errors import ConfigError, InvalidRequestError
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.frame import FLAG_ONEWAY, Frame
from rocketstore.client.aio.admin_requests import recall
from rocketstore.client.aio.cluster import Cluster, Heartbeats
from rocketstore.client.aio.errors import (
    BrokerUnreachableError,
    ClientClosedError,
    ClientError,
    NumberOutOfOrderError,
    PartlySentError,
    PreparedMessage,
    SendResult,
    TransactionResult,
    TransactionState,
)
from rocketstore.client.aio.outgoing import (
    OutgoingMessage,
    PipelineLimits,
    begin,
    identify,
    outgoing,
    request_of,
    settle,
)
from rocketstore.client.aio.pipeline import SendPipeline
from rocketstore.client.aio.queue_sends import OnFailure
from rocketstore.client.aio.tracing import (
    TRACE_CLOSE_S,
    TRACE_LIMITS,
    EndTraces,
    OpenTelemetry,
    SendSpans,
    SendTraces,
    TraceWriter,
)
from rocketstore.client.aio.transactions import Check, Transaction, Transactions, checked_state
from rocketstore.message.checks import check_group_name
from rocketstore.message.ids import ids_of_client, new_client_id
from rocketstore.message.message import PROPERTY_SHARDING_KEY, Message
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import HeartbeatData, ProducerData
from rocketstore.remoting.topics import MessageQueue

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity
    from rocketstore.client.aio.numbered import NamedSends


class NumberedProducer:
    """A producer whose messages have numbers that the application gives: ``Producer.numbered`` makes it.

    After a crash the program asks for its ``next_number``, makes the messages from there on again, and submits them:
    each is stored once, and all in the order of their numbers, whatever became of earlier attempts. Numbers count from
    0 without a gap, for each name; only one program at a time may use a name. The names of a group of brokers are in
    its log; a plain broker forgets them when it is restarted.

    After a failed message those behind it fail, too: call ``next_number`` and go on from there.
    """

    def __init__(
        self,
        name: str,
        broker: str,
        pipeline: Callable[[], SendPipeline],
        prepare: Callable[[Message, str | None, MessageQueue | int | None], OutgoingMessage],
    ) -> None:
        self.name: Final = name
        self._broker = broker
        self._pipeline = pipeline
        self._prepare = prepare
        self._following: int | None = None  # the only number that may come next; None: any
        self._submitted = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def next_number(self) -> int:
        """The number after those that are stored by now, 0 for a new name; once all that was submitted has an outcome.

        Raises ``RequestNotKnownError`` at brokers that do not number messages, as Apache's.
        """
        number = await self._sends.next_number()
        self._following = None
        return number

    async def submit(
        self, message: Message, number: int, *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> asyncio.Future[SendResult]:
        """Send a message soon, together with others: see ``Producer.submit``. ``number`` is that of the last call and
        one, or what ``next_number`` returned.

        Of a message that an earlier program has stored, the result may have the offset ``NO_OFFSET``. The future, or
        this call, raises ``NumberOutOfOrderError`` if an earlier message is missing, and ``ProducerForgottenError``.
        """
        prepared = self.prepared(message, number, key, queue)
        pending = self._pipeline().pending
        if pending.is_full:
            await pending.wait_for_room(self._sends.timeout_s)
        self._submitted += 1
        if not self._submitted % TURN_MESSAGES:
            await asyncio.sleep(0)
        future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        prepared.future = future
        self._sends.add(prepared)
        return future

    async def flush(self) -> None:
        """Return once every message submitted so far has an outcome."""
        await self._pipeline().pending.flush()

    async def close(self) -> None:
        """Send what was submitted; another one may use the name then. Idempotent."""
        await self._pipeline().close_named(self.name)

    # -- the parts of ``submit``, which the blocking producer takes on two threads -------------------------------------

    def prepared(
        self, message: Message, number: int, key: str | None, queue: MessageQueue | int | None
    ) -> OutgoingMessage:
        """Check a message and its number. On any thread."""
        if self._following not in (None, number) or number < 0:
            following = "numbers count from 0" if self._following is None else f"{self._following} is next"
            raise NumberOutOfOrderError(
                f"message {number} of producer {self.name} is out of order: {following}; after a failed message call "
                "next_number() and go on from there"
            )
        prepared = self._prepare(message, key, queue)
        prepared.number = number
        self._following = number + 1
        return prepared

    def add_all(self, messages: Sequence[OutgoingMessage]) -> None:
        """Send what another thread has prepared; the futures that are not cancelled get their outcomes here."""
        begun = begin(messages)
        try:
            self._sends.add_all(begun)
        except (ClientClosedError, ConfigError) as error:
            settle([one.future for one in begun], [error] * len(begun))

    @property
    def _sends(self) -> NamedSends:
        return self._pipeline().named(self.name, self._broker)


TIMEOUT_S: Final = 5.0
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
"""RocketMQ's ``maxMessageSize``."""
TURN_MESSAGES: Final = 128
"""After so many messages, ``submit`` lets the loop send them, which it could not while a program submits on and on."""
_REFUSED: Final = 3
"""The answer code to requests that clients do not serve."""


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """Options that are rarely changed.

    ``allow_duplicates``: send a message again although it may be stored, as RocketMQ's own producers do; otherwise it
    fails with ``outcome="unknown"``, and the caller decides. ``check_workers``: how many transactions ``check`` is
    called for at once. ``close_timeout_s``: how long ``close`` waits for messages on their way.
    ``on_failure`` is called with a broker's name and the error of each request to it that fails, repeated or not; on
    the loop: it must neither block nor raise. ``spans``: record OpenTelemetry spans of sends (the extra ``otel``).
    """

    allow_duplicates: bool = False
    body_bytes_max: int = BODY_BYTES_MAX
    check_workers: int = 1
    close_timeout_s: float = 10.0
    limits: PipelineLimits = field(default_factory=PipelineLimits)
    on_failure: OnFailure | None = None
    spans: bool = False


class Producer:
    """Sends messages to a group of brokers, or to all brokers that name servers know.

    Give either ``addresses`` of brokers of this project (one is enough to find the others), or ``name_servers``, which
    works with Apache RocketMQ's brokers, too. A message that was certainly not stored is sent again until ``timeout_s``
    has passed, at another broker if it has no ``key``; the error of the last attempt says in ``outcome`` whether it may
    be stored. Messages with the same ``key``, or for the same ``queue``, are stored in the order of the calls.

    ``group`` and ``check`` are for transactions: a broker that does not hear of the end of one asks a member of the
    producer group; ``check`` then says what has become of it. It must look where all members store their transactions,
    and answers UNKNOWN while the local transaction may still be in progress somewhere.

    ``trace``: write to RMQ_SYS_TRACE_TOPIC who sent which message, when, and how long it took, for
    ``dledger message trace`` and RocketMQ's tools. Traces never delay nor fail a send.

    One producer serves a whole program; use it on one event loop, and close it (``async with``).
    """

    def __init__(  # noqa: PLR0913  # one parameter per option
        self,
        addresses: Sequence[str] | str | None = None,
        *,
        name_servers: Sequence[str] | str | None = None,
        group: str = "",
        check: Check | None = None,
        enable_idempotence: bool | Literal["auto"] = "auto",
        trace: bool = False,
        timeout_s: float = TIMEOUT_S,
        security: ClientSecurity | None = None,
        options: ProducerOptions | None = None,
    ) -> None:
        if check is not None and not group:
            raise ConfigError(["transactions need the name of a producer group: give group=… beside check=…"])
        if group and (problem := check_group_name(group)):
            raise ConfigError([problem])
        if enable_idempotence not in (True, False, "auto"):
            raise ConfigError([f'enable_idempotence must be True, False or "auto", not {enable_idempotence!r}'])
        self.group: Final = group
        self.client_id: Final = new_client_id()
        self._transaction_ids = ids_of_client(self.client_id)
        self._check = check
        self._enable_idempotence = enable_idempotence
        self._options = options or ProducerOptions()
        self._cluster = Cluster(
            addresses,
            name_servers,
            timeout_s=timeout_s,
            security=security,
            requests=self._take_request,
            lost=self._lost,
        )
        self._trace = trace
        self._spans = SendSpans(OpenTelemetry(), group) if options is not None and options.spans else None
        self._given = (addresses, name_servers, security)
        self._traces: TraceWriter | None = None
        self._pipeline: SendPipeline | None = None
        self._submitted = 0
        self._heartbeats: Heartbeats | None = None
        self._transactions: Transactions | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Join the producer group, if there is a ``check``: from now on this producer is asked about transactions.

        Without one there is nothing to start. Raises what keeps it from joining at any broker.
        """
        self._opened()
        if self._check is None or self._transactions is not None:
            return
        deadline = self._cluster.deadline()
        await self._cluster.repeat(lambda: self._cluster.brokers(deadline), deadline, harmless=True)
        if self._transactions is None:
            traces = None if self._traces is None else EndTraces(self.group, self._traces)
            self._transactions = Transactions(
                self._cluster, self.group, self._check, workers=self._options.check_workers, traces=traces
            )
            self._heartbeats = Heartbeats(self._cluster, self._heartbeat)
            self._heartbeats.start()
        await self._joined(self._heartbeats)

    async def close(self) -> None:
        """Send what is pending, for a bounded time, leave the group, and close every connection. Idempotent."""
        if self._cluster.is_closed:
            return
        self._cluster.check_place()
        try:
            if self._pipeline is not None:
                await self._pipeline.close(self._options.close_timeout_s)
            if self._transactions is not None:
                await self._transactions.close()
            if self._heartbeats is not None:
                await self._heartbeats.stop()
            if self._traces is not None:
                await self._traces.close()
        finally:
            await self._cluster.close()

    # -- sending -------------------------------------------------------------------------------------------------------

    async def send(
        self, message: Message, *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> SendResult:
        """Send one message; returns when the broker has stored it.

        The queue is the one that ``key`` (a sharding key) hashes to, as with RocketMQ's ``SelectMessageQueueByHash``,
        or ``queue`` (a number is enough if one broker has the topic), or that of the message's ``message_group``, or
        the next in turn. Raises ``ClientError``.
        """
        return await (await self.submit(message, key=key, queue=queue))

    async def submit(
        self, message: Message, *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> asyncio.Future[SendResult]:
        """Send one message soon, together with others; the future has its result, or its error.

        Waits only while too much is pending. Raises ``MessageRefusedError`` for a message that no broker takes,
        ``SendQueueFullError`` if there is no room within ``timeout_s``.
        """
        self._opened()
        prepared = self.prepared(message, key, queue)
        if not self.has_room:
            await self.wait_for_room()
        self._submitted += 1
        if not self._submitted % TURN_MESSAGES:
            await asyncio.sleep(0)
        return self.add(prepared)

    async def send_many(
        self, messages: Iterable[Message], *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> list[SendResult]:
        """Send messages in as few requests as possible; returns one result each, in the order of the call.

        Raises the error itself if nothing was stored, ``PartlySentError`` with all outcomes if some are or may be.
        """
        self._opened()
        prepared = [self.prepared(message, key, queue) for message in messages]
        futures: list[asyncio.Future[SendResult]] = []
        try:
            for start in range(0, len(prepared), TURN_MESSAGES):
                if not self.has_room:
                    await self.wait_for_room()
                futures += [self.add(one) for one in prepared[start : start + TURN_MESSAGES]]
        except ClientError as error:
            outcomes = await _outcomes(futures)
            return results_of([*outcomes, *([error] * (len(prepared) - len(outcomes)))])
        return results_of(await _outcomes(futures))

    async def send_oneway(
        self, message: Message, *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> None:
        """Send one message without an answer: nobody says whether it was stored, and it is sent once.

        Raises ``BrokerUnreachableError`` if it could not be sent, and ``NotFoundError`` for an unknown topic.
        """
        pipeline = self._opened()
        prepared = self.prepared(message, key, queue)
        route = await self._cluster.route(message.topic, self._cluster.deadline())
        place = pipeline.selector.choose(route, prepared)
        broker = self._cluster.routes.broker(place.broker_name)
        if broker is None or not broker.master:
            raise BrokerUnreachableError(f"brokers {place.broker_name} have no master now")
        identify((prepared,), time.time_ns() // 1_000_000)
        request = request_of([prepared], place, self.group)
        await self._cluster.connections.tell(broker.master, request._replace(flag=FLAG_ONEWAY))

    async def flush(self) -> None:
        """Return once every message submitted so far has an outcome."""
        await self._opened().pending.flush()

    @property
    def pending_messages(self) -> int:
        """Messages that were submitted and have no outcome yet."""
        return 0 if self._pipeline is None else len(self._pipeline.pending)

    def numbered(self, name: str, *, broker: str = "") -> NumberedProducer:
        """For a program that numbers its messages, so that it can go on after a crash: see ``NumberedProducer``.

        ``broker``: the name of the brokers that keep the numbers and store the messages; not needed if there are no
        others. Raises ``ConfigError`` for a name that cannot be one.
        """
        try:
            check_name(name)
        except InvalidRequestError as error:
            raise ConfigError([str(error)]) from error
        return NumberedProducer(name, broker, self._opened, self.prepared)

    # -- the parts of ``submit``, which the blocking producer takes on two threads -------------------------------------

    def prepared(self, message: Message, key: str | None, queue: MessageQueue | int | None) -> OutgoingMessage:
        """Check and encode a message. On any thread. Raises ``MessageRefusedError``."""
        if self._spans is None:
            return self._outgoing(message, key, queue)
        message, span = self._spans.begin(message)
        try:
            prepared = self._outgoing(message, key, queue)
        except Exception as error:
            self._spans.refused(span, error)
            raise
        prepared.span = span
        return prepared

    def _outgoing(self, message: Message, key: str | None, queue: MessageQueue | int | None) -> OutgoingMessage:
        prepared = outgoing(message, self._options.body_bytes_max)
        if key is None and queue is None:
            prepared.key = message.properties.get(PROPERTY_SHARDING_KEY)
            return prepared
        return _placed(prepared, key, queue)

    def carried(self, message: Message) -> Message:
        """The message with the context of the caller's current span, for one that is sent on another thread."""
        return message if self._spans is None else self._spans.carried(message)

    @property
    def has_room(self) -> bool:
        """Whether a message may be added at once. On any thread."""
        return self._pipeline is None or not self._pipeline.pending.is_full

    async def wait_for_room(self) -> None:
        """Return once there is some. Raises ``SendQueueFullError``."""
        await self._opened().pending.wait_for_room(self._cluster.timeout_s)

    def add(self, prepared: OutgoingMessage) -> asyncio.Future[SendResult]:
        """Send a prepared message soon. Raises ``ClientClosedError``."""
        future: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        prepared.future = future
        self._opened().add(prepared)
        return future

    def add_all(self, prepared: Sequence[OutgoingMessage]) -> None:
        """Send what another thread has prepared; the futures that are not cancelled get their outcomes here."""
        messages = begin(prepared)
        try:
            self._opened().add_all(messages)
        except ClientClosedError as error:
            settle([one.future for one in messages], [error] * len(messages))

    # -- transactions --------------------------------------------------------------------------------------------------

    async def recall(self, handle: str) -> str:
        """Have a message that waits for its time not delivered; ``handle`` is ``recall_handle`` of its send's result.

        Returns the message's id. Raises ``ValueError`` for a text that is no handle, ``NotFoundError`` for a message
        that was delivered or recalled, and ``ClientError``.
        """
        self._opened()
        return await recall(self._cluster, handle, self.group, self._cluster.deadline())

    def transaction(
        self, message: Message, *, key: str | None = None, queue: MessageQueue | int | None = None
    ) -> Transaction:
        """``async with producer.transaction(message) as transaction:``, see ``Transaction``.

        The message is stored where nobody sees it before the block begins. If that fails, the block is not entered;
        with ``outcome="unknown"`` there may be a message that nobody commits, and ``check`` will be asked. It is not
        numbered, whatever ``enable_idempotence`` says.
        """
        return Transaction(lambda: self._begin_transaction(message, key, queue), self._find_transactions, message)

    async def send_in_transaction(
        self,
        message: Message,
        execute: Callable[[PreparedMessage], Awaitable[TransactionState]],
        *,
        key: str | None = None,
        queue: MessageQueue | int | None = None,
    ) -> TransactionResult:
        """Store a message, call ``execute``, and commit the message or roll it back as that says.

        If ``execute`` raises, the transaction stays open, and the error is passed on: ``check`` will be asked.
        """
        async with self.transaction(message, key=key, queue=queue) as transaction:
            if transaction.is_safe:
                transaction.state = checked_state(await execute(transaction.prepared))
        return transaction.result

    # -- inside --------------------------------------------------------------------------------------------------------

    def _opened(self) -> SendPipeline:
        """Raises ``ClientClosedError``."""
        self._cluster.check()
        if self._pipeline is None:
            options = self._options
            self._pipeline = SendPipeline(
                self._cluster,
                self.group,
                options.limits,
                idempotence=self._enable_idempotence,
                allow_duplicates=options.allow_duplicates,
                on_failure=options.on_failure,
            )
            if self._spans is not None:
                self._pipeline.pending.observers += (self._spans,)
            if self._trace:
                self._traces = TraceWriter(self._trace_producer)
                self._pipeline.pending.observers += (SendTraces(self.group, self._traces),)
        return self._pipeline

    def _trace_producer(self) -> Producer:
        addresses, name_servers, security = self._given
        options = ProducerOptions(close_timeout_s=TRACE_CLOSE_S, limits=TRACE_LIMITS)
        return Producer(addresses, name_servers=name_servers, security=security, options=options)

    async def _begin_transaction(
        self, message: Message, key: str | None, queue: MessageQueue | int | None
    ) -> SendResult:
        if self._check is None:
            raise ConfigError(["a producer of transactions needs group=… and check=…: brokers ask it about them"])
        await self.start()
        transactions, transaction_id = self._find_transactions(), self._transaction_ids.next()
        half = outgoing(message, self._options.body_bytes_max, producer_group=self.group, transaction_id=transaction_id)
        if not self.has_room:
            await self.wait_for_room()
        transactions.begin(transaction_id)
        try:
            return await self.add(_placed(half, key, queue))
        except BaseException:
            transactions.forget(transaction_id)
            raise

    def _find_transactions(self) -> Transactions:
        assert self._transactions is not None, "start has been called"
        return self._transactions

    async def _joined(self, heartbeats: Heartbeats | None) -> None:
        """Return once a broker knows this producer. Raises why none does."""
        if heartbeats is None or heartbeats.known_at:
            return
        deadline = self._cluster.deadline()

        async def attempt() -> None:
            await heartbeats.send_now()
            masters = [one.master for one in self._cluster.routes.brokers if one.master]
            if heartbeats.known_at:
                return
            for master in masters:
                if (error := heartbeats.error(master)) is not None:
                    raise error
            raise BrokerUnreachableError(f"producer group {self.group}: no broker has a master now")

        await self._cluster.repeat(attempt, deadline, harmless=True)

    def _heartbeat(self) -> HeartbeatData:
        return HeartbeatData(self.client_id, (ProducerData(self.group),))

    def _lost(self, address: str) -> None:
        if self._heartbeats is not None:
            self._heartbeats.lost(address)

    def _take_request(self, connection: RemotingConnection, frame: Frame) -> None:
        """Brokers ask about transactions; whatever else they ask, a producer does not answer."""
        if frame.code == RequestCode.CHECK_TRANSACTION_STATE and self._transactions is not None:
            self._transactions.take(connection, frame)
            connection.done(frame, None)
        else:
            connection.done(frame, frame.answer(_REFUSED, f"request type {frame.code} is not served by producers"))


def _placed(message: OutgoingMessage, key: str | None, queue: MessageQueue | int | None) -> OutgoingMessage:
    if key is not None and queue is not None:
        raise ConfigError(["a key chooses the queue: give either key or queue"])
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key must be a str, not {type(key).__name__}: {key!r}")
    if queue is not None and not isinstance(queue, int | MessageQueue):
        raise TypeError(f"queue must be a number or a MessageQueue, not {queue!r}")
    message.key, message.wanted = key, queue
    return message


async def _outcomes(futures: Sequence[asyncio.Future[SendResult]]) -> list[SendResult | ClientError]:
    found = await asyncio.gather(*futures, return_exceptions=True)
    outcomes: list[SendResult | ClientError] = []
    for one in found:
        if not isinstance(one, SendResult | ClientError):
            raise one
        outcomes.append(one)
    return outcomes


def results_of(outcomes: Sequence[SendResult | ClientError]) -> list[SendResult]:
    """The results, if there are only such. Raises the first error if nothing was stored, else ``PartlySentError``."""
    errors = [one for one in outcomes if isinstance(one, ClientError)]
    if not errors:
        return [one for one in outcomes if isinstance(one, SendResult)]
    if len(errors) == len(outcomes) and all(one.outcome == "not_applied" for one in errors):
        raise errors[0]
    stored = len(outcomes) - len(errors)
    unknown = sum(one.outcome == "unknown" for one in errors)
    raise PartlySentError(
        f"{stored} of {len(outcomes)} messages stored, {unknown} of unknown outcome, {len(errors) - unknown} "
        f"not stored: {errors[0]}",
        outcomes,
    )
