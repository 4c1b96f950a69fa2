"""How a broker grows: with its queues, and with the groups that read from it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.curves import Curve, line
from benchmarks.figures import Figure
from benchmarks.process_facts import resident_of
from benchmarks.processes import ChildError
from benchmarks.registry import Scenario, load
from benchmarks.scenarios.brokers import MESSAGE, QUEUES, TOPIC, prepare
from benchmarks.sending import send_count, send_rate
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message

QUEUE_COUNT: Final = "growth_queues"
GROUP_COUNT: Final = "growth_consumer_groups"
QUEUE_COUNTS: Final = (8, 80, 800, 8_000, 80_000)
TOPIC_QUEUES: Final = 800
"""Queues of each of the topics together with which there are so many."""
GROUP_COUNTS: Final = (1, 10, 100)
READ: Final = 20_000
"""Messages that each group reads."""


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """One plain broker, ASYNC_FLUSH."""
    if QUEUE_COUNT in names:
        yield _queues(context)
    if GROUP_COUNT in names:
        yield _groups(context)


def _queues(context: Context) -> Figure:
    settings = context.settings
    facts: dict[str, list[tuple[float, float]]] = {one: [] for one in ("sends", "start", "stop", "memory")}
    counts = QUEUE_COUNTS if settings.share == 1 else QUEUE_COUNTS[:3]
    limits = {"queues_max": str(2 * QUEUE_COUNTS[-1])}
    with ExitStack() as stack:
        brokers = stack.enter_context(
            LocalBrokers(context.directory / "queues", size=1, plain=True, flush="async", settings=limits)
        )
        name = brokers.master()
        made = 0
        for count in counts:
            with Admin(brokers.addresses, timeout_s=60) as admin:
                topics = _topics(count)
                for topic, queues in topics[made:]:
                    admin.put_topic(TopicInfo(topic, queues, queues))
                made = len(topics)
            with Producer(brokers.addresses, timeout_s=60) as producer:
                for topic, queues in topics:  # each queue has a message
                    send_count(producer, Message(topic, b"first"), queues)
                send_rate(producer, Message(topics[-1][0], MESSAGE.body), settings.warmup_seconds)
                rate = send_rate(producer, Message(topics[-1][0], MESSAGE.body), settings.seconds)
            memory = resident_of(brokers.pid(name), context.directory).own / 1e6
            began = time.perf_counter()
            brokers.stop(name)
            stopped = time.perf_counter()
            brokers.start(name)
            started = time.perf_counter()
            for part, value in zip(facts, (rate, started - stopped, stopped - began, memory), strict=True):
                facts[part].append((count, value))
            context.say(
                f"  {count:,} queues: {rate:,.0f} messages/s, started in {started - stopped:.2f} s, stopped in "
                f"{stopped - began:.2f} s, {memory:.0f} MB"
            )
    context.curves += [
        Curve(QUEUE_COUNT, "Sends by the number of queues", "queues", "messages/s", (line("sends", facts["sends"]),)),
        Curve(
            f"{QUEUE_COUNT}_restart",
            "Start and clean stop of a broker",
            "queues",
            "s",
            (line("start", facts["start"]), line("stop", facts["stop"])),
        ),
        Curve(f"{QUEUE_COUNT}_memory", "Memory of a broker", "queues", "MB", (line("memory", facts["memory"]),)),
    ]
    return Figure(QUEUE_COUNT, facts["sends"][-1][1], "messages/s", f"{QUEUES} queues", facts["sends"][0][1])


def _topics(count: int) -> list[tuple[str, int]]:
    """Topics with so many queues together; the topics of a smaller count are among those of a larger one."""
    found: list[tuple[str, int]] = []
    sizes = itertools.chain((8, 72, TOPIC_QUEUES - 80), itertools.repeat(TOPIC_QUEUES))
    while (left := count - sum(queues for _, queues in found)) > 0:
        found.append((f"queues-{len(found)}", min(left, next(sizes))))
    return found


def _groups(context: Context) -> Figure:
    settings = context.settings
    counts = GROUP_COUNTS if settings.share == 1 else GROUP_COUNTS[:2]
    share = settings.sized(READ)
    rates: list[tuple[float, float]] = []
    with LocalBrokers(context.directory / "groups", size=1, plain=True, flush="async") as brokers:
        brokers.master()
        with Admin(brokers.addresses) as admin, Producer(brokers.addresses, timeout_s=30) as producer:
            prepare(admin)
            send_count(producer, MESSAGE, share)
        for count in counts:
            rates.append((count, stats.median([_read(brokers, count, share, turn) for turn in range(settings.rounds)])))
            context.say(f"  {count} groups: {rates[-1][1]:,.0f} messages/s in all")
    context.curves.append(
        Curve(
            GROUP_COUNT,
            "Groups that read the same messages in turn and commit",
            "groups",
            "messages/s, all groups",
            (line("reads", rates),),
        )
    )
    return Figure(GROUP_COUNT, rates[-1][1], "messages/s", "one group", rates[0][1])


def _read(brokers: LocalBrokers, count: int, share: int, turn: int) -> float:
    """Messages per second that so many groups read together."""
    with ExitStack() as stack:
        consumers = [
            stack.enter_context(
                Consumer(brokers.addresses, group=f"group-{count}-{turn}-{number}", topics=TOPIC, start="first")
            )
            for number in range(count)
        ]
        left = dict.fromkeys(consumers, share)
        began = time.perf_counter()
        while left:
            for consumer in list(left):
                left[consumer] -= len(consumer.poll(4096, timeout_s=0.0))
                if left[consumer] <= 0:
                    consumer.commit()
                    del left[consumer]
            if time.perf_counter() - began > 600:
                raise ChildError(f"{len(left)} of {count} groups have not read everything after 600 s")
        return count * share / (time.perf_counter() - began)


SCENARIO: Final = Scenario("how a broker grows", (QUEUE_COUNT, GROUP_COUNT), measure, load(2))
