"""Which leaders move: as few as need be, to places that can take them, until each leads its share."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from dledger.types import NodeId
from dledger_cli.commands.rebalance import GroupPlacement, LeaderPlacement, Move

HOSTS = {"n0": "10.0.0.1:20911", "n1": "10.0.0.2:20911", "n2": "10.0.0.3:20911"}


def group(
    name: str, leader: str | None, hosts: Mapping[str, str] = HOSTS, unable: Mapping[str, str] | None = None
) -> GroupPlacement:
    """A group whose voters are at these addresses."""
    return GroupPlacement(
        name,
        NodeId(leader) if leader else None,
        {NodeId(node): address for node, address in hosts.items()},
        {NodeId(node): why for node, why in (unable or {}).items()},
    )


def counts(placement: LeaderPlacement) -> list[int]:
    """How many groups each place leads."""
    return [len(groups) for groups in placement.led().values()]


def test_three_leaders_on_one_machine_are_spread() -> None:
    """Two of them move, and one stays."""
    placement = LeaderPlacement([group(name, "n0") for name in "abc"])

    moves = placement.moves()

    assert moves == [Move("a", NodeId("n0"), NodeId("n1")), Move("b", NodeId("n0"), NodeId("n2"))]
    assert placement.after(moves).led() == {"10.0.0.1": ["c"], "10.0.0.2": ["a"], "10.0.0.3": ["b"]}


def test_a_share_give_or_take_one_moves_nothing() -> None:
    """Four groups on three machines: one leads two."""
    placement = LeaderPlacement([group("a", "n0"), group("b", "n0"), group("c", "n1"), group("d", "n2")])

    assert placement.moves() == []


def test_members_that_cannot_lead_get_nothing() -> None:
    """Their machine's share goes to the others, who are spread all the same."""
    placement = LeaderPlacement([group(name, "n0", unable={"n2": "it does not answer"}) for name in "abcd"])

    moves = placement.moves()

    assert [move.target for move in moves] == ["n1", "n1"]
    assert counts(placement.after(moves)) == [2, 2, 0]
    assert placement.after(moves).moves(even_unable=True)


def test_a_group_makes_room_for_another() -> None:
    """No group of the full machine can go to the empty one: one goes to a third, which passes one on first."""
    placement = LeaderPlacement(
        [
            group("a", "n0", {"n0": "m1:1", "n1": "m2:1"}),
            group("b", "n0", {"n0": "m1:1", "n1": "m2:1"}),
            group("c", "n1", {"n1": "m2:1", "n2": "m3:1"}),
        ]
    )

    moves = placement.moves()

    assert moves == [Move("c", NodeId("n1"), NodeId("n2")), Move("a", NodeId("n0"), NodeId("n1"))]
    assert counts(placement.after(moves)) == [1, 1, 1]


def test_processes_on_one_host_count_for_themselves() -> None:
    """Where two voters of any group are on it: then the port tells, which the groups of a process share."""
    here = {"n0": "127.0.0.1:1", "n1": "127.0.0.1:2", "n2": "127.0.0.1:3"}

    placement = LeaderPlacement([group("a", "n1", here), group("b", "n1", here)])

    assert placement.led() == {"127.0.0.1:1": [], "127.0.0.1:2": ["a", "b"], "127.0.0.1:3": []}


def test_a_group_without_a_leader_counts_nowhere() -> None:
    """And does not move."""
    placement = LeaderPlacement([group("a", None), group("b", "n0"), group("c", "n0")])

    assert [move.group for move in placement.moves()] == ["b"]


@pytest.mark.parametrize("seed", range(200))
def test_any_placement_ends_within_one_if_every_member_can_lead(seed: int) -> None:
    """With all groups on all machines; without more moves than there are groups, and no machine ever leads more."""
    dice = random.Random(seed)
    nodes = [f"n{number}" for number in range(dice.randint(1, 6))]
    hosts = {node: f"10.0.0.{number}:1" for number, node in enumerate(nodes)}
    placement = LeaderPlacement(
        [group(f"g{number}", dice.choice(nodes), hosts) for number in range(dice.randint(1, 20))]
    )

    moves = placement.moves()

    assert len(moves) <= len(placement.groups)
    most = max(counts(placement))
    for end in range(len(moves) + 1):
        assert max(counts(placement.after(moves[:end]))) <= most
    final = counts(placement.after(moves))
    assert max(final) - min(final) <= 1


@pytest.mark.parametrize("seed", range(200))
def test_any_placement_becomes_the_best_there_is(seed: int) -> None:
    """With groups on some machines only, and members that cannot lead: no single group's move makes it better."""
    dice = random.Random(seed)
    nodes = [f"n{number}" for number in range(5)]
    groups = []
    for number in range(dice.randint(1, 12)):
        mine = dice.sample(nodes, 3)
        hosts = {node: f"{node}:1" for node in mine}
        unable = {node: "full" for node in mine[1:] if dice.random() < 0.2}
        groups.append(group(f"g{number}", mine[0], hosts, unable))
    placement = LeaderPlacement(groups)

    moves = placement.moves()

    final = placement.after(moves)
    led = final.led()
    for name, one in final.groups.items():
        assert one.leader is not None
        for node in one.addresses:
            if node not in one.unable:
                assert len(led[final.place(name, one.leader)]) <= len(led[final.place(name, node)]) + 1
    assert all(move.target not in placement.groups[move.group].unable for move in moves)
