"""The simulator in the normal test suite: some seeds, and proof that a seed is a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim import options, simulation
from tests.sim.__main__ import main
from tests.sim.simulation import run_seed
from tests.support.sweeps import thinned

EVENTS = 4_000
REGRESSIONS = (60, 272, 512, 1090, 3022, 3551, 20244, 51998, 100302, 400005, 400147, 420863, 420970, 500005, 500117)
"""Seeds that found a bug once, here or in the checker."""


@pytest.mark.sweep
@pytest.mark.parametrize("block", range(10))
def test_sim_random_seeds_keep_every_promise(block: int) -> None:
    """Raft's safety properties hold after every event, and a healed group makes progress within 10 s."""
    for seed in thinned(range(options.NEW_WORLDS + block * 12, options.NEW_WORLDS + block * 12 + 12), 11):
        result = run_seed(seed, EVENTS)

        assert result.failure is None, "\n".join((f"seed {seed}: {result.failure}", *result.tail))


@pytest.mark.sweep
@pytest.mark.parametrize("block", range(4))
def test_sim_what_real_clients_say_of_their_entries_is_so(block: int) -> None:
    """Their windows, numbering and retries, whatever becomes of streams and members."""
    for seed in thinned(range(options.SENDER_WORLDS + block * 12, options.SENDER_WORLDS + block * 12 + 12), 11):
        result = run_seed(seed, EVENTS)

        assert result.failure is None, "\n".join((f"seed {seed}: {result.failure}", *result.tail))
        assert sum(count for kind, count in result.outcomes.items() if kind.startswith("sender"))


@pytest.mark.sweep
@pytest.mark.parametrize("block", range(4))
def test_sim_members_come_and_go(block: int) -> None:
    """Whoever counts is a function of the configuration: one voter at a time, whatever breaks meanwhile (M1 to M16)."""
    for seed in thinned(range(options.MEMBER_WORLDS + block * 12, options.MEMBER_WORLDS + block * 12 + 12), 11):
        result = run_seed(seed, EVENTS)

        assert result.failure is None, "\n".join((f"seed {seed}: {result.failure}", *result.tail))


@pytest.mark.sweep
@pytest.mark.parametrize("block", range(4))
def test_sim_state_machines_are_one(block: int) -> None:
    """Equal states at equal entries, first results, no snapshot of what is not committed, one order of all that clients
    were told: whatever becomes of members, disks, snapshots and their transfer (S1 to S9).
    """
    for seed in thinned(range(options.MACHINE_WORLDS + block * 12, options.MACHINE_WORLDS + block * 12 + 12), 11):
        result = run_seed(seed, EVENTS)

        assert result.failure is None, "\n".join((f"seed {seed}: {result.failure}", *result.tail))
        assert result.outcomes["command done"]


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_sim_regression_seed_stays_fixed(seed: int) -> None:
    """A seed that failed once must never fail again."""
    result = run_seed(seed, 10_000)

    assert result.failure is None, "\n".join((f"seed {seed}: {result.failure}", *result.tail))


@pytest.mark.parametrize("seed", range(5))
def test_sim_no_ops_in_ordinary_form_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker's group writes its no-ops so that Java readers can take them."""

    def choose(seed: int, events: int) -> options.Options:
        chosen = options.choose(seed, events)
        replication = replace(chosen.replication, noop_body=b"begins a term", noop_compatible=True)
        return replace(chosen, replication=replication)

    monkeypatch.setattr(simulation, "choose", choose)

    result = run_seed(seed, EVENTS)

    assert result.failure is None, "\n".join((f"seed {seed}: {result.failure}", *result.tail))


@pytest.mark.parametrize("seed", [3, 11, options.MACHINE_WORLDS + 7])
def test_sim_same_seed_gives_the_same_run(seed: int) -> None:
    """Same inputs, same outputs: the trace hash takes in every event and what every member held."""
    first, second = run_seed(seed, 3_000), run_seed(seed, 3_000)

    assert first == second
    assert first.trace_hash != run_seed(seed + 1, 3_000).trace_hash


def test_sim_runs_until_so_many_operations_were_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """``make sim-map`` says how many were checked."""
    status = main(["--from", str(options.MACHINE_WORLDS), "--operations", "20", "--events", "800", "--jobs", "1"])

    words = capsys.readouterr().out.split()
    assert status == 0
    assert 20 <= int(words[words.index("machines") + 1]) < 2_000
    assert int(words[words.index("seeds") + 1].rstrip(",")) < 20


def test_sim_does_not_depend_on_the_hash_seed() -> None:
    """No decision depends on the order of a set (string hashes differ per process)."""
    lines = (
        "from tests.sim.simulation import run_seed",
        "print([run_seed(seed, 2000).trace_hash for seed in (3, 7, 11, 500_007)])",
    )

    outputs = [
        subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    ]

    assert outputs[0] == outputs[1]
