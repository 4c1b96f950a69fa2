"""Every drill in real containers: killed, paused, cut off, isolated, filled up, restarted, replaced."""

from __future__ import annotations

from contextlib import closing

import pytest

from cluster.containers.engine import EngineClient
from cluster.drill.containers import LABEL, ContainerTarget
from cluster.drill.drills import DRILLS
from cluster.drill.runner import DrillResult, run_drill
from cluster.drill.stage import DrillOptions
from cluster.drill.target import Direction

SHORT = DrillOptions(rate=200, calm_s=0.5)


def run(client: EngineClient, image: str, name: str, options: DrillOptions = SHORT) -> DrillResult:
    """Nothing of it may be left afterwards."""
    drill = DRILLS[name]
    with closing(ContainerTarget(client, image, size=options.nodes, small_disks=drill.small_disks)) as target:
        result = run_drill(drill, target, options, lambda _event: None)
    mine = f"{LABEL}={target.name}"
    assert not client.containers.list(all=True, filters={"label": mine})
    assert not client.networks.list(filters={"label": mine})
    assert not client.volumes.list(filters={"label": mine})
    assert result.passed, (result.problems, result.verdict, result.events)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kill-leader", "pause-leader", "disconnect-leader", "fill-disk", "replace-volume"])
def test_a_leader_in_trouble_is_replaced(docker_engine: EngineClient, image: str, name: str) -> None:
    """Nothing acknowledged is lost, doubled or moved, another node leads, and the old one catches up."""
    result = run(docker_engine, image, name)

    facts = result.rounds[0]
    assert facts.leader_before == facts.round.victim
    assert facts.leader_after not in (None, facts.round.victim)
    assert facts.term_after > facts.term_before


@pytest.mark.slow
@pytest.mark.parametrize("direction", list(Direction))
def test_a_leader_that_is_heard_one_way_only_is_replaced(
    docker_engine: EngineClient, image: str, direction: Direction
) -> None:
    """By rules in its network namespace, which are gone afterwards."""
    result = run(docker_engine, image, "isolate-leader", DrillOptions(rate=200, calm_s=0.5, direction=direction))

    assert result.rounds[0].leader_after != result.rounds[0].round.victim


@pytest.mark.slow
def test_all_nodes_may_be_killed_at_once(docker_engine: EngineClient, image: str) -> None:
    """What was acknowledged is in the files of a majority."""
    run(docker_engine, image, "restart-all")


@pytest.mark.slow
def test_a_restart_rolls_through_the_group(docker_engine: EngineClient, image: str) -> None:
    """Every node stops gracefully, the leader hands over: no message fails for good."""
    result = run(docker_engine, image, "rolling-restart")

    assert len(result.rounds) == 3
    assert all(one.without_service_s < 5 for one in result.rounds)
