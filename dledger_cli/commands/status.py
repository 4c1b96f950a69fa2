"""``dledger status`` and ``transfer-leader``."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import click

from dledger.command_line import flag_values
from dledger.errors import DLedgerError, RequestTimeoutError
from dledger.rpc.ports import MemberStatus, NodeStatus
from dledger.types import NO_INDEX, MemberRole, NodeId, Role
from dledger_cli import terminal
from dledger_cli.targets import GroupTarget, group_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dledger.client import DLedgerClient

_APPLIED = "applied"
_COLUMNS = ("node", "role", "term", "begin", "end", "committed", "flushed", "lag", "clients", "notes")
_STYLES = {Role.LEADER.value: "green", Role.CANDIDATE.value: "yellow", "unreachable": "red"}


@click.command(
    short_help="Show every member.",
    epilog="""\b
Examples:
  dledger status
  dledger status -b 10.0.0.1:30911,10.0.0.2:30911 --watch
  dledger status --json | jq '.nodes[] | select(.role == "LEADER").node_id'

lag is how many entries a node is behind the leader's end. A node's conditions (damaged, repairing, fenced,
disk_full and so on) are listed below the table. Exit code 1 when there is no leader.""",
)
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option(
    "--interval",
    type=flag_values.Seconds(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between updates with --watch.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object (one per line with --watch).")
@group_options
def status(
    watch: bool,
    interval: float,
    as_json: bool,
    target: GroupTarget,
) -> None:
    """Show every member: role, term and how far its log reaches."""
    with closing(target.client()) as client:
        if not watch:
            if not _show(ask_members(client), as_json):
                raise click.ClickException("no leader: appends wait until a majority elects one")
            return
        _watch(client, interval, as_json)


def _watch(client: DLedgerClient, interval: float, as_json: bool) -> None:
    never = threading.Event()
    if as_json or not terminal.on_terminal():
        while True:
            _show(ask_members(client), as_json)
            never.wait(interval)
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            answers = ask_members(client)
            live.update(_rendered(columns_of(answers), status_rows(answers), condition_lines(answers)), refresh=True)
            never.wait(interval)


def ask_members(client: DLedgerClient) -> dict[NodeId, NodeStatus | DLedgerError]:
    """Every member's own status, or the error. Raises ``UnavailableError`` if nobody answers."""
    return dict(client.members_status())


def _show(answers: Mapping[NodeId, NodeStatus | DLedgerError], as_json: bool) -> bool:
    leader = find_leader(answers)
    if as_json:
        nodes = [_node_json(node_id, answer) for node_id, answer in sorted(answers.items())]
        terminal.print_json({"leader": leader.node_id if leader else None, "nodes": nodes})
    elif terminal.on_terminal():
        from rich.console import Console

        Console().print(_rendered(columns_of(answers), status_rows(answers), condition_lines(answers)))
    else:
        click.echo(terminal.plain_table(columns_of(answers), status_rows(answers)))
        for line in condition_lines(answers):
            click.echo(line)
    return leader is not None


def condition_lines(answers: Mapping[NodeId, NodeStatus | DLedgerError]) -> list[str]:
    """One line for each condition of a member."""
    return [
        f"{node_id}: {terminal.condition_text(one)}"
        for node_id, answer in sorted(answers.items())
        if isinstance(answer, NodeStatus)
        for one in answer.conditions
    ]


def _rendered(names: Sequence[str], rows: Sequence[Sequence[str]], conditions: Sequence[str]) -> RenderableType:
    """For a terminal: notes and conditions below the table, where lines are long enough for them."""
    from rich.console import Console, Group
    from rich.text import Text

    least = [one for one in (_APPLIED, "flushed", "begin", "clients", "committed", "term") if one in names]
    columns, shown, gone = terminal.fitting(
        names[:-1],
        [row[:-1] for row in rows],
        Console().width,
        least,
    )
    notes = [Text(f"{row[0]}: {row[-1]}", style="bold yellow") for row in rows if row[-1]]
    wrong = [Text(line, style="bold red") for line in conditions]
    left_out = [Text(f"(no room for: {', '.join(gone)})")] if gone else []
    return Group(terminal.table(columns, shown, _STYLES), *notes, *wrong, *left_out)


