"""Sending with asyncio. The code is that for threads; what is tested is what differs: tasks, loops and waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dledger.errors import DLedgerError, OutOfOrderSequenceError, UnavailableError
from rocketstore.client.aio_connection import AsyncBrokerConnection
from rocketstore.client.aio_producer import AsyncProducer
from rocketstore.client.aio_topic_cache import AsyncTopicCache
from rocketstore.client.errors import MessageRefusedError, PartlySentError, SendOutcomeUnknownError
from rocketstore.message.message import Message
from tests.support.fake_broker import Break, FakeBrokers, Refusal


def order(body: bytes = b"one") -> Message:
    return Message("orders", body)


def run(
    brokers: FakeBrokers, test: Callable[[AsyncProducer], Awaitable[None]], *, idempotent: bool = True, name: str = ""
) -> None:
    """With a producer on a loop of its own; nothing may be left running when it is closed."""

    async def main() -> None:
        made = AsyncProducer(brokers.addresses, timeout_s=20, enable_idempotence=idempotent, producer_name=name)
        async with asyncio.timeout(60), made as producer:
            await test(producer)
        async with asyncio.timeout(30):
            while len(asyncio.all_tasks()) > 1:  # gRPC's end a moment after their calls
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_receipts_say_where_messages_are(brokers: FakeBrokers) -> None:
    async def test(producer: AsyncProducer) -> None:
        receipt = await producer.send(order(), queue_id=2)
        many = await producer.send_many([order(b"%d" % number) for number in range(5)], queue_id=2)

        stored = brokers.queues["orders", 2].messages
        assert [one.queue_offset for one in (receipt, *many)] == list(range(6))
        assert [one.unique_key for one in (receipt, *many)] == [one.unique_key for one in stored]
        assert await producer.send_many([]) == []

    run(brokers, test)


def test_many_tasks_at_once_share_a_stream_and_look_for_topics_once(brokers: FakeBrokers) -> None:
    async def test(producer: AsyncProducer) -> None:
        receipts = await asyncio.gather(*(producer.send(order(b"%d" % number)) for number in range(300)))

        assert len({(one.queue_id, one.queue_offset) for one in receipts}) == 300
        assert sum(node.calls.count("ListTopics") for node in brokers.nodes) < 5
        assert len(brokers.nodes[0].requests) < 300

    run(brokers, test)


def test_a_pipelined_sender_keeps_the_order_and_waits_for_everything_at_its_end(brokers: FakeBrokers) -> None:
    async def test(producer: AsyncProducer) -> None:
        async with producer.sender(ordered=True) as sender:
            futures = [await sender.send(order(b"%d" % number), queue_id=1) for number in range(100)]
            rest = await sender.send_many([order(b"%d" % number) for number in range(100, 200)], queue_id=1)
        assert all(one.done() for one in futures)
        assert [one.result().queue_offset for one in futures] == list(range(100))
        assert [await one for one in futures] == [one.result() for one in futures]
        places = [one.queue_offset for one in await rest.outcomes() if not isinstance(one, DLedgerError)]
        assert places == list(range(100, 200))

    run(brokers, test)
    assert [one.body for one in brokers.queues["orders", 1].messages] == [b"%d" % number for number in range(200)]


def test_receipts_of_many_are_theirs_behind_others_in_the_same_request(brokers: FakeBrokers) -> None:
    async def test(producer: AsyncProducer) -> None:
        async with producer.sender(ordered=True, linger_ms=10_000) as sender:
            first = await sender.send(order(b"before"), queue_id=2)
            many = await sender.send_many([order(b"%d" % number) for number in range(3)], queue_id=1)
            await sender.flush()
            receipts = [one for one in await many.outcomes() if not isinstance(one, DLedgerError)]
        stored = brokers.queues["orders", 1].messages
        assert [(one.topic, one.queue_id, one.unique_key) for one in receipts] == [
            ("orders", 1, one.unique_key) for one in stored
        ]
        assert first.result().queue_id == 2
        assert len(brokers.nodes[0].requests) == 1

    run(brokers, test)


def test_another_master_is_found(brokers: FakeBrokers) -> None:
    async def test(producer: AsyncProducer) -> None:
        await producer.send(order(b"before"))
        brokers.nodes[0].stop()
        brokers.elect(1)
        await producer.send(order(b"after"))

    run(brokers, test)
    assert brokers.bodies("orders").count(b"after") == 1


@pytest.mark.parametrize("stored", [False, True])
def test_a_broken_stream_is_repeated_if_messages_are_numbered_and_told_if_not(
    brokers: FakeBrokers, *, stored: bool
) -> None:
    brokers.nodes[0].sends.append(Break(stored=stored))

    async def numbered(producer: AsyncProducer) -> None:
        await producer.send(order())

    run(brokers, numbered)
    assert brokers.bodies("orders") == [b"one"]
    brokers.nodes[0].sends.append(Break(stored=stored))

    async def unnumbered(producer: AsyncProducer) -> None:
        with pytest.raises(SendOutcomeUnknownError):
            await producer.send(order())

    run(brokers, unnumbered, idempotent=False)


def test_every_outcome_of_many_is_told(brokers: FakeBrokers) -> None:
    brokers.nodes[0].sends.append(Refusal("MESSAGE_ILLEGAL", only=(1,)))

    async def test(producer: AsyncProducer) -> None:
        with pytest.raises(PartlySentError, match="2 of 3") as caught:
            await producer.send_many([order(), order(), order()])
        assert [isinstance(one, DLedgerError) for one in caught.value.results] == [False, True, False]
        with pytest.raises(MessageRefusedError):
            await producer.send(Message("t" * 200, b""))

    run(brokers, test)


def test_a_named_producer_goes_on_where_it_was(brokers: FakeBrokers) -> None:
    async def test(producer: AsyncProducer) -> None:
        first = await producer.next_sequence()
        await producer.send(order(b"a"), sequence=first)
        assert await producer.next_sequence() == first + 1
        with pytest.raises(OutOfOrderSequenceError):
            await producer.send(order(b"c"), sequence=first + 2)

    run(brokers, test, name="orders-import")


def test_a_cancelled_send_ends_nobody_elses(brokers: FakeBrokers) -> None:
    async def test(producer: AsyncProducer) -> None:
        await producer.send(order(b"0"))
        tasks = [asyncio.create_task(producer.send(order(b"%d" % number))) for number in range(1, 20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in ended[1::2] if isinstance(one, BaseException)]

    run(brokers, test)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_closing_twice_still_finishes_what_was_begun(brokers: FakeBrokers, *, is_cancelled: bool) -> None:
    """Whoever closes it as well, or again after giving up, breaks nothing."""

    async def test(producer: AsyncProducer) -> None:
        sent = await producer.sender(linger_ms=60_000).send(order(), queue_id=1)
        first = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        if is_cancelled:
            first.cancel()
        await producer.close()
        await asyncio.wait([first])
        assert sent.result().queue_offset == 0

    run(brokers, test)
    assert brokers.bodies("orders") == [b"one"]


def test_who_waits_for_another_look_at_the_topics_shares_its_failure(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last of many would wait for as many time-outs, whatever its own is."""
    asks, failing = 0, asyncio.Event()

    async def ask_reader(*_request: object) -> object:
        nonlocal asks
        asks += 1
        await failing.wait()
        raise UnavailableError("nobody answers")

    async def main() -> None:
        connection = AsyncBrokerConnection(brokers.addresses)
        monkeypatch.setattr(connection, "ask_reader", ask_reader)
        cache = AsyncTopicCache(connection)
        tasks = [asyncio.create_task(cache.find("orders")) for _ in range(5)]
        await asyncio.sleep(0)
        failing.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in ended] == [UnavailableError] * 5
        assert asks == 1
        with pytest.raises(UnavailableError):
            await cache.find("orders")
        assert asks == 2
        await connection.close()

    asyncio.run(main())


def test_a_closed_producer_says_so(brokers: FakeBrokers) -> None:
    async def test(producer: AsyncProducer) -> None:
        await producer.send(order())
        await producer.close()
        await producer.close()
        with pytest.raises(UnavailableError, match="the producer is closed"):
            await producer.send(order(), queue_id=0)
        with pytest.raises(UnavailableError, match="the producer is closed"):
            producer.sender()

    run(brokers, test)


def test_a_topic_with_fewer_queues_refuses_no_more_than_what_was_under_way(brokers: FakeBrokers) -> None:
    """The next message goes to a queue that is there."""

    async def test(producer: AsyncProducer) -> None:
        await producer.send(order())
        brokers.add_topic("orders", 1)
        assert brokers.master is not None
        brokers.master.sends.append(Refusal("MESSAGE_ILLEGAL", reason="there is no queue 3"))
        with pytest.raises(MessageRefusedError, match="no queue 3"):
            await producer.send(order())

        assert {(await producer.send(order())).queue_id for _ in range(8)} == {0}

    run(brokers, test)
