"""Messages that a ``Consumer`` has handed out: handlers that hang, are cancelled, take batches; polls."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from dledger.errors import ConfigError
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.errors import ClientClosedError
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.server import BrokerServer
from tests.support.on_loop import on_loop
from tests.unit.rocketstore.client.aio.harness import TOPIC, Sender, bodies, gather, until


@on_loop
async def test_a_message_whose_handler_hangs_is_sent_back_and_the_queue_goes_on(
    broker: BrokerServer,
    sender: Sender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After ``consume_timeout_s``; when the handler ends at last, that changes nothing."""
    await sender.topic(queues=1)
    await sender.send(b"hangs", b"next")
    hanging = asyncio.Event()
    seen: Counter[bytes] = Counter()

    async def handle(message: ConsumedMessage) -> None:
        seen[message.body] += 1
        if message.body == b"hangs" and message.attempts == 0:
            await hanging.wait()

    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first", consume_timeout_s=0.2, commit_s=0.1)
    run = asyncio.ensure_future(consumer.run(handle, workers=2))
    with caplog.at_level(logging.WARNING):
        await until(lambda: seen == {b"hangs": 2, b"next": 1})
    assert "s (consume_timeout_s)" in caplog.text
    await until(lambda: all(lag == 0 for queue, lag in consumer.lag().items() if queue.topic == TOPIC))
    hanging.set()
    await consumer.close()
    await run
    assert seen == {b"hangs": 2, b"next": 1}


@on_loop
async def test_a_cancelled_run_gives_its_messages_back_without_counting_a_try(
    broker: BrokerServer,
    sender: Sender,
) -> None:
    """The handler is cancelled, too; a later ``run`` of the same consumer gets the message."""
    await sender.topic(queues=1)
    await sender.send(b"1")
    begun = asyncio.Event()
    seen: list[int] = []

    async def waits(_: ConsumedMessage) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def handles(message: ConsumedMessage) -> None:
        seen.append(message.attempts)

    async with Consumer(broker.address, group="g", topics=TOPIC, start="first") as consumer:
        run = asyncio.ensure_future(consumer.run(waits))
        await begun.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        run = asyncio.ensure_future(consumer.run(handles))
        await until(lambda: seen == [0])
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


@on_loop
async def test_a_handler_that_cancels_itself_has_failed(broker: BrokerServer, sender: Sender) -> None:
    """Its message comes again, and counts as tried; the workers go on."""
    await sender.topic(queues=1)
    await sender.send(b"1")
    seen: list[int] = []

    async def handle(message: ConsumedMessage) -> None:
        seen.append(message.attempts)
        if message.attempts == 0:
            raise asyncio.CancelledError

    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first")
    run = asyncio.ensure_future(consumer.run(handle, workers=1))
    await until(lambda: seen == [0, 1])
    await consumer.close()
    await run


@on_loop
async def test_a_batch_is_done_or_fails_together(broker: BrokerServer, sender: Sender) -> None:
    """Up to ``batch_max`` messages of one queue; all of a failed batch come again, the others do not."""
    await sender.topic(queues=1)
    await sender.send(*(b"%d" % number for number in range(5)))
    batches: list[list[tuple[bytes, int]]] = []

    async def handle(messages: Sequence[ConsumedMessage]) -> None:
        batches.append([(one.body, one.attempts) for one in messages])
        if len(batches) == 1:
            raise ValueError("the first batch")

    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first")
    run = asyncio.ensure_future(consumer.run_batches(handle, workers=1, batch_max=3))
    again = [(b"%d" % number, 1) for number in range(3)]
    await until(lambda: {one for batch in batches for one in batch} >= set(again))
    await consumer.close()
    await run
    assert all(len(one) <= 3 for one in batches)
    handled = Counter(one for batch in batches[1:] for one in batch)
    assert handled == Counter([*again, (b"3", 0), (b"4", 0)])


@on_loop
async def test_a_polled_message_that_failed_is_delivered_again(broker: BrokerServer, sender: Sender) -> None:
    """By ``retry``; the poll's other messages count as done as ever."""
    await sender.topic(queues=1)
    await sender.send(b"1", b"2")
    async with Consumer(broker.address, group="g", topics=TOPIC, start="first") as consumer:
        first = await gather(consumer, 2)
        await consumer.retry(first[0], delay_level=1)
        (again,) = await gather(consumer, 1)
        assert (again.body, again.topic, again.attempts) == (b"1", TOPIC, 1)
    async with Consumer(broker.address, topics=TOPIC, assign="all", start="first") as reader:
        (message, *_) = await gather(reader, 2)
        with pytest.raises(ConfigError, match="members of a group"):
            await reader.retry(message)


