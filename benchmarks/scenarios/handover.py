"""How long a group acknowledges nothing when its leader is to go: a transfer of leadership, and a clean stop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario
from dledger.client import DLedgerClient
from dledger_cli.local.group import LocalGroup

BODY: Final = os.urandom(1024)
AFTER_SECONDS: Final = 0.3
"""How long appends go on after the new leader is known."""
ROUNDS_MAX: Final = 15
OWN: Final = "no appends failed"


def longest_pause(client: DLedgerClient, event: Callable[[], object]) -> float:
    """Seconds between two acknowledgements, one append after the other, while ``event`` takes place.

    Raises ``DLedgerError`` for an append that fails: with a planned change none does.
    """
    client.append(BODY)
    acknowledged = [time.perf_counter()]
    thread = threading.Thread(target=event)
    thread.start()
    until = float("inf")
    while acknowledged[-1] < until:
        client.append(BODY)
        acknowledged.append(time.perf_counter())
        if until == float("inf") and not thread.is_alive():
            until = acknowledged[-1] + AFTER_SECONDS
    thread.join()
    return max(after - before for before, after in pairwise(acknowledged))


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Transfers to each member in turn, then stops of the leader."""
    rounds = min(context.settings.kills, ROUNDS_MAX)
    transfers: list[float] = []
    stops: list[float] = []
    with (
        LocalGroup(context.directory / "group-handover") as group,
        closing(group.client()) as client,
        closing(group.client()) as admin,
    ):
        for _ in range(rounds if "handover_transfer_p50" in names else 0):
            group.wait_converged()
            transfers.append(longest_pause(client, admin.transfer_leadership))
        for _ in range(rounds if "handover_stop_p50" in names else 0):
            group.wait_converged()
            leader = group.leader()
            stops.append(longest_pause(client, lambda leader=leader: group.stop(leader)))  # type: ignore[misc]
            group.start(leader)
    for name, took in (("handover_transfer_p50", transfers), ("handover_stop_p50", stops)):
        if took:
            context.say(f"  {name}, seconds: {' '.join(f'{value:.3f}' for value in sorted(took))}")
            yield Figure(name, stats.median(took), "s", OWN, None)


SCENARIO: Final = Scenario("handover: a leader that is to go", ("handover_transfer_p50", "handover_stop_p50"), measure)
