"""OpenTelemetry spans of sends and of deliveries (``spans=True``): the extra ``otel``.

The context travels in the message's properties (``traceparent`` and whatever else the program's propagators write), so
that a consumer's span belongs to the producer's trace, in whichever language either is written. Attributes have the
names of OpenTelemetry's conventions for messaging. The program sets up the provider; without one, nothing is recorded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dledger.errors import ConfigError
from rocketstore.client.aio.results import SendResult
from rocketstore.message.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY, Message

if TYPE_CHECKING:
    from rocketstore.client.aio.assignment import Delivery
    from rocketstore.client.aio.errors import ClientError
    from rocketstore.client.aio.outgoing import OutgoingMessage

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
