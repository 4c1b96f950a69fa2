"""``dledger member``: shows the members of a running group, and changes them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

import click

from dledger.errors import DLedgerError, UnavailableError
from dledger.rpc.ports import NodeStatus
from dledger.types import ChangeKind, MemberRole, Role
from dledger.values import parse_address
from dledger_cli import member_view, terminal
from dledger_cli.targets import GroupTarget, group_options
from dledger_cli.terminal import EXIT_INTERRUPTED, ErrorReportingGroup

if TYPE_CHECKING:
    from dledger.client import DLedgerClient
    from dledger.types import Configuration, MemberChange

POLL_S: Final = 1.0
LINE_EVERY_S: Final = 5.0
_ATTEMPTS: Final = 3
_LEAST: Final = ("rate", "last contact", "number", "committed", "address")
_STYLES: Final = {"leader": "green", "unreachable": "red", "never seen": "red", "catching up": "yellow"}
_CHANGING: Final = frozenset({"add", "replace", "promote", "demote", "remove", "cancel", "update"})


class _Members(ErrorReportingGroup):
    """Loads ``force`` on demand: it needs a node's store."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), "force"])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name != "force":
            return super().get_command(context, name)
        from dledger_cli.commands.inspect import force

        return force


@click.group(
    cls=_Members,
    writing=_CHANGING,
    short_help="Show and change a group's members.",
    epilog="""\b
Examples:
  dledger member list
  dledger member add n4=10.0.0.4:20911             a new voter: it gets the log first, and votes when it has caught up
  dledger member replace n3 n4=10.0.0.4:20911      the same, and n3 leaves for it
  dledger member remove n3

A node that lost its disk but keeps its name needs no change: start it with an empty directory.

Exit codes: 0 done, 1 refused or no leader, 2 wrong usage, 3 the outcome is unknown (`dledger member list` tells).""",
)
def member() -> None:
    """Show the members of a running group, and change them: one at a time, without stopping anything."""


