"""The drills themselves: each is a fault, how it is healed, and what is waited for in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from cluster.drill.stage import Stage
from cluster.drill.target import Direction
from dledger.types import NodeId


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill. ``round`` is run once per round; ``small_disks``: each node needs a disk that can be filled."""

    name: str
    summary: str
    round: Callable[[Stage], None]
    small_disks: bool = False


def _kill_leader(stage: Stage) -> None:
    leader = stage.leader()
    one = stage.fault(
        f"SIGKILL to {leader}, which leads",
        lambda: stage.target.kill(leader),
        victim=leader,
        undo=lambda: stage.target.restart(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"{leader} is started again")
    stage.wait_recovered(one)


def _pause_leader(stage: Stage) -> None:
    leader = stage.leader()
    one = stage.fault(
        f"{leader}, which leads, is paused: it keeps its connections and says nothing more",
        lambda: stage.target.pause(leader),
        victim=leader,
        undo=lambda: stage.target.resume(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"{leader} goes on, not knowing that it was asleep")
    stage.wait_recovered(one)


def _disconnect_leader(stage: Stage) -> None:
    leader = stage.leader()
    one = stage.fault(
        f"{leader}, which leads, is disconnected from the network",
        lambda: stage.target.disconnect(leader),
        victim=leader,
        undo=lambda: stage.target.reconnect(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"{leader} is connected again")
    stage.wait_recovered(one)


def _isolate_leader(stage: Stage) -> None:
    leader, direction = stage.leader(), stage.options.direction
    lost = "what it sends to the others is lost" if direction is Direction.OUT else "what the others send it is lost"
    one = stage.fault(
        f"{leader}, which leads, is isolated one way: {lost}",
        lambda: stage.target.isolate(leader, direction),
        victim=leader,
        undo=lambda: stage.target.rejoin(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"{leader} is heard both ways again")
    stage.wait_recovered(one)


def _fill_disk(stage: Stage) -> None:
    leader = stage.leader()
    one = stage.fault(
        f"the disk of {leader}, which leads, is full to the last byte",
        lambda: stage.target.fill_disk(leader),
        victim=leader,
        undo=lambda: stage.target.free_disk(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"there is room on the disk of {leader} again")
    stage.wait_recovered(one)


def _restart_all(stage: Stage) -> None:
    nodes = stage.target.nodes
    one = stage.fault(
        f"SIGKILL to {_listed(nodes)} at once",
        lambda: stage.target.kill(*nodes),
        undo=lambda: stage.target.restart(*nodes),
    )
    stage.heal(one, "all are started again at once")
    stage.wait_service()
    stage.wait_recovered(one)


def _rolling_restart(stage: Stage) -> None:
    leader = stage.leader()
    for node in (*stage.others(leader), leader):  # the leader last: one hand-over for the whole group
        role = "which leads and hands over" if node == stage.leader() else "a follower"
        one = stage.fault(
            f"SIGTERM to {node}, {role}",
            lambda node=node: stage.target.stop(node),  # type: ignore[misc]  # bound at once
            victim=node,
            undo=lambda node=node: stage.target.restart(node),  # type: ignore[misc]
        )
        stage.heal(one, f"{node} is started again")
        stage.wait_recovered(one)


def _replace_volume(stage: Stage) -> None:
    leader = stage.leader()

    def lose_disk() -> None:
        stage.target.kill(leader)
        stage.target.empty_volume(leader)

    one = stage.fault(
        f"SIGKILL to {leader}, which leads, and its volume is replaced by an empty one",
        lose_disk,
        victim=leader,
        undo=lambda: stage.target.restart(leader),
    )
    stage.wait_service(other_than=leader)
    stage.calm()
    stage.heal(one, f"{leader} is started with nothing, and fetches everything from the others")
    stage.wait_recovered(one)


def _listed(nodes: tuple[NodeId, ...]) -> str:
    return ", ".join(nodes[:-1]) + f" and {nodes[-1]}"


_ALL: Final = (
    Drill("kill-leader", "SIGKILL for the leader; it comes back later", _kill_leader),
    Drill("pause-leader", "the leader stands still through an election, and goes on", _pause_leader),
    Drill("disconnect-leader", "the leader is taken off the network and put back", _disconnect_leader),
    Drill("isolate-leader", "packets between the leader and the others are dropped one way", _isolate_leader),
    Drill("fill-disk", "the leader's disk fills up to the last byte, and is freed", _fill_disk, small_disks=True),
    Drill("restart-all", "SIGKILL for every node at once, and all are started again", _restart_all),
    Drill("rolling-restart", "one node after the other is stopped and started, the leader last", _rolling_restart),
    Drill("replace-volume", "the leader is killed and comes back with an empty disk", _replace_volume),
)
DRILLS: Final[Mapping[str, Drill]] = MappingProxyType({one.name: one for one in _ALL})
