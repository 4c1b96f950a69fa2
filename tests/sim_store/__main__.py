"""``python -m tests.sim_store``: run many seeds of whole brokers, or replay one."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from tests.sim_store.group import run_group
from tests.sim_store.options import choose, choose_group
from tests.sim_store.replication import run_replication
from tests.sim_store.replication_options import choose_replication
from tests.sim_store.rocketmq5 import run_rocketmq5
from tests.sim_store.simulation import run_seed
from tests.sim_store.world import Result

WORLDS: Final = ("plain", "group", "plain-transactions", "group-transactions", "group-rocketmq5", "replication")


def say(line: str) -> None:
    """Print a line for people."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim_store", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--world",
        choices=WORLDS,
        help="a broker alone, a group, or a master with slaves; each seed makes one of each kind",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="replay this seed alone")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    return parser.parse_args(given)


def run_one(which: tuple[str, int], *, trace: bool = False) -> tuple[str, Result]:
    """Run the world of a kind that a seed makes."""
    world, seed = which
    if world == "replication":
        return world, run_replication(seed, trace=trace)
    if world == "group-rocketmq5":
        return world, run_rocketmq5(seed, trace=trace)
    run = run_seed if world.startswith("plain") else run_group
    return world, run(seed, trace=trace, transactions=world.endswith("transactions"))


def replay(world: str, seed: int, *, trace: bool) -> int:
    """Run one world and tell everything about it."""
    _, result = run_one((world, seed), trace=trace)
    say(str(_options(world, seed)))
    for line in result.tail:
        say(line)
    say(f"{world} {seed}: {result.decisions} decisions, {result.simulated_ms} ms, hash {result.trace_hash:08x}")
    say(f"{result.acked} messages, {result.lost} lost, {dict(result.operations)}, {dict(result.hits)}")
    if result.failure:
        say(f"FAILED: {result.failure}")
    return 1 if result.failure else 0


def _options(world: str, seed: int) -> object:
    if world == "replication":
        return choose_replication(seed)
    return choose(seed) if world.startswith("plain") else choose_group(seed)


def results_of(which: Iterable[tuple[str, int]], jobs: int) -> Iterator[tuple[str, Result]]:
    """Run worlds in ``jobs`` processes, in whatever order they finish."""
    if jobs <= 1:
        yield from map(run_one, which)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_one, which, chunksize=2)


def run_many(worlds: tuple[str, ...], first: int, count: int, jobs: int, *, stop: bool = False) -> int:
    """Run seeds (until one fails, with ``stop``), report failures as they come and sum up."""
    begun = time.monotonic()
    failed: list[tuple[str, int]] = []
    which = [(world, seed) for seed in range(first, first + count) for world in worlds]
    total, hits, operations = Counter[str](), Counter[str](), Counter[str]()
    for done, (world, result) in enumerate(results_of(which, jobs), 1):
        total.update(
            decisions=result.decisions, changes=result.changes, crashes=result.crashes, acked=result.acked,
            lost=result.lost, seconds=result.simulated_ms // 1000,
        )  # fmt: skip
        hits += result.hits
        operations += result.operations
        if result.failure:
            failed.append((world, result.seed))
            say(f"\n{world} {result.seed} FAILED after {result.decisions} decisions: {result.failure}")
            for line in result.tail:
                say(f"  {line}")
            say(f"  replay: make sim-store WORLD={world} SEED={result.seed} (TRACE=1: every event)\n")
            if stop:
                return 1
        if done % 50 == 0:
            say(f"{done}/{len(which)} worlds, {time.monotonic() - begun:.0f} s, {len(failed)} failed")
    seconds = time.monotonic() - begun
    say(f"worlds {len(which)}, " + ", ".join(f"{name} {number}" for name, number in total.items()))
    say(f"operations: {', '.join(f'{name} {number}' for name, number in sorted(operations.items()))}")
    say(f"fault hits: {', '.join(f'{name} {number}' for name, number in sorted(hits.items()))}")
    say(f"{seconds:.1f} s, {len(which) / seconds:.2f} worlds/s")
    say(f"FAILED: {sorted(failed)}" if failed else "no failures")
    return 1 if failed else 0


def main(given: list[str] | None = None) -> int:
    """The command; 1 if anything failed."""
    arguments = _arguments(given)
    worlds = (arguments.world,) if arguments.world else WORLDS
    if arguments.seed is not None:
        return max(replay(world, arguments.seed, trace=arguments.trace) for world in worlds)
    return run_many(worlds, arguments.first, arguments.seeds, arguments.jobs, stop=arguments.stop)


if __name__ == "__main__":
    from tests.sim_store.__main__ import main as under_its_name  # a new process cannot find ``__main__.run_one``

    sys.exit(under_its_name())
