"""The drills: each is a fault, its heal, and the conditions awaited in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from cluster.drill.stage import Stage
from cluster.drill.target import Direction, MemberTarget, NotPossibleError
from dledger.types import NodeId


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill. ``round`` runs once per round. ``small_disks``: each node needs a disk that can be filled.

    ``is_road``: the rounds run on a group that was a master and its slave before, and becomes a plain broker later.
    ``changes_members``: it needs a ``MemberTarget``.
    """

    name: str
    summary: str
    round: Callable[[Stage], None]
    small_disks: bool = False
    is_road: bool = False
    changes_members: bool = False


def _kill_leader(stage: Stage) -> None:
    leader = stage.leader()
    one = stage.fault(
        f"SIGKILL to {leader}, the leader",
        lambda: stage.target.kill(leader),
        victim=leader,
        undo=lambda: stage.target.restart(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"{leader} is restarted")
    stage.wait_recovered(one)


def _pause_leader(stage: Stage) -> None:
    leader = stage.leader()
    one = stage.fault(
        f"{leader}, the leader, is paused: it keeps its connections but goes silent",
        lambda: stage.target.pause(leader),
        victim=leader,
        undo=lambda: stage.target.resume(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"{leader} resumes, unaware of the pause")
    stage.wait_recovered(one)


def _disconnect_leader(stage: Stage) -> None:
    leader = stage.leader()
    one = stage.fault(
        f"{leader}, the leader, is disconnected from the network",
        lambda: stage.target.disconnect(leader),
        victim=leader,
        undo=lambda: stage.target.reconnect(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"{leader} is reconnected")
    stage.wait_recovered(one)


def _isolate_leader(stage: Stage) -> None:
    leader, direction = stage.leader(), stage.options.direction
    lost = (
        "everything it sends to the others is lost"
        if direction is Direction.OUT
        else "everything the others send it is lost"
    )
    one = stage.fault(
        f"{leader}, the leader, is isolated one way: {lost}",
        lambda: stage.target.isolate(leader, direction),
        victim=leader,
        undo=lambda: stage.target.rejoin(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"both directions of {leader} work again")
    stage.wait_recovered(one)


def _fill_disk(stage: Stage) -> None:
    leader = stage.leader()
    one = stage.fault(
        f"the disk of {leader}, the leader, is filled to the last byte",
        lambda: stage.target.fill_disk(leader),
        victim=leader,
        undo=lambda: stage.target.free_disk(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"the disk of {leader} has free space again")
    stage.wait_recovered(one)


def _restart_all(stage: Stage) -> None:
    nodes = stage.target.nodes
    one = stage.fault(
        f"SIGKILL to {_listed(nodes)} at once",
        lambda: stage.target.kill(*nodes),
        undo=lambda: stage.target.restart(*nodes),
    )
    stage.heal(one, "all are restarted at once")
    stage.wait_service()
    stage.wait_recovered(one)


def _rolling_restart(stage: Stage) -> None:
    leader = stage.leader()
    for node in (*stage.others(leader), leader):  # the leader last: one leadership transfer for the whole group
        role = "the leader, which transfers leadership first" if node == stage.leader() else "a follower"
        one = stage.fault(
            f"SIGTERM to {node}, {role}",
            lambda node=node: stage.target.stop(node),  # type: ignore[misc]  # bound at once
            victim=node,
            undo=lambda node=node: stage.target.restart(node),  # type: ignore[misc]
        )
        stage.heal(one, f"{node} is restarted")
        stage.wait_recovered(one)


def _replace_volume(stage: Stage) -> None:
    leader = stage.leader()

    def lose_disk() -> None:
        stage.target.kill(leader)
        stage.target.empty_volume(leader)

    one = stage.fault(
        f"SIGKILL to {leader}, the leader, and an empty volume in place of its own",
        lose_disk,
        victim=leader,
        undo=lambda: stage.target.restart(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"{leader} starts empty and fetches everything from the others")
    stage.wait_recovered(one)


def _replace_node(stage: Stage) -> None:
    target, leader = _changing(stage), stage.leader()
    new = target.spares[0]
    one = stage.fault(
        f"SIGKILL to {leader}, the leader, whose machine never comes back",
        lambda: target.kill(leader),
        victim=leader,
        undo=lambda: target.replace(leader, new),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"`member replace {leader} {new}`: {new} starts empty, catches up and votes, {leader} leaves")
    stage.wait_recovered(one)


def _grow_and_shrink(stage: Stage) -> None:
    """The leader is removed last."""
    target, old = _changing(stage), stage.leader()
    for node in target.spares:
        one = stage.fault(f"`member add {node}`", lambda node=node: target.add(node), victim=node)  # type: ignore[misc]  # bound at once
        stage.heal(one, f"{node} votes")
        stage.wait_recovered(one)
        stage.calm()
    for node in (stage.others(old)[0], stage.leader()):
        role = "the leader, which hands over first" if node == stage.leader() else "a follower"
        one = stage.fault(f"`member remove {node}`, {role}", lambda node=node: target.remove(node), victim=node)  # type: ignore[misc]  # likewise
        stage.heal(one, f"{node} has left")
        stage.wait_recovered(one)
        stage.calm()


def _changing(stage: Stage) -> MemberTarget:
    if not isinstance(stage.target, MemberTarget):
        raise NotPossibleError(f"the members of this group of {stage.target.kind} cannot change")
    return stage.target


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
        is_road=True,
    ),
)
DRILLS: Final[Mapping[str, Drill]] = MappingProxyType({one.name: one for one in _ALL})
