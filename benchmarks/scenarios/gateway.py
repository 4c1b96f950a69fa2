"""RocketMQ 5's official client for Python at a broker of ours, and at Apache's 5.5 with its proxy, in turn.

Each has a broker without copies and RocketMQ's defaults; Apache's proxy runs in its broker's process (LOCAL). Four
processes send and pop, and one sends messages with a time and consumes them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.peers import java, official_client, rocketmq
from benchmarks.process_facts import processor_s
from benchmarks.processes import REPOSITORY, ChildError, LineChild, PythonChild
from benchmarks.registry import Scenario, load
from benchmarks.targets import APACHE_GATEWAY, BARE_GRPC
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client import Admin, ClientError, GroupInfo, TopicInfo
from rocketstore.nameserver.server import NameServer
from rocketstore.nameserver.settings import NameServerConfig

SEND: Final = "gateway_send"
POP: Final = "gateway_pop"
TIMED: Final = "gateway_timed_late_p99"
TOPIC: Final = "bench"
TIMED_TOPIC: Final = "bench-timed"
WARM_UP: Final = "warm-up"
TIMED_GROUP: Final = "timed"
QUEUES: Final = 8
PROCESSES: Final = 4
CONSUMERS: Final = 2
"""Of each process."""
WINDOW: Final = 64
"""Calls of a process under way."""
BODY_BYTES: Final = 256
TIMED_MESSAGES: Final = 4000
TIMED_WITHIN_S: Final = 20
TIMED_AHEAD_S: Final = 10
POP_S_MAX: Final = 120.0
SUBSCRIBE_S: Final = 6.0
"""A group's first receive says where it begins; Apache's broker answers it with nothing."""
_QUICK_SHARE: Final = 0.25
"""Of these times, with ours alone and few messages."""
ANSWER_S: Final = 180.0
"""How much longer than its load a command may take."""
REGISTERED_S: Final = 120.0
_PROGRAM: Final = Path(REPOSITORY) / "benchmarks" / "children" / "gateway_client.py"


class Side(NamedTuple):
    """A gateway, its process, and clients of it."""

    name: str
    pid: int
    clients: Sequence[LineChild]

    def ask(self, seconds: float, command: Mapping[str, object], count: int = PROCESSES) -> list[dict[str, Any]]:
        """The answers of so many clients. Raises ``ChildError`` if nothing succeeded."""
        some = self.clients[:count]
        for one in some:
            one.tell(command)
        answers = [one.hear(seconds + ANSWER_S) for one in some]
        if not any(one["count"] for one in answers) and command["do"] != "pop":
            raise ChildError(f"{self.name}: {command['do']}: nothing succeeded: {answers[0]}")
        return answers


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """In turn, so that both have the same machine. Without the client there is no figure, without Java no baseline."""
    try:
        official_client.install()
    except ChildError as error:
        context.baseline_missing("RocketMQ 5's client", f"{official_client.INSTALL}: {error}")
        return
    with ExitStack() as stack:
        sides = [_ours(context, stack)]
        if context.has(java):
            java.build("proxy")
            sides.append(_theirs(context, stack))
            baseline = APACHE_GATEWAY
        else:
            baseline = context.without(APACHE_GATEWAY, java)
        if SEND in names or POP in names:
            yield from _sends_and_pops(context, names, sides, baseline)
        if TIMED in names:
            yield _timed(context, sides, baseline)


# -- the loads ---------------------------------------------------------------------------------------------------------


def _sends_and_pops(context: Context, names: frozenset[str], sides: Sequence[Side], baseline: str) -> Iterator[Figure]:
    settings = context.settings
    for side in sides:
        _round(context, side, WARM_UP, settings.warmup_seconds)
    rounds = [
        [_round(context, side, _group(number), settings.seconds) for side in sides] for number in range(settings.rounds)
    ]
    for name, at in ((SEND, 0), (POP, 1)):
        if name in names:
            ours, *theirs = ([one[side][at] for one in rounds] for side in range(len(sides)))
            yield Figure.median(name, ours, "messages/s", baseline, theirs[0] if theirs else ())
    if SEND in names:
        sends = [one[0][0] for one in rounds]
        bare = [_bare(context, settings.seconds) for _ in rounds]
        yield Figure.median(SEND, sends, "messages/s", BARE_GRPC, bare)


def _share_of_time(context: Context) -> float:
    return 1.0 if context.settings.beside_peers else _QUICK_SHARE


def _waits(context: Context) -> dict[str, object]:
    return {} if context.settings.beside_peers else {"await_s": 1}


def _group(number: int) -> str:
    return f"round-{number}"


def _round(context: Context, side: Side, name: str, seconds: float) -> tuple[float, float]:
    """Messages/s sent, and received and acknowledged after that."""
    subscribe_s = SUBSCRIBE_S * _share_of_time(context)
    pop = {"do": "pop", "topic": TOPIC, "group": name, "consumers": 1, "seconds": subscribe_s} | _waits(context)
    side.ask(subscribe_s, pop, 1)
    sending = {"do": "send", "topic": TOPIC, "body_bytes": BODY_BYTES, "window": WINDOW, "seconds": seconds}
    sent = _rate(context, side, "sends", seconds, sending)
    popped = _rate(context, side, "pops", POP_S_MAX, pop | {"consumers": CONSUMERS, "seconds": POP_S_MAX})
    return sent, popped


def _rate(context: Context, side: Side, what: str, seconds: float, command: Mapping[str, object]) -> float:
    before = processor_s(side.pid)
    answers = side.ask(seconds, command)
    server_s = processor_s(side.pid) - before
    count = sum(one["count"] for one in answers)
    if not count:
        raise ChildError(f"{side.name}: no {what}")
    rate = count / (max(one["ended"] for one in answers) - min(one["began"] for one in answers))
    client_s = sum(one["cpu_s"] for one in answers)
    context.say(
        f"  {side.name} {what} {rate:,.0f}/s: processor {1e6 * server_s / count:,.0f} µs each, "
        f"the clients' {1e6 * client_s / count:,.0f} µs; {sum(one['failed'] for one in answers)} failed"
    )
    return float(rate)


def _timed(context: Context, sides: Sequence[Side], baseline: str) -> Figure:
    """How late (ms) messages reach their consumer that are due at whole seconds."""
    share = _share_of_time(context)
    within_s, ahead_s, subscribe_s = round(TIMED_WITHIN_S * share), round(TIMED_AHEAD_S * share), SUBSCRIBE_S * share
    count, seconds = context.settings.sized(TIMED_MESSAGES), float(within_s + ahead_s)
    timed = {"do": "timed", "topic": TIMED_TOPIC, "group": TIMED_GROUP, "window": WINDOW} | _waits(context)
    wanted = {"count": count, "within_s": within_s, "ahead_s": ahead_s}
    found: list[float] = []
    for side in sides:
        side.ask(subscribe_s, {**timed, "do": "pop", "consumers": 1, "seconds": subscribe_s}, 1)
        (answer,) = side.ask(seconds, {**timed, **wanted}, 1)
        late_ms = answer["late_ms"]
        if len(late_ms) < count:
            raise ChildError(f"{side.name}: {len(late_ms)} of {count} timed messages came")
        middle, worst = stats.median(late_ms), max(late_ms)
        context.say(f"  {side.name}: timed messages late by {middle:.0f} ms, p50; at most {worst:.0f} ms")
        found.append(stats.percentile(late_ms, 99))
    return Figure.median(TIMED, found[:1], "ms", baseline, found[1:])


def _bare(context: Context, seconds: float) -> float:
    """Calls/s of four processes at a server that does nothing."""
    log = context.directory / "bare.log"
    with ExitStack() as stack:
        server = stack.enter_context(PythonChild("benchmarks.children.bare_grpc", ["serve"], log))
        address = f"127.0.0.1:{server.hear(ANSWER_S)['port']}"
        before = processor_s(server.process.pid)
        words = ["call", address, str(seconds), str(WINDOW), str(BODY_BYTES)]
        children = [
            stack.enter_context(PythonChild("benchmarks.children.bare_grpc", words, log)) for _ in range(PROCESSES)
        ]
        answers = [one.hear(seconds + ANSWER_S) for one in children]
        count = sum(one["count"] for one in answers)
        rate = count / (max(one["ended"] for one in answers) - min(one["began"] for one in answers))
        server_s = processor_s(server.process.pid) - before
        client_s = sum(one["cpu_s"] for one in answers)
    context.say(
        f"  {BARE_GRPC} {rate:,.0f}/s: processor {1e6 * server_s / count:,.0f} µs each, "
        f"the clients' {1e6 * client_s / count:,.0f} µs"
    )
    return float(rate)


# -- the sides ---------------------------------------------------------------------------------------------------------


def _ours(context: Context, stack: ExitStack) -> Side:
    directory = context.directory / "ours"
    directory.mkdir()
    brokers = stack.enter_context(LocalBrokers(directory, size=1, plain=True, flush="async"))
    node = brokers.master()
    with Admin(brokers.addresses) as admin:
        _create(context, admin)
    return Side(
        "ours", brokers.pid(node), _clients(context, stack, "ours", f"127.0.0.1:{brokers.nodes[node].grpc_port}")
    )


def _theirs(context: Context, stack: ExitStack) -> Side:
    names = NameServer(NameServerConfig(listen_port=0, kv_config_path=context.directory / "kvConfig.json")).start()
    stack.callback(names.stop)
    address, pid = stack.enter_context(rocketmq.java_gateway(context.directory / "theirs", names.address))
    deadline = time.monotonic() + REGISTERED_S
    with Admin(name_servers=names.address, timeout_s=10) as admin:
        while True:
            with contextlib.suppress(ClientError):  # the broker has not registered yet
                _create(context, admin)
                break
            if time.monotonic() > deadline:
                raise ChildError(f"Apache's broker did not register in {REGISTERED_S:g} s")
            time.sleep(0.2)
    return Side("Apache's", pid, _clients(context, stack, "theirs", address))


def _create(context: Context, admin: Admin) -> None:
    """The topics, and the groups: Apache's proxy serves no consumer of one that it does not know."""
    rounds = [_group(number) for number in range(context.settings.rounds)]
    for group in (WARM_UP, TIMED_GROUP, *rounds):
        admin.put_group(GroupInfo(group))
    admin.put_topic(TopicInfo(TOPIC, QUEUES, QUEUES, message_type="NORMAL"))
    admin.put_topic(TopicInfo(TIMED_TOPIC, QUEUES, QUEUES, message_type="DELAY"))


def _clients(context: Context, stack: ExitStack, name: str, endpoints: str) -> list[LineChild]:
    """Which write the files of their log to the scenario's directory."""
    home = context.directory / f"clients-{name}"
    home.mkdir()
    argv = official_client.command(_PROGRAM, endpoints)
    log, environment = home / "clients.log", {"HOME": str(home), "PATH": ""}
    return [stack.enter_context(LineChild("RocketMQ 5's client", argv, log, environment)) for _ in range(PROCESSES)]


SCENARIO: Final = Scenario("RocketMQ 5's official client", (SEND, POP, TIMED), measure, load(2, 0.02))
