"""Traces of messages: RocketMQ's (``trace=True``), and OpenTelemetry's spans (``spans=True``, the extra ``otel``).

RocketMQ's traces never delay nor fail what they are about. They gather for a second, or until a message of them is
full, and are sent by a producer of their own. Where that cannot keep up, or a broker takes none, they are dropped and
counted.

The context of a span travels in the message's properties (``traceparent`` and whatever else the program's propagators
write), so that a consumer's span belongs to the producer's trace, in whichever language either is written. Attributes
have the names of OpenTelemetry's conventions for messaging. The program sets up the provider; without one, nothing is
recorded.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, Protocol

from dledger.errors import ConfigError, DLedgerError
from rocketstore.client.aio.errors import ClientError, SendResult, TransactionState
from rocketstore.client.aio.outgoing import OutgoingMessage, PipelineLimits
from rocketstore.message.ids import offset_message_id, parse_offset_message_id
from rocketstore.message.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY, Message
from rocketstore.message.trace import (
    TRACE_TOPIC,
    ConsumedTrace,
    EndedTrace,
    ReceivedTrace,
    SentTrace,
    Trace,
    encode_traces,
    keys_of,
    kind_number,
)

if TYPE_CHECKING:
    from rocketstore.client.aio.assignment import Delivery
    from rocketstore.client.aio.received import ConsumedMessage

_log = logging.getLogger(__name__)
TRACE_LIMITS: Final = PipelineLimits(pending_bytes_max=2 * 1024 * 1024, pending_messages_max=512, requests_max=4)
"""Of the producer of traces."""
TRACE_CLOSE_S: Final = 2.0
GATHER_S: Final = 1.0
KEYS_MAX: Final = 60
"""Ids and keys of one message of traces: brokers take 64 keys by default."""
BODY_CHARS_MAX: Final = 64 * 1024
WAITING_MAX: Final = 4096
"""Traces that are not sent yet."""
_V6: Final = 6
_STATES: Final = {
    TransactionState.COMMIT: "COMMIT_MESSAGE",
    TransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
    TransactionState.UNKNOWN: "UNKNOW",
}
"""As RocketMQ spells them."""
TOLD_S: Final = 60.0
KEY_CHARS_MAX: Final = 1024
"""Of the business keys of one message, in its trace: keys beyond that are left out."""


class TraceProducer(Protocol):
    """The part of ``Producer`` that traces need."""

    @property
    def has_room(self) -> bool:
        """Whether a message may be added at once."""

    def prepared(self, message: Message, key: None, queue: None) -> OutgoingMessage:
        """A checked message. Raises ``ClientError``."""

    def add(self, prepared: OutgoingMessage) -> asyncio.Future[SendResult]:
        """Send it soon. Raises ``ClientError``."""

    async def close(self) -> None:
        """Send what is pending, for a bounded time."""


class TraceWriter:
    """On one loop. ``make`` makes the producer, once there is something to send; it is closed with this."""

    def __init__(self, make: Callable[[], TraceProducer]) -> None:
        self._make = make
        self._producer: TraceProducer | None = None
        self._waiting: list[Trace] = []
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")
        self._is_closed = False
        self.dropped = 0
        """Traces that were not written."""

    def add(self, traces: Sequence[Trace]) -> None:
        """Write them soon."""
        if self._is_closed or not traces:
            return
        room = WAITING_MAX - len(self._waiting)
        self._waiting += traces[:room]
        if len(traces) > room:
            self._drop(len(traces) - room, "too many are waiting")
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._send)
        elif len(self._waiting) >= KEYS_MAX and not self._timer.cancelled():
            self._timer.cancel()
            asyncio.get_running_loop().call_soon(self._send)

    async def close(self) -> None:
        """Send what waits, for a bounded time."""
        self._send()
        self._is_closed = True
        if self._producer is not None:
            await self._producer.close()

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if not waiting or self._is_closed:
            return
        for message, count in _messages(waiting):
            try:
                producer = self._producer = self._producer or self._make()
                if not producer.has_room:
                    self._drop(count, "the brokers take them too slowly")
                    continue
                future = producer.add(producer.prepared(message, None, None))
            except DLedgerError as error:
                self._drop(count, str(error))
            else:
                future.add_done_callback(lambda done, count=count: self._sent(done, count))  # type: ignore[misc]

    def _sent(self, done: asyncio.Future[SendResult], count: int) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._drop(count, str(error))

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        now = asyncio.get_running_loop().time()
        if now >= self._told_at + TOLD_S:
            self._told_at = now
            _log.warning("traces of messages are dropped, %d until now: %s", self.dropped, why)


class SendTraces:
    """Of one producer; ``group`` is its group."""

    def __init__(self, group: str, writer: TraceWriter) -> None:
        self._group = group
        self.writer: Final = writer

    def settled(self, messages: Sequence[OutgoingMessage], outcomes: Sequence[SendResult | ClientError]) -> None:
        """These have their outcomes."""
        now_ms = time.time_ns() // 1_000_000
        self.writer.add(
            [
                self._trace(one, outcome, now_ms)
                for one, outcome in zip(messages, outcomes, strict=True)
                if one.unique_key and one.message.topic != TRACE_TOPIC
            ]
        )

    def _trace(self, one: OutgoingMessage, outcome: SendResult | ClientError, now_ms: int) -> SentTrace:
        result = outcome if isinstance(outcome, SendResult) else None
        offset_id = result.offset_id if result is not None else ""
        return SentTrace(
            one.unique_key,
            one.born_ms,
            max(now_ms - one.born_ms, 0),
            result is not None,
            one.message.topic,
            self._group,
            one.message.properties.get(PROPERTY_TAGS, ""),
            _short(one.message.properties.get(PROPERTY_KEYS, "")),
            host_of(offset_id) if offset_id else "" if result is None else result.broker,
            len(one.message.body),
            kind_number(one.message) if not one.sys_flag else 1,
            offset_id,
        )


class EndTraces:
    """Of the transactions of one producer; ``group`` is its group."""

    def __init__(self, group: str, writer: TraceWriter) -> None:
        self._group = group
        self._writer = writer

    def ended(
        self, message: Message, message_id: str, state: TransactionState, store_host: str, *, from_check: bool
    ) -> None:
        """A broker was told how a transaction ends, or will have to ask; ``store_host``: its address."""
        properties = message.properties
        self._writer.add(
            [
                EndedTrace(
                    message_id,
                    time.time_ns() // 1_000_000,
                    _STATES[state],
                    message.topic,
                    self._group,
                    properties.get(PROPERTY_TAGS, ""),
                    _short(properties.get(PROPERTY_KEYS, "")),
                    store_host,
                    message_id,
                    from_check,
                )
            ]
        )


class ConsumeTraces:
    """Of one consumer of ``group``; ``client_id`` makes the ids of what it was handed."""

    def __init__(self, group: str, client_id: str, writer: TraceWriter) -> None:
        self._group = group
        self._client_id = client_id
        self._count = 0
        self.writer: Final = writer

    def handed_out(self, delivery: Delivery) -> None:
        """The application has these messages from now on."""
        now_ms = time.time_ns() // 1_000_000
        self._count += 1
        request_id = f"{self._client_id}{self._count:08X}"
        delivery.traced = request_id, now_ms
        self.writer.add(
            [
                ReceivedTrace(_id_of(one), now_ms, request_id, self._group, one.decode().reconsume_times, _keys_of(one))
                for one in delivery.messages
            ]
        )

    def ended(self, delivery: Delivery, *, ok: bool) -> None:
        """It is done with them, or has failed: the first report counts."""
        traced, delivery.traced = delivery.traced, None
        if traced is None:
            return
        request_id, began_ms = traced
        now_ms = time.time_ns() // 1_000_000
        cost_ms = max(now_ms - began_ms, 0)
        self.writer.add(
            [
                ConsumedTrace(_id_of(one), now_ms, cost_ms, ok, request_id, self._group, _keys_of(one))
                for one in delivery.messages
            ]
        )


def _messages(traces: Sequence[Trace]) -> list[tuple[Message, int]]:
    """Messages of traces, each with how many are in it."""
    found: list[tuple[Message, int]] = []
    some: list[Trace] = []
    keys: dict[str, None] = {}
    chars = 0
    for one in traces:
        more, size = dict.fromkeys(keys_of(one)), len(one.encode())
        if some and (len(keys | more) > KEYS_MAX or chars + size > BODY_CHARS_MAX):
            found.append((_message(some, keys), len(some)))
            some, keys, chars = [], {}, 0
        some.append(one)
        keys |= more
        chars += size
    found.append((_message(some, keys), len(some)))
    return found


def _message(traces: Sequence[Trace], keys: dict[str, None]) -> Message:
    return Message(TRACE_TOPIC, encode_traces(traces), keys=list(keys)[:KEYS_MAX])


def _id_of(message: ConsumedMessage) -> str:
    whole = message.decode()
    return whole.unique_key or offset_message_id(whole.store_host, whole.offset)


def _keys_of(message: ConsumedMessage) -> str:
    return _short(message.property(PROPERTY_KEYS))


def _short(keys: str) -> str:
    return keys if len(keys) <= KEY_CHARS_MAX else keys[:KEY_CHARS_MAX].rpartition(" ")[0]


def host_of(offset_id: str) -> str:
    """The address of the broker that gave a message this id."""
    host, _ = parse_offset_message_id(offset_id)
    ip = ip_address(host.ip)
    return f"[{ip}]:{host.port}" if ip.version == _V6 else f"{ip}:{host.port}"


SCOPE: Final = "dledger"
PARENT: Final = "traceparent"
"""The property, and W3C's header, that names the span from which a message comes."""

