"""Messages that are acknowledged singly: eight consumers of a group of three, and how long a waiting one waits."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin, Consumer, Message, Producer, TopicInfo
from rocketstore.client.aio import Producer as AioProducer
from rocketstore.client.aio import SimpleConsumer

TOPIC: Final = "bench"
BODY: Final = os.urandom(256)
QUEUES: Final = 8
CONSUMERS: Final = 8
PROCESSES: Final = 2
POPPED: Final = 100_000
WAITED: Final = 500
PULLING: Final = "the same messages pulled by one consumer that commits offsets"
SENDING: Final = "a send alone, which each of them includes"


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """A group of three, quorum flush."""
    with LocalBrokers(context.directory / "brokers-pop") as brokers:
        brokers.master()
        addresses = brokers.addresses
        with Admin(addresses) as admin, Producer(addresses, timeout_s=30) as producer:
            admin.put_topic(TopicInfo(TOPIC, QUEUES, QUEUES))
            if "pop_8consumers" in names:
                for _ in range(POPPED):
                    producer.submit(Message(TOPIC, BODY))
                producer.flush()
                popped = [pop_rate(addresses, f"poppers-{number}") for number in range(context.settings.rounds)]
                pulled = pull_rate(addresses)
                yield Figure("pop_8consumers", stats.median(popped), "messages/s", PULLING, pulled)
        if "pop_latency_p50" in names:
            took, sent = asyncio.run(latencies(addresses))
            context.say(f"  p99 of a waiting receive: {stats.percentile(took, 99) * 1000:.1f} ms")
            yield Figure("pop_latency_p50", stats.median(took) * 1000, "ms", SENDING, stats.median(sent) * 1000)


def pop_rate(addresses: Sequence[str], group: str) -> float:
    """Messages per second that eight consumers in two processes receive and acknowledge."""
    share = POPPED * 9 // 10 // PROCESSES
    words = [group, str(CONSUMERS // PROCESSES), str(share), ",".join(addresses)]
    command = [sys.executable, "-m", "benchmarks.children.poppers", *words]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)
    ]
    try:
        answers = [json.loads(one.communicate()[0]) for one in children]
    finally:
        for one in children:
            one.kill()
            one.wait()
    took = max(one["ended"] for one in answers) - min(one["began"] for one in answers)
    return float(sum(one["acknowledged"] for one in answers) / took)


def pull_rate(addresses: Sequence[str]) -> float:
    """The same by one consumer with offsets."""
    with Consumer(addresses, group="pullers", topics=TOPIC, start="first") as consumer:
        taken, started = 0, time.perf_counter()
        while taken < POPPED * 9 // 10:
            taken += len(consumer.poll(4096))
        return taken / (time.perf_counter() - started)


async def latencies(addresses: Sequence[str]) -> tuple[list[float], list[float]]:
    """Seconds from a send's begin until a consumer that waits has the message; and until the send is answered."""
    took: list[float] = []
    sent: list[float] = []
    async with (
        AioProducer(addresses) as producer,
        SimpleConsumer(addresses, group="waiting", topics=TOPIC) as consumer,
    ):
        await consumer.receive(32, 0.1)
        for _ in range(WAITED):
            waiting = asyncio.create_task(consumer.receive(1, 30.0))
            await asyncio.sleep(0.02)  # it waits at the broker
            started = time.perf_counter()
            await producer.send(Message(TOPIC, BODY))
            sent.append(time.perf_counter() - started)
            messages = await waiting
            took.append(time.perf_counter() - started)
            await consumer.ack(*messages)
    return took, sent


POP: Final = Scenario("messages acknowledged singly", ("pop_8consumers", "pop_latency_p50"), measure)
