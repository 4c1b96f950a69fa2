"""Groups with a state machine: what applying costs appends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from benchmarks.children.machine_node import IDLE
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.machine_group import MachineGroup
from benchmarks.process_facts import processor_s
from benchmarks.registry import Scenario, load
from benchmarks.scenarios.appends import BODY_BYTES, WINDOWS
from benchmarks.targets import BARE_LOG
from cluster.local.group import LocalGroup

APPENDS: Final = "machine_append"
APPEND_PROCESSOR: Final = "machine_append_processor"


@dataclass(slots=True)
class AppendLoad:
    """One group under a full pipeline of appends."""

    group: LocalGroup
    client: LoadClient
    rates: list[float] = field(default_factory=list)
    processor_us: list[float] = field(default_factory=list)
    """Of all nodes together, per entry."""

    def measure(self, context: Context) -> None:
        """One round."""
        settings, group = context.settings, self.group
        entries, used_s = self._entries(), self._processor_s()
        window, _ = WINDOWS["append_pipelined"]
        self.rates.append(self.client.appends_per_second(settings.seconds, settings.warmup_seconds, BODY_BYTES, window))
        group.wait_converged()
        used_s = self._processor_s() - used_s
        self.processor_us.append(used_s * 1e6 / (self._entries() - entries))

    def _entries(self) -> int:
        return max(one.committed_index for one in self.group.statuses().values())

    def _processor_s(self) -> float:
        return sum(processor_s(self.group.pid(node)) for node in self.group.nodes)


def measure_appends(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Appends to a group with a machine that does next to nothing, and to one without, by turns."""
    with ExitStack() as stack:
        loads: list[AppendLoad] = []
        for name, group in (
            ("machine", MachineGroup(context.directory / "machine", IDLE)),
            ("bare", LocalGroup(context.directory / "bare")),
        ):
            stack.enter_context(group)
            group.leader()
            log = context.directory / f"{name}-client.log"
            loads.append(AppendLoad(group, stack.enter_context(LoadClient(group.addresses, group.name, log))))
        for _ in range(context.settings.rounds):
            for one in loads:
                one.measure(context)
    machine, bare = loads
    if APPENDS in names:
        yield Figure.median(APPENDS, machine.rates, "entries/s", BARE_LOG, bare.rates)
    if APPEND_PROCESSOR in names:
        yield Figure.median(APPEND_PROCESSOR, machine.processor_us, "µs", BARE_LOG, bare.processor_us)


APPENDING: Final = Scenario(
    "appends to a log with a state machine", (APPENDS, APPEND_PROCESSOR), measure_appends, load(2)
)
