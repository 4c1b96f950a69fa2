"""``dledger cluster rebalance``: spreads the leaders of groups of brokers over their machines.

Where the leaders are, and which should move so that each machine leads its share, is decided without input or output.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import click

from dledger.command_line import flag_values
from dledger.errors import DLedgerError
from dledger.rpc.ports import NodeStatus
from dledger.types import MemberRole, NodeId
from dledger.values import host_of
from dledger_cli import terminal
from dledger_cli.commands.status import find_leader
from dledger_cli.targets import BrokerTarget, broker_options

if TYPE_CHECKING:
    from dledger.client import DLedgerClient
    from rocketstore.client.aio.admin_requests import BrokerStatus
    from rocketstore.client.aio.errors import ClientError
    from rocketstore.client.aio.routes import RoutedBroker
    from rocketstore.client.blocking import Admin


@dataclass(frozen=True, slots=True)
class GroupPlacement:
    """One group: who leads it, and who could."""

    name: str
    leader: NodeId | None
    addresses: Mapping[NodeId, str]
    """The peer addresses of its voters."""
    unable: Mapping[NodeId, str] = field(default_factory=dict)
    """Voters that cannot lead now, and why."""


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer of a group's leadership."""

    group: str
    source: NodeId
    target: NodeId


class LeaderPlacement:
    """The groups' leaders by place: a machine, or a process where two voters of a group are on one machine.

    Machines are told apart by the hosts of the peer addresses, processes by host and port, which the groups of a
    process share.
    """

    def __init__(self, groups: Sequence[GroupPlacement]) -> None:
        self.groups = {one.name: one for one in groups}
        several = any(_has_twins(map(host_of, one.addresses.values())) for one in groups)
        self._place_of = {
            one.name: {node: address if several else host_of(address) for node, address in one.addresses.items()}
            for one in groups
        }

    def place(self, group: str, node: NodeId) -> str:
        """Where a voter is."""
        return self._place_of[group][node]

    def led(self) -> dict[str, list[str]]:
        """The groups led at each place, also at those that lead none."""
        found: dict[str, list[str]] = {place: [] for places in self._place_of.values() for place in places.values()}
        for name, one in sorted(self.groups.items()):
            if one.leader is not None:
                found[self.place(name, one.leader)].append(name)
        return dict(sorted(found.items()))

    def after(self, moves: Iterable[Move]) -> LeaderPlacement:
        """As it will be."""
        leaders = {move.group: move.target for move in moves}
        return LeaderPlacement(
            [replace(one, leader=leaders.get(name, one.leader)) for name, one in self.groups.items()]
        )

    def moves(self, *, even_unable: bool = False) -> list[Move]:
        """The transfers, in order, after which no place leads two groups more than another that could lead one of them.

        ``even_unable``: as if every voter could lead now. No place ever leads more than the most at the beginning.
        """
        led = {place: set(groups) for place, groups in self.led().items()}
        leaders = {name: one.leader for name, one in self.groups.items() if one.leader is not None}
        found: list[Move] = []
        while path := self._path(led, leaders, even_unable=even_unable):
            for move in reversed(path):  # the last first: it makes room for the one before
                source, target = self.place(move.group, move.source), self.place(move.group, move.target)
                led[source].remove(move.group)
                led[target].add(move.group)
                leaders[move.group] = move.target
                found.append(move)
        return found

    def _path(self, led: Mapping[str, set[str]], leaders: Mapping[str, NodeId], *, even_unable: bool) -> list[Move]:
        """Moves from a place to another that leads at least two groups fewer, through others; empty if there are none.

        Each such path makes the sum of squares smaller, so there is an end.
        """
        for begin in sorted(led, key=lambda place: (-len(led[place]), place)):
            reached: dict[str, Move | None] = {begin: None}
            waiting = deque([begin])
            while waiting:
                place = waiting.popleft()
                if len(led[place]) <= len(led[begin]) - 2:
                    return self._back(reached, place)
                for move in self._moves_from(led[place], leaders, even_unable=even_unable):
                    target = self.place(move.group, move.target)
                    if target not in reached:
                        reached[target] = move
                        waiting.append(target)
        return []

    def _moves_from(
        self, groups: Collection[str], leaders: Mapping[str, NodeId], *, even_unable: bool
    ) -> Iterable[Move]:
        for name in sorted(groups):
            one = self.groups[name]
            for node in sorted(one.addresses):
                if node != leaders[name] and (even_unable or node not in one.unable):
                    yield Move(name, leaders[name], node)

    def _back(self, reached: Mapping[str, Move | None], place: str) -> list[Move]:
        path: list[Move] = []
        while (move := reached[place]) is not None:
            path.insert(0, move)
            place = self.place(move.group, move.source)
        return path


