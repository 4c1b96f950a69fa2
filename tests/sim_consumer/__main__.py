"""``python -m tests.sim_consumer``: play worlds with many seeds, or one again."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.sim_consumer.worlds import KINDS, WORLDS, play


def main() -> int:
    """Says every world that fails; 1 if one did."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim_consumer", description=__doc__)
    parser.add_argument("--world", choices=sorted(WORLDS), help="only this one")
    parser.add_argument("--kind", help="only this consumer: " + ", ".join(KINDS))
    parser.add_argument("--seed", type=int, help="only this seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="show what the consumers log")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO if given.log else logging.CRITICAL, format="%(relativeCreated)d %(message)s")
    seeds = range(given.first, given.first + given.seeds) if given.seed is None else [given.seed]
    failed = played = 0
    for seed in seeds:
        for name in [given.world] if given.world else WORLDS:
            for kind in [given.kind] if given.kind else KINDS:
                began = time.monotonic()
                played += 1
                try:
                    run = play(name, kind, seed)
                except AssertionError as error:
                    failed += 1
                    sys.stdout.write(f"FAILED {error}\n")
                else:
                    sys.stdout.write(
                        f"{name} {kind} {seed}: {len(run.oracle.sent)} messages, {run.oracle.repeated} repeated, "
                        f"{time.monotonic() - began:.1f} s\n"
                    )
                sys.stdout.flush()
    sys.stdout.write(f"{played} worlds, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
