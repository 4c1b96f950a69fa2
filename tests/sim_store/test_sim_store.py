"""Whole brokers under simulation in the normal test suite: some seeds, and proof that a seed is a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim_store.simulation import run_seed

REGRESSIONS = (48,)
"""Seeds that found a bug once."""


@pytest.mark.parametrize("seed", [*range(1, 7), *REGRESSIONS])
def test_a_broker_keeps_every_promise(seed: int) -> None:
    """Whatever its disk does, and however its threads take turns: see ``checks``."""
    result = run_seed(seed)

    assert result.failure is None, "\n".join((f"seed {seed}: {result.failure}", *result.tail))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_many_brokers_keep_every_promise(block: int) -> None:
    """More of the same."""
    for seed in range(1000 + block * 25, 1025 + block * 25):
        result = run_seed(seed)

        assert result.failure is None, "\n".join((f"seed {seed}: {result.failure}", *result.tail))


def test_the_same_seed_gives_the_same_run_in_any_process() -> None:
    """The hash takes in every change of the disk, who made it and when; string hashes differ per process."""
    program = "from tests.sim_store.simulation import run_seed\nprint([run_seed(seed).trace_hash for seed in (4, 10)])"

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
    assert len(set(outputs[0].split())) == 2
