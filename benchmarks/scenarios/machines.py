"""Groups with a state machine: what applying and snapshots cost appends, and how fast a member gets a snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.machine_group import MachineGroup
from benchmarks.process_facts import processor_s
from benchmarks.registry import Scenario, constant, load, logs
from benchmarks.scenarios.appends import BODY_BYTES, WINDOWS, round_trips
from benchmarks.targets import BARE_LOG
from dledger.client import DLedgerClient
from dledger.types import NO_INDEX
from dledger_cli.local.group import LocalGroup, wait_until

APPENDS: Final = "machine_append"
APPEND_PROCESSOR: Final = "machine_append_processor"
PAUSE: Final = "machine_snapshot_pause"
INSTALL: Final = "machine_install"
INSTALL_PROCESSOR: Final = "machine_install_processor"
"""Of sender and receiver, start included."""
INSTALL_ELECTIONS: Final = "machine_install_elections"
GIB: Final = 1 << 30
WAIT_S: Final = 600.0


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
            ("machine", MachineGroup(context.directory / "machine")),
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


def measure_pause(context: Context, _: frozenset[str]) -> Iterator[Figure]:
    """Single appends with and without a snapshot of 1 GiB, written by the leader at its usual rate, by turns."""
    quiet: list[float] = []
    saving: list[float] = []
    with ExitStack() as stack:
        group = stack.enter_context(MachineGroup(context.directory / "pause", context.settings.sized(GIB)))
        client = stack.enter_context(closing(group.client()))
        saver = stack.enter_context(closing(group.client(timeout_s=WAIT_S)))
        leader = group.leader()
        round_trips(client.append, context.settings.warmup_seconds)
        for _round in range(context.settings.rounds):
            quiet.append(stats.percentile(round_trips(client.append, context.settings.seconds), 99))
            with ThreadPoolExecutor(1) as pool:
                address = group.nodes[leader].client_address
                saved = pool.submit(saver.create_snapshot, address, timeout_s=WAIT_S)
                samples: list[float] = []
                while not saved.done():
                    samples += round_trips(client.append, 0.1)
                saved.result()
            saving.append(stats.percentile(samples, 99))
    more = [during - before for during, before in zip(saving, quiet, strict=True)]
    context.say(f"  p99 of an append: {stats.median(quiet):.1f} ms, during a snapshot {stats.median(saving):.1f} ms")
    yield Figure.median(PAUSE, more, "ms")


def measure_install(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """A follower was away while the log that it lacks has gone: how fast it gets the state; elections meanwhile."""
    state_bytes = int(context.settings.log_gib * GIB)
    settings = {
        "segment_bytes": "16m",
        "retention_hours": "0",
        "delete_hour": ";".join(map(str, range(24))),
        "clean_interval_ms": "100",
        "follower_keep_bytes": "0",
        "snapshot_rate_bytes_max": "0",
    }
    with ExitStack() as stack:
        group = stack.enter_context(MachineGroup(context.directory / "install", state_bytes, settings=settings))
        client = stack.enter_context(closing(group.client(timeout_s=WAIT_S)))
        leader = group.leader()
        late = next(one for one in group.nodes if one != leader)
        client.append(b"before")
        address = group.nodes[leader].client_address
        group.kill(late)
        client.append_many([bytes(BODY_BYTES)] * (64 * 1024))
        for node in group.nodes:
            if node != late:  # whatever retention asked for is written before the measurement
                _save_all(client, group.nodes[node].client_address)
        wait_until(lambda: client.metadata(address).begin_index > 1, WAIT_S, "the log keeps its beginning")
        before = client.metadata(address)
        leader_used_s = processor_s(group.pid(leader))
        began = time.perf_counter()
        group.start(late)
        late_address = group.nodes[late].client_address
        wait_until(
            lambda: (client.metadata(late_address).applied_index or NO_INDEX) >= before.committed_index,
            WAIT_S,
            f"{late} does not get the snapshot",
        )
        took_s = time.perf_counter() - began
        used_s = processor_s(group.pid(late)) + processor_s(group.pid(leader)) - leader_used_s
        after = client.metadata(address)
    if INSTALL in names:
        yield Figure(INSTALL, state_bytes / took_s / 1e6, "MB/s", "", None)
    if INSTALL_PROCESSOR in names:
        yield Figure(INSTALL_PROCESSOR, used_s * 1e9 / state_bytes, "s/GB", "", None)
    if INSTALL_ELECTIONS in names:
        yield Figure(INSTALL_ELECTIONS, after.term - before.term, "elections", "", None)


def _save_all(client: DLedgerClient, address: str) -> None:
    """Have a member write a snapshot of all that is committed."""

    def is_applied() -> bool:
        status = client.metadata(address)
        return status.applied_index == status.committed_index

    wait_until(is_applied, WAIT_S, f"{address} does not apply its log")
    client.create_snapshot(address, timeout_s=WAIT_S)


APPENDING: Final = Scenario(
    "appends to a log with a state machine", (APPENDS, APPEND_PROCESSOR), measure_appends, load(2)
)
PAUSING: Final = Scenario("appends during a snapshot", (PAUSE,), measure_pause, constant(5))
_INSTALL_NAMES: Final = (INSTALL, INSTALL_PROCESSOR, INSTALL_ELECTIONS)
INSTALLING: Final = Scenario("a follower whose log has gone", _INSTALL_NAMES, measure_install, logs(5))
