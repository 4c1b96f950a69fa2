"""A broker's state with a million consumer offsets: what a view of it, its file and a full state in the log take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario, constant
from dledger.store.fs import FileSystem
from rocketstore.state.applier import BrokerSnapshot, write_snapshot
from rocketstore.state.changes import split_full
from rocketstore.state.publisher import FULL_PART_BYTES
from rocketstore.state.tables import Tables

OFFSETS: Final = 1_000_000
GROUPS: Final = 1000
QUEUES_PER_TOPIC: Final = 8
VIEW: Final = "broker_state_view"
FILE: Final = "broker_state_file"
FULL: Final = "broker_state_full"
FULL_BYTES: Final = "broker_state_full_bytes"


def tables_of(offsets: int, groups: int = GROUPS) -> Tables:
    """So many consumer offsets, each group's of topics of its own."""
    tables = Tables()
    for group in range(groups):
        noted = tables.groups[f"group-{group}"] = {}
        for number in range(offsets // groups):
            topic, queue_id = divmod(number, QUEUES_PER_TOPIC)
            noted[(f"topic-{group}-{topic}", queue_id)] = 1_000_000 + number
    tables.offset_count = offsets
    return tables


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Processor time: whatever else the machine does can only add to it."""
    tables = tables_of(context.settings.sized(OFFSETS))
    changes = tuple(tables.as_changes())
    fs = FileSystem()
    bodies: list[bytes] = []
    parts: dict[str, Callable[[], object]] = {
        VIEW: tables.copy,
        FILE: lambda: write_snapshot(fs, context.directory, BrokerSnapshot(changes, 1)),
        FULL: lambda: bodies.extend(split_full(changes, full_id="1", upto=1, bytes_max=FULL_PART_BYTES)),
    }
    for name, part in parts.items():
        if name not in names and (name != FULL or FULL_BYTES not in names):
            continue
        bodies.clear()
        took: list[float] = []
        for _ in range(context.settings.rounds):
            began = time.thread_time()
            part()
            took.append((time.thread_time() - began) * 1e3)
        if name in names:
            yield Figure.median(name, took, "ms")
    if FULL_BYTES in names:
        yield Figure(FULL_BYTES, sum(map(len, bodies)) / context.settings.rounds / 1e6, "MB", "", None)


SCENARIO: Final = Scenario("a broker's state", (VIEW, FILE, FULL, FULL_BYTES), measure, constant(2))