def _has_twins(hosts: Iterable[str]) -> bool:
    listed = list(hosts)
    return len(set(listed)) < len(listed)


_ATTEMPTS_PER_GROUP: Final = 3
"""Leaders may move by themselves meanwhile, so the number of transfers has a bound."""
_POLL_S: Final = 0.05


@click.command(
    short_help="Spread the leaders over the machines.",
    epilog="""\b
Examples:
  dledger cluster rebalance --namesrv 10.0.0.1:9876 --dry-run
  dledger cluster rebalance --namesrv 10.0.0.1:9876
  dledger cluster rebalance --json | jq .machines

Machines are told apart by the hosts in dLegerPeers; if two members of a group are on one host, each process counts
for itself. One leader moves at a time, without losing a message, and the next one follows once it accepts messages.
A group with preferredLeaderIds goes back to those by itself.

Exit codes: 0 each machine leads its share, give or take one; 1 not, with the reason.""",
)
@click.option("--dry-run", is_flag=True, help="Move nothing: show which leaders would move.")
@click.option(
    "--wait",
    "wait_s",
    type=flag_values.Seconds(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each new leader may take until it accepts messages.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@broker_options
def rebalance(dry_run: bool, wait_s: float, as_json: bool, target: BrokerTarget) -> None:
    """Move the leaders of groups of brokers until each machine leads its share of them."""
    with target.brokers() as brokers:
        if not target.broker_name:
            brokers.every()  # refuses several clusters
        run = _Run(_Groups(brokers.admin, brokers.found(), target), wait_s, quiet=as_json)
        placement = run.plan() if dry_run else run.carry_out()
    problems = run.problems(placement)
    if as_json:
        terminal.print_json(
            {
                "balanced": not problems,
                "dry_run": dry_run,
                "moves": [one.facts(placement) for one in run.steps],
                "machines": placement.led(),
                "problems": problems,
            }
        )
    else:
        rows = [(place, str(len(names)), " ".join(names)) for place, names in placement.led().items()]
        terminal.print_table(("machine", "leads", "groups"), [tuple(map(_shown, row)) for row in rows])
    if problems:
        raise click.ClickException(f"not balanced: {_shown('; '.join(problems))}")


def _shown(text: str) -> str:
    """Anybody may have registered anything."""
    return terminal.printable(text.encode())


@dataclass(frozen=True, slots=True)
class _Step:
    """A transfer that was made or tried, or would be made."""

    move: Move
    seconds: float | None = None
    """From the request until the new leader accepted messages; None: it does not, or nothing was done."""
    error: str = ""

    def facts(self, placement: LeaderPlacement) -> dict[str, object]:
        move = self.move
        return {
            "group": move.group,
            "from_node": move.source,
            "to_node": move.target,
            "from": placement.place(move.group, move.source),
            "to": placement.place(move.group, move.target),
            "seconds": self.seconds,
            "error": self.error,
        }

    def line(self, placement: LeaderPlacement) -> str:
        group, source, target = self.move.group, self.move.source, self.move.target
        told = f"{group}: {source} ({placement.place(group, source)}) -> {target} ({placement.place(group, target)})"
        if self.error:
            return f"{told} failed: {self.error}"
        return told if self.seconds is None else f"{told}, accepts messages after {self.seconds:.2f} s"


class _Run:
    """One run of the command."""

    def __init__(self, groups: _Groups, wait_s: float, *, quiet: bool) -> None:
        self._groups = groups
        self._wait_s = wait_s
        self._quiet = quiet
        self.steps: list[_Step] = []

    def plan(self) -> LeaderPlacement:
        """Note the transfers without making them; returns the placement after them."""
        placement = self._groups.placement()
        moves = placement.moves()
        for move in moves:
            self._note(_Step(move), placement)
        return placement.after(moves)

    def carry_out(self) -> LeaderPlacement:
        """Make the transfers, one at a time; returns the placement after them."""
        placement = self._groups.placement()
        for _ in range(_ATTEMPTS_PER_GROUP * len(placement.groups)):
            moves = placement.moves()
            if not moves:
                break
            step = self._groups.transfer(moves[0], self._wait_s)
            self._note(step, placement)
            self._groups.look(step.move.group)
            placement = self._groups.placement()
        return placement

    def problems(self, placement: LeaderPlacement) -> list[str]:
        """Why the leaders are not spread; empty if they are."""
        found = list(self._groups.problems.values())
        if placement.moves(even_unable=True):
            found += [
                f"{one.move.group} did not move to {one.move.target}: {one.error}" for one in self.steps if one.error
            ]
            told = {(one.move.group, one.move.target) for one in self.steps if one.error}
            found += [
                f"{name}: {node} ({placement.place(name, node)}) cannot lead: {why}"
                for name, one in placement.groups.items()
                for node, why in one.unable.items()
                if (name, node) not in told
            ]
            if placement.moves():
                found.append(
                    f"leaders were moved {len(self.steps)} times: look at what moves them back (preferredLeaderIds, "
                    "elections), and run this again"
                )
        return found

    def _note(self, step: _Step, placement: LeaderPlacement) -> None:
        self.steps.append(step)
        if not self._quiet:
            click.echo(_shown(step.line(placement)))


class _Groups:
    """The groups of brokers: who leads them, and how to change that."""

    def __init__(self, admin: Admin, routed: Sequence[RoutedBroker], target: BrokerTarget) -> None:
        self._admin = admin
        self._target = target
        self._refused: dict[str, dict[NodeId, str]] = {}
        """Voters that did not take over, by group, and why: they are not tried again."""
        self._found: dict[str, GroupPlacement] = {}
        self._leaders: dict[str, NodeStatus] = {}
        self.problems: dict[str, str] = {}
        """The problems of a group as a whole, and what to do."""
        statuses = admin.statuses()
        self._addresses = {
            one.name: one.readable
            for one in routed
            if not any(_is_plain(statuses.get(address)) for address in one.readable)
        }
        for name in self._addresses:
            self.look(name)

    def placement(self) -> LeaderPlacement:
        """As known now."""
        return LeaderPlacement(
            [
                dataclasses.replace(one, unable={**one.unable, **self._refused.get(name, {})})
                for name, one in self._found.items()
            ]
        )

    def look(self, name: str) -> None:
        """Ask a group's members who leads now."""
        self.problems.pop(name, None)
        try:
            with closing(self._client(name)) as client:
                answers = client.members_status()
        except DLedgerError as error:
            self.problems[name] = f"{name}: no member answers: start its brokers ({error})"
            return
        statuses = [one for one in answers.values() if isinstance(one, NodeStatus)]
        newest = max(statuses, key=lambda one: (one.configuration_index, one.term))
        leader = find_leader(answers)
        if leader is None:
            self.problems[name] = f"{name} has no leader: start its members until a majority of them runs"
        else:
            self._leaders[name] = newest = leader
        voters = {one.node_id: one.peer_address for one in newest.members if one.role is MemberRole.VOTER}
        if leader is not None and leader.node_id not in voters:
            self.problems[name] = f"{name} is being left by its leader: run this again once another one leads"
            leader = None
        unable = {node: why for node in voters if (why := _why_unable(answers.get(node)))}
        self._found[name] = GroupPlacement(name, leader.node_id if leader is not None else None, voters, unable)

    def transfer(self, move: Move, wait_s: float) -> _Step:
        """Transfer a group's leadership, and wait until the new leader accepts messages."""
        began_s = time.monotonic()
        try:
            with closing(self._client(move.group, wait_s)) as client:
                client.transfer_leadership(move.target)
        except DLedgerError as error:
            return self._failed(move, str(error))
        members = self._leaders[move.group].members
        address = next(one.client_address for one in members if one.node_id == move.target)
        never = threading.Event()
        while not self._is_master(address):
            if time.monotonic() - began_s >= wait_s:
                told = f"it leads, but accepts no messages after {wait_s:g} s"
                return self._failed(move, f"{told}: see `dledger broker status --node {address}`")
            never.wait(_POLL_S)
        return _Step(move, time.monotonic() - began_s)

    def _failed(self, move: Move, why: str) -> _Step:
        self._refused.setdefault(move.group, {})[move.target] = why
        return _Step(move, error=why)

    def _is_master(self, address: str) -> bool:
        try:
            return self._admin.status(address).runtime.is_master
        except DLedgerError:
            return False

    def _client(self, name: str, timeout_s: float | None = None) -> DLedgerClient:
        from dledger.client import DLedgerClient  # here, so that --help does not load it

        return DLedgerClient(
            self._addresses[name],
            group="",  # the only one there; a broker's name may be another
            timeout_s=timeout_s or self._target.timeout_s,
            security=self._target.security.for_client(),
        )


def _is_plain(status: BrokerStatus | ClientError | None) -> bool:
    """Whether a broker says that it replicates no log, or is another program's."""
    return status is not None and not isinstance(status, DLedgerError) and not status.runtime.role


def _why_unable(status: NodeStatus | DLedgerError | None) -> str:
    """Why a voter cannot lead now; empty if it can, as far as one knows without trying."""
    if not isinstance(status, NodeStatus):
        return "it does not answer: start it"
    if not status.voter:
        return "its vote does not count until it has caught up: wait, and run this again"
    return "its disk is full: make room" if status.disk_full else ""
