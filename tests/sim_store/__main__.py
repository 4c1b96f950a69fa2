"""``python -m tests.sim_store``: run many seeds of whole brokers, or replay one."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.sim_store.options import choose
from tests.sim_store.simulation import Result, run_seed


def say(line: str) -> None:
    """Print a line for people."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim_store", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="replay this seed alone")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    return parser.parse_args(given)


def replay(seed: int, *, trace: bool) -> int:
    """Run one seed and tell everything about it."""
    result = run_seed(seed, trace=trace)
    say(str(choose(seed)))
    for line in result.tail:
        say(line)
    say(f"seed {seed}: {result.decisions} decisions, {result.simulated_ms} ms simulated, hash {result.trace_hash:08x}")
    say(f"{result.acked} messages, {result.lost} lost unflushed, {dict(result.operations)}, {dict(result.hits)}")
    if result.failure:
        say(f"FAILED: {result.failure}")
    return 1 if result.failure else 0


def results_of(seeds: Iterable[int], jobs: int) -> Iterator[Result]:
    """Run seeds in ``jobs`` processes, in whatever order they finish."""
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=4)


def run_many(first: int, count: int, jobs: int, *, stop: bool = False) -> int:
    """Run seeds (until one fails, with ``stop``), report failures as they come and sum up."""
    begun = time.monotonic()
    failed: list[int] = []
    total, hits, operations = Counter[str](), Counter[str](), Counter[str]()
    for done, result in enumerate(results_of(range(first, first + count), jobs), 1):
        total.update(
            decisions=result.decisions, changes=result.changes, crashes=result.crashes, acked=result.acked,
            lost=result.lost, seconds=result.simulated_ms // 1000,
        )  # fmt: skip
        hits += result.hits
        operations += result.operations
        if result.failure:
            failed.append(result.seed)
            say(f"\nseed {result.seed} FAILED after {result.decisions} decisions: {result.failure}")
            for line in result.tail:
                say(f"  {line}")
            say(f"  replay: make sim-store SEED={result.seed} (TRACE=1: every event)\n")
            if stop:
                return 1
        if done % 50 == 0:
            say(f"{done}/{count} seeds, {time.monotonic() - begun:.0f} s, {len(failed)} failed")
    seconds = time.monotonic() - begun
    say(f"seeds {count}, " + ", ".join(f"{name} {number}" for name, number in total.items()))
    say(f"operations: {', '.join(f'{name} {number}' for name, number in sorted(operations.items()))}")
    say(f"fault hits: {', '.join(f'{name} {number}' for name, number in sorted(hits.items()))}")
    say(f"{seconds:.1f} s, {count / seconds:.2f} seeds/s")
    say(f"FAILED seeds: {sorted(failed)}" if failed else "no failures")
    return 1 if failed else 0


def main(given: list[str] | None = None) -> int:
    """The command; 1 if anything failed."""
    arguments = _arguments(given)
    if arguments.seed is not None:
        return replay(arguments.seed, trace=arguments.trace)
    return run_many(arguments.first, arguments.seeds, arguments.jobs, stop=arguments.stop)


if __name__ == "__main__":
    sys.exit(main())
