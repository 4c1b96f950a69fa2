"""A ``Consumer`` where it does not belong: in a child process, on another loop, in a group that wants other things."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from rocketstore.client.aio.broker_session import Subscriptions
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.consumer_options import ConsumerOptions
from rocketstore.client.aio.errors import ClientClosedError
from rocketstore.client.aio.subscription_check import difference
from rocketstore.remoting.bodies.clients import SubscriptionData
from rocketstore.server import BrokerServer
from tests.support.on_loop import on_loop
from tests.unit.rocketstore.client.aio.harness import TOPIC, Sender, bodies, gather

Call = Callable[[Consumer], Awaitable[object]]
CALLS: list[Call] = [
    Consumer.start,
    lambda one: one.poll(timeout_s=0.1),
    Consumer.commit,
    Consumer.close,
    lambda one: one.seek(one.queues[0], 0) if one.queues else one.start(),
]


def refusals(consumer: Consumer) -> list[str]:
    """What each call is answered in this process, on a new loop."""

    async def ask(call: Call) -> str:
        try:
            async with asyncio.timeout(5):
                await call(consumer)
        except ClientClosedError as error:
            return str(error)
        return "done"

    return [asyncio.run(ask(call)) for call in CALLS]


def in_child(consumer: Consumer) -> str:
    """What the calls are answered in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, "\n".join(set(refusals(consumer))).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        found = stream.read()
    os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("is_started", [True, False])
def test_in_a_forked_child_every_call_fails_at_once_and_the_parent_goes_on(
    broker: BrokerServer, sender: Sender, is_started: bool
) -> None:
    """Also of a consumer that was not started: the child's would have the client id of the parent's."""

    async def run() -> None:
        await sender.topic()
        await sender.send(b"1")
        consumer = Consumer(broker.address, group="g", topics=TOPIC, start="first")
        if is_started:
            await consumer.start()
        assert in_child(consumer) == "this client was made in another process: make one after the fork"
        assert bodies(await gather(consumer, 1)) == [b"1"]
        await consumer.close()

    asyncio.run(run())


def test_on_another_loop_every_call_fails_at_once(broker: BrokerServer, sender: Sender) -> None:
    """It belongs to the one on which it was started, and can be closed there."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(sender.topic())
    consumer = Consumer(broker.address, group="g", topics=TOPIC)
    loop.run_until_complete(consumer.start())
    assert set(refusals(consumer)) == {"this client was made on another event loop: make one for each loop"}
    loop.run_until_complete(consumer.close())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@on_loop
async def test_two_loops_can_have_a_consumer_each(broker: BrokerServer, sender: Sender) -> None:
    """In one process: neither knows of the other."""
    await sender.topic()
    await sender.send(b"1", queue=0)
    await sender.send(b"2", queue=1)

    def elsewhere() -> list[bytes]:
        async def run() -> list[bytes]:
            async with Consumer(broker.address, group="other", topics=TOPIC, start="first") as consumer:
                return bodies(await gather(consumer, 2))

        return asyncio.run(run())

    async with Consumer(broker.address, group="g", topics=TOPIC, start="first") as consumer:
        there = asyncio.create_task(asyncio.to_thread(elsewhere))
        assert bodies(await gather(consumer, 2)) == [b"1", b"2"]
        assert await there == [b"1", b"2"]


@on_loop
async def test_another_subscription_than_the_groups_is_told_at_the_start(
    broker: BrokerServer, sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    """Once; members that subscribe to the same are told nothing."""
    await sender.topic()
    async with Consumer(broker.address, group="g", topics={TOPIC: "paid || new"}):
        async with Consumer(broker.address, group="g", topics={TOPIC: "new||paid"}):
            assert "subscribe" not in caplog.text
        async with Consumer(broker.address, group="g", topics={TOPIC: "new"}):
            pass
    told = [one.message for one in caplog.records if "each misses the messages" in one.message]
    assert len([one for one in told if one.startswith("other consumers of group g subscribe to topic orders")]) == 1


def subscribed(**expressions: str) -> Subscriptions:
    return Subscriptions("g", "c1", expressions, ConsumerOptions())


def test_subscriptions_are_compared_as_brokers_compare_them() -> None:
    """However they are written; the retry topic is the group's own."""
    table = {
        "A": SubscriptionData("A", "x || y", ("x", "y"), (120, 121)),
        "B": SubscriptionData("B"),
        "%RETRY%g": SubscriptionData("%RETRY%g"),
    }
    assert difference(subscribed(A="y||x", B="*"), table) == ""
    assert difference(subscribed(A="y||x", B="*"), {}) == ""
    assert "topic A with 'x || y', and this one with 'x'" in difference(subscribed(A="x", B="*"), table)
    assert "others to B, and this one does not" in difference(subscribed(A="x||y"), table)
    assert "this one to C, and others do not" in difference(subscribed(A="x||y", B="*", C="*"), table)
    filtered = {"B": SubscriptionData("B", "a > 1", expression_type="SQL92")}
    assert "with 'a > 1'" in difference(subscribed(B="*"), filtered)
