"""``dledger dlq`` and ``dledger transaction``: messages that no consumer gets.

Both list and export them. Dead letters of consumer groups are delivered again; transactions that were given up are
checked again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from dledger.access.rules import DEAD_PREFIX
from dledger.command_line import flag_values
from dledger.errors import DLedgerError
from dledger_cli import terminal
from dledger_cli.commands.message_query import check_offset_id
from dledger_cli.messages import body_of, message_json, send_again, walk
from dledger_cli.targets import BrokerTarget, broker_options
from dledger_cli.terminal import ErrorReportingGroup, Moment, start_of, time_text
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC

if TYPE_CHECKING:
    from dledger_cli.targets import ChosenBrokers
    from rocketstore.client.blocking import Admin
    from rocketstore.message.message import Message

_F = TypeVar("_F", bound=Callable[..., Any])
LISTED = 50


@dataclass(frozen=True, slots=True)
class DeadLetterQuery:
    """``offsets``: only these; otherwise those stored from ``start`` to before ``until_ms`` (0: no end), with this
    ``key`` if it is given, at most ``count``.
    """

    offsets: tuple[int, ...]
    start: str | int
    until_ms: int
    key: str
    count: int

    def takes(self, one: Message) -> bool:
        """Whether it is one of them, of those that were read."""
        is_early = not self.until_ms or one.store_timestamp < self.until_ms
        return is_early and (not self.key or self.key in one.keys)


def wanted_options(command: _F) -> _F:
    """The options of ``DeadLetterQuery``."""
    for option in reversed(
        (
            click.option(
                "--offset", "offsets", type=flag_values.Whole(min=0), multiple=True, help="Only this; may be repeated."
            ),
            click.option(
                "--from",
                "start",
                type=Moment(ends=True),
                default="first",
                show_default=True,
                metavar="first|TIME",
                help="Where to start.",
            ),
            click.option("--until", type=Moment(), default=0, metavar="TIME", help="Only those stored before."),
            click.option("--key", default="", help="Only those with this business key."),
            click.option("--max", "count", type=flag_values.Whole(min=1), metavar="N", help="Maximum messages."),
        )
    ):
        command = option(command)
    return command


def found(brokers: ChosenBrokers, topic: str, wanted: DeadLetterQuery) -> Iterator[tuple[str, Message]]:
    """The messages of a topic that are wanted, with the names of their brokers, oldest first in each queue.

    Raises ``NotFoundError`` if there is no such topic.
    """
    from rocketstore.remoting.topics import MessageQueue

    left = wanted.count
    for part in brokers.with_topic(topic):
        for number in range(part.read_queues):
            queue = MessageQueue(topic, part.broker, number)
            end = brokers.admin.offset_at(queue, "last")
            places = [brokers.admin.offset_at(queue, start_of(wanted.start))]
            if wanted.offsets:
                places = sorted({one for one in wanted.offsets if one < end})
            for place in places:
                for one in walk(brokers.admin, queue, place, place + 1 if wanted.offsets else end):
                    if left > 0 and wanted.takes(one) and (not wanted.offsets or one.queue_offset == place):
                        left -= 1
                        yield part.broker, one
                    if not left:
                        return


def show(
    messages: Iterator[tuple[str, Message]],
    columns: Sequence[str],
    row: Callable[[Message], tuple[str, ...]],
    *,
    as_json: bool,
) -> None:
    """A table, or a JSON object each."""
    if as_json:
        for _, one in messages:
            terminal.print_json(message_json(one, body_of(one)))
        return
    rows = [(*row(one), terminal.printable(body_of(one)[:60])) for _, one in messages]
    terminal.print_table((*columns, "body"), rows, least=("body",))


def letter_row(one: Message) -> tuple[str, ...]:
    """Its offset, when it was stored, and its keys."""
    keys = terminal.printable(" ".join(one.keys).encode())
    return str(one.queue_offset), time_text(one.store_timestamp), keys


def export_to(messages: Iterator[tuple[str, Message]], output: Path | None) -> int:
    """One JSON object per line, to a new file or to standard output; returns how many."""
    if output is None:
        return _write(messages, sys.stdout)
    try:
        with output.open("x", encoding="utf-8") as file:
            return _write(messages, file)
    except FileExistsError as error:
        raise click.UsageError(f"{output} exists already: give another file") from error


def _write(messages: Iterator[tuple[str, Message]], file: IO[str]) -> int:
    count = 0
    for broker, one in messages:
        file.write(json.dumps({"broker": broker, **message_json(one, body_of(one))}) + "\n")
        count += 1
    return count


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
        show(messages, ("offset", "dead since", "keys", "of topic", "deliveries"), _dead_row, as_json=as_json)


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


def _dead_row(one: Message) -> tuple[str, ...]:
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
    "export",
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
def export_dead(  # noqa: PLR0913  # one parameter per option
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
        show(messages, ("offset", "given up", "keys", "of topic", "group", "id"), _given_up_row, as_json=as_json)


def _given_up_row(one: Message) -> tuple[str, ...]:
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
    "export",
    short_help="Write given-up transactions to a file.",
    epilog="""\b
Examples:
  dledger transaction export -o transactions.jsonl
  dledger transaction export --from 1d | wc -l""",
)
@wanted_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A new file; default: standard output.")
@broker_options
def export_given_up(  # one parameter per option
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
