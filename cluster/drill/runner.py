"""Runs one drill, from an empty group to a verdict.

The drill ``upgrade`` goes from a master and its slave to a group and back to a plain broker, on the same directories,
under load. The brokers are stopped twice on the way; the producer pauses for that, as docs/brokers.md says, and the
consumer goes on trying. At every station, everything is read back from every broker before it is stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.drill.drills import Drill, DrillContext, DrillOptions
from cluster.drill.history import (
    Bucket,
    DrillEvent,
    EventKind,
    FaultEffects,
    HistoryRecorder,
    NodeCopy,
    Notes,
    Round,
    StatePeriod,
    effects_of,
    series,
    state_periods,
    timeline,
)
from cluster.drill.load import QUEUES, TIMEOUT_S, TOPIC, Load, pull_all, read_node
from cluster.drill.target import (
    SECURITY,
    DrillError,
    DrillTarget,
    MemberTarget,
    MigrationForm,
    MigrationTarget,
    Watch,
    wait_until,
)
from cluster.drill.verdict import DrillVerdict, Station, judge, judge_migration
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


_SAID_MAX: Final = 2000


def run_migration(
    drill: Drill, target: MigrationTarget, options: DrillOptions, tell: Callable[[DrillEvent], None]
) -> DrillResult:
    """Start the pair, go all the way under load, and judge. The caller closes ``target``.

    Raises ``DrillError`` if the pair does not start, ``NotPossibleError`` if the drill cannot be run here.
    """
    target.start()
    pair = target.nodes[:2]
    create_topic(target, pair)
    recorder = HistoryRecorder(tell)
    load = Load([target.address(node) for node in target.nodes], recorder, rate=options.rate, name=drill.name)
    problems: list[str] = []
    with Watch({node: target.address(node) for node in target.nodes}, recorder) as watch:
        context = DrillContext(target, watch, recorder, options)
        migration = _Migration(drill, target, context, load, recorder)
        try:
            recorder.event(EventKind.STEP, f"{pair[0]} is the master, {pair[1]} its slave; the load starts")
            load.start()
            context.calm()
            migration.to_group(pair)
            run_rounds(drill, context, problems, recorder)
            migration.to_plain()
            context.calm()
            load.finish(DRAIN_S)
            migration.read_plain()
        except DrillError as error:
            problems.append(str(error))
            recorder.event(EventKind.PROBLEM, str(error).splitlines()[0])
        finally:
            load.abandon()
    notes = recorder.finish()
    verdict = judge_migration(notes.sends, notes.deliveries, migration.stations) if migration.is_complete else None
    return result_of(drill, target, options, notes, context, verdict, problems)


class _Migration:
    """The steps between the stations, and the messages read at each."""

    def __init__(
        self, drill: Drill, target: MigrationTarget, context: DrillContext, load: Load, recorder: HistoryRecorder
    ) -> None:
        self.stations: list[Station] = []
        self.is_complete = False
        self._drill = drill
        self._target = target
        self._context = context
        self._load = load
        self._recorder = recorder
        self._exported = NodeId("")

    def to_group(self, pair: Sequence[NodeId]) -> None:
        """Stop master and slave, align all directories, and start them as one group."""
        target, context = self._target, self._context
        master, slave = pair
        sent = self._pause()
        context.wait_alike(pair)
        self._station(sent, [self._queues(node, f"{node} of the pair") for node in pair])

        def stop() -> None:
            target.stop(slave)
            target.stop(master)

        one = context.fault("slave and master are stopped", stop, kind=EventKind.STEP)
        self._align(master)
        self._start(one, MigrationForm.GROUP, target.nodes, "all start as one group on the same directories")

    def to_plain(self) -> None:
        """Stop the group, export its log, and start a plain broker on that."""
        target, context = self._target, self._context
        sent = self._pause()
        end = context.wait_alike()
        copies = [
            read_node(node, target.address(node), GROUP_NAME, TOPIC, QUEUES, end, name=f"{node} of the group")
            for node in target.nodes
        ]
        self._station(sent, copies)
        leader = context.leader()

        def stop() -> None:
            for node in (*context.others(leader), leader):
                target.stop(node)

        one = context.fault("the group is stopped, the leader last", stop, kind=EventKind.STEP)
        words = ("upgrade", "export", target.root_of(leader), target.plain_root_of(leader))
        code, said = target.run_tool(*words, "-c", target.conf_of(leader), "--json")
        if code:
            raise DrillError(f"dledger upgrade export failed: {said[-_SAID_MAX:]}")
        found = _document(said)
        context.step(
            f"dledger upgrade export: {found.get('messages'):,} messages of {leader} after its old files, compared"
        )
        self._exported = leader
        self._start(one, MigrationForm.PLAIN, [leader], f"{leader} starts as a plain broker on the exported directory")

    def read_plain(self) -> None:
        """Read everything back at the end of the migration."""
        node = self._exported
        self._context.wait_alike([node])
        self._station(self._recorder.finished(), [self._queues(node, f"the plain broker {node}")])
        self.is_complete = True

    def _pause(self) -> int:
        self._context.step("the producer pauses")
        return self._load.pause()

    def _align(self, master: NodeId) -> None:
        """Compare the directories, of which some must lack messages, and give all of them what they lack."""
        target = self._target
        words = ["upgrade", "check", "--nodes", ",".join(map(target.root_of, target.nodes)), "--json"]
        for node in target.nodes:
            words += ["-c", target.conf_of(node)]
        code, said = target.run_tool(*words)
        standings = {one["name"]: one["standing"] for one in _document(said).get("nodes", [])}
        if code != 1 or not set(standings.values()) <= {"equal", "behind"}:
            raise DrillError(f"dledger upgrade check gave {code}, although a member is empty: {said[-_SAID_MAX:]}")
        self._context.step("dledger upgrade check: " + ", ".join(f"{name} {how}" for name, how in standings.items()))
        code, said = target.run_tool(*words, "--align", "--master", target.root_of(master))
        if code:
            raise DrillError(f"dledger upgrade check --align gave {code}: {said[-_SAID_MAX:]}")
        aligned = _document(said).get("aligned", [])
        self._context.step("dledger upgrade check --align: the old logs are equal; " + "; ".join(aligned))

    def _start(self, one: Round, form: MigrationForm, nodes: Sequence[NodeId], text: str) -> None:
        self._context.heal(one, text)
        self._target.start_as(form, *nodes)
        self._load.resume()
        self._context.wait_service()
        self._context.wait_recovered(one, nodes)

    def _station(self, sent: int, copies: list[NodeCopy]) -> None:
        held = sum(len(one) for one in copies[0].queues.values())
        self._context.step(f"read back from {', '.join(copy.node for copy in copies)}: {held:,} messages")
        self.stations.append(Station(sent, copies))

    def _queues(self, node: NodeId, name: str) -> NodeCopy:
        """A plain broker's copy."""
        address = self._target.address(node)
        try:
            with Admin([address], timeout_s=TIMEOUT_S, security=SECURITY) as admin:
                queues = {one: pull_all(admin, address, TOPIC, one) for one in range(QUEUES)}
        except DLedgerError as error:
            raise DrillError(f"cannot read back what {name} holds: {error}") from error
        return NodeCopy(NodeId(name), queues, "")


def _document(said: str) -> dict[str, Any]:  # whatever JSON holds
    """A command's JSON; other output comes before it."""
    at = said.find("{")
    try:
        found = json.loads(said[at:]) if at >= 0 else {}
    except ValueError as error:
        raise DrillError(f"dledger upgrade printed no JSON: {said[-_SAID_MAX:]}") from error
    return dict(found)
