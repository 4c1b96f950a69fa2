"""``dledger message delayed``: list, find and cancel messages that wait for a time of their own."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from dledger.command_line import flag_values
from dledger_cli import terminal
from dledger_cli.broker_target import BrokerTarget, broker_options
from dledger_cli.moments import Moment, time_text
from dledger_cli.reporting import ErrorReportingGroup

if TYPE_CHECKING:
    from rocketstore.client.aio.timed import TimedMessage

SHOWN: Final = 32
COUNT: Final = flag_values.Whole(min=1)


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"cancel"}),
    short_help="List, find and cancel messages that wait for their time.",
    epilog="""\b
Examples:
  dledger message delayed list
  dledger message delayed search order-17 -t orders
  dledger message delayed cancel HANDLE""",
)
def delayed() -> None:
    """List, find and cancel messages that wait for a time of their own (not at a delay level).

    With access control, an administrator lists them; anyone who may send to a message's topic may cancel it.
    """


@delayed.command(
    "list",
    short_help="Show which messages are due next.",
    epilog="""\b
Examples:
  dledger message delayed list
  dledger message delayed list -t orders --from 2026-12-24T18:00 --json""",
)
@click.option("-t", "--topic", default="", metavar="TOPIC", help="Only messages for this topic.")
@click.option("--from", "start", type=Moment(), default=0, metavar="TIME", help="Due at this time or later.")
@click.option("--max", "count", type=COUNT, default=SHOWN, show_default=True, metavar="N", help="Maximum messages.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per message.")
@broker_options
def list_messages(topic: str, start: int, count: int, as_json: bool, target: BrokerTarget) -> None:
    """Show the messages that are due next, and how many wait in all."""
    _show(target, topic, "", start, count, as_json)


@delayed.command(
    short_help="Find waiting messages by key or id.",
    epilog="""\b
Examples:
  dledger message delayed search order-17
  dledger message delayed search C0000202B9F818B4AAC24DD5B1B70000 -t orders""",
)
@click.argument("key")
@click.option("-t", "--topic", default="", metavar="TOPIC", help="Only messages for this topic.")
@click.option("--max", "count", type=COUNT, default=SHOWN, show_default=True, metavar="N", help="Maximum messages.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per message.")
@broker_options
def search(key: str, topic: str, count: int, as_json: bool, target: BrokerTarget) -> None:
    """Show the waiting messages with this key or message id. Exit code 1 if there is none.

    All that wait are looked at, so it may take a while.
    """
    if not _show(target, topic, key, 0, count, as_json):
        raise click.exceptions.Exit(1)


@delayed.command(
    short_help="Have a waiting message not delivered.",
    epilog="""\b
Examples:
  dledger message delayed cancel "$(dledger message delayed search order-17 --json | jq -r .recall_handle)\"""",
)
@click.argument("handle")
@broker_options
def cancel(handle: str, target: BrokerTarget) -> None:
    """Have the message with this recall handle not delivered; ``list`` and ``search`` show handles."""
    with target.brokers() as brokers:
        try:
            message_id = brokers.admin.recall(handle)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    click.echo(f"cancelled: message {message_id} will not be delivered")


def _show(target: BrokerTarget, topic: str, key: str, from_ms: int, count: int, as_json: bool) -> int:
    """Returns how many were shown."""
    shown = 0
    with target.brokers() as brokers:
        for broker in brokers.every():
            begin, left = (from_ms, 0), count
            while begin[0] >= 0 and left > 0:
                page = brokers.admin.timed(topic, key, *begin, max_messages=left, broker=broker)
                for one in page.messages:
                    _print(one, page.broker, as_json)
                left, shown = left - len(page.messages), shown + len(page.messages)
                begin = page.next_ms, page.next_offset
            if not as_json:
                late = f", {page.late} of them late" if page.late else ""
                due = f", the next one at {time_text(page.next_due_ms)}" if page.next_due_ms >= 0 else ""
                click.echo(f"{page.broker}: {page.open} messages wait for their time{late}{due}", err=True)
    return shown


def _print(one: TimedMessage, broker: str, as_json: bool) -> None:
    if as_json:
        terminal.print_json({"broker": broker} | asdict(one))
        return
    left = max(0, one.due_ms - int(time.time() * 1000))
    about = " ".join(text for text in (one.tags and f"[{one.tags}]", one.keys) if text)
    click.echo(f"{time_text(one.due_ms)}  in {left // 1000} s  {one.topic}  {one.message_id}  {about}".rstrip())
    click.echo(f"    {one.recall_handle}")
