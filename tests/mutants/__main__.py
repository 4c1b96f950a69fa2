"""``python -m tests.mutants``: plant every bug, say what caught it; exit code 1 if one survived."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutant import ROOT, Mutant, MutantError, read_all
from tests.mutants.trial import Finding, Outcome, copied, planted, try_seeds, try_tests, try_worlds
from tests.support import memory_disk


def say(line: str) -> None:
    """Print a line for people."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def judge(mutant: Mutant, copy: Path, *, seeds: bool) -> list[Finding]:
    """All that is said of one bug; nothing but ``BROKEN`` if it cannot be planted."""
    try:
        with planted(mutant, copy):
            findings = try_tests(mutant, copy)
            if seeds and mutant.seeds:
                findings.append(try_seeds(mutant, copy))
            if seeds and mutant.worlds:
                findings.append(try_worlds(mutant, copy))
            return findings
    except MutantError as error:
        return [Finding("row", Outcome.BROKEN, str(error), 0.0)]


def is_caught(findings: list[Finding]) -> bool:
    """By any layer; nothing is known of a bug with which something could not run."""
    outcomes = {one.outcome for one in findings}
    return Outcome.BROKEN not in outcomes and outcomes != {Outcome.SURVIVED}


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """So many copies of the project, to be taken and put back."""
    free: SimpleQueue[Path] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(count):
            made = stack.enter_context(tempfile.TemporaryDirectory(dir=memory_disk.directory(), prefix="mutants-"))
            free.put(stack.enter_context(copied(Path(made))))
        yield free


def misfits(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """Of which rows the text is not found exactly once, and where."""
    problems: list[str] = []
    for mutant in mutants:
        try:
            mutant.spoilt(root)
        except MutantError as error:
            problems.append(str(error))
    return problems


def main(given: list[str] | None = None) -> int:
    """The command; 1 if a bug was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="these alone")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--no-seeds", action="store_true", help="without the simulators")
    parser.add_argument("--check", action="store_true", help="plant nothing: only look whether each row fits the code")
    arguments = parser.parse_args(given)
    try:
        mutants = [one for one in read_all() if not arguments.names or one.name in arguments.names]
    except MutantError as error:
        parser.error(str(error))
    unknown = set(arguments.names) - {one.name for one in mutants}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    if arguments.check:
        problems = misfits(mutants)
        say("\n".join([*problems, f"{len(mutants) - len(problems)} of {len(mutants)} rows fit"]))
        return 1 if problems else 0
    begun = time.monotonic()
    talking = threading.Lock()
    layers: Counter[str] = Counter()
    missed: list[str] = []
    seeds = not arguments.no_seeds

    with copies(arguments.jobs) as free, ThreadPoolExecutor(arguments.jobs) as pool:

        def work(mutant: Mutant) -> None:
            copy = free.get()
            try:
                findings = judge(mutant, copy, seeds=seeds)
            finally:
                free.put(copy)
            with talking:
                for one in findings:
                    layers[one.layer] += one.outcome in (Outcome.CAUGHT, Outcome.HUNG)
                caught = is_caught(findings)
                missed.extend([] if caught else [mutant.name])
                say(f"{'caught' if caught else 'MISSED'} {mutant.name}: {'; '.join(map(str, findings))}")

        list(pool.map(work, mutants))
    said = ", ".join(f"{layer} {count}" for layer, count in layers.most_common())
    spent = time.monotonic() - begun, sum(os.times()[2:4])
    say(
        f"{len(mutants) - len(missed)} of {len(mutants)} caught in {spent[0]:.0f} s "
        f"({spent[1]:.0f} s of processor time), by: {said}"
    )
    if missed:
        say(f"MISSED: {' '.join(sorted(missed))}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
