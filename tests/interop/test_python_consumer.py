"""Our ``Consumer`` at Apache RocketMQ's own brokers, 4.9 and 5.5: ``make interop``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from rocketstore.client.aio.admin import Admin
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.errors import ClientError
from rocketstore.client.aio.producer import Producer
from rocketstore.client.aio.received import ConsumedMessage
from rocketstore.message.message import Message
from tests.interop import java, rocketmq, rocketmq5
from tests.interop.rocketmq import broker_port
from tests.support.on_loop import on_loop

pytestmark = pytest.mark.interop

TOPIC: Final = "Python"
START_S: Final = 120
DEADLINE_S: Final = 90


@contextmanager
def apache(release: int, directory: Path, **more: str) -> Iterator[str]:
    """A broker of a release with some settings, and its name server, whose address it is."""
    java.build()
    module = rocketmq if release == 4 else rocketmq5
    with module.name_server(directory / "namesrv") as address:
        settings = {"listenPort": broker_port(), "namesrvAddr": address, "brokerName": "theirs"}
        settings |= {"messageDelayLevel": "1s 1s 1s 1s 1s 1s 1s"}
        with module.broker(directory / "broker", settings | more):
            yield address


@pytest.fixture(params=[4, 5])
def name_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with apache(request.param, tmp_path) as started:
        yield started


async def _ready(name_server: str) -> None:
    """Return once the broker has registered."""
    async with asyncio.timeout(START_S):
        while True:
            cluster = Cluster(None, name_server, timeout_s=5)
            try:
                await cluster.brokers(cluster.deadline())
            except ClientError:
                await asyncio.sleep(0.5)
            else:
                return
            finally:
                await cluster.close()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.05)


async def _send(name_server: str, count: int, *, queue: int | None = None) -> None:
    async with Producer(name_servers=name_server, timeout_s=DEADLINE_S) as producer:
        for number in range(count):
            await producer.send(Message(TOPIC, b"%d" % number), queue=queue)


@on_loop
async def test_a_group_shares_retries_and_goes_on(name_server: str) -> None:
    """Two members share the queues; a failed message comes again; a later member goes on at the committed offsets."""
    await _ready(name_server)
    await _send(name_server, 20)
    got: Counter[bytes] = Counter()
    failed: set[bytes] = set()

    async def handle(message: ConsumedMessage) -> None:
        assert message.topic == TOPIC
        if not failed:
            failed.add(message.body)
            raise ValueError("the first one fails once")
        got[message.body] += 1

    members = [Consumer(name_servers=name_server, group="py", topics=TOPIC, start="first") for _ in range(2)]
    runs = [asyncio.ensure_future(one.run(handle)) for one in members]
    await _until(lambda: len(got) == 20)
    await _until(lambda: all(any(queue.topic == TOPIC for queue in one.queues) for one in members))
    for one in members:
        await one.close()
    await asyncio.gather(*runs)
    assert failed <= set(got)
    await _send(name_server, 3)
    async with Consumer(name_servers=name_server, group="py", topics=TOPIC) as later:
        assert len(await _gather(later, 3)) == 3


@on_loop
async def test_queues_are_read_in_order_alone_and_from_any_place(name_server: str) -> None:
    """``ordered`` takes the broker's locks; with ``assign`` and ``seek`` there is no group at all."""
    await _ready(name_server)
    async with Admin(name_servers=name_server, timeout_s=DEADLINE_S) as admin:
        await admin.put_topic(TopicInfo(TOPIC, read_queues=2, write_queues=2))
    await _send(name_server, 5, queue=1)
    expected = [b"%d" % number for number in range(5)]
    async with Consumer(name_servers=name_server, group="in-order", topics=TOPIC, start="first", ordered=True) as one:
        assert [message.body for message in await _gather(one, 5)] == expected
    async with Consumer(name_servers=name_server, topics=TOPIC, assign=[1], start="first") as reader:
        assert [message.body for message in await _gather(reader, 5)] == expected
        (queue,) = reader.queues
        await reader.seek(queue, 3)
        assert [message.body for message in await _gather(reader, 2)] == expected[3:]


async def _gather(consumer: Consumer, count: int) -> list[ConsumedMessage]:
    found: list[ConsumedMessage] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            found += await consumer.poll()
    return found
