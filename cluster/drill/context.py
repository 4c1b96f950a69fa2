"""The steps of a drill: inject a fault, wait until the group serves again, heal it, wait until all have caught up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from cluster.drill.history import EventKind, HistoryRecorder, SendOutcome
from cluster.drill.target import Direction, DrillError, DrillTarget
from cluster.drill.timeline import Round
from cluster.drill.watch import Watch, wait_until
from dledger.conditions import ConditionKind
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