Span = Any  # of a module that need not be installed


class OpenTelemetry:
    """The parts of its interface that are used here. Raises ``ConfigError`` where it is not installed."""

    def __init__(self, load: Callable[[str], Any] = importlib.import_module) -> None:
        try:
            self.trace: Final = load("opentelemetry.trace")
            self.propagate: Final = load("opentelemetry.propagate")
        except ImportError as error:
            raise ConfigError(
                ["spans need OpenTelemetry, which is not installed: install dledger with the extra 'otel'"]
            ) from error
        self.tracer: Final = self.trace.get_tracer(SCOPE)

    def carried(self, message: Message, context: object = None) -> Message:
        """The message with the context (None: the current one) in its properties."""
        carrier: dict[str, str] = {}
        self.propagate.inject(carrier, context)
        return replace(message, properties={**message.properties, **carrier}) if carrier else message

    def parent(self, properties: Mapping[str, str]) -> object:
        """The context that a message carries; None: the current one."""
        return self.propagate.extract(dict(properties)) if PARENT in properties else None

    def failed(self, span: Span, why: str) -> None:
        """Mark a span."""
        span.set_status(self.trace.Status(self.trace.StatusCode.ERROR, why))


class SendSpans:
    """Of one producer of ``group``: from the call that sends a message to its outcome."""

    def __init__(self, otel: OpenTelemetry, group: str) -> None:
        self._otel = otel
        self._group = group

    def carried(self, message: Message) -> Message:
        """With the caller's context, for a message that another thread will send."""
        return message if PARENT in message.properties else self._otel.carried(message)

    def begin(self, message: Message) -> tuple[Message, Span]:
        """The message to send, in which the span's context is. On any thread."""
        otel = self._otel
        span = otel.tracer.start_span(
            f"send {message.topic}",
            context=otel.parent(message.properties),
            kind=otel.trace.SpanKind.PRODUCER,
            attributes=_attributes(message.topic, "send", message.properties, len(message.body))
            | ({"messaging.rocketmq.client_group": self._group} if self._group else {}),
        )
        return otel.carried(message, otel.trace.set_span_in_context(span)), span

    def refused(self, span: Span, why: Exception) -> None:
        """The message will not be sent."""
        self._otel.failed(span, str(why))
        span.end()

    def settled(self, messages: Sequence[OutgoingMessage], outcomes: Sequence[SendResult | ClientError]) -> None:
        """These have their outcomes."""
        for one, outcome in zip(messages, outcomes, strict=True):
            span, one.span = one.span, None
            if span is None:
                continue
            if one.unique_key:
                span.set_attribute("messaging.message.id", one.unique_key)
            if isinstance(outcome, SendResult):
                span.set_attribute("messaging.destination.partition.id", f"{outcome.broker}:{outcome.queue}")
            else:
                span.set_attribute("error.type", type(outcome).__name__)
                self._otel.failed(span, str(outcome))
            span.end()


