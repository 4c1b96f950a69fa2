"""Runs one drill, from an empty group to a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.drill.context import DrillContext, DrillOptions
from cluster.drill.drills import Drill
from cluster.drill.history import DrillEvent, EventKind, HistoryRecorder, NodeCopy, Notes
from cluster.drill.load import QUEUES, TOPIC, Load
from cluster.drill.readback import read_node
from cluster.drill.target import SECURITY, DrillError, DrillTarget, MemberTarget
from cluster.drill.timeline import Bucket, FaultEffects, StatePeriod, effects_of, series, state_periods, timeline
from cluster.drill.verdict import DrillVerdict, judge
from cluster.drill.watch import Watch, wait_until
from dledger.errors import DLedgerError
from dledger.types import NodeId
from rocketstore.client import Admin, TopicInfo

GROUP_NAME: Final = "drill"
READY_TIMEOUT_S: Final = 90.0
DRAIN_S: Final = 20.0
LOG_LINES: Final = 2
"""Lines of each node's log to show if a group does not start."""


@dataclass(frozen=True, slots=True)
class DrillResult:
    """Everything in a report. ``verdict`` is None if the messages could not be read back."""

    name: str
    summary: str
    target: str
    notes: tuple[str, ...]
    nodes: tuple[NodeId, ...]
    rate: float
    rounds: tuple[FaultEffects, ...]
    events: tuple[DrillEvent, ...]
    state_periods: dict[NodeId, list[StatePeriod]]
    series: tuple[Bucket, ...]
    seconds: float
    verdict: DrillVerdict | None
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the group recovered as expected, and every message is where it belongs."""
        return self.verdict is not None and self.verdict.passed and not self.problems

    @property
    def without_service_s(self) -> float:
        """The longest time without an acknowledgement around any of the faults."""
        return max((one.without_service_s for one in self.rounds), default=math.nan)


def run_drill(
    drill: Drill, target: DrillTarget, options: DrillOptions, tell: Callable[[DrillEvent], None]
) -> DrillResult:
    """Start the group, run the drill under load, heal, read everything back and judge. The caller closes ``target``.

    Raises ``DrillError`` if the group does not start, ``NotPossibleError`` if the drill cannot be run here.
    """
    target.start()
    spares = target.spares if isinstance(target, MemberTarget) else ()
    addresses = {node: target.address(node) for node in (*target.nodes, *spares)}
    create_topic(target, target.nodes)
    recorder = HistoryRecorder(tell)
    load = Load(list(addresses.values()), recorder, rate=options.rate, name=drill.name)
    problems: list[str] = []
    copies: list[NodeCopy] = []
    with Watch(addresses, recorder) as watch:
        context = DrillContext(target, watch, recorder, options)
        try:
            leader = context.leader()
            recorder.event(
                EventKind.STEP, f"{leader} leads; the load starts: {options.rate:g} messages/s, one consumer"
            )
            load.start()
            run_rounds(drill, context, problems, recorder)
            load.finish(DRAIN_S)
            end = context.wait_alike()
            recorder.event(EventKind.STEP, "the load has ended; reading everything back from every node")
            copies = [read_node(one, addresses[one], GROUP_NAME, TOPIC, QUEUES, end) for one in target.nodes]
        except DrillError as error:
            problems.append(str(error))
        finally:
            load.abandon()
    notes = recorder.finish()
    verdict = judge(notes.sends, notes.deliveries, copies) if copies else None
    return result_of(drill, target, options, notes, context, verdict, problems)


def run_rounds(drill: Drill, context: DrillContext, problems: list[str], recorder: HistoryRecorder) -> None:
    """Run the rounds; a failed drill is healed, so that its messages can still be judged."""
    try:
        for _ in range(context.options.rounds):
            context.calm()
            drill.round(context)
        context.calm()
    except DrillError as error:
        problems.append(str(error))
        recorder.event(EventKind.PROBLEM, str(error).splitlines()[0])
        context.undo_the_rest()


def result_of(
    drill: Drill,
    target: DrillTarget,
    options: DrillOptions,
    notes: Notes,
    context: DrillContext,
    verdict: DrillVerdict | None,
    problems: list[str],
) -> DrillResult:
    """The result of a finished drill; ``verdict`` is None if the messages could not be read back."""
    rounds = tuple(effects_of(one, notes) for one in context.rounds)
    problems += [f"no acknowledgements after: {one.round.fault}" for one in rounds if math.isinf(one.without_service_s)]
    return DrillResult(
        name=_name(drill, options),
        summary=drill.summary,
        target=target.kind,
        notes=target.notes,
        nodes=target.nodes,
        rate=options.rate,
        rounds=rounds,
        events=timeline(notes, rounds),
        state_periods=state_periods(notes.seen, notes.ended_s),
        series=series(notes),
        seconds=notes.ended_s,
        verdict=verdict,
        problems=tuple(problems),
    )


def _name(drill: Drill, options: DrillOptions) -> str:
    return f"{drill.name} --direction {options.direction}" if drill.name == "isolate-leader" else drill.name


def create_topic(target: DrillTarget, nodes: Sequence[NodeId]) -> None:
    """Create it and wait until these brokers know it. Raises ``DrillError``."""
    try:
        _create_topic([target.address(node) for node in nodes])
    except DrillError as error:
        said = [line for node in nodes for line in target.log_of(node).splitlines()[-LOG_LINES:]]
        raise DrillError("\n".join([str(error), *said])) from error


def _create_topic(addresses: list[str]) -> None:
    try:
        with Admin(addresses, timeout_s=READY_TIMEOUT_S, security=SECURITY) as admin:
            admin.put_topic(TopicInfo(TOPIC, QUEUES, QUEUES))
    except DLedgerError as error:
        raise DrillError(f"the group cannot create the topic: {error}") from error
    wait_until(lambda: all(map(_knows_topic, addresses)), READY_TIMEOUT_S, "not every broker knows the topic")


def _knows_topic(address: str) -> bool:
    with Admin([address], timeout_s=1.0, security=SECURITY) as admin:
        try:
            return TOPIC in admin.topics_at(address)
        except DLedgerError:
            return False
