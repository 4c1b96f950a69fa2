"""The drills: each is a fault, its heal, and the conditions awaited in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from cluster.drill.context import DrillContext
from cluster.drill.target import Direction, MemberTarget, NotPossibleError
from dledger.types import NodeId


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill. ``round`` runs once per round. ``small_disks``: each node needs a disk that can be filled.

    ``is_migration``: the rounds run on a group that was a master and its slave before, and a plain one later.
    ``changes_members``: it needs a ``MemberTarget``.
    """

    name: str
    summary: str
    round: Callable[[DrillContext], None]
    small_disks: bool = False
    is_migration: bool = False
    changes_members: bool = False


def _kill_leader(context: DrillContext) -> None:
    leader = context.leader()
    one = context.fault(
        f"SIGKILL to {leader}, the leader",
        lambda: context.target.kill(leader),
        victim=leader,
        undo=lambda: context.target.restart(leader),
    )
    context.wait_service(other_than=leader)
    context.calm()
    context.heal(one, f"{leader} is restarted")
    context.wait_recovered(one)


def _pause_leader(context: DrillContext) -> None:
    leader = context.leader()
    one = context.fault(
        f"{leader}, the leader, is paused: it keeps its connections but goes silent",
        lambda: context.target.pause(leader),
        victim=leader,
        undo=lambda: context.target.resume(leader),
    )
    context.wait_service(other_than=leader)
    context.calm()
    context.heal(one, f"{leader} resumes, unaware of the pause")
    context.wait_recovered(one)


def _disconnect_leader(context: DrillContext) -> None:
    leader = context.leader()
    one = context.fault(
        f"{leader}, the leader, is disconnected from the network",
        lambda: context.target.disconnect(leader),
        victim=leader,
        undo=lambda: context.target.reconnect(leader),
    )
    context.wait_service(other_than=leader)
    context.calm()
    context.heal(one, f"{leader} is reconnected")
    context.wait_recovered(one)


def _isolate_leader(context: DrillContext) -> None:
    leader, direction = context.leader(), context.options.direction
    lost = (
        "everything it sends to the others is lost"
        if direction is Direction.OUT
        else "everything the others send it is lost"
    )
    one = context.fault(
        f"{leader}, the leader, is isolated one way: {lost}",
        lambda: context.target.isolate(leader, direction),
        victim=leader,
        undo=lambda: context.target.rejoin(leader),
    )
    context.wait_service(other_than=leader)
    context.calm()
    context.heal(one, f"both directions of {leader} work again")
    context.wait_recovered(one)


def _fill_disk(context: DrillContext) -> None:
    leader = context.leader()
    one = context.fault(
        f"the disk of {leader}, the leader, is filled to the last byte",
        lambda: context.target.fill_disk(leader),
        victim=leader,
        undo=lambda: context.target.free_disk(leader),
    )
    context.wait_service(other_than=leader)
    context.calm()
    context.heal(one, f"the disk of {leader} has free space again")
    context.wait_recovered(one)


def _restart_all(context: DrillContext) -> None:
    nodes = context.target.nodes
    one = context.fault(
        f"SIGKILL to {_listed(nodes)} at once",
        lambda: context.target.kill(*nodes),
        undo=lambda: context.target.restart(*nodes),
    )
    context.heal(one, "all are restarted at once")
    context.wait_service()
    context.wait_recovered(one)


def _rolling_restart(context: DrillContext) -> None:
    leader = context.leader()
    for node in (*context.others(leader), leader):  # the leader last: one leadership transfer for the whole group
        role = "the leader, which transfers leadership first" if node == context.leader() else "a follower"
        one = context.fault(
            f"SIGTERM to {node}, {role}",
            lambda node=node: context.target.stop(node),  # type: ignore[misc]  # bound at once
            victim=node,
            undo=lambda node=node: context.target.restart(node),  # type: ignore[misc]
        )
        context.heal(one, f"{node} is restarted")
        context.wait_recovered(one)


def _replace_volume(context: DrillContext) -> None:
    leader = context.leader()

    def lose_disk() -> None:
        context.target.kill(leader)
        context.target.empty_volume(leader)

    one = context.fault(
        f"SIGKILL to {leader}, the leader, and an empty volume in place of its own",
        lose_disk,
        victim=leader,
        undo=lambda: context.target.restart(leader),
    )
    context.wait_service(other_than=leader)
    context.calm()
    context.heal(one, f"{leader} starts empty and fetches everything from the others")
    context.wait_recovered(one)


def _replace_node(context: DrillContext) -> None:
    target, leader = _changing(context), context.leader()
    new = target.spares[0]
    one = context.fault(
        f"SIGKILL to {leader}, the leader, whose machine never comes back",
        lambda: target.kill(leader),
        victim=leader,
        undo=lambda: target.replace(leader, new),
    )
    context.wait_service(other_than=leader)
    context.calm()
    context.heal(one, f"`member replace {leader} {new}`: {new} starts empty, catches up and votes, {leader} leaves")
    context.wait_recovered(one)


def _grow_and_shrink(context: DrillContext) -> None:
    """The leader is removed last."""
    target, old = _changing(context), context.leader()
    for node in target.spares:
        one = context.fault(f"`member add {node}`", lambda node=node: target.add(node), victim=node)  # type: ignore[misc]  # bound at once
        context.heal(one, f"{node} votes")
        context.wait_recovered(one)
        context.calm()
    for node in (context.others(old)[0], context.leader()):
        role = "the leader, which hands over first" if node == context.leader() else "a follower"
        one = context.fault(f"`member remove {node}`, {role}", lambda node=node: target.remove(node), victim=node)  # type: ignore[misc]  # likewise
        context.heal(one, f"{node} has left")
        context.wait_recovered(one)
        context.calm()


def _changing(context: DrillContext) -> MemberTarget:
    if not isinstance(context.target, MemberTarget):
        raise NotPossibleError(f"the members of this group of {context.target.kind} cannot change")
    return context.target


def _listed(nodes: tuple[NodeId, ...]) -> str:
    return ", ".join(nodes[:-1]) + f" and {nodes[-1]}"


_ALL: Final = (
    Drill("kill-leader", "SIGKILL to the leader; it comes back later", _kill_leader),
    Drill("pause-leader", "the leader is paused through an election, then resumes", _pause_leader),
    Drill("disconnect-leader", "the leader is disconnected from the network and reconnected", _disconnect_leader),
    Drill("isolate-leader", "packets between the leader and the others are dropped one way", _isolate_leader),
    Drill("fill-disk", "the leader's disk fills up completely and is freed again", _fill_disk, small_disks=True),
    Drill("restart-all", "SIGKILL to every node at once; all are restarted", _restart_all),
    Drill("rolling-restart", "nodes are stopped and started one by one, the leader last", _rolling_restart),
    Drill("replace-volume", "the leader is killed and comes back with an empty disk", _replace_volume),
    Drill(
        "replace-node",
        "the leader is lost for good, and one command puts another node in its place",
        _replace_node,
        changes_members=True,
    ),
    Drill(
        "grow-and-shrink",
        "two nodes are added, then a follower and the leader are removed",
        _grow_and_shrink,
        changes_members=True,
    ),
    Drill(
        "upgrade",
        "master and slave become a group, its leader is killed, and the group becomes a plain broker again",
        _kill_leader,
        is_migration=True,
    ),
)
DRILLS: Final[Mapping[str, Drill]] = MappingProxyType({one.name: one for one in _ALL})
