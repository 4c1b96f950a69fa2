"""How long a group accepts no appends after its leader is killed or frozen, with default settings on both sides."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.peers import etcd
from benchmarks.registry import Scenario
from benchmarks.targets import ETCD, OWN_P50
from dledger.client import DLedgerClient
from dledger.errors import DLedgerError
from dledger.types import NodeId
from dledger_cli.local.group import LocalGroup

ETCD_KILLS_MAX: Final = 5
GIVE_UP_SECONDS: Final = 30.0
FROZEN: Final = "failover_frozen_max"
BODY: Final = os.urandom(1024)


def first_append_after(
    group: LocalGroup, client: DLedgerClient, harm: Callable[[NodeId], None], undo: Callable[[NodeId], None]
) -> float:
    """Harm the leader; returns the seconds until a new append is acknowledged. Afterwards the node is back in the
    group.
    """
    client.append(BODY)
    leader = group.leader()
    started = time.perf_counter()
    harm(leader)
    while True:
        try:
            client.append(BODY)
            break
        except DLedgerError:
            if time.perf_counter() > started + GIVE_UP_SECONDS:
                raise
    took = time.perf_counter() - started
    undo(leader)
    group.wait_converged()
    return took


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Kills of our group, with etcd's evenly interspersed."""
    kills = context.settings.kills
    etcd_kills = min(kills, ETCD_KILLS_MAX)
    ours: list[float] = []
    theirs: list[float] = []
    with ExitStack() as stack:
        group = stack.enter_context(LocalGroup(context.directory / "group-failover"))
        client = stack.enter_context(closing(group.client()))
        peer = None
        if context.has(etcd):
            peer = stack.enter_context(etcd.etcd_group(context.directory / "etcd-failover"))
            peer.putter()(BODY)
        else:
            context.without(ETCD, etcd)
        for number in range(kills):
            ours.append(first_append_after(group, client, group.kill, group.start))
            its_turn = number * etcd_kills // kills != (number + 1) * etcd_kills // kills
            if peer is not None and its_turn:
                theirs.append(peer.first_put_after_kill(BODY))
    context.say(f"  seconds of each kill: {' '.join(f'{value:.2f}' for value in sorted(ours))}")
    if "failover_p50" in names:
        yield Figure("failover_p50", stats.median(ours), "s", ETCD, stats.median(theirs) if theirs else None)
    if "failover_max" in names:
        yield Figure("failover_max", max(ours), "s", ETCD, max(theirs, default=None))


def measure_frozen(context: Context, _: frozenset[str]) -> Iterator[Figure]:
    """SIGSTOP: as after a power cut or in a partition, nothing says that the leader is gone."""
    with ExitStack() as stack:
        group = stack.enter_context(LocalGroup(context.directory / "group-frozen"))
        client = stack.enter_context(closing(group.client()))
        took = [first_append_after(group, client, group.pause, group.resume) for _ in range(context.settings.kills)]
    context.say(f"  seconds of each: {' '.join(f'{value:.2f}' for value in sorted(took))}")
    yield Figure(FROZEN, max(took), "s", OWN_P50, stats.median(took))


SCENARIO: Final = Scenario("failover: SIGKILL for the leader", ("failover_p50", "failover_max"), measure)
FREEZING: Final = Scenario("failover: SIGSTOP for the leader", (FROZEN,), measure_frozen)
