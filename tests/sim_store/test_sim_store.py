"""Whole brokers under simulation in the normal test suite: some seeds, and proof that a seed is a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim_store.__main__ import WORLDS, run_one

REGRESSIONS = (
    ("plain", 48),
    ("group", 4),
    ("group", 32),
    ("replication", 35),
    ("group-rocketmq5", 218),
    ("group-rocketmq5", 1012),
)
"""Worlds that found a bug once: a checkpoint of what could not be flushed; dispatch that looked for what was gone; a
turned bit that nobody had met, which the world itself took for a difference of logs; a slave with a full disk that
wrote a record of its own; a new master that gave out what the filter would have passed over;
a master that was replaced and said of a newer message that it was not there.
"""


def run(world: str, seed: int) -> None:
    """It must keep every promise."""
    _, result = run_one((world, seed))

    assert result.failure is None, "\n".join((f"{world} {seed}: {result.failure}", *result.tail))


USUAL = [(world, seed) for world in ("plain", "group") for seed in (1, 3, 5)]
WITH_TRANSACTIONS = [(f"{world}-transactions", seed) for world in ("plain", "group") for seed in (1, 3)]


REPLICATION = [("replication", seed) for seed in (3, 5, 8)]
ROCKETMQ5 = [("group-rocketmq5", seed) for seed in (1, 5, 9)]
MORE = [*USUAL, *ROCKETMQ5, *REPLICATION, *WITH_TRANSACTIONS, *REGRESSIONS]
FEW = [("plain", 1), ("group", 1), ("replication", 3), ("plain-transactions", 1), ("group-transactions", 1)]
FEW += [("group-rocketmq5", 1)]
"""One of each kind, in every run."""


@pytest.mark.parametrize(
    ("world", "seed"), [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE if one not in FEW)]
)
def test_brokers_keep_every_promise(world: str, seed: int) -> None:
    """Whatever their disks and links do, and however their threads take turns: see ``checks``."""
    run(world, seed)


@pytest.mark.soak
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("block", range(20))
def test_many_brokers_keep_every_promise(block: int, world: str) -> None:
    """More of the same."""
    for seed in range(1000 + block * 25, 1025 + block * 25):
        run(world, seed)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_in_any_process() -> None:
    """The hash takes in every change of the disk, who made it and when; string hashes differ per process."""
    program = (
        "from tests.sim_store.__main__ import run_one\n"
        "which = (('plain', 4), ('plain', 10), ('group', 1), ('replication', 5), ('group-rocketmq5', 9))\n"
        "print([run_one(one)[1].trace_hash for one in which])"
    )

    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            timeout=300,
        ).stdout
        for hash_seed in ("1", "2")
    ]

    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 5


def test_several_processes_share_the_worlds() -> None:
    """As ``make sim-store`` has them do."""
    command = [sys.executable, "-m", "tests.sim_store", "--seeds", "2", "--world", "plain", "--jobs", "2"]

    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "worlds 2," in ended.stdout
