"""A small perfect drill, as it would have been recorded, for tests that break one thing of it each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cluster.drill.history import (
    DrillDelivery,
    DrillEvent,
    DrillSend,
    EventKind,
    NodeCopy,
    NodeView,
    Notes,
    Round,
    SeenChange,
    SendOutcome,
    ServedMessage,
    effects_of,
    series,
    state_periods,
    timeline,
)
from cluster.drill.runner import DrillResult
from cluster.drill.verdict import DrillVerdict, judge
from dledger.types import NodeId

N0, N1, N2 = NODES = NodeId("n0"), NodeId("n1"), NodeId("n2")
QUEUES = 2


def body_of(number: int) -> bytes:
    return b"drill/%d " % number


@dataclass
class History:
    """Messages 0 to 9 by turns in two queues, all acknowledged, stored on three nodes and consumed once."""

    sends: list[DrillSend] = field(default_factory=list)
    deliveries: list[DrillDelivery] = field(default_factory=list)
    copies: list[NodeCopy] = field(default_factory=list)

    def verdict(self) -> DrillVerdict:
        return judge(self.sends, self.deliveries, self.copies)

    def with_outcome(self, number: int, outcome: SendOutcome) -> None:
        """Another outcome than acknowledged, hence no place."""
        self.sends[number] = self.sends[number]._replace(outcome=outcome, queue_id=-1, queue_offset=-1, error="why")

    def change_queue(self, queue_id: int, messages: list[ServedMessage], *nodes: NodeId) -> None:
        """What these nodes (or all) give back of a queue."""
        self.copies = [
            replace(copy, queues={**copy.queues, queue_id: tuple(messages)}) if copy.node in (nodes or NODES) else copy
            for copy in self.copies
        ]

    def queue(self, queue_id: int) -> list[ServedMessage]:
        return list(self.copies[0].queues[queue_id])


def perfect(count: int = 10) -> History:
    """Nothing is wrong."""
    made = History()
    queues: dict[int, list[ServedMessage]] = {queue_id: [] for queue_id in range(QUEUES)}
    for number in range(count):
        queue_id, offset, at_s = number % QUEUES, number // QUEUES, number * 0.1
        queues[queue_id].append(ServedMessage(offset, body_of(number), number))
        made.sends.append(
            DrillSend(number, body_of(number), at_s, at_s + 0.01, SendOutcome.ACKNOWLEDGED, queue_id, offset)
        )
        made.deliveries.append(DrillDelivery(0, at_s + 0.02, queue_id, offset, body_of(number)))
    made.copies = [NodeCopy(node, {q: tuple(all_) for q, all_ in queues.items()}, "entries 0 to 12") for node in NODES]
    return made


def failover() -> Notes:
    """n0 leads and is killed at second 1; n1 leads from 1.8 on and acknowledges again at 2.01."""
    history = perfect(40)
    sends = [one for one in history.sends if not 1.0 <= one.sent_s < 2.0]
    sends.append(DrillSend(99, b"drill/99 ", 0.99, 1.2, SendOutcome.UNKNOWN, error="the stream ended"))
    return Notes(
        sends=sorted(sends, key=lambda one: one.number),
        attempts_failed=[(1.05, "n0: the stream ended"), (1.4, "n0: is unreachable")],
        deliveries=history.deliveries,
        seen=[
            SeenChange(0.0, N0, NodeView("LEADER", 1, is_master=True)),
            SeenChange(0.0, N1, NodeView("FOLLOWER", 1)),
            SeenChange(0.0, N2, NodeView("FOLLOWER", 1)),
            SeenChange(1.04, N0, NodeView()),
            SeenChange(1.7, N1, NodeView("CANDIDATE", 2)),
            SeenChange(1.8, N1, NodeView("LEADER", 2, is_master=True)),
            SeenChange(1.82, N2, NodeView("FOLLOWER", 2)),
            SeenChange(3.2, N0, NodeView("FOLLOWER", 2)),
        ],
        events=[
            DrillEvent(0.0, EventKind.STEP, "the load begins"),
            DrillEvent(1.0, EventKind.FAULT, "SIGKILL to n0", N0),
            DrillEvent(3.0, EventKind.HEAL, "n0 is restarted", N0),
            DrillEvent(3.5, EventKind.RECOVERED, "all have caught up", N0),
        ],
        ended_s=4.0,
    )


def result_of(notes: Notes, verdict: DrillVerdict | None, *problems: str, name: str = "kill-leader") -> DrillResult:
    """As the runner would put it together, for one fault at second 1."""
    rounds = (effects_of(Round(1, "SIGKILL to n0", N0, 1.0, 3.0, 3.5), notes),)
    return DrillResult(
        name=name,
        summary="SIGKILL to the leader",
        target="containers",
        notes=("a note <of the target>",),
        nodes=NODES,
        rate=10.0,
        rounds=rounds,
        events=timeline(notes, rounds),
        state_periods=state_periods(notes.seen, notes.ended_s),
        series=series(notes),
        seconds=notes.ended_s,
        verdict=verdict,
        problems=problems,
    )
