"""Many leases at once whose consumer is killed, and one message that nobody can consume among a hundred thousand."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from rocketstore.broker.popping.copies import AT_ONCE as COPIES_AT_ONCE
from rocketstore.client import Message
from rocketstore.client.aio import Producer
from rocketstore.client.aio.errors import ClientError, NotFoundError
from rocketstore.client.aio.received import PoppedMessage
from rocketstore.client.aio.simple_consumer import SimpleConsumer
from tests.integration.broker_harness import BrokerGroup
from tests.support.waiting import wait_until

LEASES: Final = 8000
LEASE_S: Final = 60.0
AGAIN_S_MAX: Final = 5.0
"""After its lease has ended, a message is redelivered within this time, beside that of sends."""
PROBE: Final = "probe"
OTHERS: Final = 100_000
ATTEMPTS: Final = 17
"""RocketMQ's default: 16 retries after the first delivery."""
PAUSE_S_MAX: Final = 5.0
CONSUMERS: Final = 8
HOLDER: Final = """
import asyncio, sys
from rocketstore.client.aio.simple_consumer import SimpleConsumer

async def hold(name, count, lease_s, *addresses):
    consumer = SimpleConsumer(
        addresses, group=name, topics=name, start="first", invisible_s=float(lease_s), timeout_s=20.0
    )
    left = int(count)
    while left > 0:
        for one in await consumer.receive(32, 5.0):
            print(one.body.decode(), one.point.pop_time + one.point.invisible_time, flush=True)
            left -= 1
    await asyncio.sleep(3600)

asyncio.run(hold(*sys.argv[1:]))
"""


@pytest.fixture
def brokers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BrokerGroup]:
    """With a topic of the test's name."""
    files = {"mappedFileSizeCommitLog": str(64 << 20), "mappedFileSizeConsumeQueue": "600000"}
    with BrokerGroup(tmp_path / "brokers", settings=files) as made:
        made.master()
        made.create_topic(name_of(request))
        yield made


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of this test's topic and group."""
    return name_of(request)


def name_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).removeprefix("test_")[:40]


def put(brokers: BrokerGroup, topic: str, bodies: Sequence[bytes]) -> None:
    with brokers.producer(60.0) as producer:
        sent = list(producer.send_many([Message(topic, body) for body in bodies]))
    assert len(sent) == len(bodies)


def consumers_of(brokers: BrokerGroup, name: str, *, invisible_s: float) -> list[SimpleConsumer]:
    return [
        SimpleConsumer(
            brokers.addresses, group=name, topics=name, start="first", invisible_s=invisible_s, timeout_s=30.0
        )
        for _ in range(CONSUMERS)
    ]


def wait_committed(brokers: BrokerGroup, name: str, count: int) -> None:
    """The group's offset is at the end of every queue of the topic, and of what came again."""

    def is_at_the_end() -> bool:
        with brokers.admin(15.0) as admin:
            rows = admin.progress(name)
        stored = sum(one.max_offset for one in rows if one.queue.topic == name)
        return stored == count and all(one.committed == one.max_offset for one in rows)

    wait_until(is_at_the_end, "everything is committed", 30)


def held(brokers: BrokerGroup, name: str) -> dict[bytes, int]:
    """A consumer receives everything and is killed: when each of its leases ends, in ms since 1970."""
    words = [sys.executable, "-c", HOLDER, name, str(LEASES), str(LEASE_S), *brokers.addresses]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    ends: dict[bytes, int] = {}
    try:
        assert process.stdout is not None
        while len(ends) < LEASES:
            line = process.stdout.readline()
            assert line, f"the consumer ended with {len(ends)} messages"
            body, end_ms = line.split()
            ends[body.encode()] = int(end_ms)
    finally:
        process.kill()
        process.communicate()
    return ends


@contextmanager
def refused_only_if_repeated() -> Iterator[None]:
    """P5: within a lease, a handle is refused only if it was used: by an attempt of the same call without an answer.

    That it did what it should shows in the end: nothing comes again, and everything is committed.
    """
    try:
        yield
    except NotFoundError as error:
        if error.outcome != "unknown":
            raise