def find_leader(answers: Mapping[NodeId, NodeStatus | DLedgerError]) -> NodeStatus | None:
    """The leader of the highest term; an older one has not noticed yet that it was replaced."""
    leaders = [one for one in answers.values() if isinstance(one, NodeStatus) and one.role is Role.LEADER]
    return max(leaders, key=lambda one: one.term, default=None)


def _node_json(node_id: NodeId, answer: NodeStatus | DLedgerError) -> dict[str, object]:
    if isinstance(answer, NodeStatus):
        members = [{**dataclasses.asdict(one), **member_json(one)} for one in answer.members]
        return {"reachable": True, **dataclasses.asdict(answer), "members": members}
    return {"reachable": False, "node_id": node_id, "error": str(answer)}


def member_json(member: MemberStatus) -> dict[str, object]:
    """The fields of a member that JSON has no numbers for."""
    return {"role": member.role.name.lower(), "uid": f"{member.uid:016x}" if member.uid else None}


def columns_of(answers: Mapping[NodeId, NodeStatus | DLedgerError]) -> Sequence[str]:
    """The columns; a log with a state machine has one more."""
    has_machine = any(isinstance(one, NodeStatus) and one.applied_index is not None for one in answers.values())
    after = _COLUMNS.index("flushed") + 1
    return (*_COLUMNS[:after], _APPLIED, *_COLUMNS[after:]) if has_machine else _COLUMNS


def status_rows(answers: Mapping[NodeId, NodeStatus | DLedgerError]) -> list[Sequence[str]]:
    """One row of ``columns_of`` per member."""
    has_machine = _APPLIED in columns_of(answers)
    leader = find_leader(answers)
    addresses = {
        member.node_id: member.client_address
        for one in answers.values()
        if isinstance(one, NodeStatus)
        for member in one.members
        if member.client_address
    }
    rows: list[Sequence[str]] = []
    for node_id, answer in sorted(answers.items()):
        address = addresses.get(node_id, "")
        if isinstance(answer, NodeStatus):
            lag = str(max(0, leader.end_index - answer.end_index)) if leader else ""
            indexes = [answer.begin_index, answer.end_index, answer.committed_index, answer.flushed_index]
            if has_machine:
                indexes.append(NO_INDEX if answer.applied_index is None else answer.applied_index)
            rows.append(
                (node_id, answer.role, str(answer.term), *map(str, indexes), lag, address, ", ".join(_notes(answer)))
            )
        else:
            rows.append((node_id, "unreachable", *[""] * (6 + has_machine), address, _why(answer, address)))
    return rows


def _why(error: DLedgerError, address: str) -> str:
    """The reason, without the address that the row has already."""
    if isinstance(error, RequestTimeoutError):
        return "no answer in time"
    return str(error).removeprefix(f"{address} ").removeprefix("is unreachable: ")


def _notes(answer: NodeStatus) -> list[str]:
    notes = []
    if answer.disk_full:
        notes.append("DISK FULL")
    if any(one.node_id == answer.node_id and one.role is MemberRole.LEARNER for one in answer.members):
        notes.append("learner")
    elif not answer.voter:
        notes.append("not voting yet")
    if answer.flush_mode != "sync":
        notes.append(f"flush {answer.flush_mode}")
    if answer.pending_entries:
        notes.append(f"{answer.pending_entries} pending")
    return notes


@click.command(
    "transfer-leader",
    short_help="Transfer leadership.",
    epilog="""\b
Examples:
  dledger transfer-leader          to the most up-to-date follower
  dledger transfer-leader n2""",
)
@click.argument("node", required=False, metavar="[TARGET]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@group_options
def transfer_leader(node: str | None, as_json: bool, target: GroupTarget) -> None:
    """Transfer leadership to TARGET without losing an acknowledged append."""
    with closing(target.client()) as client:
        leader = client.transfer_leadership(NodeId(node) if node else None)
    if as_json:
        terminal.print_json({"leader": leader.node_id, "address": leader.address})
    else:
        click.echo(f"{leader.node_id} leads now")
