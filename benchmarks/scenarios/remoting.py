"""RocketMQ's own producer and push consumer: three of our brokers beside three of Java's, taking turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.peers import java, rocketmq
from benchmarks.peers.rocketmq import JavaLoad
from benchmarks.processes import ChildError
from benchmarks.registry import Scenario, load
from benchmarks.targets import JAVA_BROKERS
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin, ClientError
from rocketstore.nameserver.server import NameServer
from rocketstore.nameserver.settings import NameServerConfig

SENDS: Final[Mapping[str, tuple[str, int]]] = {
    "remoting_send_one": ("threads", 1),
    "remoting_send_threads": ("threads", 256),
    "remoting_send_async": ("async", 1000),
    "remoting_send_batch": ("batch", 100),
}
"""The load of each figure: what sends, and how many at once."""
CONSUMER: Final = "remoting_push_consumer"
TOPIC: Final = "bench"
CONSUMED_TOPIC: Final = "bench-consumed"
BODY_BYTES: Final = 1024
CONSUMED: Final = 300_000
REGISTERED_S: Final = 240.0
"""Java's brokers register every 30 s: at the third time if other programs keep the machine busy."""
_FILL_S: Final = 120.0


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Nothing without a JDK: the client is Java's."""
    if not context.has(java):
        context.without("RocketMQ", java)
        return
    java.build(*rocketmq.MODULES)
    with ExitStack() as stack:
        ours = JavaLoad(context.directory / "client-of-ours", _our_brokers(context, stack))
        stack.enter_context(ours)
        theirs = JavaLoad(context.directory / "client-of-theirs", _java_brokers(context, stack))
        stack.enter_context(theirs)
        for name, (what, width) in SENDS.items():
            if name in names:
                yield _sends(context, name, what, width, (ours, theirs))
        if CONSUMER in names:
            yield _consumer(context, (ours, theirs))


def _our_brokers(context: Context, stack: ExitStack) -> str:
    """The name server of a group of ours."""
    directory = context.directory / "ours"
    directory.mkdir()
    address = _name_server(context, stack)
    brokers = stack.enter_context(LocalBrokers(directory, settings={"namesrvAddr": address}))
    _wait_for_master(address, brokers.name)
    return address


def _java_brokers(context: Context, stack: ExitStack) -> str:
    """The name server of a group of Java's."""
    address = _name_server(context, stack)
    stack.enter_context(rocketmq.java_brokers(context.directory / "theirs", address))
    _wait_for_master(address, rocketmq.BROKER_NAME)
    return address


def _name_server(context: Context, stack: ExitStack) -> str:
    server = NameServer(NameServerConfig(listen_port=0, kv_config_path=context.directory / "kvConfig.json")).start()
    stack.callback(server.stop)
    return server.address


def _wait_for_master(name_server: str, broker: str) -> None:
    deadline = time.monotonic() + REGISTERED_S
    with Admin(name_servers=name_server, timeout_s=1.0) as admin:
        while time.monotonic() < deadline:
            with suppress(ClientError):  # nobody has registered yet
                if any(one.name == broker and one.master for one in admin.brokers()):
                    return
            time.sleep(0.1)
    raise ChildError(f"no master of {broker} registered in {REGISTERED_S:g} s")


def _sends(context: Context, name: str, what: str, width: int, sides: tuple[JavaLoad, JavaLoad]) -> Figure:
    settings = context.settings
    key, unit = ("p50Ms", "ms") if width == 1 else ("perSecond", "messages/s")

    def one_round(side: JavaLoad, seconds: float) -> float:
        answer = side.measure(what, TOPIC, width=width, seconds=seconds, bodyBytes=BODY_BYTES)
        _say_failures(context, answer)
        return float(answer[key])

    for side in sides:
        one_round(side, settings.warmup_seconds)
    rounds = [tuple(one_round(side, settings.seconds) for side in sides) for _ in range(settings.rounds)]
    return _figure(context, name, unit, rounds)


def _consumer(context: Context, sides: tuple[JavaLoad, JavaLoad]) -> Figure:
    count = context.settings.sized(CONSUMED)
    for side in sides:
        answer = side.measure("batch", CONSUMED_TOPIC, width=100, seconds=_FILL_S, bodyBytes=BODY_BYTES, count=count)
        _say_failures(context, answer)
        if answer["count"] < count:
            raise ChildError(f"only {answer['count']} messages were stored in {_FILL_S:g} s")
    groups = (f"bench-consumers-{number}" for number in itertools.count())

    def one_round(side: JavaLoad) -> float:
        return float(side.measure("consume", CONSUMED_TOPIC, group=next(groups), width=count)["perSecond"])

    for side in sides:
        one_round(side)
    rounds = [tuple(one_round(side) for side in sides) for _ in range(context.settings.rounds)]
    return _figure(context, CONSUMER, "messages/s", rounds)


def _say_failures(context: Context, answer: Mapping[str, Any]) -> None:  # Any: the values of a JSON object
    if answer["failed"]:
        context.say(f"  {answer['failed']} sends failed; the last one: {answer['failure']}")


def _figure(context: Context, name: str, unit: str, rounds: list[tuple[float, ...]]) -> Figure:
    for ours, theirs in rounds:
        context.say(f"  {ours:,.2f} {unit} of ours, {theirs:,.2f} of Java's: {ours / theirs:.2f}")
    return Figure.median(name, [one[0] for one in rounds], unit, JAVA_BROKERS, [one[1] for one in rounds])


SCENARIO: Final = Scenario(
    "RocketMQ's own client, three brokers beside Java's", (*SENDS, CONSUMER), measure, load(8, 0.05)
)
