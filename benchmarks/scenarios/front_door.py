"""The cost of the front door: the same gRPC load at ``listenPort``, which relays it, and at ``grpcPort``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import grpc

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario
from benchmarks.scenarios.brokers import BODY, QUEUES, TOPIC, prepare
from benchmarks.targets import DIRECT
from cluster.local.brokers import LocalBrokers
from cluster.local.group import HOST, free_ports
from rocketstore.broker_grpc.codec import SERVICE
from rocketstore.client.blocking import Admin
from rocketstore.pb import broker_pb2 as pb

NAMES: Final = ("front_door_unary_p50", "front_door_send_stream")
BATCH: Final = 64
WINDOW: Final = 32
"""Requests of a stream that are not answered yet."""
TIMEOUT_SECONDS: Final = 60.0


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Both ports belong to the same plain broker, and take turns."""
    settings = context.settings
    (grpc_port,) = free_ports(1)
    with ExitStack() as stack:
        brokers = stack.enter_context(
            LocalBrokers(
                context.directory / "front-door",
                size=1,
                plain=True,
                flush="async",
                settings={"grpcPort": str(grpc_port), "mappedFileSizeCommitLog": "256m"},
            )
        )
        node = brokers.nodes[brokers.master()]
        with Admin(brokers.addresses) as admin:
            prepare(admin)
        relayed, direct = (
            stack.enter_context(grpc.insecure_channel(f"{HOST}:{port}", [("grpc.use_local_subchannel_pool", 1)]))
            for port in (node.client_port, grpc_port)
        )
        for name, unit, one_round in (
            (NAMES[0], "ms", unary_p50_ms),
            (NAMES[1], "messages/s", stream_rate),
        ):
            if name not in names:
                continue
            for channel in (relayed, direct):
                one_round(channel, settings.warmup_seconds)
            rounds = [
                (one_round(relayed, settings.seconds), one_round(direct, settings.seconds))
                for _ in range(settings.rounds)
            ]
            for through, past in rounds:
                context.say(f"  {through:,.3f} {unit} relayed, {past:,.3f} direct: {through / past:.3f}")
            through, past = (stats.median(column) for column in zip(*rounds, strict=True))
            yield Figure(name, through, unit, DIRECT, past)


def unary_p50_ms(channel: grpc.Channel, seconds: float) -> float:
    """The median time of a small call, one after the other."""
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        f"/{SERVICE}/QueueRange", request_serializer=None, response_deserializer=None
    )
    request = pb.QueueRequest(topic=TOPIC, queue_id=0).SerializeToString()
    took: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        call(request, timeout=TIMEOUT_SECONDS)
        took.append((time.perf_counter() - started) * 1000)
    return stats.median(took)


def stream_rate(channel: grpc.Channel, seconds: float) -> float:
    """Messages per second on one stream, encoded beforehand: the client costs as little as it can."""
    messages = [pb.Message(topic=TOPIC, body=BODY, queue_id=number % QUEUES) for number in range(BATCH)]
    request = pb.SendRequest(messages=messages, packed_answer=True).SerializeToString()
    room = threading.Semaphore(WINDOW)
    deadline = time.perf_counter() + seconds

    def requests() -> Iterator[bytes]:
        while time.perf_counter() < deadline and room.acquire(timeout=TIMEOUT_SECONDS):
            yield request

    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
        f"/{SERVICE}/SendStream", request_serializer=None, response_deserializer=None
    )
    started = time.perf_counter()
    answered = 0
    for _ in call(requests(), timeout=seconds + TIMEOUT_SECONDS):
        room.release()
        answered += BATCH
    return answered / (time.perf_counter() - started)


SCENARIO: Final = Scenario("front door: gRPC through the relay beside gRPC directly", NAMES, measure)
