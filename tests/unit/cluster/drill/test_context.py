"""What a drill waits for, and by which statuses it judges."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from cluster.drill.drills import DrillContext, DrillOptions
from cluster.drill.history import HistoryRecorder, Round
from cluster.drill.target import Watch
from dledger.monitoring import Condition, ConditionKind
from dledger.types import NodeId
from rocketstore.remoting.runtime import RuntimeInfo

if TYPE_CHECKING:
    from cluster.drill.target import DrillTarget

NODES = [NodeId(f"n{number}") for number in range(3)]
ACKNOWLEDGED = 5000


def alike(end: int, *conditions: Condition) -> RuntimeInfo:
    """What each of the nodes says of itself."""
    return RuntimeInfo(role="FOLLOWER", term=1, problems=conditions, end=end, written=end, dispatch_behind=0)


class LateWatch(Watch):
    """Its nodes answer anew only after somebody has looked."""

    def __init__(self, recorder: HistoryRecorder) -> None:
        super().__init__({}, recorder)
        self.recorder = recorder
        self.say(1000, recorder.now_s - 0.5)

    def say(self, end: int, asked_s: float) -> None:
        """All of them."""
        for node in NODES:
            self._take(node, asked_s, alike(end))

    def statuses_since(self, asked_s: float) -> dict[NodeId, RuntimeInfo]:
        """As of the look before."""
        found = super().statuses_since(asked_s)
        self.say(ACKNOWLEDGED, self.recorder.now_s)
        return found


def test_the_end_up_to_which_logs_are_compared_is_not_older_than_the_end_of_the_load() -> None:
    """What follows that end is compared on no node, since it bounds what is read."""
    recorder = HistoryRecorder()
    watch = LateWatch(recorder)
    target = cast("DrillTarget", SimpleNamespace(nodes=tuple(NODES)))

    assert DrillContext(target, watch, recorder, DrillOptions()).wait_alike() == ACKNOWLEDGED


def test_a_status_is_as_old_as_the_question() -> None:
    """An answer that comes later may be from before."""
    watch = Watch({}, HistoryRecorder())
    watch._take(NODES[0], 1.0, alike(1))
    watch._take(NODES[1], 2.0, alike(2))

    assert set(watch.statuses) == set(NODES[:2])
    assert set(watch.statuses_since(1.5)) == {NODES[1]}


class NewDiskWatch(Watch):
    """The last of its nodes has caught up at once; it counts once it has been looked at a few times."""

    looks = 0

    def statuses_since(self, asked_s: float) -> dict[NodeId, RuntimeInfo]:
        self.looks += 1
        lacking = Condition(ConditionKind.NO_STANDING, "its vote does not count", 0)
        return {node: alike(1, *([lacking] if node == NODES[-1] and self.looks < 5 else [])) for node in NODES}

    def leader(self, timeout_s: float, *, other_than: NodeId | None = None) -> NodeId:
        return NODES[0]


def test_a_group_has_recovered_only_once_all_its_members_count() -> None:
    """The next fault may leave no others: a new disk holds everything a moment before its vote counts."""
    recorder = HistoryRecorder()
    watch = NewDiskWatch({}, recorder)
    target = cast("DrillTarget", SimpleNamespace(nodes=tuple(NODES)))
    one = Round(1, "kill", NODES[-1], 0.0)

    DrillContext(target, watch, recorder, DrillOptions()).wait_recovered(one)

    assert watch.looks >= 5
    assert not math.isnan(one.recovered_s)
