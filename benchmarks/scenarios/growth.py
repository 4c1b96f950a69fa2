"""How the log grows: with the size of entries, the load, the clients, the nodes, and its own length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.curves import Curve, line
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.processes import PythonChild
from benchmarks.registry import Scenario, load, logs
from benchmarks.scenarios.appends import round_trips
from benchmarks.scenarios.restart import LoggedNode
from dledger_cli.local.group import LocalGroup

ENTRY_SIZE: Final = "growth_entry_size"
LOAD: Final = "growth_load"
CLIENTS: Final = "growth_clients"
NODES: Final = "growth_nodes"
LOG_SIZE: Final = "growth_log_size"
BODY_BYTES: Final = 1024
SIZES: Final = (100, 1024, 10 * 1024, 100 * 1024, 1024 * 1024)
PENDING_BYTES: Final = 4 << 20
"""Outstanding in a full pipeline of large entries: half of a client's limit."""
WINDOW: Final = 4000
SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The offered load, as shares of the throughput of a full pipeline."""
CLIENT_COUNTS: Final = (1, 3, 10, 30, 100, 300, 1000)
NODE_COUNTS: Final = (1, 3, 5)
GIBS: Final = (1.0, 3.0, 10.0, 30.0)
ANSWER_S: Final = 180.0


class GrowthClient(PythonChild):
    """The clients of one measurement; see ``children/growth_client.py``."""

    def __init__(self, context: Context, group: LocalGroup) -> None:
        words = [group.name, *group.addresses]
        super().__init__("benchmarks.children.growth_client", words, context.directory / "growth-client.log")

    def measure(self, context: Context, command: Mapping[str, object]) -> dict[str, Any]:  # Any: of a JSON object
        """Rate and latencies of appends of 1 KiB."""
        seconds = context.settings.seconds
        return self.ask({**command, "seconds": seconds, "body_bytes": BODY_BYTES}, seconds + ANSWER_S)


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Each on a group of three of its own, flushed by a majority."""
    parts: dict[str, Callable[[Context], Figure]] = {
        ENTRY_SIZE: _entry_size,
        LOAD: _load,
        CLIENTS: _clients,
        NODES: _nodes,
    }
    for name, part in parts.items():
        if name in names:
            yield part(context)


