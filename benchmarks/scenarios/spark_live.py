"""Spark with a running group of three brokers: following a topic, catching up with it, writing to it.

Producer, three brokers and Spark share this machine's processors; if there are two, none of them has one to itself. So
reading has two figures: live, while a producer sends as fast as it can; and of a topic filled beforehand, from the same
running group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.processes import PythonChild
from benchmarks.registry import Scenario, constant
from benchmarks.sending import send_count
from benchmarks.targets import BARE_PRODUCER, OWN_P50, SENT_MEANWHILE
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.message.message import Message

CHILD: Final = "benchmarks.children.spark_live"
BODY: Final = os.urandom(200)
FILLED: Final = 1_000_000
SINK_ROWS: Final = 300_000
LIVE_RATE_MAX: Final = 60_000
"""The live producer's maximum rate per second: slightly more than Spark has to keep up with."""
FOLLOWED_SECONDS: Final = 30.0
SETTLE_SECONDS: Final = 60.0
"""How long to send before measuring: Java compiles meanwhile, for half a minute with a fifth of one processor."""
PATIENCE_SECONDS: Final = 600.0
QUEUES: Final = 8


class Live:
    """The group, a producer in this process, and the session."""

    def __init__(self, context: Context, stack: ExitStack) -> None:
        self.brokers = stack.enter_context(LocalBrokers(context.directory / "spark-live"))
        self.brokers.master()
        self.producer = stack.enter_context(Producer(self.brokers.addresses, timeout_s=60))
        scratch = context.directory / "spark-live-scratch"
        scratch.mkdir()
        self._child = stack.enter_context(PythonChild(CHILD, [str(scratch)], context.directory / "spark-live.log"))
        servers = ",".join(self.brokers.addresses)
        # The leader is the busiest process here, and sending slows down storing.
        self._reads = {"bootstrap.servers": servers, "group": self.brokers.name, "readFrom": "follower"}
        self._writes = {"bootstrap.servers": servers, "group": self.brokers.name}

    def topic(self, name: str) -> None:
        """Create a topic."""
        with Admin(self.brokers.addresses, timeout_s=30) as admin:
            admin.put_topic(TopicInfo(name, QUEUES, QUEUES))

    def send(self, topic: str, count: int, rate: float = 0) -> float:
        """Send this many messages, at most ``rate`` per second; returns the actual rate."""
        return send_count(self.producer, Message(topic, BODY), count, rate)

    def ask(self, do: str, **more: object) -> dict[str, Any]:  # Any: the values of a JSON object
        """Send one command to the session."""
        return self._child.ask({"do": do, **more}, PATIENCE_SECONDS)

    def reading(self, topic: str) -> dict[str, str]:
        """The options of a stream that reads everything from a new topic."""
        with closing(self.brokers.client(30)) as client:
            end = client.metadata().committed_index + 1
        return {**self._reads, "subscribe": topic, "startingOffsets": f'{{"index": {end}}}'}

    def wait_seen(self, rows: int) -> dict[str, Any]:  # Any: as above
        """The rows that the stream has read, once there are this many."""
        while (seen := self.ask("seen"))["rows"] < rows:
            time.sleep(0.1)
        return seen

    def sink_seconds(self, topic: str, rows: int) -> float:
        """How long a job takes to write this many rows."""
        options = {**self._writes, "topic": topic}
        return float(self.ask("sink", options=options, rows=rows, bytes=len(BODY))["seconds"])


@contextmanager
def following(live: Live, topic: str) -> Iterator[None]:
    """Runs the stream during the block; the topic is new."""
    live.ask("follow", options=live.reading(topic))
    live.send(topic, 1000)
    live.wait_seen(1)
    try:
        yield
    finally:
        live.ask("stop")


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """One group, one session."""
    with ExitStack() as stack:
        live = Live(context, stack)
        if names & {"spark_stream", "spark_stream_lag"}:
            yield from measure_live(context, live, names)
        if "spark_stream_drain" in names:
            live.topic("filled")
            reading = live.reading("filled")
            count = context.settings.sized(FILLED)
            sent = live.send("filled", count)
            context.say(f"  {count:,} messages were sent at {sent:,.0f}/s")
            rates = [drain_rate(live, reading, count) for _ in range(context.settings.rounds)]
            yield Figure.median("spark_stream_drain", rates, "messages/s", BARE_PRODUCER, [sent])
        if "spark_sink" in names:
            live.topic("written")
            rows = context.settings.sized(SINK_ROWS)
            live.sink_seconds("written", max(1, rows // 10))  # the first job starts the workers
            rates = [rows / live.sink_seconds("written", rows) for _ in range(context.settings.rounds)]
            live.topic("bare")
            yield Figure.median("spark_sink", rates, "messages/s", BARE_PRODUCER, [live.send("bare", rows)])


def measure_live(context: Context, live: Live, names: frozenset[str]) -> Iterator[Figure]:
    """Send and follow at the same time: what the stream has read, and the age of messages when their batch was done."""
    live.topic("live")
    with following(live, "live"):
        warm = int(LIVE_RATE_MAX * SETTLE_SECONDS)
        live.send("live", warm, LIVE_RATE_MAX)
        before = live.ask("seen")  # including the current lag, as at the end
        began = time.time()
        count = int(LIVE_RATE_MAX * max(context.settings.seconds, FOLLOWED_SECONDS))
        sent = live.send("live", count, LIVE_RATE_MAX)
        after = live.wait_seen(1000 + warm + count)
    rate = (1000 + warm + count - before["rows"]) / (after["ended"] - began)
    ages = after["oldest"][len(before["oldest"]) :]
    if "spark_stream" in names:
        yield Figure("spark_stream", rate, "messages/s", SENT_MEANWHILE, sent)
    if "spark_stream_lag" in names:
        yield Figure("spark_stream_lag", max(ages), "s", OWN_P50, stats.median(ages))


def drain_rate(live: Live, reading: dict[str, str], count: int) -> float:
    """Messages per second of a stream that reads everything available, from start to end."""
    answer = live.ask("drain", options=reading)
    if answer["rows"] != count:
        raise RuntimeError(f"{answer['rows']} messages were read of {count}")
    return count / float(answer["seconds"])


SCENARIO: Final = Scenario(
    "following a running group with Spark, and writing into it",
    ("spark_stream", "spark_stream_lag", "spark_stream_drain", "spark_sink"),
    measure,
    constant(12),
)
