"""A group of three with one client: pipelined throughput compared with PySyncObj's, single round trips with etcd's."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Final

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.peers import etcd, pysyncobj
from benchmarks.registry import Scenario
from benchmarks.targets import ETCD, OWN_P50, PYSYNCOBJ
from cluster.local.group import LocalGroup
from dledger.sending.window import WindowOptions

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


def round_trips(append: Callable[[bytes], object], seconds: float) -> list[float]:
    """Milliseconds of single appends, one after the other."""
    body = os.urandom(BODY_BYTES)
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
    settings = context.settings
    ours: list[float] = []
    theirs: list[float] = []
    with ExitStack() as stack:
        client = stack.enter_context(LoadClient(group.addresses, group.name, context.directory / f"{name}.log"))
        peer = None
        if pysyncobj.available():
            peer = stack.enter_context(pysyncobj.pysyncobj_group(context.directory / f"pysyncobj-{name}"))
        else:
            context.baseline_missing(PYSYNCOBJ, pysyncobj.INSTALL)
        for _ in range(settings.rounds):
            ours.append(client.appends_per_second(settings.seconds, settings.warmup_seconds, BODY_BYTES, window))
            if peer is not None:
                theirs.append(
                    peer.appends_per_second(settings.seconds, settings.warmup_seconds, BODY_BYTES, peer_window)
                )
    yield Figure(name, stats.median(ours), "entries/s", PYSYNCOBJ, stats.median(theirs) if theirs else None)


def single(context: Context, group: LocalGroup, suffix: str, names: frozenset[str]) -> Iterator[Figure]:
    """Round trips, one at a time, in an otherwise idle group."""
    settings = context.settings
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    with ExitStack() as stack:
        client = stack.enter_context(closing(group.client()))
        put = None
        if etcd.available():
            put = stack.enter_context(etcd.etcd_group(context.directory / f"etcd{suffix}")).putter()
        else:
            context.baseline_missing(ETCD, etcd.INSTALL)
        for append in (client.append, put):
            if append is not None:
                round_trips(append, settings.warmup_seconds)
        for _ in range(settings.rounds):
            ours.append(round_trips(client.append, settings.seconds))
            if put is not None:
                theirs.append(round_trips(put, settings.seconds))
    p50, p99 = (stats.median([stats.percentile(samples, percent) for samples in ours]) for percent in (50, 99))
    for percent, value in ((50, p50), (99, p99)):
        name = f"append_roundtrip_p{percent}{suffix}"
        if name in names:
            peer_value = stats.median([stats.percentile(samples, percent) for samples in theirs]) if theirs else None
            yield Figure(name, value, "ms", ETCD, peer_value)
            if percent == 99:
                yield Figure(name, value, "ms", OWN_P50, p50)


def measure(flush: str, suffix: str, context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """All requested figures of one flush mode, on one group."""
    with LocalGroup(context.directory / f"group-{flush}", flush=flush) as group:
        group.leader()
        if any("roundtrip" in name for name in names):
            yield from single(context, group, suffix, names)
        for name, windows in WINDOWS.items():
            if name + suffix in names:
                yield from pipelined(context, group, name + suffix, windows)


def _scenario(flush: str, suffix: str) -> Scenario:
    names = ("append_roundtrip_p50", "append_roundtrip_p99", *WINDOWS)
    return Scenario(
        f"three nodes, flush={flush}, one client",
        tuple(name + suffix for name in names),
        functools.partial(measure, flush, suffix),
    )


SYNC: Final = _scenario("sync", "")
ASYNC: Final = _scenario("async", "_async")
