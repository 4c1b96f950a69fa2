"""The cost of metrics: a scrape of a busy broker, and the processor time that they add to appends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Final
from urllib.request import urlopen

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.process_facts import processor_s
from benchmarks.registry import Scenario
from benchmarks.targets import UNMEASURED
from dledger.client import DLedgerClient
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message

TOPICS: Final = 300
GROUPS: Final = 100
SCRAPES: Final = 100
PROBE: Final = "/healthz of the same port"
PIPELINED: Final = 60_000
SINGLES: Final = 1500
BODY: Final = os.urandom(1024)


def measure_scrape(context: Context, _names: frozenset[str]) -> Iterator[Figure]:
    """Three brokers with more topics and groups than have their own series; the slowest broker counts."""
    brokers = LocalBrokers(context.directory / "brokers-metrics")
    brokers.serve_metrics()
    with brokers:
        brokers.master()
        fill(brokers)
        took = {node: scrape_ms(port, "/metrics") for node, port in brokers.metrics_ports.items()}
        probe = scrape_ms(next(iter(brokers.metrics_ports.values())), "/healthz")
    for node, times in took.items():
        middle, most = stats.median(times), stats.percentile(times, 99)
        context.say(f"  scrape of {node}: median {middle:.1f} ms, 99th percentile {most:.1f} ms")
    slowest = max(stats.median(times) for times in took.values())
    yield Figure("metrics_scrape", slowest, "ms", PROBE, stats.median(probe))


def fill(brokers: LocalBrokers) -> None:
    """Topics with messages, and groups that have consumed from them."""
    with Admin(brokers.addresses, timeout_s=30) as admin:
        for number in range(TOPICS):
            admin.put_topic(TopicInfo(f"topic-{number}"))
    with Producer(brokers.addresses, timeout_s=30) as producer:
        for number in range(TOPICS):
            producer.send(Message(f"topic-{number}", b"message"))
    for number in range(GROUPS):
        group, topic = f"group-{number}", f"topic-{number}"
        with Consumer(brokers.addresses, group=group, topics=topic, start="first") as consumer:
            consumer.poll()
            consumer.commit()


def scrape_ms(port: int, path: str) -> list[float]:
    """The durations of many requests."""
    took: list[float] = []
    for _ in range(SCRAPES):
        began_s = time.perf_counter()
        with urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            answer.read()
        took.append((time.perf_counter() - began_s) * 1000)
    return took


def measure_overhead(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Two groups side by side, one with metrics; they alternate, so that the machine's load affects both."""
    measured, plain = (LocalGroup(context.directory / name, name=name) for name in ("measured", "plain"))
    measured.serve_metrics()
    with ExitStack() as stack:
        groups = [stack.enter_context(group) for group in (measured, plain)]
        clients = [stack.enter_context(closing(group.client(timeout_s=30))) for group in groups]
        for name, count, append in (
            ("metrics_overhead_pipelined", PIPELINED, append_pipelined),
            ("metrics_overhead_single", SINGLES, append_singly),
        ):
            if name not in names:
                continue
            spent: list[list[float]] = [[], []]
            sides = list(zip(spent, groups, clients, strict=True))
            for number in range(2 * context.settings.rounds + 1):  # the first is a warm-up
                for costs, group, client in sides if number % 2 else reversed(sides):
                    before = group_processor_s(group)
                    append(client, count)
                    costs.append((group_processor_s(group) - before) / count * 1e6)
            with_metrics, without = (costs[1:] for costs in spent)
            yield Figure.median(name, with_metrics, "µs/entry", UNMEASURED, without)


def append_pipelined(client: DLedgerClient, count: int) -> None:
    """Many in flight: a batch holds many entries."""
    for _ in range(count):
        client.submit(BODY)
    client.flush()


def append_singly(client: DLedgerClient, count: int) -> None:
    """One at a time: every entry is a batch, the worst case for costs per batch."""
    for _ in range(count):
        client.append(BODY)


def group_processor_s(group: LocalGroup) -> float:
    """Processor time that the group's processes have used so far."""
    return sum(processor_s(group.pid(node)) for node in group.nodes)


SCRAPE: Final = Scenario("Metrics: a scrape of brokers with many topics", ("metrics_scrape",), measure_scrape)
OVERHEAD: Final = Scenario(
    "Metrics: processor time of all nodes per append of 1 KiB",
    ("metrics_overhead_pipelined", "metrics_overhead_single"),
    measure_overhead,
)
