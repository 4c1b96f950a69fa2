"""Our ``Consumer`` at Apache RocketMQ's own brokers, 4.9 and 5.5, beside its own consumers: ``make interop``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from rocketstore.client.aio.cluster import Cluster
from rocketstore.client.aio.consumed_message import ConsumedMessage
from rocketstore.client.aio.consumer import Consumer
from rocketstore.client.aio.errors import ClientError
from tests.interop import java, rocketmq, rocketmq5
from tests.interop.rocketmq import broker_port
from tests.support.on_loop import on_loop

pytestmark = pytest.mark.interop

TOPIC: Final = "Python"
START_S: Final = 120
DEADLINE_S: Final = 90


class Apache(NamedTuple):
    """A name server and a broker of a release, and the release's own producer."""

    name_server: str
    directory: Path
    run: Callable[..., list[str]]

    async def produce(self, topic: str, count: int) -> None:
        sent = await asyncio.to_thread(self.run, self.directory / "c", "produce", self.name_server, topic, str(count))
        assert [one.partition(" ")[0] for one in sent] == ["SEND_OK"] * count


@contextmanager
def apache(release: int, directory: Path) -> Iterator[Apache]:
    java.build()
    module = rocketmq if release == 4 else rocketmq5
    with module.name_server(directory / "namesrv") as address:
        settings = {"listenPort": broker_port(), "namesrvAddr": address, "brokerName": "theirs"}
        settings |= {"messageDelayLevel": "1s 1s 1s 1s 1s 1s 1s"}
        with module.broker(directory / "broker", settings):
            yield Apache(address, directory, rocketmq.client if release == 4 else rocketmq5.client)


@pytest.fixture(params=[4, 5])
def brokers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Apache]:
    with apache(request.param, tmp_path) as started:
        yield started


async def _ready(brokers: Apache) -> None:
    """Return once the broker has registered."""
    async with asyncio.timeout(START_S):
        while True:
            cluster = Cluster(None, brokers.name_server, timeout_s=5)
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


@on_loop
async def test_a_group_shares_retries_and_goes_on(brokers: Apache) -> None:
    """Two members share the queues; a failed message comes again; a later member goes on at the committed offsets."""
    await _ready(brokers)
    await brokers.produce(TOPIC, 20)
    got: Counter[bytes] = Counter()
    failed: set[bytes] = set()

    async def handle(message: ConsumedMessage) -> None:
        assert message.topic == TOPIC
        if not failed:
            failed.add(message.body)
            raise ValueError("the first one fails once")
        got[message.body] += 1

    members = [Consumer(name_servers=brokers.name_server, group="py", topics=TOPIC, start="first") for _ in range(2)]
    runs = [asyncio.ensure_future(one.run(handle)) for one in members]
    await _until(lambda: len(got) == 20)
    await _until(lambda: all(any(q.topic == TOPIC for q in one.queues) for one in members))
    for one in members:
        await one.close()
    await asyncio.gather(*runs)
    assert failed <= set(got)
    got.clear()
    await brokers.produce(TOPIC, 3)
    async with Consumer(name_servers=brokers.name_server, group="py", topics=TOPIC) as later:
        found: list[ConsumedMessage] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(found) < 3:
                found += await later.poll()
        assert len(found) == 3
