"""What a drill waits for, and by which statuses it judges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from cluster.drill.history import HistoryRecorder
from cluster.drill.stage import DrillOptions, Stage
from cluster.drill.watch import Watch
from dledger.types import NodeId

if TYPE_CHECKING:
    from cluster.drill.target import DrillTarget
    from rocketstore.client import BrokerStatus

NODES = [NodeId(f"n{number}") for number in range(3)]
ACKNOWLEDGED = 5000


def alike(end: int) -> BrokerStatus:
    """What each of the nodes says of itself."""
    return cast(
        "BrokerStatus",
        SimpleNamespace(
            max_offset=end, end_offset=end, dispatch_behind_bytes=0, raft_role="FOLLOWER", term=1, is_master=False
        ),
    )


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

    def statuses_since(self, asked_s: float) -> dict[NodeId, BrokerStatus]:
        """As of the look before."""
        found = super().statuses_since(asked_s)
        self.say(ACKNOWLEDGED, self.recorder.now_s)
        return found


def test_the_end_up_to_which_logs_are_compared_is_not_older_than_the_end_of_the_load() -> None:
    """What follows that end is compared on no node, since it bounds what is read."""
    recorder = HistoryRecorder()
    watch = LateWatch(recorder)
    target = cast("DrillTarget", SimpleNamespace(nodes=tuple(NODES)))

    assert Stage(target, watch, recorder, DrillOptions()).wait_alike() == ACKNOWLEDGED


def test_a_status_is_as_old_as_the_question() -> None:
    """An answer that comes later may be from before."""
    watch = Watch({}, HistoryRecorder())
    watch._take(NODES[0], 1.0, alike(1))
    watch._take(NODES[1], 2.0, alike(2))

    assert set(watch.statuses) == set(NODES[:2])
    assert set(watch.statuses_since(1.5)) == {NODES[1]}
