"""Crowds of RocketMQ's clients, good and bad: what they cost a broker, and another client's sends meanwhile.

The crowd comes from one address, the client from another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import stats
from benchmarks.blocking_remoting import BlockingRemotingClient
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.process_facts import processor_s, resident_of
from benchmarks.processes import ChildError, PythonChild
from benchmarks.registry import Scenario
from benchmarks.scenarios.brokers import TOPIC, prepare
from benchmarks.targets import ALONE
from dledger.remoting.frame import Frame
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.client.blocking import Admin
from rocketstore.remoting.codes import RequestCode

CONNECTIONS: Final = 10_000
CONSUMERS: Final = 1000
DEAF: Final = 50
STORM: Final = 50
SUBSCRIPTIONS: Final = 1000
BODY_BYTES: Final = 1024
STORED: Final = 2000
"""Messages that are there to be pulled."""
TIMEOUT_S: Final = 60.0
CROWD_S_MAX: Final = 300.0
"""How long it may take until all of a crowd are there."""
CROWDS: Final[Mapping[str, tuple[Mapping[str, object], str]]] = {
    "crowd_connections": ({"do": "connect", "count": CONNECTIONS}, "connections with heartbeats"),
    "crowd_consumers": ({"do": "consume", "count": CONSUMERS}, "consumers that join one group"),
    "crowd_deaf": ({"do": "ignore", "count": DEAF}, "clients that pull and read nothing"),
    "crowd_heartbeats": (
        {"do": "beat", "count": STORM, "subscriptions": SUBSCRIPTIONS},
        f"clients that send heartbeats of {SUBSCRIPTIONS:,} subscriptions as fast as they can",
    ),
}
"""The work of each crowd."""
PARTS: Final = ("send_p50", "send_p99", "send_max", "memory", "processor")


class _Sends(NamedTuple):
    """Latencies in milliseconds of one client's messages, one after the other."""

    p50: float
    p99: float
    longest: float


class _Broker(NamedTuple):
    """The broker's process."""

    pid: int
    directory: Path

    def megabytes(self) -> float:
        """Resident memory besides the mapped files."""
        return resident_of(self.pid, self.directory).own / 1e6


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Each crowd leaves before the next one comes; each has a broker of its own, so that memory can be compared."""
    for crowd, (full, what) in CROWDS.items():
        wanted = [f"{crowd}_{part}" for part in PARTS if f"{crowd}_{part}" in names]
        if wanted:
            command = {**full, "count": context.settings.sized(int(str(full["count"])))}
            context.say(f"  {command['count']:,} {what}")
            figures = _one(context, crowd, command)
            yield from (figures[name] for name in wanted)


def _one(context: Context, crowd: str, command: Mapping[str, object]) -> dict[str, Figure]:
    seconds = context.settings.seconds
    with ExitStack() as stack:
        brokers = stack.enter_context(
            LocalBrokers(
                context.directory / crowd,
                size=1,
                plain=True,
                flush="async",
                settings={"connections_max": str(2 * CONNECTIONS), "mappedFileSizeCommitLog": "256m"},
            )
        )
        name = brokers.master()
        with Admin(brokers.addresses) as admin:
            prepare(admin)
        broker = _Broker(brokers.pid(name), context.directory)
        frames = stack.enter_context(closing(BlockingRemotingClient()))
        address = brokers.nodes[name].client_address
        send = _sender(frames, address)
        for _ in range(STORED):
            send()
        _sends(send, context.settings.warmup_seconds)
        alone = _sends(send, seconds)
        before = broker.megabytes()
        log = context.directory / f"{crowd}.log"
        child = stack.enter_context(PythonChild("benchmarks.children.crowd", [address.rpartition(":")[2]], log))
        began, used = time.monotonic(), processor_s(broker.pid)
        with ThreadPoolExecutor(1) as pool:
            all_here = pool.submit(child.ask, command, CROWD_S_MAX)
            meanwhile = _sends(send, seconds, all_here)
        processor = 100 * (processor_s(broker.pid) - used) / (time.monotonic() - began)
        memory = broker.megabytes() - before
        answer = all_here.result()
        counted = child.ask({"do": "count", "anew": False}, TIMEOUT_S)
    context.say(f"    {answer['clients']} clients; {counted['counted']} answers; {counted['known']} members known")
    context.say(f"    sends: alone {_text(alone)}, meanwhile {_text(meanwhile)}")
    context.say(f"    {memory:.0f} MB more, {processor:.0f}% of a processor")
    if answer["clients"] != command["count"]:
        raise ChildError(f"{answer['clients']} of {command['count']} clients could connect")
    rows = {
        "send_p50": (meanwhile.p50, "ms", ALONE, alone.p50),
        "send_p99": (meanwhile.p99, "ms", ALONE, alone.p99),
        "send_max": (meanwhile.longest, "ms", ALONE, alone.longest),
        "memory": (memory, "MB", "", None),
        "processor": (processor, "% of a core", "", None),
    }
    return {f"{crowd}_{part}": Figure(f"{crowd}_{part}", *row) for part, row in rows.items()}


def _sender(frames: BlockingRemotingClient, address: str) -> Callable[[], None]:
    fields = {
        "a": "bench",
        "b": TOPIC,
        "c": "TBW102",
        "d": "4",
        "e": "0",
        "f": "0",
        "g": "1700000000000",
        "h": "0",
        "i": "",
        "j": "0",
        "k": "false",
        "m": "false",
    }
    request = Frame(RequestCode.SEND_MESSAGE_V2, 0, fields, bytes(BODY_BYTES))

    def send() -> None:
        answer = frames.call(address, request, TIMEOUT_S)
        if answer.code:
            raise ChildError(f"a message was refused with code {answer.code}: {answer.remark}")

    return send


def _sends(send: Callable[[], None], seconds: float, done: Future[dict[str, Any]] | None = None) -> _Sends:
    """For so many seconds, and until something is done."""
    took: list[float] = []
    deadline = time.perf_counter() + seconds
    while (began := time.perf_counter()) < deadline or not (done is None or done.done()):
        send()
        took.append((time.perf_counter() - began) * 1000)
    return _Sends(stats.median(took), stats.percentile(took, 99), max(took))


def _text(sends: _Sends) -> str:
    return f"p50 {sends.p50:.2f} ms, p99 {sends.p99:.2f} ms, longest {sends.longest:.1f} ms"


SCENARIO: Final = Scenario(
    "crowds of remoting clients, and another client's sends",
    tuple(f"{crowd}_{part}" for crowd in CROWDS for part in PARTS),
    measure,
)
