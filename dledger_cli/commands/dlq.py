"""``dledger dlq``: lists, delivers again and exports the dead letters of consumer groups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dledger.access.rules import DEAD_PREFIX
from dledger.errors import DLedgerError
from dledger_cli import terminal
from dledger_cli.broker_target import BrokerTarget, broker_options
from dledger_cli.commands.undelivered import LISTED, DeadLetterQuery, export_to, found, letter_row, show, wanted_options
from dledger_cli.dead_letters import send_again
from dledger_cli.reporting import ErrorReportingGroup

if TYPE_CHECKING:
    from rocketstore.client.blocking import Admin
    from rocketstore.message.message import Message


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"resend"}),
    short_help="Dead letters: list, send again, export.",
    epilog="""\b
Examples:
  dledger dlq list
  dledger dlq list -g billing
  dledger dlq resend -g billing --from 2h
  dledger dlq export -g billing -o letters.jsonl""",
)
def dlq() -> None:
    """Messages of a consumer group whose last delivery failed (16 by default). They stay until the log expires them."""


@dlq.command(
    "list",
    short_help="Show dead letters, or who has any.",
    epilog="""\b
Examples:
  dledger dlq list                          groups with dead letters, and how many
  dledger dlq list -g billing --from 1d
  dledger dlq list -g billing --json --max 1000""",
)
@click.option("-g", "--group", help="Show this group's dead letters.")
@wanted_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object per message; of all groups, one array.")
@broker_options
def list_letters(  # noqa: PLR0913  # one parameter per option
    group: str | None,
    offsets: tuple[int, ...],
    start: str | int,
    until: int,
    key: str,
    count: int | None,
    as_json: bool,
    target: BrokerTarget,
) -> None:
    """Show a group's dead letters (50, unless --max says otherwise), or how many each group has."""
    with target.brokers() as brokers:
        if group is None:
            _list_groups(brokers.admin, as_json)
            return
        wanted = DeadLetterQuery(offsets, start, until, key, count or LISTED)
        messages = found(brokers, f"{DEAD_PREFIX}{group}", wanted)
        show(messages, ("offset", "dead since", "keys", "of topic", "deliveries"), _row, as_json=as_json)


def _list_groups(admin: Admin, as_json: bool) -> None:
    names = sorted({one.name for one in admin.topics() if one.name.startswith(DEAD_PREFIX)})
    ranges = admin.topic_ranges(names)
    counts = {
        name.removeprefix(DEAD_PREFIX): sum(max(one.max_offset - one.min_offset, 0) for one in ranges.get(name, ()))
        for name in names
    }
    if as_json:
        terminal.print_json([{"group": name, "dead_letters": number} for name, number in counts.items()])
    else:
        terminal.print_table(("group", "dead letters"), [(name, str(number)) for name, number in counts.items()])


def _row(one: Message) -> tuple[str, ...]:
    from rocketstore.message.message import PROPERTY_RETRY_TOPIC

    origin = one.properties.get(PROPERTY_RETRY_TOPIC, "")
    return *letter_row(one), terminal.printable(origin.encode()), str(one.reconsume_times)


@dlq.command(
    short_help="Deliver dead letters once more.",
    epilog="""\b
Examples:
  dledger dlq resend -g billing --offset 17 --offset 18
  dledger dlq resend -g billing --from 2h --yes
  dledger dlq resend -g billing --key order-17 --dry-run""",
)
@click.option("-g", "--group", required=True, help="The consumer group.")
@wanted_options
@click.option("--dry-run", is_flag=True, help="Say how many, and send nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@broker_options
def resend(  # noqa: PLR0913  # one parameter per option
    group: str,
    offsets: tuple[int, ...],
    start: str | int,
    until: int,
    key: str,
    count: int | None,
    dry_run: bool,
    yes: bool,
    target: BrokerTarget,
) -> None:
    """Deliver dead letters to their group once more, after a second; a copy that fails again is a dead letter again.

    Without options, all of them. The old ones stay where they are, so the same command would send them again.
    """
    wanted = DeadLetterQuery(offsets, start, until, key, count or sys.maxsize)
    with target.brokers() as brokers:
        letters = [(broker, one.offset) for broker, one in found(brokers, f"{DEAD_PREFIX}{group}", wanted)]
        told = f"{len(letters):,} dead letters of {group}" if len(letters) != 1 else f"1 dead letter of {group}"
        if dry_run or not letters:
            click.echo(f"{told} would be delivered again")
            return
        if not yes:
            terminal.confirm(f"Deliver {told} again?")
        for sent, (broker, position) in enumerate(letters):
            try:
                send_again(brokers.admin, group, position, broker)
            except DLedgerError:
                click.echo(f"{sent:,} of {told} were sent before this one", err=True)
                raise
    click.echo(f"{told}: delivered again in a second")


@dlq.command(
    short_help="Write dead letters to a file.",
    epilog="""\b
Examples:
  dledger dlq export -g billing -o letters.jsonl
  dledger dlq export -g billing --from 1d | jq -r .keys[]""",
)
@click.option("-g", "--group", required=True, help="The consumer group.")
@wanted_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A new file; default: standard output.")
@broker_options
def export(  # noqa: PLR0913  # one parameter per option
    group: str,
    offsets: tuple[int, ...],
    start: str | int,
    until: int,
    key: str,
    count: int | None,
    output: Path | None,
    target: BrokerTarget,
) -> None:
    """Write dead letters as JSON, one per line, with their properties and bodies."""
    wanted = DeadLetterQuery(offsets, start, until, key, count or sys.maxsize)
    with target.brokers() as brokers:
        written = export_to(found(brokers, f"{DEAD_PREFIX}{group}", wanted), output)
    click.echo(f"{written:,} dead letters of {group} written", err=True)