async def redelivered(
    brokers: BrokerGroup, name: str, count: int, until_s: float
) -> tuple[dict[bytes, list[int]], float]:
    """So many messages, acknowledged; when each came, in ms since 1970; and how long (s) one send took meanwhile."""
    found: dict[bytes, list[int]] = defaultdict(list)
    took_s: list[float] = []

    async def send_one_after_the_other(producer: Producer) -> None:
        while len(found) < count and time.time() < until_s:
            began = time.monotonic()
            await producer.send(Message(PROBE, b""))
            took_s.append(time.monotonic() - began)

    async def consume(consumer: SimpleConsumer) -> None:
        while len(found) < count and time.time() < until_s:
            got = await consumer.receive(32, 1.0)
            now_ms = int(time.time() * 1000)
            for one in got:
                assert one.attempts == 1
                found[one.body].append(now_ms)
            if got:
                with refused_only_if_repeated():
                    await consumer.ack(*got)

    async with AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(one) for one in consumers_of(brokers, name, invisible_s=300)]
        producer = await stack.enter_async_context(Producer(brokers.addresses, timeout_s=30.0))
        await asyncio.gather(send_one_after_the_other(producer), *(consume(one) for one in consumers))
        assert not await consumers[0].receive(1, 2.0), "a message came a third time"
    return found, statistics.median(took_s)


def test_the_leases_of_a_killed_consumer_all_come_again_once(brokers: BrokerGroup, name: str) -> None:
    """P4: none before its time, all within seconds after it, and the window moves to the end.

    They come again in rounds of ``COPIES_AT_ONCE``, each of which is stored, and then settled: a busy machine, on which
    a send takes half a second, may take as long for each.
    """
    brokers.create_topic(PROBE)
    put(brokers, name, [b"%d" % number for number in range(LEASES)])
    ends = held(brokers, name)
    assert time.time() * 1000 < min(ends.values()), "this machine is too slow for this test"

    came, send_s = asyncio.run(redelivered(brokers, name, LEASES, max(ends.values()) / 1000 + 120))

    assert came.keys() == ends.keys()
    assert {len(times) for times in came.values()} == {1}
    late_ms = {body: times[0] - ends[body] for body, times in came.items()}
    assert min(late_ms.values()) >= 0
    assert max(late_ms.values()) <= (AGAIN_S_MAX + 2 * LEASES / COPIES_AT_ONCE * send_s) * 1000
    wait_committed(brokers, name, LEASES)


async def consumed(brokers: BrokerGroup, name: str) -> tuple[Counter[bytes], list[int], float]:
    """How often each came, the attempts of the poison, and the longest time (s) in which nothing came."""
    found: Counter[bytes] = Counter()
    attempts: list[int] = []
    loop = asyncio.get_running_loop()
    last, longest = loop.time(), 0.0

    async def handle(consumer: SimpleConsumer, messages: Sequence[PoppedMessage]) -> None:
        nonlocal last, longest
        longest, last = max(longest, loop.time() - last), loop.time()
        good = [one for one in messages if one.body != b"poison"]
        found.update(one.body for one in messages)
        if good:
            with refused_only_if_repeated():
                await consumer.ack(*good)
        for one in messages:
            if one.body == b"poison":
                attempts.append(one.attempts)
                with refused_only_if_repeated():
                    await consumer.change_invisible(one, 0)

    async def consume(consumer: SimpleConsumer) -> None:
        idle = 0
        while idle < 3 and (len(found) <= OTHERS or len(attempts) < ATTEMPTS or not idle):
            try:
                got = await consumer.receive(32, 1.0)
            except ClientError:
                got = []
            idle = 0 if got else idle + 1
            if got:
                await handle(consumer, got)

    async with AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(one) for one in consumers_of(brokers, name, invisible_s=60)]
        async with asyncio.timeout(900):
            await asyncio.gather(*(consume(one) for one in consumers))
    return found, attempts, longest


def test_a_message_that_nobody_can_consume_becomes_a_dead_letter_and_disturbs_no_other(
    brokers: BrokerGroup, name: str
) -> None:
    """P4: it is tried as often as the group says; all others come once, without a pause."""
    bodies = [b"%d" % number for number in range(OTHERS)]
    put(brokers, name, [*bodies[:1000], b"poison", *bodies[1000:]])

    found, attempts, longest_s = asyncio.run(consumed(brokers, name))

    assert found.keys() == {*bodies, b"poison"}
    assert {count for body, count in found.items() if body != b"poison"} == {1}
    assert attempts == list(range(ATTEMPTS))
    assert longest_s < PAUSE_S_MAX
    wait_committed(brokers, name, OTHERS + 1)
    with brokers.admin(15.0) as admin:
        assert sum(one.max_offset for one in admin.queue_ranges(f"%DLQ%{name}")) == 1
