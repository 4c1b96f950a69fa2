"""A group of three with one client: its throughput beside PySyncObj's, and one append after the other beside etcd's."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.peers import etcd, pysyncobj
from benchmarks.process_facts import processor_s
from benchmarks.processes import ChildError
from benchmarks.registry import Scenario, load
from benchmarks.targets import ETCD, OWN_P50, PYSYNCOBJ
from dledger.sending.window import WindowOptions
from dledger_cli.local.group import LocalGroup

BODY_BYTES: Final = 1024
PEER_WINDOW: Final = 1000
"""PySyncObj's number of outstanding appends: its published 8,100/s at a p50 of 102 ms imply about this many."""
WINDOWS: Final = {
    "append_pipelined": (WindowOptions().inflight_items_max, PEER_WINDOW),
    "append_pipelined_even": (PEER_WINDOW, PEER_WINDOW),
    "append_pipelined_deep": (8000, 8000),
}
"""Outstanding appends, ours and PySyncObj's: first each side's usual number, which is judged; then two numbers that are
the same on both sides, which are only shown: PySyncObj's speed is its window divided by its tick.
"""
BULK: Final = "append_bulk"
BULK_ENTRIES: Final = 1024
BULK_CALLERS: Final = 4
"""Threads that append so many entries in each call: together as many as are outstanding in ``append_pipelined``."""
LEADER_PROCESSOR: Final = "append_leader_processor"
SINGLES: Final = ("append_roundtrip_p50", "append_roundtrip_p99", LEADER_PROCESSOR)


@dataclass(slots=True)
class OneByOne:
    """One side's appends, one after the other."""

    append: Callable[[bytes], object]
    leader: Callable[[], int]
    """The process id of the leader."""
    rounds: list[list[float]] = field(default_factory=list)
    """Milliseconds of each append."""
    processor_ms: list[float] = field(default_factory=list)
    """Of the leader per append, by round that had but one; heartbeats are in it."""

    def measure(self, seconds: float) -> None:
        """One round."""
        leader = self.leader()
        before = processor_s(leader)
        samples = round_trips(self.append, seconds)
        used = processor_s(leader) - before
        self.rounds.append(samples)
        if self.leader() == leader:
            self.processor_ms.append(used * 1e3 / len(samples))

    def percentile(self, percent: float) -> float:
        """The median of the rounds' percentiles."""
        return stats.median([stats.percentile(samples, percent) for samples in self.rounds])

    def processor(self) -> float:
        """The median of the rounds. Raises ``ChildError`` if leadership moved in each of them."""
        if not self.processor_ms:
            raise ChildError("another node became leader in every round: is this machine overloaded?")
        return stats.median(self.processor_ms)


def round_trips(append: Callable[[bytes], object], seconds: float, body_bytes: int = BODY_BYTES) -> list[float]:
    """Milliseconds of single appends, one after the other."""
    body = os.urandom(body_bytes)
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while not samples or time.perf_counter() < deadline:
        started = time.perf_counter()
        append(body)
        samples.append((time.perf_counter() - started) * 1e3)
    return samples


def pipelined(context: Context, group: LocalGroup, name: str, windows: tuple[int, int]) -> Iterator[Figure]:
    """Throughput with this many appends outstanding, ours and the peer's."""
    window, peer_window = windows

    def ours(client: LoadClient) -> float:
        settings = context.settings
        return client.appends_per_second(settings.seconds, settings.warmup_seconds, BODY_BYTES, window)

    yield beside_pysyncobj(context, group, name, ours, peer_window)


def bulk(context: Context, group: LocalGroup, name: str) -> Iterator[Figure]:
    """Throughput of ``append_many``; PySyncObj has nothing like it, and appends as usual."""

    def ours(client: LoadClient) -> float:
        settings = context.settings
        return client.bulk_appends_per_second(
            settings.seconds, settings.warmup_seconds, BODY_BYTES, BULK_ENTRIES, BULK_CALLERS
        )

    yield beside_pysyncobj(context, group, name, ours, PEER_WINDOW)


def beside_pysyncobj(
    context: Context, group: LocalGroup, name: str, ours: Callable[[LoadClient], float], peer_window: int
) -> Figure:
    """Entries per second, taking turns with PySyncObj."""
    settings = context.settings
    rates: list[float] = []
    theirs: list[float] = []
    with ExitStack() as stack:
        client = stack.enter_context(LoadClient(group.addresses, group.name, context.directory / f"{name}.log"))
        peer = None
        if pysyncobj.available():
            peer = stack.enter_context(pysyncobj.pysyncobj_group(context.directory / f"pysyncobj-{name}"))
        else:
            context.baseline_missing(PYSYNCOBJ, pysyncobj.INSTALL)
        for _ in range(settings.rounds):
            rates.append(ours(client))
            if peer is not None:
                theirs.append(
                    peer.appends_per_second(settings.seconds, settings.warmup_seconds, BODY_BYTES, peer_window)
                )
    return Figure.median(name, rates, "entries/s", PYSYNCOBJ, theirs)


def single(context: Context, group: LocalGroup, suffix: str, names: frozenset[str]) -> Iterator[Figure]:
    """One append after the other, in an otherwise idle group."""
    settings = context.settings
    with ExitStack() as stack:
        client = stack.enter_context(closing(group.client()))
        ours = OneByOne(client.append, lambda: group.pid(group.leader()))
        theirs = None
        if context.has(etcd):
            peer = stack.enter_context(etcd.etcd_group(context.directory / f"etcd{suffix}"))
            theirs = OneByOne(peer.putter(), lambda: peer.pid(peer.leader()))
        else:
            context.without(ETCD, etcd)
        sides = [side for side in (ours, theirs) if side is not None]
        for side in sides:
            round_trips(side.append, settings.warmup_seconds)
        for _ in range(settings.rounds):
            for side in sides:
                side.measure(settings.seconds)
    for percent in (50, 99):
        name, value = f"append_roundtrip_p{percent}{suffix}", ours.percentile(percent)
        if name in names:
            yield Figure(name, value, "ms", ETCD, None if theirs is None else theirs.percentile(percent))
            if percent == 99:
                yield Figure(name, value, "ms", OWN_P50, ours.percentile(50))
    if (name := LEADER_PROCESSOR + suffix) in names:
        yield Figure(name, ours.processor(), "ms", ETCD, None if theirs is None else theirs.processor())


def measure(flush: str, suffix: str, context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """All requested figures of one flush mode, on one group."""
    with LocalGroup(context.directory / f"group-{flush}", flush=flush) as group:
        group.leader()
        if names.intersection(name + suffix for name in SINGLES):
            yield from single(context, group, suffix, names)
        for name, windows in WINDOWS.items():
            if name + suffix in names:
                yield from pipelined(context, group, name + suffix, windows)
        if BULK + suffix in names:
            yield from bulk(context, group, BULK + suffix)


def _scenario(flush: str, suffix: str) -> Scenario:
    names = (*SINGLES, *WINDOWS, BULK)
    return Scenario(
        f"three nodes, flush={flush}, one client",
        tuple(name + suffix for name in names),
        functools.partial(measure, flush, suffix),
        load(len(WINDOWS) + 1),
    )


SYNC: Final = _scenario("sync", "")
ASYNC: Final = _scenario("async", "_async")
