"""Numbered sends: messages that a broker of this project recognizes if they are sent again: each is stored once.

For each broker name there is one numbered producer: its messages go to the master in one sequence, many requests at a
time, and are sent again under the same numbers whatever became of a request (``dledger.sending.window`` decides). So an
unknown outcome remains only for a message without an answer by its deadline. The requests are 20100 and 20101 of
docs/protocol.md, which a broker announces in its first answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from dledger.errors import DLedgerError, OutOfOrderSequenceError, UnknownProducerError
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from dledger.sending.aio import AsyncLinks, AsyncSender, OnAnswer, OnEnd
from dledger.sending.batch import AllStored, Answer, OutgoingBatch, WindowRules
from dledger.sending.numbering import ProducerNumbering, new_producer_name
from dledger.sending.window import Window, WindowOptions
from rocketstore.client.aio.cluster import PAUSE_S, Cluster
from rocketstore.client.aio.connections import ATTEMPT_S_MAX
from rocketstore.client.aio.errors import (
    BadAnswerError,
    BrokerBusyError,
    BrokerFailedError,
    BrokerUnreachableError,
    ClientError,
    MessageRefusedError,
    TimedOutError,
    may_repeat,
    refusal_of,
)
from rocketstore.client.aio.outgoing import CREATING_TOPIC, OutgoingMessage
from rocketstore.client.aio.results import NO_OFFSET, STORED, SendResult, SendStatus
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import HostAddress
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.headers import RouteHeader, write_header
from rocketstore.remoting.numbered_sends import (
    NumberedMessage,
    decode_next,
    decode_stored,
    encode_message,
    encode_name,
    encode_numbered,
)
from rocketstore.types import PutMessageStatus, StoredPlace

ANSWER_S_MAX: Final = 60.0
"""How long a request is waited for; its messages have an outcome before, but the numbers behind it depend on it."""
REQUESTS_MAX: Final = 12
"""In progress to one broker."""
NUMBERED_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of messages that are numbered and have no outcome yet. Those behind them wait."""
BATCH_MESSAGES: Final = 1024
_Stored: TypeAlias = tuple[StoredPlace | None, HostAddress, SendStatus]
_Batch: TypeAlias = OutgoingBatch[OutgoingMessage, _Stored]
Settle: TypeAlias = Callable[[OutgoingMessage, SendResult | ClientError], None]
"""Gives a message its outcome."""
OnFailure: TypeAlias = Callable[[str, ClientError], object]
"""Is told of each request that failed, repeated or not: the broker's name, and why."""


async def numbers_messages(cluster: Cluster, address: str) -> bool:
    """Whether a broker recognizes numbered messages: its first answer says so. Raises ``ClientError``."""
    connections = cluster.connections
    if not connections.is_open(address):  # any request will do, whatever its answer
        header = write_header(RouteHeader(CREATING_TOPIC))
        await connections.call(address, Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, 0, header), ATTEMPT_S_MAX)
    return connections.protocol_version(address) > 0


