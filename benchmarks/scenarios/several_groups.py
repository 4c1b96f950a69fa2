"""Three groups in each of three processes, each process leading one, beside one group on as many processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.registry import Scenario, load
from benchmarks.scenarios.appends import BODY_BYTES, WINDOWS
from benchmarks.targets import ONE_GROUP
from cluster.local.several_groups import SeveralGroups

APPENDS: Final = "groups_append"
GROUPS: Final = ("a", "b", "c")
SEGMENTS: Final = {"segment_bytes": "256m", "index_segment_bytes": "40m"}


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Full pipelines to all three, and to one alone, by turns; the processors are shared by all."""
    del names  # there is one
    three: list[float] = []
    one: list[float] = []
    with ExitStack() as stack:
        spread = stack.enter_context(SeveralGroups(context.directory / "three", GROUPS, settings=SEGMENTS))
        alone = stack.enter_context(SeveralGroups(context.directory / "one", GROUPS[:1], settings=SEGMENTS))
        for group, node in zip(GROUPS, spread.nodes, strict=True):
            spread.lead(group, node)
        alone.leader_of(GROUPS[0])
        clients = [
            stack.enter_context(LoadClient(spread.addresses, group, context.directory / f"client-{group}.log"))
            for group in GROUPS
        ]
        single = stack.enter_context(LoadClient(alone.addresses, GROUPS[0], context.directory / "client-one.log"))
        for _ in range(context.settings.rounds):
            three.append(sum(_rates(context, clients)))
            one.append(sum(_rates(context, [single])))
    yield Figure.median(APPENDS, three, "entries/s", ONE_GROUP, one)


def _rates(context: Context, clients: Sequence[LoadClient]) -> list[float]:
    """What each acknowledges per second, all at the same time."""
    settings, (window, _) = context.settings, WINDOWS["append_pipelined"]
    with ThreadPoolExecutor(len(clients)) as threads:
        running = [
            threads.submit(client.appends_per_second, settings.seconds, settings.warmup_seconds, BODY_BYTES, window)
            for client in clients
        ]
        return [one.result() for one in running]


SCENARIO: Final = Scenario("three groups on three processes", (APPENDS,), measure, load(4))
