"""Liveness of suspicion: with all told of a crash, there is a new leader within 200 simulated milliseconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger.core.member_state import Leader
from tests.sim.options import SUSPICION_WORLDS, choose
from tests.sim.simulation import Simulation
from tests.support.sweeps import thinned

LIMIT_US = 200_000


def new_leader_after_us(seed: int, size: int) -> int:
    """How long a group under load, which nothing else happens to, has no leader after the first one's crash."""
    usual = choose(seed, 10_000)
    world = replace(usual, size=size, faults=(), tempo=1000, told=1.0, false_alarm_us=0, election=choose(0, 1).election)
    simulation = Simulation(replace(world, drop=0.0, duplicate=0.0, reorder=0.0, spike=0.0, async_members=()))
    scheduler = simulation.scheduler
    for node in simulation.nodes:
        node.start()
    simulation.clients.start()

    def leaders() -> list[int]:
        running = [node.core.state for node in simulation.nodes if node.core is not None]
        return [state.term for state in running if isinstance(state.role, Leader) and state.commit_index >= 3]

    def run_until_led(limit_us: int, after: int = -1) -> int:
        begun_us = scheduler.now_us
        while not any(term > after for term in leaders()):
            scheduler.run_next()
            if scheduler.now_us - begun_us > limit_us:
                break
        return scheduler.now_us - begun_us

    run_until_led(10_000_000)
    until_us = scheduler.now_us + 300_000 + int(simulation.random.random() * 200_000)
    while scheduler.now_us < until_us:
        scheduler.run_next()
    (term,) = leaders()
    simulation.crash(simulation.nodes[simulation.believed_leader(0)], 60_000_000)
    return run_until_led(2_000_000, term)


@pytest.mark.sweep
@pytest.mark.parametrize("size", [3, 5])
def test_with_all_told_there_is_a_leader_within_200_ms(size: int) -> None:
    """Ranks keep members apart, and whoever is refused asks again soon."""
    took = {
        seed: new_leader_after_us(seed, size) for seed in thinned(range(SUSPICION_WORLDS, SUSPICION_WORLDS + 40), 4)
    }

    late = {seed: time_us for seed, time_us in took.items() if time_us >= LIMIT_US}
    assert late == {}
