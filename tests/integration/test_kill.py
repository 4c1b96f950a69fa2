"""SIGKILL: whoever is killed, and however often, nothing that was acknowledged is lost and the replicas stay alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.harness import Group

KILLS = 4


@pytest.mark.slow
def test_leader_is_killed_again_and_again(group: Group) -> None:
    """Acknowledged = survives (Raft leader completeness, §5.4.3): the leader dies under load, each time a new one."""
    with group.workload() as load:
        for _ in range(KILLS):
            load.history.wait_for_acks(100)
            leader = group.leader()
            group.kill(leader)
            group.leader(other_than=leader)
            load.history.wait_for_acks(100)
            group.start(leader)

    group.verify()


def test_killed_follower_catches_up(steady: Group) -> None:
    """One of three may die at any time: the others go on, and it gets what it missed."""
    with steady.workload() as load:
        load.history.wait_for_acks(100)
        term, follower = steady.term(), steady.followers(steady.leader())[0]
        steady.kill(follower)
        load.history.wait_for_acks(300)
        steady.start(follower)
        load.history.wait_for_acks(100)

    steady.verify()
    assert steady.term() == term, "a dead follower costs no election, nor does its return (pre-vote)"


def test_killed_majority_stops_the_service_until_it_returns(group: Group) -> None:
    """Without a quorum nothing is acknowledged; with it back, everything that was is there."""
    with group.workload() as load:
        load.history.wait_for_acks(100)
        survivor = group.followers(group.leader())[0]
        for node in group.followers(survivor):
            group.kill(node)
        group.wait_for(lambda all_: all_[survivor].leader is None, "the survivor gives up its leader")
        committed = group.status(survivor).committed_index
        for node in group.followers(survivor):
            group.start(node)
        load.history.wait_for_acks(100)

    log = group.verify()
    assert max(log) > committed


@pytest.mark.smoke
def test_all_nodes_killed_at_once_keep_every_committed_entry(group: Group) -> None:
    """Everybody dies under load; after the restart nobody's term or commit goes back (Raft: persistent state)."""
    with group.workload() as load:
        load.history.wait_for_acks(300)
        before = group.told_by()
        for node in group.nodes:
            group.kill(node)
        group.start_all()
        load.history.wait_for_acks(100)
        after = group.told_by()

    for node, status in before.items():
        assert after[node].term >= status.term
        assert after[node].committed_index >= status.committed_index
    group.verify()


@pytest.mark.smoke
def test_acknowledged_entries_survive_a_restart_without_any_load(group: Group) -> None:
    """Stop everybody gracefully, start everybody: the same log, and terms only grow."""
    group.append(500)
    before, terms = group.verify(), {node: one.term for node, one in group.told_by().items()}

    codes = [group.stop(node) for node in group.nodes]
    group.start_all()
    group.leader()
    after = group.verify()

    assert codes == [0, 0, 0]
    assert {index: after[index] for index in before} == before
    assert all(one.term > terms[node] for node, one in group.told_by().items()), "every campaign is a new term"


@pytest.mark.parametrize("size", [1, 5])
def test_groups_of_other_sizes(make_group: Callable[..., Group], size: int) -> None:
    """One node alone, and five of which two die: both acknowledge, restart and keep everything."""
    group = make_group(size=size)
    group.start_all()
    with group.workload() as load:
        load.history.wait_for_acks(100)
        victims = list(group.nodes)[: max(1, size // 2)]
        for node in victims:
            group.kill(node)
        if size > 1:
            load.history.wait_for_acks(100)
        for node in victims:
            group.start(node)
        load.history.wait_for_acks(100)

    group.verify()