def _entry_size(context: Context) -> Figure:
    rates: list[tuple[float, float]] = []
    singles: list[tuple[float, float]] = []
    settings = context.settings
    with (
        LocalGroup(context.directory / "sizes") as group,
        closing(group.client(timeout_s=30)) as single,
        LoadClient(group.addresses, group.name, context.directory / "load.log") as client,
    ):
        for size in SIZES:
            window = max(4, min(WINDOW, PENDING_BYTES // size))
            rate = client.appends_per_second(settings.seconds, settings.warmup_seconds, size, window)
            rates.append((size, rate))
            singles.append((size, stats.median(round_trips(single.append, settings.seconds, size))))
            context.say(f"  {size:,} bytes: {rate:,.0f} entries/s, {singles[-1][1]:.2f} ms")
    volumes = [(size, rate * size / 1e6) for size, rate in rates]
    context.curves += [
        Curve(
            ENTRY_SIZE,
            "Appends to three nodes by the size of entries",
            "bytes of an entry",
            "a full pipeline",
            (line("entries/s", rates), line("MB/s", volumes)),
        ),
        Curve(
            f"{ENTRY_SIZE}_latency",
            "One append after the other by the size of entries",
            "bytes of an entry",
            "ms, median",
            (line("append", singles),),
        ),
    ]
    return Figure(ENTRY_SIZE, volumes[-1][1], "MB/s", f"entries of {BODY_BYTES} bytes", volumes[1][1])


def _load(context: Context) -> Figure:
    settings = context.settings
    with ExitStack() as stack:
        group = stack.enter_context(LocalGroup(context.directory / "load"))
        group.leader()
        pipeline = stack.enter_context(LoadClient(group.addresses, group.name, context.directory / "pipeline.log"))
        most = pipeline.appends_per_second(settings.seconds, settings.warmup_seconds, BODY_BYTES, WINDOW)
        client = stack.enter_context(GrowthClient(context, group))
        answers = []
        for share in SHARES:
            answer = client.measure(context, {"do": "offer", "per_second": share * most})
            context.say(f"  {share * most:,.0f}/s offered: p50 {answer['p50']:.2f} ms, p99 {answer['p99']:.2f} ms")
            answers.append((share * most, answer))
    lines = [line(part, [(rate, answer[part]) for rate, answer in answers]) for part in ("p50", "p99")]
    context.curves.append(
        Curve(LOAD, "Latency of appends by the offered load", "entries/s offered", "ms", tuple(lines))
    )
    half = next(answer for share, (_, answer) in zip(SHARES, answers, strict=True) if share == 0.5)
    return Figure(LOAD, half["p99"], "ms", "a tenth of the load instead of half", answers[0][1]["p99"])


def _clients(context: Context) -> Figure:
    answers: list[tuple[int, dict[str, Any]]] = []  # Any: the values of a JSON object
    settings = {"connections_max": str(4 * CLIENT_COUNTS[-1])}
    with LocalGroup(context.directory / "clients", settings=settings) as group, GrowthClient(context, group) as client:
        group.leader()
        for count in CLIENT_COUNTS:
            answer = client.measure(context, {"do": "many", "clients": count})
            context.say(f"  {count} clients: {answer['per_second']:,.0f}/s, p99 {answer['p99']:.2f} ms")
            answers.append((count, answer))
    context.curves += [
        Curve(
            CLIENTS,
            "Appends by clients that wait for each",
            "clients",
            "entries/s",
            (line("entries/s", [(count, answer["per_second"]) for count, answer in answers]),),
        ),
        Curve(
            f"{CLIENTS}_latency",
            "Their latency",
            "clients",
            "ms",
            tuple(line(part, [(count, answer[part]) for count, answer in answers]) for part in ("p50", "p99")),
        ),
    ]
    rates = [float(answer["per_second"]) for _, answer in answers]
    return Figure(CLIENTS, rates[-1], "entries/s", "one client", rates[0])


def _nodes(context: Context) -> Figure:
    settings = context.settings
    rates: list[tuple[float, float]] = []
    singles: list[tuple[float, float]] = []
    for size in NODE_COUNTS:
        with LocalGroup(context.directory / f"nodes-{size}", size=size) as group:
            group.leader()
            with closing(group.client()) as single:
                singles.append((size, stats.median(round_trips(single.append, settings.seconds))))
            with LoadClient(group.addresses, group.name, context.directory / f"nodes-{size}.log") as client:
                rate = client.appends_per_second(settings.seconds, settings.warmup_seconds, BODY_BYTES, WINDOW)
                rates.append((size, rate))
        context.say(f"  {size} nodes: {rate:,.0f} entries/s, {singles[-1][1]:.2f} ms")
    context.curves += [
        Curve(NODES, "A full pipeline by the number of nodes", "nodes", "entries/s", (line("entries/s", rates),)),
        Curve(f"{NODES}_latency", "One append after the other", "nodes", "ms, median", (line("append", singles),)),
    ]
    return Figure(NODES, rates[-1][1], "entries/s", "one node", rates[0][1])


def gibs(most: float) -> Sequence[float]:
    """The sizes of logs that are no larger than ``BENCH_LOG_GIB``, and that one."""
    return sorted({one for one in GIBS if one < most} | {most / 10, most})


def measure_log_size(context: Context, _names: frozenset[str]) -> Iterator[Figure]:
    """The restart of one node; its log grows, so that it is written once."""
    clean: list[tuple[float, float]] = []
    killed: list[tuple[float, float]] = []
    with ExitStack() as stack:
        node: LoggedNode | None = None
        length = 0
        for size in gibs(context.settings.log_gib):
            more, length = int(size * (1 << 30)) - length, int(size * (1 << 30))
            if node is None:
                node = LoggedNode(context.directory / "growing", more, stack)
            else:
                node.fill(more)
            clean.append((size, stats.median([node.restart_seconds() for _ in range(context.settings.rounds)])))
            node.crash_with_tail()
            killed.append((size, node.restart_seconds()))
            context.say(f"  {size:g} GiB: {clean[-1][1]:.2f} s, killed {killed[-1][1]:.2f} s")
    context.curves.append(
        Curve(
            LOG_SIZE,
            "From starting a node to its first answer",
            "GiB of log",
            "s",
            (line("stopped", clean), line("killed, 32 MiB not flushed", killed)),
        )
    )
    yield Figure(LOG_SIZE, clean[-1][1], "s", "a tenth of the log", clean[0][1])


LOGS: Final = Scenario("how the log grows", (ENTRY_SIZE, LOAD, CLIENTS, NODES), measure, load(12))
LENGTH: Final = Scenario("restart by the length of the log", (LOG_SIZE,), measure_log_size, logs(1.2))