@member.command(
    "list",
    short_help="Show the members.",
    epilog="""\b
Examples:
  dledger member list
  dledger member list --json | jq '.members[] | select(.role == "learner")'""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@group_options
def show(as_json: bool, target: GroupTarget) -> None:
    """Show who belongs to the group, in which role, and how far each of them is."""
    with closing(target.client()) as client:
        try:
            status = client.leader_status()
        except UnavailableError:
            known = [one for one in client.members_status().values() if isinstance(one, NodeStatus)]
            status = max(known, key=lambda one: (one.configuration_index, one.committed_index))
        _print(status, as_json)
    if status.role is not Role.LEADER:
        raise click.ClickException(f"no leader: this is what {status.node_id} knows")


def _print(status: NodeStatus, as_json: bool) -> None:
    if as_json:
        terminal.print_json(member_view.members_json(status))
        return
    rows = member_view.member_rows(status)
    terminal.print_table(member_view.COLUMNS, rows, _STYLES, least=_LEAST, below=("node", "notes"))
    click.echo(member_view.summary(status))


def _place(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, str]:
    node_id, _, address = text.partition("=")
    if not (node_id and address):
        raise click.BadParameter(f"{text[:64]!r} is not ID=HOST:PORT, for example n4=10.0.0.4:20911")
    try:
        parse_address(address)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return node_id, address


def _waiting_options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--no-wait", is_flag=True, help="Return once the group knows the new member.")(command)
    return click.option("--json", "as_json", is_flag=True, help="One JSON object per event.")(command)


@member.command(
    short_help="Add a member.",
    epilog="""\b
Examples:
  dledger member add n4=10.0.0.4:20911              waits until n4 votes; start n4 meanwhile, as is printed first
  dledger member add n4=10.0.0.4:20911 --learner    it only follows: a copy that never counts

The address is the one for the other members (the port of peers). Any leader carries the change on, also if this
command is interrupted: `dledger member cancel n4` undoes it.""",
)
@click.argument("place", callback=_place, metavar="ID=HOST:PORT")
@click.option("--learner", is_flag=True, help="It stays a learner: gets the log, and never counts.")
@_waiting_options
@group_options
def add(place: tuple[str, str], learner: bool, no_wait: bool, as_json: bool, target: GroupTarget) -> None:
    """Add a member, which becomes a voter when it has caught up."""
    _add(target, place, learner=learner, replaces="", waits=not (no_wait or learner), as_json=as_json)


@member.command(
    short_help="Replace a member.",
    epilog="""\b
Examples:
  dledger member replace n3 n4=10.0.0.4:20911    n4 catches up and votes, and n3 leaves

For a dead machine. If only its disk is lost, start it again with an empty directory: that needs no change.""",
)
@click.argument("old", metavar="OLD-ID")
@click.argument("place", callback=_place, metavar="ID=HOST:PORT")
@_waiting_options
@group_options
def replace(old: str, place: tuple[str, str], no_wait: bool, as_json: bool, target: GroupTarget) -> None:
    """Add a member that takes the place of another one when it has caught up."""
    _add(target, place, learner=False, replaces=old, waits=not no_wait, as_json=as_json)


def _step(
    short_help: str, example: str, more: str = "", *, moves: bool = False
) -> Callable[[Callable[..., None]], click.Command]:
    """A command that is one change: of the member ``node``, or, if it ``moves``, of the one at ``place``."""
    of_member = click.argument("place", callback=_place, metavar="ID=HOST:PORT") if moves else click.argument("node")

    def made(command: Callable[..., None]) -> click.Command:
        command = click.option("--json", "as_json", is_flag=True, help="One JSON object.")(group_options(command))
        epilog = f"\b\nExamples:\n  dledger member {example}" + (f"\n\n{more}" if more else "")
        return member.command(short_help=short_help, epilog=epilog)(of_member(command))

    return made


@_step("Make a learner a voter.", "promote n4")
def promote(node: str, as_json: bool, target: GroupTarget) -> None:
    """Make a learner a voter, if it has caught up; otherwise the refusal says how far it is."""
    _change(target, ChangeKind.PROMOTE, node, "", as_json, f"{node} is a voter now")


@_step("Make a voter a learner.", "demote n3")
def demote(node: str, as_json: bool, target: GroupTarget) -> None:
    """Make a voter a learner: it goes on to get the log, and counts no more."""
    _change(target, ChangeKind.DEMOTE, node, "", as_json, f"{node} is a learner now")


@_step(
    "Remove a member.",
    "remove n3",
    "A leader hands over first. Refused if too few of the others could be reached: the group would stop.",
)
def remove(node: str, as_json: bool, target: GroupTarget) -> None:
    """Remove a member for good: its process stays up, serves reads, and counts no more."""
    _change(target, ChangeKind.REMOVE, node, "", as_json, f"{node} was removed: stop it, its directory is not needed")


@_step("Undo an addition.", "cancel n4")
def cancel(node: str, as_json: bool, target: GroupTarget) -> None:
    """Remove a learner, also one that was to become a voter."""
    _change(target, ChangeKind.REMOVE, node, "", as_json, f"{node} was removed", only_learners=True)


@_step(
    "Change a member's address.",
    "update n2=10.0.0.9:20911",
    "Start the node at its new address; the others use it once the change is committed.",
    moves=True,
)
def update(place: tuple[str, str], as_json: bool, target: GroupTarget) -> None:
    """Tell the group where a member is reached from now on."""
    node, address = place
    _change(target, ChangeKind.UPDATE, node, address, as_json, f"{node} is at {address} now")


# --- single steps -----------------------------------------------------------------------------------------------------


def _change(
    target: GroupTarget,
    kind: ChangeKind,
    node: str,
    address: str,
    as_json: bool,
    said: str,
    *,
    only_learners: bool = False,
) -> None:
    from dledger.client import member_change

    with closing(target.client()) as client:
        before = client.leader_status()
        known = member_view.find_member(before, node)
        if only_learners and known is not None and known.role is MemberRole.VOTER:
            raise click.ClickException(f"{node} is a voter: `dledger member remove {node}` removes it")
        change = member_change(kind, node, address, expected_index=before.configuration_index)
        made = make(client, change)
    if as_json:
        terminal.print_json({"event": "done", **_configuration_json(made)})
        return
    click.echo(said)
    click.echo(f"configuration {made.index}, {member_view.VoterTally(len(made.voters))}")


def make(client: DLedgerClient, change: MemberChange) -> Configuration:
    """Have the change made; after a lost answer it is asked for again, which cannot make it twice."""
    lost: DLedgerError | None = None
    for _ in range(_ATTEMPTS):
        try:
            return client.change_members(change)
        except DLedgerError as error:
            if error.outcome != "unknown":
                if lost is None:
                    raise
                raise lost from error  # the members may have changed by it, and since
            lost = error
    assert lost is not None
    raise lost


def _configuration_json(made: Configuration) -> dict[str, object]:
    return {
        "configuration_index": made.index,
        "voters": list(made.voters),
        "learners": list(made.learners),
        "majority": made.quorum,
    }


# --- additions, which take time ---------------------------------------------------------------------------------------


def _add(
    target: GroupTarget, place: tuple[str, str], *, learner: bool, replaces: str, waits: bool, as_json: bool
) -> None:
    from dledger.client import member_change

    node, address = place
    with closing(target.client()) as client:
        before = client.leader_status()
        change = member_change(
            ChangeKind.ADD,
            node,
            address,
            learner=learner,
            replaces=replaces,
            expected_index=before.configuration_index,
        )
        made = make(client, change)
        if not as_json:
            _print_settings(before, node, address)
        said = f"registered {node} as a learner (configuration {made.index})"
        _tell(as_json, "registered", {"node": node, **_configuration_json(made)}, said)
        if not waits:
            return
        with _told_at_interrupt(node):
            status = _wait(client, node, replaces, as_json)
    tally = member_view.tally_of(status)
    if as_json:
        terminal.print_json({"event": "done", **member_view.members_json(status)})
        return
    click.echo(member_view.summary(status))
    if tally.voters % 2 == 0:
        click.echo(f"note: {tally.voters} voters tolerate no more failures than {tally.voters - 1}: add another one")


def _print_settings(before: NodeStatus, node: str, address: str) -> None:
    """The lines that a new node's conf file needs, so that it can be started at once."""
    peers = ";".join([*(f"{one.node_id}-{one.peer_address}" for one in before.members), f"{node}-{address}"])
    lines = [("dLegerGroup", before.group)] if before.group != "default" or before.is_broker else []
    lines += [("dLegerPeers", peers), ("dLegerSelfId", node), ("dLegerJoin", "true")]
    if before.is_broker:
        lines.insert(0, ("enableDLegerCommitLog", "true"))
    if before.cluster_id != before.group:
        lines.append(("cluster_id", before.cluster_id))
    click.echo(f"settings of {node}, whose directory must be empty:")
    for name, value in lines:
        click.echo(f"  {name}={value}")


@contextmanager
def _told_at_interrupt(node: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        click.echo(
            f"\nThe change goes on without this command, and `dledger member list` shows how far it is. "
            f"`dledger member cancel {node}` undoes it.",
            err=True,
        )
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


def _wait(client: DLedgerClient, node: str, replaces: str, as_json: bool) -> NodeStatus:
    """Until the new member votes and the replaced one is gone. Raises ``ClickException`` if it was removed again."""
    told = _Progress(as_json)
    promoted = removed = False
    while True:
        try:
            status = client.leader_status()
        except DLedgerError as error:
            told.trouble(str(error))
            time.sleep(POLL_S)
            continue
        added = member_view.find_member(status, node)
        if added is None and status.configuration_committed:
            told.end()
            raise click.ClickException(f"{node} is not a member any more: somebody cancelled its addition")
        if not removed and replaces and member_view.find_member(status, replaces) is None:
            removed = True
            told.end()
            _tell(as_json, "removed", {"node": replaces}, f"{replaces} was removed")
        if not promoted and added is not None and added.role is MemberRole.VOTER:
            promoted = True
            told.end()
            _tell(as_json, "promoted", {"node": node}, f"{node} is a voter now")
        if promoted and removed == bool(replaces) and status.configuration_committed:
            return status
        if not promoted:
            told.progress(member_view.catch_up_of(status, node))
        time.sleep(POLL_S)


def _tell(as_json: bool, event: str, facts: dict[str, object], said: str) -> None:
    if as_json:
        terminal.print_json({"event": event, **facts})
    else:
        click.echo(said)


class _Progress:
    """One line that changes on a terminal; elsewhere a line now and then, or a JSON object."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._in_place = not as_json and sys.stderr.isatty()
        self._next = 0.0
        self._width = 0

    def progress(self, now: member_view.CatchUpView) -> None:
        """How far the member has come."""
        if self._in_place:
            self._overwrite(str(now))
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY_S
            if self._as_json:
                terminal.print_json({"event": "progress", **now.json()})
            else:
                click.echo(str(now))

    def trouble(self, why: str) -> None:
        """The group does not answer at present."""
        if self._in_place:
            self._overwrite(why)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY_S
            click.echo(why, err=True)

    def end(self) -> None:
        """Make room for other lines."""
        if self._width:
            click.echo("\r" + " " * self._width + "\r", nl=False, err=True)
            self._width = 0

    def _overwrite(self, text: str) -> None:
        line = terminal.printable(text.encode())[: max(20, terminal_width() - 1)]
        click.echo("\r" + line.ljust(self._width), nl=False, err=True)
        self._width = len(line)


def terminal_width() -> int:
    """Of this terminal, in characters."""
    import shutil

    return shutil.get_terminal_size().columns
