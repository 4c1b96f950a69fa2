"""Drills on real processes: the same faults, clients and verdicts as in containers, without Docker."""

from __future__ import annotations

from contextlib import closing

import pytest

from cluster.drill.drills import DRILLS, Drill, DrillContext, DrillOptions
from cluster.drill.history import EventKind
from cluster.drill.processes import FILLER, ProcessMembers, ProcessMigration, ProcessTarget
from cluster.drill.runner import DrillResult, run_drill, run_migration
from cluster.drill.target import Direction, DrillError, NotPossibleError
from dledger.types import NodeId
from tests.support.lacking import need_root

SHORT = DrillOptions(rate=200, calm_s=0.5)


def run(name: str, options: DrillOptions = SHORT) -> DrillResult:
    drill = DRILLS[name]
    with closing(ProcessTarget(size=options.nodes, small_disks=drill.small_disks)) as target:
        result = run_drill(drill, target, options, lambda _event: None)
    assert result.passed, (result.problems, result.verdict, result.events)
    assert not target.directory.exists()
    return result


@pytest.mark.slow
def test_the_killed_leader_is_followed_by_another_one_and_comes_back() -> None:
    """Twice in a row; the timeline knows both."""
    result = run("kill-leader", DrillOptions(rate=200, calm_s=0.5, rounds=2))

    assert len(result.rounds) == 2
    assert all(one.leader_after not in (None, one.round.victim) for one in result.rounds)
    assert all(one.term_after > one.term_before for one in result.rounds)
    assert result.verdict is not None
    assert result.verdict.acknowledged > 100


@pytest.mark.slow
@pytest.mark.parametrize("direction", list(Direction))
def test_a_leader_that_is_heard_one_way_only_is_replaced(direction: Direction) -> None:
    """Clients still reach it: whatever it takes then must not be acknowledged and lost."""
    result = run("isolate-leader", DrillOptions(rate=200, calm_s=0.5, direction=direction))

    assert result.rounds[0].leader_after != result.rounds[0].round.victim


@pytest.mark.slow
def test_a_disconnected_leader_is_replaced() -> None:
    """Both ways at once."""
    run("disconnect-leader")


@pytest.mark.slow
def test_a_leader_comes_back_with_nothing() -> None:
    """It fetches all from the others and votes no earlier."""
    run("replace-volume")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "members"), [("replace-node", 3), ("grow-and-shrink", 3)])
def test_members_come_and_go_under_load(name: str, members: int) -> None:
    """Nothing acknowledged is lost, doubled or moved, and the last members all hold it; the leader is among those that
    go.
    """
    with closing(ProcessMembers(size=3)) as target:
        before = set(target.nodes)
        result = run_drill(DRILLS[name], target, SHORT, lambda _event: None)
        assert len(target.nodes) == members
        assert before - set(target.nodes)

    assert result.passed, (result.problems, result.verdict, result.events)
    assert not target.directory.exists()
    assert result.rounds[-1].leader_after not in (None, result.rounds[-1].round.victim)


@pytest.mark.slow
def test_a_pair_becomes_a_group_that_loses_its_leader_and_becomes_a_plain_broker_again() -> None:
    """On the same directories, under load: nothing acknowledged is lost, and queue offsets go on at every step."""
    with closing(ProcessMigration(size=3)) as target:
        result = run_migration(DRILLS["upgrade"], target, SHORT, lambda _event: None)

    assert result.passed, (result.problems, result.verdict, result.events)
    assert not target.directory.exists()
    verdict = result.verdict
    assert verdict is not None
    assert [name.split()[0] for name in verdict.earlier] == ["n0", "n1", "n0", "n1", "n2"]
    to_group, killed, to_plain = result.rounds
    assert to_group.term_before == to_plain.term_after == -1
    assert killed.leader_after not in (None, killed.round.victim)
    assert any("n2 behind" in one.text for one in result.events), "the third directory was empty"


@pytest.mark.slow
def test_a_full_disk_moves_the_leadership() -> None:
    """And with room again, the node catches up."""
    need_root()
    result = run("fill-disk")

    assert result.rounds[0].leader_after != result.rounds[0].round.victim


@pytest.mark.slow
def test_a_drill_that_fails_on_its_way_is_healed_and_judged_all_the_same() -> None:
    """It has not passed, whatever the messages say; but what became of them is known."""

    def break_off(stage: DrillContext) -> None:
        leader = stage.leader()
        stage.fault(
            "paused for good",
            lambda: stage.target.pause(leader),
            victim=leader,
            undo=lambda: stage.target.resume(leader),
        )
        raise DrillError("no leader that accepts messages within 60 s")

    with closing(ProcessTarget(size=3)) as target:
        result = run_drill(Drill("broken", "it breaks off", break_off), target, SHORT, lambda _event: None)

    assert not result.passed
    assert result.problems == ("no leader that accepts messages within 60 s",)
    assert result.verdict is not None
    assert result.verdict.passed
    assert [one.kind for one in result.events if one.kind in (EventKind.PROBLEM, EventKind.HEAL)] == [
        EventKind.PROBLEM,
        EventKind.HEAL,
    ]


def test_what_a_process_target_must_not_do_it_refuses() -> None:
    """Fill this host's disk, or take the files away from under a running broker."""
    node = NodeId("n0")
    with closing(ProcessTarget(size=3)) as target:
        target.start()

        with pytest.raises(NotPossibleError, match="shared with this host"):
            target.fill_disk(node)
        with pytest.raises(DrillError, match="still running"):
            target.empty_volume(node)

        assert not list(target.directory.rglob(FILLER))
