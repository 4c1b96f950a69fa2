"""The drills: each is a fault, its heal, and the conditions awaited in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from cluster.drill.history import EventKind, HistoryRecorder, Round, SendOutcome
from cluster.drill.target import Direction, DrillError, DrillTarget, MemberTarget, NotPossibleError, Watch, wait_until
from dledger.monitoring import ConditionKind
from dledger.types import NodeId
from rocketstore.remoting.runtime import RuntimeInfo

SERVICE_TIMEOUT_S: Final = 60.0
CATCH_UP_TIMEOUT_S: Final = 90.0
ACKNOWLEDGEMENTS: Final = 50
"""Consecutive acknowledgements after which service counts as restored."""


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """Options of a drill. ``calm_s``: the quiet time before, between and after faults."""

    nodes: int = 3
    rounds: int = 1
    rate: float = 500.0
    direction: Direction = Direction.OUT
    calm_s: float = 2.0
    keep: bool = False


class DrillContext:
    """A running drill's group, and its rounds so far."""

    def __init__(self, target: DrillTarget, watch: Watch, recorder: HistoryRecorder, options: DrillOptions) -> None:
        self.target = target
        self.watch = watch
        self.options = options
        self.rounds: list[Round] = []
        self._recorder = recorder
        self._undo: Callable[[], object] | None = None

    # --- looking -----------------------------------------------------------------------------------------------------

    def leader(self) -> NodeId:
        """The node that currently leads and accepts messages."""
        return self.watch.leader(SERVICE_TIMEOUT_S)

    def others(self, node: NodeId) -> list[NodeId]:
        return [one for one in self.target.nodes if one != node]

    def step(self, text: str) -> None:
        """Add a line to the timeline."""
        self._recorder.event(EventKind.STEP, text)

    # --- hurting and healing -----------------------------------------------------------------------------------------

    def fault(
        self,
        text: str,
        act: Callable[[], object],
        *,
        victim: NodeId | None = None,
        undo: Callable[[], object] | None = None,
        kind: EventKind = EventKind.FAULT,
    ) -> Round:
        """Start a round. Its time is taken just before the fault, so that no measurement is too short.

        ``kind``: what the timeline calls it, if it is a planned stop.
        ``undo`` is called by ``heal``, or when the drill fails before that.
        """
        at_s = self._recorder.now_s
        if self.rounds:
            self.rounds[-1].ends_s = at_s
        one = Round(len(self.rounds) + 1, text, victim, at_s)
        self.rounds.append(one)
        self._undo = undo
        self._recorder.event(kind, text, node=victim, at_s=at_s)
        act()
        return one

    def heal(self, one: Round, text: str) -> None:
        """Undo the fault."""
        undo, self._undo = self._undo, None
        one.healed_s = self._recorder.now_s
        self._recorder.event(EventKind.HEAL, text, node=one.victim, at_s=one.healed_s)
        if undo is not None:
            undo()

    def undo_the_rest(self) -> None:
        """After a failure: resume and reconnect all nodes, so that they can still be read."""
        undo, self._undo = self._undo, None
        if undo is not None:
            self._recorder.event(EventKind.HEAL, "undoing the fault so that everything can be read back")
            undo()

    # --- waiting -----------------------------------------------------------------------------------------------------

    def calm(self) -> None:
        """Wait while nothing happens, so that the charts show normal operation; the load must continue meanwhile."""
        began_s = self._recorder.now_s
        threading.Event().wait(self.options.calm_s)
        self._wait_acknowledged(began_s)

    def wait_service(self, *, other_than: NodeId | None = None) -> NodeId:
        """Wait until a (different) node leads and messages are acknowledged again; returns the leader."""
        leader = self.watch.leader(SERVICE_TIMEOUT_S, other_than=other_than)
        self._wait_acknowledged(self._recorder.now_s)
        return leader

    def wait_recovered(self, one: Round, nodes: Collection[NodeId] = ()) -> None:
        """Wait until every node (of ``nodes``) responds, has all that the leader had at the start of this wait, and
        counts for elections: the next fault may leave no others.
        """
        chosen = nodes or self.target.nodes
        leader = self.leader()
        status = self.watch.statuses.get(leader)
        if status is None or status.written is None:
            raise DrillError(f"{leader} was the leader and stopped answering")
        mark = status.written

        def all_have() -> bool:
            statuses = {node: one for node, one in self.watch.statuses.items() if node in chosen}
            terms = {status.term for status in statuses.values()}
            return (
                len(statuses) == len(chosen)
                and len(terms) == 1
                and all(_has(status, mark) for status in statuses.values())
            )

        wait_until(all_have, CATCH_UP_TIMEOUT_S, "not every node has caught up")
        one.recovered_s = self._recorder.now_s
        text = f"all {len(chosen)} nodes are up and have caught up" if len(chosen) > 1 else "it serves"
        self._recorder.event(EventKind.RECOVERED, text, node=one.victim, at_s=one.recovered_s)

    def wait_alike(self, nodes: Collection[NodeId] = ()) -> int:
        """After the load: wait until every node (of ``nodes``) has everything in its log and queues; returns the log's
        end.

        Statuses from before this wait do not count: they may be equal but lack the last messages.
        """
        began_s = self._recorder.now_s
        chosen = nodes or self.target.nodes
        found: list[int] = []

        def alike() -> bool:
            statuses = [one for node, one in self.watch.statuses_since(began_s).items() if node in chosen]
            ends = {(status.end, status.written) for status in statuses}
            found[:] = [end for _, end in ends if end is not None]
            return (
                len(statuses) == len(chosen)
                and len(ends) == len(found) == 1
                and all(top == end for top, end in ends)
                and all(status.dispatch_behind == 0 for status in statuses)
            )

        wait_until(alike, CATCH_UP_TIMEOUT_S, "the nodes' logs differ")
        return found[0]

    def _wait_acknowledged(self, since_s: float) -> None:
        enough = min(ACKNOWLEDGEMENTS, max(1, int(self.options.rate / 2)))
        wait_until(
            lambda: self._recorder.acknowledged_since(since_s) >= enough,
            SERVICE_TIMEOUT_S,
            f"fewer than {enough} messages were acknowledged "
            f"({self._recorder.count(SendOutcome.REFUSED)} refused so far)",
        )


def _has(status: RuntimeInfo, mark: int) -> bool:
    """Whether it has everything up to there, and counts for elections."""
    return status.end is not None and status.end >= mark and ConditionKind.NO_STANDING not in status.conditions


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
