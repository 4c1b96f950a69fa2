"""A ``Consumer`` where it does not belong: in a child process, on another loop, in a group that wants other things."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable

import pytest

from rocketstore.client.aio.broker_session import Subscriptions, difference
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.consumer_options import ConsumerOptions
from rocketstore.client.aio.errors import ClientClosedError
from rocketstore.remoting.groups import SubscriptionData
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


_FORKS = """
    import asyncio, os, sys, warnings
    from rocketstore.client.aio.consumer import Consumer
    from rocketstore.client.aio.errors import ClientClosedError
    warnings.simplefilter("ignore", DeprecationWarning)
    address, is_started = sys.argv[1], sys.argv[2] == "True"

    async def run():
        consumer = Consumer(address, group="g", topics="orders", start="first")
        if is_started:
            await consumer.start()
        if not os.fork():
            seek = lambda: consumer.seek(consumer.queues[0], 0) if consumer.queues else consumer.start()
            for call in (consumer.start, lambda: consumer.poll(timeout_s=0.1), consumer.commit, consumer.close, seek):
                async def ask():
                    async with asyncio.timeout(20):
                        await call()
                try:
                    asyncio.run(ask())
                except ClientClosedError as error:
                    assert str(error) == "this client was made in another process: make one after the fork", error
                else:
                    os._exit(1)
            os._exit(0)
        _, status = os.wait()
        assert status == 0, status
        (message,) = await consumer.poll(timeout_s=30)
        assert message.body == b"1", message
        await consumer.close()

    asyncio.run(run())
"""


@pytest.mark.parametrize("is_started", [True, False])
def test_in_a_forked_child_every_call_fails_at_once_and_the_parent_goes_on(
    broker: BrokerServer, sender: Sender, is_started: bool
) -> None:
    """Also of a consumer that was not started: the child's would have the client id of the parent's.

    In a program of its own: here gRPC has threads, whose locks a child would inherit.
    """

    async def run() -> None:
        await sender.topic()
        await sender.send(b"1")

    asyncio.run(run())
    words = [sys.executable, "-c", textwrap.dedent(_FORKS), broker.address, str(is_started)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_on_another_loop_every_call_fails_at_once(broker: BrokerServer, sender: Sender) -> None:
    """It belongs to the one on which it was started, and can be closed there."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(sender.topic())
    consumer = Consumer(broker.address, group="g", topics=TOPIC)
    loop.run_until_complete(consumer.start())
    assert set(refusals(consumer)) == {
        "this client was made on another event loop: make one for each loop, and close it there"
    }
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
    assert "with SQL92 'a > 1', and this one with '*'" in difference(subscribed(B="*"), filtered)
