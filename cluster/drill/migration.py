"""The migration from a master and its slave to a group and back to a plain broker, on the same directories, under load.

The brokers are stopped twice on the way; the producer pauses for that, as docs/brokers.md says, and the consumer
goes on trying. At every station, everything is read back from every broker before it is stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from cluster.drill.context import DrillContext, DrillOptions
from cluster.drill.drills import Drill
from cluster.drill.history import DrillEvent, EventKind, HistoryRecorder, NodeCopy
from cluster.drill.load import QUEUES, TOPIC, Load
from cluster.drill.readback import TIMEOUT_S, pull_all, read_node
from cluster.drill.runner import DRAIN_S, GROUP_NAME, DrillResult, create_topic, result_of, run_rounds
from cluster.drill.target import SECURITY, DrillError, MigrationForm, MigrationTarget
from cluster.drill.timeline import Round
from cluster.drill.verdict import Station, judge_migration
from cluster.drill.watch import Watch
from dledger.errors import DLedgerError
from dledger.types import NodeId
from rocketstore.client import Admin

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
