"""Commands to a state machine of three members, beside etcd's puts and Apache Ratis: the same callers and bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import CommandRates, LoadClient
from benchmarks.machine_group import MachineGroup
from benchmarks.peers import etcd, java, ratis
from benchmarks.process_facts import processor_s
from benchmarks.registry import Scenario, load
from benchmarks.scenarios.appends import BODY_BYTES
from benchmarks.targets import ETCD, RATIS

CALLERS: Final = (1, 16, 256)
RATE: Final = "machine_commands"
MEDIAN: Final = "machine_command_p50"
PROCESSOR: Final = "machine_command_processor"
NAMES: Final = tuple(f"{name}_{callers}" for callers in CALLERS for name in (RATE, MEDIAN, PROCESSOR))


@dataclass(slots=True)
class CommandsSide:
    """One of the systems; ``load``: with so many callers."""

    load: Callable[[int], CommandRates]
    pids: tuple[int, ...]
    rates: list[CommandRates] = field(default_factory=list)
    processor_us: list[float] = field(default_factory=list)
    """Of all members per command; those of the warm-up count, too, at the same rate."""

    def measure(self, callers: int, seconds: float) -> None:
        """One round, which takes so long."""
        before = sum(map(processor_s, self.pids))
        found = self.load(callers)
        used_s = sum(map(processor_s, self.pids)) - before
        self.rates.append(found)
        self.processor_us.append(used_s * 1e6 / (found.per_second * seconds))

    def values(self, name: str) -> list[float]:
        """Of all rounds."""
        columns = {
            RATE: [one.per_second for one in self.rates],
            MEDIAN: [one.p50_ms for one in self.rates],
            PROCESSOR: self.processor_us,
        }
        return columns[name]


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """All callers, one number after the other; the systems take turns."""
    settings = context.settings
    times = settings.warmup_seconds, settings.seconds
    with ExitStack() as stack:
        sides = _sides(context, stack, times)
        for callers in CALLERS:
            wanted = [name for name in (RATE, MEDIAN, PROCESSOR) if f"{name}_{callers}" in names]
            if not wanted:
                continue
            for side in sides.values():
                side.rates, side.processor_us = [], []
            for _ in range(settings.rounds):
                for side in sides.values():
                    side.measure(callers, sum(times))
            for name in wanted:
                unit = {RATE: "commands/s", MEDIAN: "ms", PROCESSOR: "µs"}[name]
                for peer in (ETCD, RATIS):
                    theirs = sides[peer].values(name) if peer in sides else []
                    yield Figure.median(f"{name}_{callers}", sides[""].values(name), unit, peer, theirs)


def _sides(context: Context, stack: ExitStack, times: tuple[float, float]) -> dict[str, CommandsSide]:
    directory = context.directory
    group = stack.enter_context(MachineGroup(directory / "machine"))
    group.leader()
    client = stack.enter_context(LoadClient(group.addresses, group.name, directory / "client.log"))
    warmup_s, seconds = times
    pids = tuple(group.pid(node) for node in group.nodes)
    sides = {"": CommandsSide(lambda callers: client.commands(seconds, warmup_s, BODY_BYTES, callers), pids)}
    report_missing(context)
    if not context.has(java):
        return sides
    java.build(ratis.MODULE)

    def by_java(kind: str, members: str, log: Path) -> Callable[[int], CommandRates]:
        return lambda callers: ratis.measure(kind, members, callers, BODY_BYTES, times, log)

    theirs = stack.enter_context(ratis.ratis_group(directory / "ratis"))
    sides[RATIS] = CommandsSide(by_java("ratis", theirs.members, directory / "ratis-load.log"), theirs.pids)
    if context.has(etcd):
        other = stack.enter_context(etcd.etcd_group(directory / "etcd"))
        other.leader()
        pids = tuple(other.pid(one) for one in other.endpoints)
        sides[ETCD] = CommandsSide(by_java("etcd", ",".join(other.endpoints), directory / "etcd-load.log"), pids)
    return sides


def report_missing(context: Context) -> None:
    """Say what is to be installed for the peers; both are loaded by a program in Java."""
    if not context.has(java):
        context.without(RATIS, java)
        context.without(ETCD, java)
    elif not context.has(etcd):
        context.without(ETCD, etcd)


SCENARIO: Final = Scenario("commands beside etcd and Ratis", NAMES, measure, load(3 * len(CALLERS), 0.1))