@on_loop
async def test_messages_of_a_poll_that_failed_are_not_committed(broker: BrokerServer, sender: Sender) -> None:
    """An exception leaves the ``async with``: what it got last comes again."""
    await sender.topic(queues=1)
    await sender.send(b"1")

    async def fails() -> None:
        async with Consumer(broker.address, group="g", topics=TOPIC, start="first") as consumer:
            await gather(consumer, 1)
            raise ValueError("in the application")

    with pytest.raises(ValueError, match="in the application"):
        await fails()
    async with Consumer(broker.address, group="g", topics=TOPIC, start="first") as consumer:
        assert bodies(await gather(consumer, 1)) == [b"1"]


@on_loop
async def test_a_broadcast_gets_everything_and_keeps_its_own_offsets(
    broker: BrokerServer,
    sender: Sender,
    tmp_path: Path,
) -> None:
    """Two consumers get each message; the file says where one goes on; brokers keep no offset of it."""
    await sender.topic(queues=2)
    file = tmp_path / "offsets.json"
    settings = {"group": "g", "topics": TOPIC, "start": "first", "broadcast": True}
    async with (
        Consumer(broker.address, offsets_file=file, **settings) as one,  # type: ignore[arg-type]
        Consumer(broker.address, **settings) as other,  # type: ignore[arg-type]
    ):
        await sender.send(b"1")
        await sender.send(b"2", queue=1)
        assert bodies(await gather(one, 2)) == bodies(await gather(other, 2)) == [b"1", b"2"]
    assert json.loads(file.read_text()) == {"offsets": {TOPIC: {broker.config.name: {"0": 1, "1": 1}}}}
    await sender.send(b"3")
    async with Consumer(broker.address, offsets_file=file, **settings) as one:  # type: ignore[arg-type]
        assert bodies(await gather(one, 1)) == [b"3"]
        assert await one.poll(timeout_s=0.1) == []
    assert broker.state.offset("g", TOPIC, 0) == -1


@on_loop
async def test_what_is_in_use_is_bounded(broker: BrokerServer, sender: Sender) -> None:
    """A queue goes on for ``pending_span_max`` offsets behind a message that is not done, and then waits for it."""
    await sender.topic(queues=1)
    await sender.send(*(b"%d" % number for number in range(10)))
    first_done = asyncio.Event()
    seen: list[bytes] = []

    async def handle(message: ConsumedMessage) -> None:
        seen.append(message.body)
        if message.body == b"0":
            await first_done.wait()

    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first", pending_span_max=4)
    run = asyncio.ensure_future(consumer.run(handle, workers=8))
    await until(lambda: len(seen) == 4)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(seen) == 4
    first_done.set()
    await until(lambda: len(seen) == 10)
    await consumer.close()
    await run


@on_loop
async def test_closing_waits_for_handlers_and_commits_them(broker: BrokerServer, sender: Sender) -> None:
    """A message whose handler was at work when ``close`` was called does not come again."""
    await sender.topic(queues=1)
    await sender.send(b"1")
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def handle(_: ConsumedMessage) -> None:
        begun.set()
        await may_end.wait()

    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first")
    run = asyncio.ensure_future(consumer.run(handle))
    await begun.wait()
    closing = asyncio.ensure_future(consumer.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    may_end.set()
    await closing
    await run
    assert broker.state.offset("g", TOPIC, 0) == 1
    with pytest.raises(ClientClosedError):
        await consumer.poll()


@on_loop
async def test_a_close_that_was_cancelled_goes_on_and_another_waits_for_its_end(
    broker: BrokerServer, sender: Sender
) -> None:
    """Nothing of the member is left, and what its handler did is committed."""
    await sender.topic(queues=1)
    await sender.send(b"1")
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def handle(_: ConsumedMessage) -> None:
        begun.set()
        await may_end.wait()

    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first")
    before = {one for one in asyncio.all_tasks() if one is not asyncio.current_task()}
    run = asyncio.ensure_future(consumer.run(handle))
    await begun.wait()
    first = asyncio.ensure_future(consumer.close())
    await until(lambda: any(one.get_name() == "consumer closing" for one in asyncio.all_tasks()))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.ensure_future(consumer.close())
    may_end.set()
    await second
    await run
    assert broker.state.offset("g", TOPIC, 0) == 1
    assert {one for one in asyncio.all_tasks() if one is not asyncio.current_task()} <= before


@on_loop
async def test_two_handlers_may_close_their_consumer(broker: BrokerServer, sender: Sender) -> None:
    """Neither waits for the other one for ever."""
    await sender.topic(queues=2)
    await sender.send(b"1", b"2")
    both = asyncio.Barrier(2)
    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first")

    async def handle(_: ConsumedMessage) -> None:
        await both.wait()
        await consumer.close()

    await asyncio.wait_for(consumer.run(handle), 30)


@on_loop
async def test_a_handler_may_close_its_consumer(broker: BrokerServer, sender: Sender) -> None:
    """``run`` returns then."""
    await sender.topic(queues=1)
    await sender.send(b"1")
    consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first")

    async def handle(_: ConsumedMessage) -> None:
        await consumer.close()

    await asyncio.wait_for(consumer.run(handle), 30)
