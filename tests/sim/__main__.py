"""``python -m tests.sim``: run many seeds, or replay one."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from tests.sim.options import MEMBER_FAULTS, MEMBER_WORLDS, SWARM, choose
from tests.sim.planted import PLANTS, run_planted
from tests.sim.simulation import Result

EVENTS: Final = 10_000
OPERATIONS: Final = ("command done", "command other revision", "query acked", "old query acked")
"""Of the clients of state machines: what was answered, and so is checked."""
SEEDS_MAX: Final = 100_000
ROLES: Final = ("leader", "candidate", "follower", "down")


def say(line: str) -> None:
    """Print a line for people."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--operations", type=int, default=0, help="as many seeds as make so many on state machines")
    parser.add_argument("--from", dest="first", type=int, default=MEMBER_WORLDS, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--events", type=int, default=EVENTS, help="events before the group is healed")
    parser.add_argument("--seed", type=int, help="replay this seed alone")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="break one rule of the core: some seed must fail")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    return parser.parse_args(given)


def replay(seed: int, events: int, plant: str | None, *, trace: bool) -> int:
    """Run one seed and tell everything about it."""
    result = run_planted(seed, events, plant, trace=trace)
    say(str(choose(seed, events)))
    for line in result.tail:
        say(line)
    say(f"seed {seed}: {result.events} events, {result.simulated_ms} ms simulated, trace hash {result.trace_hash:016x}")
    say(f"{result.elections} elections, {result.committed} entries, {dict(result.outcomes)}, {dict(result.hits)}")
    if result.failure:
        say(f"FAILED: {result.failure}")
    return 1 if result.failure else 0


def results_of(seeds: Iterable[int], events: int, plant: str | None, jobs: int) -> Iterator[Result]:
    """Run seeds in ``jobs`` processes, in whatever order they finish."""
    work = partial(run_planted, events=events, plant=plant)
    if jobs <= 1:
        yield from map(work, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=gc.freeze) as pool:
        yield from pool.imap_unordered(work, seeds, chunksize=8)


def run_many(
    first: int, count: int, events: int, plant: str | None, jobs: int, *, stop: bool = False, operations: int = 0
) -> int:
    """Run seeds, report failures as they come and sum up.

    Until one fails, with ``stop``; until so many operations are done, with ``operations``.
    """
    begun = time.monotonic()
    failed: list[int] = []
    total: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    roles: Counter[tuple[str, str]] = Counter()
    outcomes: Counter[str] = Counter()
    slowest_heal = answered = 0
    for done, result in enumerate(results_of(range(first, first + count), events, plant, jobs), 1):
        total.update(events=result.events, elections=result.elections, entries=result.committed)
        hits += result.hits
        roles += result.roles
        outcomes += result.outcomes
        slowest_heal = max(slowest_heal, result.heal_ms)
        answered = sum(outcomes[kind] for kind in OPERATIONS)
        if result.failure:
            failed.append(result.seed)
            say(f"\nseed {result.seed} FAILED after {result.events} events: {result.failure}")
            for line in result.tail:
                say(f"  {line}")
            extra = "" if events == EVENTS else f" EVENTS={events}"
            say(
                f"  replay: make sim SEED={result.seed}{extra}   (all events: python -m tests.sim --seed "
                f"{result.seed} --events {events} --trace)\n"
            )
            if stop:
                return 1
        if done % 100 == 0:
            seconds = time.monotonic() - begun
            say(f"{done}/{count} seeds, {total['events']} events, {seconds:.0f} s, {len(failed)} failed")
        if 0 < operations <= answered:
            count = done
            break
    seconds = time.monotonic() - begun
    say(f"seeds {count}, events {total['events']}, elections {total['elections']}, committed {total['entries']}")
    say(f"operations of state machines {answered}")
    say(f"outcomes: {', '.join(f'{name} {number}' for name, number in sorted(outcomes.items()))}")
    say_hits(hits, roles)
    say(f"slowest recovery {slowest_heal} ms (simulated) after healing")
    say(f"{seconds:.1f} s, {count / seconds:.1f} seeds/s, {total['events'] / seconds:.0f} events/s")
    say(f"FAILED seeds: {sorted(failed)}" if failed else "no failures")
    return 1 if failed else 0


def say_hits(hits: Counter[str], roles: Counter[tuple[str, str]]) -> None:
    """How often each kind struck, and what the members were that it met then."""
    say(f"{'fault':18}{'hits':>10}" + "".join(f"{role:>11}" for role in ROLES))
    listed = (*SWARM, *MEMBER_FAULTS)
    for name in [*listed, *sorted(name for name in hits if name not in listed)]:
        say(f"{name:18}{hits[name]:>10}" + "".join(f"{roles[name, role]:>11}" for role in ROLES))


def main(given: list[str] | None = None) -> int:
    """The command; 1 if anything failed."""
    arguments = _arguments(given)
    if arguments.seed is not None:
        return replay(arguments.seed, arguments.events, arguments.plant, trace=arguments.trace)
    return run_many(
        arguments.first,
        SEEDS_MAX if arguments.operations else arguments.seeds,
        arguments.events,
        arguments.plant,
        arguments.jobs,
        stop=arguments.stop,
        operations=arguments.operations,
    )


if __name__ == "__main__":
    sys.exit(main())
