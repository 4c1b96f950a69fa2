"""Real brokers: sending, pulling and queries, and the failover time after killing the master."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario, load
from benchmarks.scenarios import failover
from benchmarks.sending import send_rate
from dledger.errors import DLedgerError
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record, encode_record

TOPIC: Final = "bench"
QUEUES: Final = 8
BODY: Final = os.urandom(1024)
MESSAGE: Final = Message(TOPIC, BODY)
PULLED: Final = 300_000
ASKED: Final = 2000
KILLS_MAX: Final = 20
GIVE_UP_SECONDS: Final = 30.0
LOG_APPENDS: Final = "the same entries appended to a bare replicated log"
DECODING: Final = "decoding the same records alone"
HEALTH_CHECK: Final = "a gRPC health check of the same broker"
LOG_FAILOVER: Final = "the bare replicated log's longest"


def bare_append_rate(context: Context, size: int) -> float:
    """Entries of the same size per second, appended to a group with the same number of nodes."""
    with LocalGroup(context.directory / f"bare-group-{size}", size=size) as group, closing(group.client()) as client:
        body = BODY + bytes(len(encode_record(MESSAGE)) - len(BODY))
        sent = 0
        started = time.perf_counter()
        deadline = started + context.settings.seconds
        while time.perf_counter() < deadline:
            for _ in range(1024):
                client.submit(body)
            sent += 1024
        client.flush()
        return sent / (time.perf_counter() - started)


def prepare(admin: Admin) -> None:
    """Create the topic used by all measurements."""
    admin.put_topic(TopicInfo(TOPIC, QUEUES, QUEUES))


def measure_group(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """A group of three, quorum flush."""
    settings = context.settings
    if "broker_send_3nodes" in names:
        with LocalBrokers(context.directory / "brokers") as brokers:
            brokers.master()
            with Admin(brokers.addresses) as admin, Producer(brokers.addresses, timeout_s=30) as producer:
                prepare(admin)
                send_rate(producer, MESSAGE, settings.warmup_seconds)
                rates = [send_rate(producer, MESSAGE, settings.seconds) for _ in range(settings.rounds)]
        bare = [bare_append_rate(context, 3)]
        yield Figure.median("broker_send_3nodes", rates, "messages/s", LOG_APPENDS, bare)
    if "broker_failover_p99" in names:
        yield from measure_failover(context)


def measure_failover(context: Context) -> Iterator[Figure]:
    """Kill the master under load; the seconds until a send is acknowledged again."""
    kills = min(context.settings.kills, KILLS_MAX)
    took: list[float] = []
    with LocalBrokers(context.directory / "brokers-failover") as brokers, Producer(brokers.addresses) as producer:
        brokers.master()
        with Admin(brokers.addresses) as admin:
            prepare(admin)
        for _ in range(kills):
            send_rate(producer, MESSAGE, 0.5)
            master = brokers.master()
            started = time.perf_counter()
            brokers.kill(master)
            while True:
                try:
                    producer.send(MESSAGE)
                    break
                except DLedgerError:
                    if time.perf_counter() > started + GIVE_UP_SECONDS:
                        raise
            took.append(time.perf_counter() - started)
            brokers.start(master)
            brokers.wait_converged()
    context.say(f"  seconds of each kill: {' '.join(f'{value:.2f}' for value in sorted(took))}")
    with LocalGroup(context.directory / "failover-bare") as group, closing(group.client()) as client:
        bare = [failover.first_append_after(group, client, group.kill, group.start) for _ in range(3)]
    yield Figure("broker_failover_p99", stats.percentile(took, 99), "s", LOG_FAILOVER, max(bare))


def measure_plain(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """One plain broker, ASYNC_FLUSH."""
    settings = context.settings
    with LocalBrokers(context.directory / "broker-plain", size=1, plain=True, flush="async") as brokers:
        brokers.master()
        with Admin(brokers.addresses) as admin, Producer(brokers.addresses, timeout_s=30) as producer:
            prepare(admin)
            send_rate(producer, MESSAGE, settings.warmup_seconds)
            if "broker_send_plain" in names:
                rates = [send_rate(producer, MESSAGE, settings.seconds) for _ in range(settings.rounds)]
                bare = [bare_append_rate(context, 1)]
                yield Figure.median("broker_send_plain", rates, "messages/s", LOG_APPENDS, bare)
            pulled = settings.sized(PULLED)
            while sum(one.max_offset for one in admin.queue_ranges(TOPIC)) < pulled:
                send_rate(producer, MESSAGE, 1.0)
            if "pull" in names:
                rates = [pull_rate(brokers, pulled) for _ in range(settings.rounds)]
                yield Figure.median("pull", rates, "messages/s", DECODING, [decode_rate()])
            if "query_p50" in names:
                yield from measure_query(brokers, admin, producer)


def pull_rate(brokers: LocalBrokers, count: int) -> float:
    """Messages per second received by one consumer that reads every body."""
    with Consumer(brokers.addresses, topics=TOPIC, assign="all", start="first") as consumer:
        taken = 0
        started = time.perf_counter()
        while taken < count:
            got = consumer.poll(4096)
            if not all(len(message.body) == len(BODY) for message in got):
                raise RuntimeError("a message came back changed")
            taken += len(got)
        return taken / (time.perf_counter() - started)


def decode_rate() -> float:
    """Messages per second when decoding one record repeatedly."""
    record = encode_record(Message(TOPIC, BODY, properties={"UNIQ_KEY": "7F000001000078C900000000000001BE"}))
    started = time.perf_counter()
    for _ in range(50_000):
        decode_record(record)
    return 50_000 / (time.perf_counter() - started)


def measure_query(brokers: LocalBrokers, admin: Admin, producer: Producer) -> Iterator[Figure]:
    """Messages queried by id, one at a time, compared with the minimum cost of a call."""
    sent = producer.send(Message(TOPIC, BODY, keys="asked-for"))
    took: list[float] = []
    bare: list[float] = []
    with grpc.insecure_channel(next(iter(brokers.nodes.values())).grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for _ in range(ASKED):
            started = time.perf_counter()
            admin.message_by_id(sent.offset_id)
            between = time.perf_counter()
            health.Check(health_pb2.HealthCheckRequest())
            bare.append(time.perf_counter() - between)
            took.append(between - started)
    yield Figure("query_p50", stats.median(took) * 1000, "ms", HEALTH_CHECK, stats.median(bare) * 1000)


GROUP: Final = Scenario(
    "three brokers, quorum flush", ("broker_send_3nodes", "broker_failover_p99"), measure_group, load(3)
)
PLAIN: Final = Scenario("a plain broker", ("broker_send_plain", "pull", "query_p50"), measure_plain, load(1))