class NumberedSender:
    """The numbered producer of one broker name. ``settle`` is called with each message and its outcome."""

    def __init__(
        self, cluster: Cluster, broker: str, timeout_s: float, settle: Settle, note_failure: OnFailure
    ) -> None:
        self._cluster = cluster
        self._broker = broker
        self._settle = settle
        self._note_failure = note_failure
        self._loop = asyncio.get_running_loop()
        self._added: deque[OutgoingMessage] = deque()
        self._is_scheduled = False
        self._host: HostAddress | None = None
        self._id_prefix = ""  # of the offset ids with this host
        self._failure: ClientError | None = None
        """Why the last request did not get through in time. While they do, those that wait have time."""
        rules: WindowRules[OutgoingMessage, _Stored] = WindowRules(
            is_retried=may_repeat,
            bad_answer=BadAnswerError,
            is_final=lambda error: isinstance(error, BadAnswerError),
            unknown=TimedOutError,
        )
        options = WindowOptions(
            linger_ms=0.0,
            batch_bytes=768 * 1024,
            pending_bytes_max=NUMBERED_BYTES_MAX,
            inflight_requests_max=REQUESTS_MAX,
            inflight_items_max=1 << 16,
            timeout_ms=timeout_s * 1000.0,
        )
        links = AsyncLinks(self._connect, self._find_master, self._failed)
        self._window: Window[OutgoingMessage, _Stored] = Window(options, rules, ProducerNumbering())
        self._sender = AsyncSender(links, self._window, f"messages for {broker}")

    def add(self, message: OutgoingMessage) -> None:
        """Send a message, whose queue is chosen, together with others of this turn of the loop."""
        self._added.append(message)
        self._schedule()

    async def close(self) -> None:
        """End; what has no outcome yet gets one. Idempotent."""
        await self._sender.abandon(TimedOutError("the producer was closed", outcome="not_applied"))
        self._send_added()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._send_added)

    def _send_added(self) -> None:
        """Number as many as may be on their way."""
        self._is_scheduled = False
        while self._added and not self._window.is_full:
            messages = self._in_time()
            try:
                spans = self._sender.add_many_at_once([_payload(one) for one in messages], messages)
            except DLedgerError as error:  # it is closed
                for message in messages:
                    self._settle(message, _own(error))
                continue
            for batch, first, _ in spans:
                if not first:
                    batch.when_done(partial(self._done, batch))

    def _in_time(self) -> list[OutgoingMessage]:
        """The next messages, without those that have no more time, and those whose callers gave up."""
        now, failure = self._loop.time(), self._failure
        taken: list[OutgoingMessage] = []
        while self._added and len(taken) < BATCH_MESSAGES:
            message = self._added.popleft()
            if message.future is None or message.future.done():
                self._settle(message, TimedOutError("nobody waits for it", outcome="not_applied"))
            elif failure is not None and now > message.deadline:
                self._settle(message, failure)
            else:
                taken.append(message)
        return taken

    def _done(self, batch: _Batch) -> None:
        for message, outcome in zip(batch.items, batch.outcomes, strict=True):
            if outcome is None:
                self._settle(message, TimedOutError("the message has no outcome"))
            elif isinstance(outcome, DLedgerError):
                error = _own(outcome)
                if may_repeat(error):
                    self._failure = error
                self._settle(message, error)
            else:
                self._failure = None
                self._settle(message, self._result(message, *outcome))
        if self._added:
            self._schedule()

    def _result(
        self, message: OutgoingMessage, place: StoredPlace | None, host: HostAddress, status: SendStatus
    ) -> SendResult:
        queue = message.queue
        assert queue is not None, "it was placed"
        if place is None:  # an earlier request has stored it, and the broker does not remember where
            return SendResult(queue.topic, queue.broker_name, queue.queue_id, NO_OFFSET, message.unique_key, "", status)
        if host != self._host:
            self._host, self._id_prefix = host, offset_message_id(host, 0)[:-16]
        return SendResult(
            queue.topic,
            queue.broker_name,
            place.queue_id,
            place.queue_offset,
            message.unique_key,
            f"{self._id_prefix}{place.offset:016X}",
            status,
        )

    def _failed(self, _address: str, error: DLedgerError) -> None:
        if isinstance(error, ClientError) and may_repeat(error, harmless=True):
            self._note_failure(self._broker, error)

    async def _find_master(self) -> str | None:
        with suppress(ClientError):
            await self._cluster.routes.refresh_brokers()
        broker = self._cluster.routes.broker(self._broker)
        return (broker.master or None) if broker is not None else None

    async def _connect(
        self,
        timeout_s: float,
        on_answer: OnAnswer[OutgoingMessage, _Stored],
        on_end: OnEnd[OutgoingMessage, _Stored],
    ) -> NumberedStream:
        """A stream to the master. Raises ``ClientError`` if there is none by then: nothing was sent."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        broker = self._cluster.routes.broker(self._broker)
        address = broker.master if broker is not None else ""
        while True:
            failure: ClientError
            try:
                if address:
                    return await self._opened(address, deadline - loop.time(), on_answer, on_end)
                failure = BrokerUnreachableError(f"brokers {self._broker} have no master now")
            except ClientError as error:
                failure = error
                if not may_repeat(error, harmless=True):
                    raise
            self._note_failure(self._broker, failure)
            if deadline - loop.time() <= PAUSE_S:
                failure.outcome = "not_applied"
                raise failure
            await asyncio.sleep(PAUSE_S)
            address = await self._find_master() or ""

    async def _opened(
        self,
        address: str,
        timeout_s: float,
        on_answer: OnAnswer[OutgoingMessage, _Stored],
        on_end: OnEnd[OutgoingMessage, _Stored],
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
        on_answer: OnAnswer[OutgoingMessage, _Stored],
        on_end: OnEnd[OutgoingMessage, _Stored],
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
        body = encode_numbered(batch.producer, batch.sequence, payloads)
        request = Frame(OwnCode.SEND_NUMBERED, 0, {}, body)
        task = asyncio.get_running_loop().create_task(self._ask(batch, len(payloads), request))
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

    async def _ask(self, batch: _Batch, count: int, request: Frame) -> None:
        outcome: Answer[_Stored]
        try:
            answer = await self._connections.call(self.address, request, ANSWER_S_MAX)
            outcome = self._outcome(answer, count)
        except ClientError as error:
            outcome = error
            self._break(error)
        except asyncio.CancelledError:
            outcome = TimedOutError(f"unknown whether it was stored: {self.broken}")
        self._on_answer(self, batch, outcome)

    def _outcome(self, answer: Frame, count: int) -> Answer[_Stored]:
        status = STORED.get(answer.code)
        if status is None:
            return self._refusal(answer, count)
        try:
            ip, port, places = decode_stored(answer.body)
        except RequestError as error:
            return BadAnswerError(f"{self.address}: {error}")
        host = HostAddress(ip, port)
        return AllStored([(place, host, status) for place in places])

    def _refusal(self, answer: Frame, count: int) -> Answer[_Stored]:
        """Why none of the messages is stored, or all may be."""
        fields = answer.fields
        refusal: DLedgerError = refusal_of(answer, self.address)
        status = fields.get("status", "")
        if status == PutMessageStatus.OUT_OF_ORDER_SEQUENCE:
            refusal = OutOfOrderSequenceError(str(refusal))
        elif status == PutMessageStatus.UNKNOWN_PRODUCER:
            refusal = UnknownProducerError(str(refusal))
        elif status == PutMessageStatus.TOO_MANY_PRODUCERS:
            refusal = BrokerBusyError(str(refusal), answer_code=answer.code, address=self.address)
        refusal.outcome = "unknown" if fields.get("outcome") == "unknown" else "not_applied"
        if "outcome" not in fields and isinstance(refusal, BrokerFailedError):
            refusal.outcome = "unknown"
        blamed = fields.get("message", "")
        if not blamed.isdigit() or int(blamed) >= count or refusal.outcome == "unknown" or count == 1:
            return refusal
        behind = OutOfOrderSequenceError(f"another message of its request was refused: {refusal}")
        outcomes: Sequence[DLedgerError] = [behind] * count
        return [refusal if place == int(blamed) else one for place, one in enumerate(outcomes)]

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


def _payload(message: OutgoingMessage) -> bytes:
    queue, sent = message.queue, message.message
    return encode_message(
        NumberedMessage(
            sent.topic,
            -1 if queue is None else queue.queue_id,
            sent.flag,
            message.sys_flag,
            message.born_ms,
            message.properties.encode(),
            sent.body,
        )
    )


def _own(error: DLedgerError) -> ClientError:
    """An error of the window as one of this client."""
    if isinstance(error, ClientError):
        return error
    if error.outcome == "unknown":
        return TimedOutError(str(error))
    return BrokerUnreachableError(str(error))
