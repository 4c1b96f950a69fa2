"""OpenTelemetry spans of sends and deliveries, with its own SDK, against a whole broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dledger.errors import ConfigError
from rocketstore.client.aio import tracing as client_spans
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.errors import MessageRefusedError
from rocketstore.client.aio.producer import Producer, ProducerOptions
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.client.aio.tracing import OpenTelemetry
from rocketstore.message.message import Message
from rocketstore.server import BrokerServer
from tests.support import lacking
from tests.support.on_loop import on_loop, until
from tests.unit.rocketstore.test_server import plain, running

SPANS = ProducerOptions(spans=True)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerServer]:
    with running(plain(tmp_path)) as server:
        yield server


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """The spans that have ended, of a provider of this test only."""
    sdk = lacking.module("opentelemetry.sdk.trace", "dev")
    export = lacking.module("opentelemetry.sdk.trace.export", "dev")
    memory = lacking.module("opentelemetry.sdk.trace.export.in_memory_span_exporter", "dev")
    kept, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    real = OpenTelemetry.__init__

    def made(self: OpenTelemetry, *arguments: Any) -> None:  # noqa: ANN401  # whatever it gets
        real(self, *arguments)
        object.__setattr__(self, "tracer", provider.get_tracer("test"))

    monkeypatch.setattr(client_spans.OpenTelemetry, "__init__", made)
    return lambda: list(kept.get_finished_spans())


def named(spans: list[Any], name: str) -> list[Any]:
    return [one for one in spans if one.name == name]


@on_loop
async def test_a_consumers_span_belongs_to_the_producers_trace(
    broker: BrokerServer, finished: Callable[[], list[Any]]
) -> None:
    """The context travels in the message; in a handler, the delivery's span is the current one; a failure is marked."""
    trace = lacking.module("opentelemetry.trace", "otel")
    tries: list[int] = []

    async def handle(_message: ConsumedMessage) -> None:
        tries.append(trace.get_current_span().get_span_context().span_id)
        if len(tries) == 1:
            raise ValueError("the first try fails")

    async with Producer(broker.address, group="senders", timeout_s=30, options=SPANS) as producer:
        sent = await producer.send(Message("T", b"x", keys="k1", tags="new"))
    settings = {"start": "first", "ordered": True, "timeout_s": 30, "spans": True}
    async with Consumer(broker.address, group="readers", topics="T", **settings) as consumer:  # type: ignore[arg-type]
        running_ = asyncio.create_task(consumer.run(handle))
        await until(lambda: len(named(finished(), "process T")) == 2, "both tries have ended")
        running_.cancel()
        await asyncio.gather(running_, return_exceptions=True)

    (send,) = named(finished(), "send T")
    assert send.attributes["messaging.message.id"] == sent.message_id
    failed, done = named(finished(), "process T")
    for one in (failed, done):
        assert (one.context.trace_id, one.parent.span_id) == (send.context.trace_id, send.context.span_id)
        assert one.attributes["messaging.consumer.group.name"] == "readers"
    assert [failed.context.span_id, done.context.span_id] == tries
    assert (failed.status.is_ok, done.status.is_ok, send.status.is_ok) == (False, True, True)


@on_loop
async def test_a_message_that_is_not_sent_ends_its_span(
    broker: BrokerServer, finished: Callable[[], list[Any]]
) -> None:
    """Refused before it is sent, or without an outcome when the producer is closed."""
    async with Producer(broker.address, timeout_s=30, options=SPANS) as producer:
        with pytest.raises(MessageRefusedError):
            await producer.send(Message("T", b"x", queue_id=3))
    (span,) = finished()
    assert not span.status.is_ok


def test_without_opentelemetry_the_error_says_what_to_install() -> None:
    def load(_name: str) -> object:
        raise ImportError

    with pytest.raises(ConfigError, match="extra 'otel'"):
        OpenTelemetry(load)
