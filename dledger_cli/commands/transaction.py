"""``dledger transaction``: lists, checks again and exports transactions that were given up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dledger_cli import terminal
from dledger_cli.broker_target import BrokerTarget, broker_options
from dledger_cli.commands.message_query import check_offset_id
from dledger_cli.commands.undelivered import LISTED, DeadLetterQuery, export_to, found, letter_row, show, wanted_options
from dledger_cli.reporting import ErrorReportingGroup
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC

if TYPE_CHECKING:
    from dledger_cli.chosen_brokers import ChosenBrokers
    from rocketstore.message.message import Message


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"resume"}),
    short_help="Given-up transactions: list, check again, export.",
    epilog="""\b
Examples:
  dledger transaction list
  dledger transaction resume 7F00000100002A9F0000000000000400
  dledger transaction resume --all --from 1d""",
)
def transaction() -> None:
    """Transactions that were given up, because no producer said what became of them, however often it was asked."""


@transaction.command(
    "list",
    short_help="Show transactions that were given up.",
    epilog="""\b
Examples:
  dledger transaction list --from 1d
  dledger transaction list --json --max 1000""",
)
@wanted_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object per message.")
@broker_options
def list_given_up(  # one parameter per option
    offsets: tuple[int, ...],
    start: str | int,
    until: int,
    key: str,
    count: int | None,
    as_json: bool,
    target: BrokerTarget,
) -> None:
    """Show transactions that were given up (50, unless --max says otherwise), with the ids for resume."""
    with target.brokers() as brokers:
        messages = found(brokers, CHECKED_TOO_OFTEN_TOPIC, DeadLetterQuery(offsets, start, until, key, count or LISTED))
        show(messages, ("offset", "given up", "keys", "of topic", "group", "id"), _row, as_json=as_json)


def _row(one: Message) -> tuple[str, ...]:
    from rocketstore.message.message import PROPERTY_PRODUCER_GROUP, PROPERTY_REAL_TOPIC

    told = (one.properties.get(name, "") for name in (PROPERTY_REAL_TOPIC, PROPERTY_PRODUCER_GROUP))
    return *letter_row(one), *(terminal.printable(text.encode()) for text in told), _id_of(one)


def _id_of(one: Message) -> str:
    from rocketstore.message.ids import offset_message_id

    return offset_message_id(one.store_host, one.offset)


@transaction.command(
    short_help="Have producers asked again.",
    epilog="""\b
Examples:
  dledger transaction resume 7F00000100002A9F0000000000000400
  dledger transaction resume --all --from 1d --yes""",
)
@click.argument("message_ids", metavar="[OFFSET_MESSAGE_ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All, or those that the other options leave.")
@wanted_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@broker_options
def resume(  # noqa: PLR0913  # one parameter per option
    message_ids: tuple[str, ...],
    everything: bool,
    offsets: tuple[int, ...],
    start: str | int,
    until: int,
    key: str,
    count: int | None,
    yes: bool,
    target: BrokerTarget,
) -> None:
    """Begin transactions again that were given up: their producers are asked what became of them.

    The ids are those of `transaction list`. Each can be resumed once.
    """
    for one in message_ids:
        check_offset_id(one)
    if bool(message_ids) == everything:
        raise click.UsageError("give the ids of messages, or --all")
    with target.brokers() as brokers:
        if everything:
            wanted = DeadLetterQuery(offsets, start, until, key, count or sys.maxsize)
            ids = [_id_of(one) for _, one in found(brokers, CHECKED_TOO_OFTEN_TOPIC, wanted)]
            if ids and not yes:
                terminal.confirm(f"Check {len(ids):,} transactions again?")
            message_ids = tuple(ids)
        _resume(brokers, message_ids, target.broker_name, skips_missing=everything)


def _resume(brokers: ChosenBrokers, ids: tuple[str, ...], broker: str, *, skips_missing: bool) -> None:
    from rocketstore.client.aio.errors import NotFoundError

    begun = 0
    for one in ids:
        try:
            brokers.admin.resume_transaction(one, broker)
        except NotFoundError as error:
            if not skips_missing:
                raise
            click.echo(f"note: {error}", err=True)  # most likely it was resumed before
        else:
            begun += 1
            if not skips_missing:
                click.echo(f"{one} is a transaction again: its producers are asked in the next round of checks")
    if skips_missing:
        click.echo(f"{begun:,} of {len(ids):,} are transactions again: their producers are asked in the next round")


@transaction.command(
    short_help="Write given-up transactions to a file.",
    epilog="""\b
Examples:
  dledger transaction export -o transactions.jsonl
  dledger transaction export --from 1d | wc -l""",
)
@wanted_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A new file; default: standard output.")
@broker_options
def export(  # one parameter per option
    offsets: tuple[int, ...],
    start: str | int,
    until: int,
    key: str,
    count: int | None,
    output: Path | None,
    target: BrokerTarget,
) -> None:
    """Write given-up transactions as JSON, one message per line, with properties and bodies."""
    wanted = DeadLetterQuery(offsets, start, until, key, count or sys.maxsize)
    with target.brokers() as brokers:
        written = export_to(found(brokers, CHECKED_TOO_OFTEN_TOPIC, wanted), output)
    click.echo(f"{written:,} given-up transactions written", err=True)
