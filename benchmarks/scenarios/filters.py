"""SQL conditions: what groups with one each cost a producer on the same topic."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.process_facts import processor_s
from benchmarks.processes import ChildError, PythonChild
from benchmarks.registry import Scenario
from benchmarks.scenarios.brokers import TOPIC, prepare
from benchmarks.targets import ALONE
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client.blocking import Admin, Producer
from rocketstore.message.message import Message

if TYPE_CHECKING:
    from rocketstore.client.aio.errors import SendResult

GROUPS: Final = 10
RATE: Final = 10_000
"""Messages per second."""
BLOCK: Final = 100
"""Messages that are sent together, so often that it makes the rate; the latency of one of them is measured."""
ROUNDS: Final = 3
TIMEOUT_S: Final = 60.0
BODY: Final = bytes(256)
REGIONS: Final = ("EU", "US", "JP", "BR")
MESSAGES: Final = tuple(
    Message(TOPIC, BODY, properties={"amount": str(one), "region": REGIONS[one % 4], "kind": "order"})
    for one in range(BLOCK)
)


class _Sends(NamedTuple):
    """Latencies in ms, messages per second, and how many were sent."""

    p50: float
    p99: float
    rate: float
    sent: int


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Alone and with the groups, in turn: a machine that is busy for a while is so for both."""
    seconds = context.settings.seconds
    alone: list[_Sends] = []
    meanwhile: list[_Sends] = []
    costs: list[float] = []
    with ExitStack() as stack:
        brokers = stack.enter_context(LocalBrokers(context.directory / "filters", size=1, plain=True, flush="async"))
        name = brokers.master()
        address, pid = brokers.nodes[name].client_address, brokers.pid(name)
        with Admin(brokers.addresses) as admin:
            prepare(admin)
        producer = stack.enter_context(Producer(brokers.addresses, timeout_s=30))
        _sends(producer, context.settings.warmup_seconds)
        for number in range(max(ROUNDS, context.settings.rounds)):
            used = processor_s(pid)
            alone.append(_sends(producer, seconds))
            used_alone = (processor_s(pid) - used) / alone[-1].sent
            log = context.directory / f"filters-{number}.log"
            with PythonChild("benchmarks.children.sql_groups", [address], log) as child:
                child.ask({"do": "join", "count": GROUPS, "topic": TOPIC}, TIMEOUT_S)
                used = processor_s(pid)
                meanwhile.append(_sends(producer, seconds))
                costs.append(((processor_s(pid) - used) / meanwhile[-1].sent - used_alone) / GROUPS)
                received = child.ask({"do": "count"}, TIMEOUT_S)["received"]
            context.say(f"  alone {_text(alone[-1])}; with {GROUPS} groups {_text(meanwhile[-1])}, {received} received")
            if not received:
                raise ChildError("the groups received nothing")
    if "sql_groups_processor" in names:
        yield Figure("sql_groups_processor", stats.median(costs) * 1e6, "us per message and group", "", None)
    if "sql_groups_send_p99" in names:
        with_groups = stats.median([one.p99 for one in meanwhile])
        yield Figure("sql_groups_send_p99", with_groups, "ms", ALONE, stats.median([one.p99 for one in alone]))


def _sends(producer: Producer, seconds: float) -> _Sends:
    took: list[float] = []
    futures: list[Future[SendResult]] = []
    started = time.perf_counter()
    blocks = 0
    while (elapsed := time.perf_counter() - started) < seconds:
        if (ahead := blocks * BLOCK / RATE - elapsed) > 0:
            time.sleep(ahead)
        begun = time.perf_counter()
        some = [producer.submit(one) for one in MESSAGES]
        some[0].add_done_callback(lambda _done, begun=begun: took.append(time.perf_counter() - begun))  # type: ignore[misc]
        futures += some
        blocks += 1
    for one in futures:
        one.result()
    rate = len(futures) / (time.perf_counter() - started)
    return _Sends(stats.median(took) * 1000, stats.percentile(took, 99) * 1000, rate, len(futures))


def _text(sends: _Sends) -> str:
    return f"p50 {sends.p50:.2f} ms, p99 {sends.p99:.2f} ms at {sends.rate:,.0f}/s"


SCENARIO: Final = Scenario("groups with SQL conditions", ("sql_groups_processor", "sql_groups_send_p99"), measure)
