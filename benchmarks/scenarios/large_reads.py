"""Large reads of a log: how fast one client gets it, and what another client's appends notice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.registry import Scenario, load
from benchmarks.scenarios.appends import BULK_ENTRIES, round_trips
from benchmarks.targets import APPEND_ALONE
from dledger_cli.local.group import LocalGroup

BODY_BYTES: Final = 1536
ENTRIES: Final = 300 * BULK_ENTRIES
"""The log has nearly half a gigabyte: more than a processor's caches, less than anybody's memory."""
FILL_TIMEOUT_S: Final = 60.0
RATE: Final = "log_bulk_read"
APPEND: Final = "log_bulk_read_append_p50"


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Three nodes; the leader is read by one client, alone and while another one appends, one entry after the other."""
    settings = context.settings
    rates: list[float] = []
    alone: list[float] = []
    meanwhile: list[float] = []
    with ExitStack() as stack:
        group = stack.enter_context(LocalGroup(context.directory / "large-reads"))
        group.leader()
        client = stack.enter_context(closing(group.client(timeout_s=FILL_TIMEOUT_S)))
        bodies = [os.urandom(BODY_BYTES)] * BULK_ENTRIES
        for _ in range(ENTRIES // BULK_ENTRIES):
            client.append_many(bodies)
        reader = stack.enter_context(LoadClient(group.addresses, group.name, context.directory / "large-reads.log"))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        reader.megabytes_read_per_second(settings.warmup_seconds)
        for _ in range(settings.rounds):
            if RATE in names:
                rates.append(reader.megabytes_read_per_second(settings.seconds))
            if APPEND in names:
                alone.append(stats.median(round_trips(client.append, settings.seconds)))
                reading = pool.submit(reader.megabytes_read_per_second, settings.seconds)
                meanwhile.append(stats.median(round_trips(client.append, settings.seconds)))
                reading.result()
    if rates:
        yield Figure.median(RATE, rates, "MB/s", "")
    if meanwhile:
        yield Figure.median(APPEND, meanwhile, "ms", APPEND_ALONE, alone)


SCENARIO: Final = Scenario("large reads of a log of three nodes", (RATE, APPEND), measure, load(3))
