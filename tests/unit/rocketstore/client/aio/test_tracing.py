"""Traces that producers and consumers write, against whole brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.admin_requests import TopicInfo, Traced
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.errors import ClientError, PreparedMessage, TransactionState
from rocketstore.client.aio.producer import Producer
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.client.aio.tracing import _STATES, KEYS_MAX, WAITING_MAX, TraceWriter
from rocketstore.message.message import Message
from rocketstore.message.trace import TRACE_TOPIC, EndedTrace, SentTrace, decode_traces
from rocketstore.server import BrokerServer
from tests.support.on_loop import on_loop, until
from tests.unit.rocketstore.test_server import plain, running


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerServer]:
    with running(plain(tmp_path)) as server:
        yield server


async def steps_of(admin: Admin, message_id: str, count: int) -> list[Traced]:
    """Once there are so many."""
    found: list[Traced] = []

    async def looked() -> bool:
        nonlocal found
        found = await admin.trace(message_id)
        return len(found) >= count and all(one.cost_ms >= 0 for one in found)

    async with asyncio.timeout(30):
        while not await looked():
            await asyncio.sleep(0.05)
    return found


@on_loop
async def test_a_trace_says_who_sent_and_who_consumed_a_message(broker: BrokerServer) -> None:
    """When, how long it took, and whether it failed; and nobody traces the traces."""
    tries = 0

    async def handle(_message: ConsumedMessage) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("the first try fails")

    async with Producer(broker.address, group="senders", trace=True, timeout_s=30) as producer:
        sent = await producer.send(Message("T", b"x", keys=["k1", "k2"], tags="new"))
    options = {"start": "first", "trace": True, "timeout_s": 30, "ordered": True}
    async with Consumer(broker.address, group="readers", topics="T", **options) as consumer:  # type: ignore[arg-type]
        running_ = asyncio.create_task(consumer.run(handle))
        await until(lambda: tries == 2, "it was consumed at the second try")
        running_.cancel()
        await asyncio.gather(running_, return_exceptions=True)
    async with Admin(broker.address, timeout_s=30) as admin:
        first, failed, done = await steps_of(admin, sent.message_id, 3)
        assert (first.step, first.group, first.ok) == ("sent", "senders", True)
        assert first.detail == broker.address
        assert (failed.step, failed.group, failed.ok, done.ok) == ("consumed", "readers", False, True)
        assert first.time_ms <= failed.time_ms <= done.time_ms
        assert {one.host for one in (first, failed, done)} == {"127.0.0.1"}
        traces = await admin.messages_by_key(TRACE_TOPIC, "k1")
        assert len(traces) >= 1
        assert all(TRACE_TOPIC.encode() not in one.body for one in traces)


@on_loop
async def test_a_trace_says_how_a_transaction_ended(broker: BrokerServer) -> None:
    """As RocketMQ's producers write it: what was decided, and that a message without an end was left to a check."""

    async def check(_: PreparedMessage) -> TransactionState:
        return TransactionState.UNKNOWN

    ids = []
    async with Producer(broker.address, group="senders", check=check, trace=True, timeout_s=30) as producer:
        for state in TransactionState:
            async with producer.transaction(Message("T", b"x", keys="k1", tags="new")) as transaction:
                transaction.state = state
            ids.append(transaction.id)
    async with Admin(broker.address, timeout_s=30) as admin:
        for message_id, state in zip(ids, TransactionState, strict=True):
            ended = (await ended_of(admin, message_id))[0]
            assert (ended.group, ended.detail) == ("senders", _STATES[state])
        (message,) = [
            one
            for each in await admin.messages_by_key(TRACE_TOPIC, ids[0])
            for one in decode_traces(each.body)
            if isinstance(one, EndedTrace) and one.message_id == ids[0]
        ]
        assert (message.topic, message.tags, message.keys) == ("T", "new", "k1")
        assert (message.store_host, message.transaction_id, message.from_check) == (broker.address, ids[0], False)


async def ended_of(admin: Admin, message_id: str) -> list[Traced]:
    found: list[Traced] = []
    async with asyncio.timeout(30):
        while not found:
            found = [one for one in await admin.trace(message_id) if one.step == "ended"]
            await asyncio.sleep(0.05)
    return found


@on_loop
async def test_a_broker_that_takes_no_traces_takes_messages_all_the_same(tmp_path: Path) -> None:
    """Traces neither fail nor delay a send, nor closing the producer for long; they are counted."""
    with running(plain(tmp_path, autoCreateTopicEnable="false")) as broker:
        async with Admin(broker.address, timeout_s=30) as admin:
            await admin.put_topic(TopicInfo("T"))
        async with Producer(broker.address, trace=True, timeout_s=30) as producer:
            await asyncio.gather(*[producer.send(Message("T", b"x")) for _ in range(100)])
        assert producer._traces is not None
        assert producer._traces.dropped == 100


class FullProducer:
    """Has no room."""

    has_room = False
    closed = False

    async def close(self) -> None:
        self.closed = True


class TakingProducer(FullProducer):
    """Takes everything."""

    has_room = True

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def prepared(self, message: Message, _key: None, _queue: None) -> Message:
        return message

    def add(self, message: Message) -> asyncio.Future[object]:
        self.sent.append(message)
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


def traces(count: int) -> list[SentTrace]:
    return [SentTrace(f"{number:032X}", 1, 1, True, "T") for number in range(count)]


@on_loop
async def test_traces_that_wait_are_bounded_and_never_block() -> None:
    full = FullProducer()
    writer = TraceWriter(lambda: full)  # type: ignore[arg-type, return-value]
    writer.add(traces(WAITING_MAX + 7))
    assert writer.dropped == 7
    await writer.close()
    assert writer.dropped == WAITING_MAX + 7
    assert full.closed
    writer.add(traces(1))  # after the end nothing happens


@on_loop
async def test_traces_gather_in_messages_of_as_many_keys_as_brokers_take() -> None:
    """A broker refuses a message with more, and nothing of it could be found."""
    taking = TakingProducer()
    writer = TraceWriter(lambda: taking)  # type: ignore[arg-type, return-value]
    writer.add(traces(2 * KEYS_MAX + 1))
    await writer.close()
    assert [len(one.keys) for one in taking.sent] == [KEYS_MAX, KEYS_MAX, 1]
    assert writer.dropped == 0


@on_loop
async def test_a_message_that_was_not_stored_is_traced_as_such(broker: BrokerServer) -> None:
    async with Admin(broker.address, timeout_s=30) as admin:
        await admin.put_topic(TopicInfo("Closed", permission=4))
        async with Producer(broker.address, trace=True, timeout_s=2) as producer:
            await producer.send(Message("T", b"x"))  # so that there is a topic of traces
            future = await producer.submit(Message("Closed", b"x", keys="lost"))
            with pytest.raises(ClientError):
                await future
        async with asyncio.timeout(30):
            while not (found := await admin.messages_by_key(TRACE_TOPIC, "lost")):
                await asyncio.sleep(0.05)
        assert b"\x01false\x02" in found[0].body
