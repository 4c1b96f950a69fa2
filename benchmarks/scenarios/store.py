"""The store alone, in this process: the cost of appending on leader and follower, compared with the minimum work."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from crc32c import crc32c

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario
from benchmarks.store_access import BODY_BYTES, RECORD_BYTES, TERM, open_store
from benchmarks.targets import BARE_LOOP
from dledger.store.format import HEADER
from dledger.types import EntryRun, LogIndex
from dledger.values import MIB

BATCH_ENTRIES: Final = 256
RUN_BYTES: Final = MIB
RUNS_BYTES: Final = 256 * MIB
ROUND_BYTES_MAX: Final = 2048 * MIB
"""The maximum written in one round, so that it measures the store, not the kernel's throttling of dirty pages."""
BARE_BYTES: Final = 1024 * MIB
WARM_BYTES: Final = 64 * MIB


def random_bodies() -> list[bytes]:
    """One batch of distinct bodies."""
    return [os.urandom(BODY_BYTES) for _ in range(BATCH_ENTRIES)]


def leader_appends_per_second(context: Context, bodies: Sequence[bytes]) -> float:
    """Entries per second accepted by ``append_as_leader`` in batches, rolling segments as they fill."""
    directory = context.directory / "store-leader"
    store = open_store(directory)
    try:
        _repeat(lambda: store.append_as_leader(TERM, bodies), len(bodies), 0.5, ROUND_BYTES_MAX // 8 // RECORD_BYTES)
        limit = ROUND_BYTES_MAX // RECORD_BYTES
        return _repeat(lambda: store.append_as_leader(TERM, bodies), len(bodies), context.settings.seconds, limit)
    finally:
        store.close()
        shutil.rmtree(directory)


def bare_appends_per_second(target: mmap.mmap, bodies: Sequence[bytes]) -> float:
    """Entries per second of the minimum work that yields records: pack, crc32c of the body, join, memcpy."""
    batch_bytes = RECORD_BYTES * len(bodies)
    batches = len(target) // batch_bytes
    pack = HEADER.pack
    started = time.perf_counter()
    for offset in range(0, batches * batch_bytes, batch_bytes):
        parts: list[bytes] = []
        for index, body in enumerate(bodies):
            parts.append(pack(1, RECORD_BYTES, index, 1, offset, 0, 0, crc32c(body), BODY_BYTES))
            parts.append(body)
        target[offset : offset + batch_bytes] = b"".join(parts)
    return batches * len(bodies) / (time.perf_counter() - started)


def bare_into_fresh_file(context: Context, bodies: Sequence[bytes]) -> float:
    """The minimum loop over a mapped segment that is preallocated and untouched, as in a growing log."""
    path = context.directory / "bare-segment"
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, BARE_BYTES)
            with mmap.mmap(file.fileno(), BARE_BYTES) as target:
                return bare_appends_per_second(target, bodies)
        finally:
            path.unlink()


def bare_into_warm_memory(bodies: Sequence[bytes]) -> float:
    """The minimum loop over resident memory: the upper limit of the arithmetic alone."""
    with mmap.mmap(-1, WARM_BYTES) as target:
        target[:] = bytes(WARM_BYTES)
        return stats.median([bare_appends_per_second(target, bodies) for _ in range(5)])


def make_runs(context: Context, bodies: Sequence[bytes]) -> list[EntryRun]:
    """Runs as pushed by a leader, each about 1 MiB, contiguous from the start of the log."""
    directory = context.directory / "store-source"
    store = open_store(directory)
    try:
        while store.end_position < RUNS_BYTES:
            store.append_as_leader(TERM, bodies)
        runs: list[EntryRun] = []
        first = 0
        while first <= store.last.index:
            last = store.slice_run(LogIndex(first), RUN_BYTES)
            runs.append(store.read_run(LogIndex(first), last))
            first = last + 1
        return runs
    finally:
        store.close()
        shutil.rmtree(directory)


def follower_gigabytes_per_second(context: Context, runs: Sequence[EntryRun]) -> float:
    """GB of log per second through ``check_run`` and ``append_run``: every CRC verified, then one copy."""
    directory = context.directory / "store-follower"
    store = open_store(directory)
    try:
        started = time.perf_counter()
        for run in runs:
            store.append_run(store.check_run(run), run.first_index)
        return _total(runs) / (time.perf_counter() - started) / 1e9
    finally:
        store.close()
        shutil.rmtree(directory)


def crc_gigabytes_per_second(runs: Sequence[EntryRun]) -> float:
    """GB per second of ``crc32c`` over the same bytes, run by run."""
    started = time.perf_counter()
    for run in runs:
        crc32c(run.data)
    return _total(runs) / (time.perf_counter() - started) / 1e9


def copy_gigabytes_per_second(runs: Sequence[EntryRun]) -> float:
    """GB per second when copying the same bytes into mapped, warm memory."""
    target = mmap.mmap(-1, 2 * max(len(run.data) for run in runs))
    try:
        target[:] = bytes(len(target))
        started = time.perf_counter()
        for run in runs:
            target[: len(run.data)] = run.data
        return _total(runs) / (time.perf_counter() - started) / 1e9
    finally:
        target.close()


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Alternating rounds of ours and of the minimum work, so that noise affects both."""
    bodies = random_bodies()
    rounds = range(context.settings.rounds)
    if "store_append" in names:
        ours, bare, warm = [], [], []
        for _ in rounds:
            ours.append(leader_appends_per_second(context, bodies))
            bare.append(bare_into_fresh_file(context, bodies))
            warm.append(bare_into_warm_memory(bodies))
        yield Figure.median("store_append", ours, "entries/s", BARE_LOOP, bare)
        yield Figure.median("store_append", ours, "entries/s", "the same loop into warm memory", warm)
    if "follower_append" in names:
        runs = make_runs(context, bodies)
        appended, copied, summed = [], [], []
        for _ in rounds:
            appended.append(follower_gigabytes_per_second(context, runs))
            copied.append(copy_gigabytes_per_second(runs))
            summed.append(crc_gigabytes_per_second(runs))
        yield Figure.median("follower_append", appended, "GB/s", "memcpy", copied)
        yield Figure.median("follower_append", appended, "GB/s", "crc32c alone", summed)


def _repeat(action: Callable[[], object], entries_each: int, seconds: float, entries_max: int | None) -> float:
    """Entries per second of an action repeated for ``seconds``, or until ``entries_max`` are done."""
    entries = 0
    started = time.perf_counter()
    deadline = started + seconds
    while (now := time.perf_counter()) < deadline and (entries_max is None or entries < entries_max):
        action()
        entries += entries_each
    return entries / (now - started)


def _total(runs: Sequence[EntryRun]) -> int:
    return sum(len(run.data) for run in runs)


SCENARIO: Final = Scenario("the store alone", ("store_append", "follower_append"), measure)
