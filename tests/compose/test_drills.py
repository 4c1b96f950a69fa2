"""Every drill in real containers: killed, paused, cut off, isolated, filled up, restarted, replaced."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import docker
import pytest

from cluster.drill.containers import LABEL, ContainerMembers, ContainerMigration, ContainerTarget
from cluster.drill.drills import DRILLS, Drill, DrillContext, DrillOptions
from cluster.drill.runner import DrillResult, run_drill, run_migration
from cluster.drill.target import Direction

SHORT = DrillOptions(rate=200, calm_s=0.5)
ONE_LEADER_EACH = ("kill-leader", "pause-leader", "disconnect-leader", "replace-volume")
CHANGE_MEMBERS = ("grow-and-shrink", "replace-node")
MOVES_THE_LEADERSHIP = len(ONE_LEADER_EACH) + len(Direction)


def run(client: docker.DockerClient, image: str, drill: Drill) -> DrillResult:
    """Nothing of it may be left afterwards."""
    target = ContainerTarget(client, image, size=SHORT.nodes, small_disks=drill.small_disks)
    if drill.changes_members:
        target = ContainerMembers(client, image, size=SHORT.nodes)
    with closing(target):
        result = run_drill(drill, target, SHORT, lambda _event: None)
    nothing_is_left(client, target)
    assert result.passed, "\n".join([*result.problems, str(result.verdict), *map(str, result.events)])
    return result


def nothing_is_left(client: docker.DockerClient, target: ContainerTarget) -> None:
    """Of what it made."""
    mine = f"{LABEL}={target.name}"
    assert not client.containers.list(all=True, filters={"label": mine})
    assert not client.networks.list(filters={"label": mine})
    assert not client.volumes.list(filters={"label": mine})


def most_drills(stage: DrillContext) -> None:
    """One after the other on the same group, whose load goes on."""
    rounds = [(name, Direction.OUT) for name in ONE_LEADER_EACH]
    rounds += [("isolate-leader", direction) for direction in Direction]
    rounds += [("restart-all", Direction.OUT), ("rolling-restart", Direction.OUT)]
    for name, direction in rounds:
        stage.options = replace(stage.options, direction=direction)
        stage.calm()
        DRILLS[name].round(stage)


@pytest.mark.slow
def test_a_group_survives_one_drill_after_the_other(docker_engine: docker.DockerClient, image: str) -> None:
    """Nothing acknowledged is lost, doubled or moved, and every node catches up each time.

    A leader in trouble is replaced, also one that is only heard one way (by rules in its network namespace, which are
    gone afterwards). All may be killed at once: what was acknowledged is in the files of a majority. When a restart
    rolls through the group, every node stops gracefully and the leader hands over: no message fails for long.
    """
    together = {*ONE_LEADER_EACH, "isolate-leader", "restart-all", "rolling-restart"}
    assert set(DRILLS) == {*together, *CHANGE_MEMBERS, "fill-disk", "upgrade"}

    result = run(docker_engine, image, Drill("most-drills", "one after the other", most_drills))

    rounds = result.rounds
    for facts in rounds[:MOVES_THE_LEADERSHIP]:
        assert facts.leader_before == facts.round.victim, facts
        assert facts.leader_after not in (None, facts.round.victim), facts
        assert facts.term_after > facts.term_before, facts
    rolling = rounds[MOVES_THE_LEADERSHIP + 1 :]
    assert len(rolling) == SHORT.nodes
    assert all(one.without_service_s < 5 for one in rolling), rolling


def changes_of_members(stage: DrillContext) -> None:
    """Three become five and three others; then one of those is lost, and a node that had left takes its place."""
    for name in CHANGE_MEMBERS:
        DRILLS[name].round(stage)


@pytest.mark.slow
def test_containers_come_and_go_under_load(docker_engine: docker.DockerClient, image: str) -> None:
    """Nothing acknowledged is lost, doubled or moved; a node that had left comes back with an empty volume."""
    drill = Drill("changes-of-members", "one after the other", changes_of_members, changes_members=True)

    rounds = run(docker_engine, image, drill).rounds

    assert [one.round.victim for one in rounds[:2]] == ["n3", "n4"]
    lost = rounds[-1]
    assert lost.leader_before == lost.round.victim
    assert lost.leader_after not in (None, lost.round.victim)


@pytest.mark.soak
def test_a_pair_becomes_a_group_and_a_plain_broker_again(docker_engine: docker.DockerClient, image: str) -> None:
    """On the same volumes; ``make test`` runs the same drill on processes."""
    target = ContainerMigration(docker_engine, image, size=SHORT.nodes)
    with closing(target):
        result = run_migration(DRILLS["upgrade"], target, SHORT, lambda _event: None)
    nothing_is_left(docker_engine, target)

    assert result.passed, "\n".join([*result.problems, str(result.verdict), *map(str, result.events)])
    assert [one.round.victim is None for one in result.rounds] == [True, False, True]


@pytest.mark.soak
def test_a_full_disk_moves_the_leadership(docker_engine: docker.DockerClient, image: str) -> None:
    """On a group of its own: volumes that can be filled forget everything when a container ends.

    ``make test`` runs the same drill on processes, whose disks are small file systems.
    """
    facts = run(docker_engine, image, DRILLS["fill-disk"]).rounds[0]

    assert facts.leader_before == facts.round.victim
    assert facts.leader_after not in (None, facts.round.victim)
    assert facts.term_after > facts.term_before
