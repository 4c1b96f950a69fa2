"""Messages that are acknowledged singly, over the failures of masters and consumers (P3, P5)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Final

import pytest

from rocketstore.client import Message
from rocketstore.client.aio.errors import ClientError, NotFoundError
from rocketstore.client.aio.received import PoppedMessage
from rocketstore.client.aio.simple_consumer import SimpleConsumer
from rocketstore.pop.tables import AHEAD_MS
from tests.integration.broker_harness import BrokerGroup
from tests.support.on_loop import on_loop

RESUMED_S_MAX: Final = 5.0
"""How long a consumer may get nothing after a master was killed."""
STALLED_S_MAX: Final = 30.0
"""How long nothing new may be acknowledged after masters were killed: a lease and a failover are less."""
LEASES: Final = 1000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerGroup]:
    with BrokerGroup(tmp_path_factory.mktemp("brokers")) as brokers:
        yield brokers


@pytest.fixture
def brokers(running: BrokerGroup, request: pytest.FixtureRequest) -> BrokerGroup:
    """All three run again, and there is a topic of the test's name."""
    for node in running.nodes:
        if not running.is_running(node):
            running.start(node)
    running.master()
    running.create_topic(name_of(request))
    return running


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of this test's topic and group."""
    return name_of(request)


def name_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).removeprefix("test_")[:50]


def put(brokers: BrokerGroup, topic: str, count: int) -> set[bytes]:
    """Messages ``0`` and so on."""
    sent = [b"%d" % number for number in range(count)]
    with brokers.producer(20.0) as producer:
        for one in producer.send_many([Message(topic, body) for body in sent]):
            assert one.offset_id
    return set(sent)


def consumer(brokers: BrokerGroup, name: str, invisible_s: float) -> SimpleConsumer:
    return SimpleConsumer(
        brokers.addresses, group=name, topics=name, start="first", invisible_s=invisible_s, timeout_s=20.0
    )


async def take(consumer: SimpleConsumer, count: int, until: float, *, ack: bool = False) -> list[PoppedMessage]:
    """So many messages, or those that come until then, in the loop's time."""
    found: list[PoppedMessage] = []
    while len(found) < count and asyncio.get_running_loop().time() < until:
        try:
            some = await consumer.receive(32, 1.0)
        except ClientError:
            await asyncio.sleep(0.05)
            continue
        found += some
        if ack and some:  # at once, so that none comes again however long all of them take
            await consumer.ack(*some)
    return found


async def is_acknowledged(consumer: SimpleConsumer, message: PoppedMessage) -> bool:
    """By this call; if not, it was before, perhaps by a try whose answer was lost, or it was given out again."""
    while True:
        try:
            await consumer.ack(message)
        except NotFoundError:
            return False
        except ClientError:
            await asyncio.sleep(0.05)
        else:
            return True


def bodies(messages: list[PoppedMessage]) -> list[bytes]:
    return [one.body for one in messages]


@on_loop
async def leader_killed(brokers: BrokerGroup, name: str) -> None:
    loop = asyncio.get_running_loop()
    sent = await asyncio.to_thread(put, brokers, name, 2 * LEASES)
    lease_s = 30.0
    async with consumer(brokers, name, lease_s) as first, consumer(brokers, name, lease_s) as second:
        began = loop.time()
        over = began + lease_s  # perhaps, for the first of them
        held = await take(first, LEASES, began + lease_s / 2)
        assert len(held) >= LEASES
        await first.ack(*held[:100])
        await asyncio.to_thread(brokers.kill, await asyncio.to_thread(brokers.master))
        killed = loop.time()
        got = await take(second, 1, killed + 30)
        assert loop.time() - killed < RESUMED_S_MAX
        got += await take(second, len(sent) - len(held) - len(got), over - 2)  # then some would rightly come again
        assert len(held) + len(got) >= len(sent), "messages are lost, or this machine is too slow for this test"
        assert not set(bodies(got)) & set(bodies(held)), "visible twice within the invisible time"
        await first.ack(*held[100:500])
        with pytest.raises(NotFoundError):
            await first.ack(held[0])
        await second.ack(*got)
        assert loop.time() < over, "this machine is too slow for this test"
        again = await take(second, len(held) - 500, loop.time() + lease_s + AHEAD_MS / 1000 + 10, ack=True)
        assert sorted(bodies(again)) == sorted(bodies(held[500:]))
        assert {one.attempts for one in again} == {1}
        with pytest.raises(NotFoundError):
            await first.ack(held[600])
        assert not await take(second, 1, loop.time() + 2)


def test_a_killed_master_loses_and_repeats_nothing(brokers: BrokerGroup, name: str) -> None:
    """P3, P5: another one goes on within seconds; what is out stays with its consumer, who can acknowledge it there.

    What was acknowledged never comes again, and what was not does, once its time is over.
    """
    leader_killed(brokers, name)


@on_loop
async def killed_again_and_again(brokers: BrokerGroup, name: str, kills: int) -> None:
    loop = asyncio.get_running_loop()
    sent = await asyncio.to_thread(put, brokers, name, 2000)
    done: dict[bytes, int] = {}
    late: set[bytes] = set()  # acknowledged at a master that failed before it said so, or given out again

    async def consume(consumer: SimpleConsumer) -> None:
        while len(done.keys() | late) < len(sent):
            try:
                found = await consumer.receive(8, 1.0)
            except ClientError:
                await asyncio.sleep(0.05)
                continue
            for one in found:
                if await is_acknowledged(consumer, one):
                    done[one.body] = done.get(one.body, 0) + 1
                else:
                    late.add(one.body)

    async with AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(consumer(brokers, name, 3.0)) for _ in range(12)]
        tasks = [asyncio.create_task(consume(one)) for one in consumers]
        for _ in range(kills):
            before = len(done)
            if before > len(sent) - 100:
                break
            master = await asyncio.to_thread(brokers.master)
            await asyncio.to_thread(brokers.kill, master)
            killed = loop.time()
            while len(done) == before:
                assert loop.time() < killed + 2 * RESUMED_S_MAX
                await asyncio.sleep(0.01)
            await asyncio.to_thread(brokers.start, master)
        while not all(one.done() for one in tasks):
            before = len(done.keys() | late)
            await asyncio.wait(tasks, timeout=STALLED_S_MAX)
            missing = sent - done.keys() - late
            assert len(missing) < len(sent) - before or not missing, f"these do not come: {sorted(missing)}"
        await asyncio.gather(*tasks)
    assert done.keys() | late == sent
    assert max(done.values()) == 1, "a message that was acknowledged came again"


@pytest.mark.slow
def test_kills_in_a_row_are_survived(brokers: BrokerGroup, name: str) -> None:
    """Twelve consumers of a topic with fewer queues: each message is acknowledged once, whoever is master."""
    killed_again_and_again(brokers, name, 4)
