"""``python -m tests.sim_pop``: play worlds with many seeds, or one again."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.sim_pop.oracle import BrokenRuleError
from tests.sim_pop.world import World

_CHUNK = 200


def run(seeds: range, steps: int, failures_max: int = 3) -> list[tuple[int, str]]:
    """The first seeds that fail, and why."""
    failed: list[tuple[int, str]] = []
    for seed in seeds:
        try:
            World(seed).play(steps)
        except Exception as error:  # noqa: BLE001  # whatever a bug raises is a failure of the world
            failed.append((seed, f"{type(error).__name__}: {error}"))
            if len(failed) == failures_max:
                break
    return failed


def main() -> int:
    """Says every world that fails; 1 if one did."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim_pop", description=__doc__)
    parser.add_argument("--seed", type=int, help="only this seed, with its story")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    if given.seed is not None:
        world = World(given.seed)
        try:
            world.play(given.steps)
        except BrokenRuleError as error:
            sys.stdout.write("\n".join((*world.story, f"seed {given.seed} FAILED: {error}", "")))
            return 1
        except BaseException:
            sys.stdout.write("\n".join((*world.story, "")))
            raise
        sys.stdout.write("\n".join((*world.story, "")))
        return 0
    began, failed, last = time.monotonic(), 0, given.first + given.seeds
    chunks = [range(one, min(one + _CHUNK, last)) for one in range(given.first, last, _CHUNK)]
    with ProcessPoolExecutor(given.jobs) as pool:
        for found in pool.map(partial(run, steps=given.steps), chunks):
            for seed, why in found:
                failed += 1
                sys.stdout.write(f"seed {seed} FAILED: {why}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{given.seeds} worlds, {failed} failed, {time.monotonic() - began:.0f} s\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
