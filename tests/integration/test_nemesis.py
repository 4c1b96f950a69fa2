"""Faults in random order on five nodes under load: kills, pauses, partitions (halves, isolation, bridge, ring)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger.types import NodeId
from tests.integration.conftest import Adopt
from tests.integration.harness import ProxiedGroup

ROUNDS = 6
SERVICE_TIMEOUT_S = 90.0

Fault = Callable[[ProxiedGroup, random.Random], Callable[[], None]]
"""Does harm, leaving some majority able to work, and gives what undoes it."""


def _some(group: ProxiedGroup, chance: random.Random, count: int) -> list[NodeId]:
    return chance.sample(sorted(group.nodes), count)


def kill_two(group: ProxiedGroup, chance: random.Random) -> Callable[[], None]:
    """SIGKILL of a minority."""
    for node in _some(group, chance, 2):
        group.kill(node)
    return group.start_all


def kill_leader(group: ProxiedGroup, _chance: random.Random) -> Callable[[], None]:
    """SIGKILL of whoever leads."""
    group.kill(group.leader())
    return group.start_all


def pause_leader_and_another(group: ProxiedGroup, chance: random.Random) -> Callable[[], None]:
    """SIGSTOP of a minority, the leader among it."""
    leader = group.leader()
    paused = [leader, chance.choice(group.followers(leader))]
    for node in paused:
        group.pause(node)

    def undo() -> None:
        for node in paused:
            group.resume(node)

    return undo


def halves(group: ProxiedGroup, chance: random.Random) -> Callable[[], None]:
    """Two on one side, three on the other."""
    group.network.partition(_some(group, chance, 2), cut=chance.random() < 0.5)
    return group.network.heal_all


def bridge(group: ProxiedGroup, chance: random.Random) -> Callable[[], None]:
    """Two pairs that reach each other only through the fifth node, which sees a majority with either."""
    a, b, c, d, _ = _some(group, chance, 5)
    for one in (a, b):
        for other in (c, d):
            group.network.block(one, other)
            group.network.block(other, one)
    return group.network.heal_all


def ring(group: ProxiedGroup, chance: random.Random) -> Callable[[], None]:
    """Each node reaches two neighbours: everybody sees a majority, each a different one."""
    order = _some(group, chance, 5)
    for place, node in enumerate(order):
        for step in (2, 3):
            group.network.block(node, order[(place + step) % 5])
    return group.network.heal_all


def one_way(group: ProxiedGroup, chance: random.Random) -> Callable[[], None]:
    """The leader is heard by nobody, or hears nobody."""
    leader = group.leader()
    mute = chance.random() < 0.5
    for other in group.followers(leader):
        group.network.block(*((leader, other) if mute else (other, leader)))
    return group.network.heal_all


FAULTS: tuple[Fault, ...] = (kill_two, kill_leader, pause_leader_and_another, halves, bridge, ring, one_way)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 6))])
def test_five_nodes_survive_faults_in_random_order(adopt: Adopt, tmp_path: Path, seed: int) -> None:
    """While any majority is connected the service returns (trap 29); in the end one log explains every answer."""
    chance = random.Random(seed)
    group = adopt(ProxiedGroup(tmp_path / "group", size=5))
    group.start_all()
    group.leader()
    faults = chance.sample(FAULTS, ROUNDS)

    with group.workload() as load:
        for fault in faults:
            load.history.wait_for_acks(30, SERVICE_TIMEOUT_S)
            undo = fault(group, chance)
            load.history.wait_for_acks(30, SERVICE_TIMEOUT_S)
            undo()
        load.history.wait_for_acks(30, SERVICE_TIMEOUT_S)

    group.verify()
