"""Members of a group with asyncio: what differs from threads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import pytest

from dledger.errors import UnavailableError
from rocketstore.client.aio_group_consumer import AsyncGroupConsumer
from rocketstore.client.shares import GroupDelivery
from rocketstore.state.changes import TopicConfig
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.client.test_group_consumer import committed, put


@pytest.fixture
def broker() -> Iterator[RemotingHarness]:
    with RemotingHarness() as harness:
        harness.state.table["%RETRY%g"] = TopicConfig("%RETRY%g", 1, 1)
        yield harness


def run(broker: RemotingHarness, test: Callable[[AsyncGroupConsumer], Awaitable[None]]) -> AsyncGroupConsumer:
    """With a member on a loop of its own."""

    async def main() -> AsyncGroupConsumer:
        made = AsyncGroupConsumer([broker.address], group="g", start="first", timeout_s=15.0, pull_wait_ms=200)
        made.subscribe("T")
        async with asyncio.timeout(60), made:
            await test(made)
        return made

    return asyncio.run(main())


def test_a_coroutine_handles_messages_at_once(broker: RemotingHarness) -> None:
    """As many as there are workers; one that fails is sent back; all that is done is committed at the end."""
    sent = put(broker, 12)
    done: list[bytes] = []

    async def test(member: AsyncGroupConsumer) -> None:
        together = asyncio.Barrier(4)

        async def handle(delivery: GroupDelivery) -> None:
            if not delivery.attempts:
                await together.wait()
            done.append(delivery.body)
            if delivery.body == b"5" and not delivery.attempts:
                raise ValueError("scripted")

        await member.start(handle, workers=4)
        while len(done) < 13:
            await asyncio.sleep(0.01)

    run(broker, test)
    assert Counter(done) == Counter([*sent, b"5"])
    assert committed(broker) == dict.fromkeys(range(4), 3)


def test_messages_are_iterated_over_and_acknowledged(broker: RemotingHarness) -> None:
    """What is not acknowledged is not committed."""
    put(broker, 8)

    async def test(member: AsyncGroupConsumer) -> None:
        await member.start()
        assert {one.queue_id for one in member.queues if one.topic == "T"} == {0, 1, 2, 3}
        number = 0
        async for delivery in member:
            number += 1
            if delivery.message.queue_id != 1:
                member.ack(delivery)
            if number == 8:
                break
        await member.commit()
        assert sum(one for name, one in member.lag().items() if name.topic == "T") == 2  # of queue 1

    run(broker, test)
    assert committed(broker) == {0: 2, 1: 0, 2: 2, 3: 2}


def test_a_message_received_by_a_cancelled_task_comes_again(broker: RemotingHarness) -> None:
    """It was given to nobody."""

    async def test(member: AsyncGroupConsumer) -> None:
        await member.start()
        task = asyncio.create_task(member.receive(30.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        put(broker, 1)
        delivery = await member.receive(30.0)
        assert delivery is not None
        assert (delivery.body, delivery.attempts) == (b"0", 0)
        member.ack(delivery)

    closed = run(broker, test)
    with pytest.raises(UnavailableError):
        asyncio.run(closed.commit())
