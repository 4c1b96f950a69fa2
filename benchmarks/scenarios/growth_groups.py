"""How groups grow: with their number in the same three processes, and with the length of their members' logs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.curves import Curve, line
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.registry import Scenario, load, logs
from benchmarks.scenarios.appends import BODY_BYTES, WINDOWS
from benchmarks.scenarios.failover import first_append_after
from benchmarks.scenarios.growth import gibs
from dledger.client import DLedgerClient
from dledger_cli.local.group import LocalGroup, SeveralGroups

GROUPS: Final = "growth_groups"
FAILOVER: Final = "growth_log_failover"
CATCH_UP: Final = "growth_log_catch_up"
COUNTS: Final = (1, 2, 4, 8)
SEGMENTS: Final = {"segment_bytes": "64m", "index_segment_bytes": "10m"}
PIECE: Final = bytes(1 << 20)
PIECES_AT_ONCE: Final = 16
BEHIND_BYTES: Final = 64 << 20
"""That a killed member lacks when it starts again."""
CAUGHT_UP_S_MAX: Final = 120.0


def measure_groups(context: Context, _: frozenset[str]) -> Iterator[Figure]:
    """Full pipelines to all groups at the same time; leaders are spread over the processes."""
    rates: list[tuple[float, float]] = []
    for count in COUNTS:
        names = [f"g{number}" for number in range(count)]
        with ExitStack() as stack:
            groups = stack.enter_context(SeveralGroups(context.directory / f"of-{count}", names, settings=SEGMENTS))
            nodes = list(groups.nodes)
            for number, name in enumerate(names):
                groups.lead(name, nodes[number % len(nodes)])
            clients = [
                stack.enter_context(
                    LoadClient(groups.addresses, name, context.directory / f"client-{count}-{name}.log")
                )
                for name in names
            ]
            rates.append((count, stats.median([_rate(context, clients) for _ in range(context.settings.rounds)])))
        context.say(f"  {count} groups: {rates[-1][1]:,.0f} entries/s")
    lines = (line("all together", rates), line("each", [(count, rate / count) for count, rate in rates]))
    context.curves.append(Curve(GROUPS, "Full pipelines to groups on three processes", "groups", "entries/s", lines))
    yield Figure(GROUPS, rates[-1][1], "entries/s", "one group", rates[0][1])


def _rate(context: Context, clients: list[LoadClient]) -> float:
    settings, (window, _) = context.settings, WINDOWS["append_pipelined"]
    with ThreadPoolExecutor(len(clients)) as threads:
        running = [
            threads.submit(client.appends_per_second, settings.seconds, settings.warmup_seconds, BODY_BYTES, window)
            for client in clients
        ]
        return sum(one.result() for one in running)


def measure_lengths(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """A group of three whose log grows: its leader killed, and a member that was away while 64 MiB were appended."""
    failovers: list[tuple[float, float]] = []
    catching_up: list[tuple[float, float]] = []
    with LocalGroup(context.directory / "growing") as group, closing(group.client(timeout_s=60)) as client:
        length = 0
        for size in gibs(context.settings.log_gib / len(group.nodes)):
            _append(client, int(size * (1 << 30)) - length)
            length = int(size * (1 << 30))
            gaps = [first_append_after(group, client, group.kill, group.start) for _ in range(context.settings.rounds)]
            failovers.append((size, stats.median(gaps)))
            catching_up.append((size, _caught_up_s(group, client)))
            length += BEHIND_BYTES
            context.say(f"  {size:g} GiB: failover {failovers[-1][1]:.2f} s, caught up in {catching_up[-1][1]:.2f} s")
    context.curves.append(
        Curve(
            FAILOVER,
            "Until a killed leader is replaced, and until a killed member has 64 MiB that it lacks",
            "GiB of each member's log",
            "s",
            (line("failover", failovers), line("caught up, with its start", catching_up)),
        )
    )
    for name, points in ((FAILOVER, failovers), (CATCH_UP, catching_up)):
        if name in names:
            yield Figure(name, points[-1][1], "s", "the shortest log", points[0][1])


def _append(client: DLedgerClient, count: int) -> None:
    """So many bytes, in entries of 1 MiB."""
    left = count // len(PIECE)
    while left > 0:
        client.append_many([PIECE] * min(left, PIECES_AT_ONCE))
        left -= PIECES_AT_ONCE


def _caught_up_s(group: LocalGroup, client: DLedgerClient) -> float:
    """From a killed member's start, with its process, until it has all that the others have."""
    leader = group.leader()
    late = next(one for one in group.nodes if one != leader)
    group.kill(late)
    _append(client, BEHIND_BYTES)
    began = time.perf_counter()
    group.start(late)
    group.wait_converged(CAUGHT_UP_S_MAX)
    return time.perf_counter() - began


NUMBER: Final = Scenario("groups in three processes", (GROUPS,), measure_groups, load(6))
LENGTH: Final = Scenario("failover by the length of the log", (FAILOVER, CATCH_UP), measure_lengths, logs(1.2))