class ConsumeSpans:
    """Of one consumer of ``group``: from when the application has messages until it is done with them."""

    def __init__(self, otel: OpenTelemetry, group: str) -> None:
        self._otel = otel
        self._group = group

    def handed_out(self, delivery: Delivery) -> None:
        """A single message continues its producer's trace; several are linked with theirs."""
        otel, first = self._otel, delivery.messages[0]
        topic, is_one = first.topic, len(delivery.messages) == 1
        whole = first.decode()
        attributes = _attributes(topic, "process", whole.properties if is_one else {}, len(first.raw_body))
        if not is_one:
            attributes["messaging.batch.message_count"] = len(delivery.messages)
        if self._group:
            attributes["messaging.consumer.group.name"] = self._group
        delivery.span = otel.tracer.start_span(
            f"process {topic}",
            context=otel.parent(whole.properties) if is_one else None,
            kind=otel.trace.SpanKind.CONSUMER,
            attributes=attributes,
            links=[] if is_one else self._links(delivery),
        )

    def current(self, delivery: Delivery) -> AbstractContextManager[object]:
        """Meanwhile, the delivery's span is the current one."""
        if delivery.span is None:
            return nullcontext()
        found: AbstractContextManager[object] = self._otel.trace.use_span(delivery.span, end_on_exit=False)
        return found

    def ended(self, delivery: Delivery, *, ok: bool) -> None:
        """It is done with them, or has failed: the first report counts."""
        span, delivery.span = delivery.span, None
        if span is None:
            return
        if not ok:
            self._otel.failed(span, "the application did not consume it")
        span.end()

    def _links(self, delivery: Delivery) -> list[object]:
        otel = self._otel
        contexts = (otel.parent(one.decode().properties) for one in delivery.messages[:LINKS_MAX])
        spans = (otel.trace.get_current_span(one) for one in contexts if one is not None)
        return [otel.trace.Link(one.get_span_context()) for one in spans]


LINKS_MAX: Final = 128
"""OpenTelemetry's own limit for a span."""


def _attributes(topic: str, operation: str, properties: Mapping[str, str], body_bytes: int) -> dict[str, object]:
    found: dict[str, object] = {
        "messaging.system": "rocketmq",
        "messaging.destination.name": topic,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.message.body.size": body_bytes,
    }
    if properties.get(PROPERTY_UNIQUE_KEY):
        found["messaging.message.id"] = properties[PROPERTY_UNIQUE_KEY]
    if properties.get(PROPERTY_TAGS):
        found["messaging.rocketmq.message.tag"] = properties[PROPERTY_TAGS]
    if properties.get(PROPERTY_KEYS):
        found["messaging.rocketmq.message.keys"] = properties[PROPERTY_KEYS].split(" ")
    return found
