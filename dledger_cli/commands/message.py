"""``dledger message``: sends and consumes messages, and lists, finds and cancels those that wait for their time."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import click

from dledger.command_line import flag_values
from dledger_cli import terminal
from dledger_cli.commands.log import LineTally, send_lines
from dledger_cli.commands.message_query import (
    expression_of,
    print_messages,
    query_by_id,
    query_by_key,
    sql_option,
    trace,
)
from dledger_cli.messages import print_message
from dledger_cli.targets import BrokerTarget, broker_options
from dledger_cli.terminal import ErrorReportingGroup, Moment, start_of, time_text

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rocketstore.client.aio.admin_requests import TimedMessage
    from rocketstore.client.aio.errors import SendResult
    from rocketstore.client.aio.rebalancer import Assign
    from rocketstore.client.blocking import Producer
    from rocketstore.client.blocking_consumer import Consumer
    from rocketstore.message.message import Message
    from rocketstore.remoting.topics import MessageQueue

DELAY_LEVEL_MAX = 18
_OPTIONS = {"TAGS": "--tags", "KEYS": "--keys", "DELAY": "--delay-level"}
UNCONFIRMED = {
    "FLUSH_DISK_TIMEOUT": "not yet known to be on the master's disk",
    "FLUSH_SLAVE_TIMEOUT": "slaves did not confirm them in time",
    "SLAVE_NOT_AVAILABLE": "too few slaves follow, so perhaps only the master has them",
}
POLL_S = 0.25
FOLLOWED_WAIT_S = 5.0
"""How long brokers may hold back the answer to a pull while somebody waits for new messages."""
POLLED_MAX = 1024


@click.group(
    cls=ErrorReportingGroup,
    writing=frozenset({"send"}),
    short_help="Send, consume and find messages.",
    epilog="""\b
Examples:
  dledger message send -t orders "hello" --tags new --keys order-17
  dledger message consume -t orders --from first
  dledger message query-by-key -t orders order-17""",
)
def message() -> None:
    """Send, consume and find messages."""


message.add_command(query_by_id)
message.add_command(query_by_key)
message.add_command(print_messages)
message.add_command(trace)


@dataclass(frozen=True, slots=True)
class _Letter:
    """The parts that all messages of one command share."""

    topic: str
    tags: str
    keys: str
    delay_level: int
    properties: dict[str, str]
    key: str | None
    next_queue: Callable[[], MessageQueue | int | None] = lambda: None

    def message(self, body: bytes) -> Message:
        from rocketstore.message.message import Message

        return Message(
            self.topic,
            body,
            properties=dict(self.properties),
            tags=self.tags,
            keys=self.keys,
            delay_level=self.delay_level,
        )


@message.command(
    short_help="Send messages: arguments, lines, or a file.",
    epilog="""\b
Examples:
  dledger message send -t orders hello world                 two messages
  dledger message send -t orders --tags new --keys "order-17 alice" '{"id": 17}'
  dledger message send -t orders --delay-level 3 later       in 10 seconds
  dledger message send -t orders --key alice one two         the same key, the same queue, in order
  journalctl -o json | dledger message send -t journal -     one message per line of standard input
  dledger message send -t lines --file access.log

A message is acknowledged when the master has stored it (in a group: a majority). Exit code 3 means that some messages
have an unknown outcome: they may be stored or not. What is sent again meanwhile
is stored once.""",
)
@click.argument("texts", nargs=-1, metavar="[TEXT]… | -")
@click.option("-t", "--topic", required=True, help="The topic.")
@click.option("--tags", help="The tag.")
@click.option("--keys", help="Business keys to find it by, separated by spaces.")
@click.option("--queue", type=flag_values.Whole(min=0), help="Send to this queue; default: each in turn.")
@click.option("--key", help="Sharding key: the same key always goes to the same queue.")
@click.option(
    "--delay-level", type=flag_values.Whole(1, DELAY_LEVEL_MAX), help="Deliver later: 1 s, 5 s, 10 s, 30 s, 1 m …"
)
@click.option(
    "--property", "properties", multiple=True, metavar="NAME=VALUE", help="Any other property; may be repeated."
)
@click.option(
    "--file", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Send the lines of this file."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per stored message.")
@broker_options
def send(  # noqa: PLR0913  # one parameter per option
    texts: tuple[str, ...],
    topic: str,
    tags: str | None,
    keys: str | None,
    queue: int | None,
    key: str | None,
    delay_level: int | None,
    properties: tuple[str, ...],
    file: Path | None,
    as_json: bool,
    target: BrokerTarget,
) -> None:
    """Send messages: each argument, or each line of standard input (-) or of a file."""
    if bool(texts) == bool(file):
        raise click.UsageError("give either texts, or - for standard input, or --file")
    if "-" in texts and len(texts) > 1:
        raise click.UsageError("- is standard input: give it alone, or texts only")
    if queue is not None and key is not None:
        raise click.UsageError("give either --queue or --key")
    letter = _Letter(topic, tags or "", keys or "", delay_level or 0, _assigned(properties), key)
    try:
        letter.message(b"")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if target.broker_name:
        next_queue = _queues_of_one_broker(target, topic, queue, key)
        letter = replace(letter, key=None, next_queue=next_queue)
    elif queue is not None:
        if target.name_servers:
            with target.brokers() as brokers:
                brokers.only_one_with(topic)  # a queue's number means one queue
        letter = replace(letter, next_queue=lambda: queue)
    with target.sending() as producer:
        if file is not None:
            with file.open("rb") as stream:
                total = terminal.count_lines(stream)
                _send_stream(producer, letter, stream, as_json, total)
        elif texts == ("-",):
            _send_stream(producer, letter, sys.stdin.buffer, as_json, None)
        else:
            statuses: Counter[str] = Counter()
            try:
                for text in texts:
                    sent = producer.send(letter.message(os.fsencode(text)), key=letter.key, queue=letter.next_queue())
                    statuses[sent.status] += 1
                    _print_sent(sent, as_json, delayed=bool(delay_level))
            finally:
                _tell_unconfirmed(statuses)


def _queues_of_one_broker(
    target: BrokerTarget, topic: str, queue: int | None, key: str | None
) -> Callable[[], MessageQueue]:
    """Of the brokers of ``--broker-name``: this queue, the key's, or each in turn. Raises ``NotFoundError``."""
    from rocketstore.client.aio.outgoing import queue_number_of_key
    from rocketstore.remoting.topics import MessageQueue

    with target.brokers() as brokers:
        part = brokers.only_one_with(topic)
    queues = [MessageQueue(topic, part.broker, number) for number in range(max(part.write_queues, 1))]
    if queue is not None:
        queues = [MessageQueue(topic, part.broker, queue)]
    elif key is not None:
        queues = [queues[queue_number_of_key(key, len(queues))]]
    start = random.randrange(len(queues))  # many short-lived commands would fill the first one
    return itertools.cycle([*queues[start:], *queues[:start]]).__next__


def _assigned(assignments: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in assignments:
        name, equals, text = one.partition("=")
        if not equals or not name:
            raise click.UsageError(f"invalid --property {one!r}: use --property NAME=VALUE")
        if name in _OPTIONS:
            raise click.UsageError(f"--property {name} means something to the store: use {_OPTIONS[name]}")
        found[name] = text
    return found


def _print_sent(sent: SendResult, as_json: bool, *, delayed: bool) -> None:
    """A delayed message has no place in its topic yet: the result's is where it waits."""
    if as_json:
        found: dict[str, object] = {
            "status": sent.status,
            "topic": sent.topic,
            "broker": sent.broker,
            "queue_id": sent.queue,
            "queue_offset": sent.offset,
            "message_id": sent.message_id,
            "offset_message_id": sent.offset_id,
        }
        terminal.print_json(found | {"queue_offset": None, "delayed": True} if delayed else found)
    elif terminal.on_terminal():
        place = "to be delivered later," if delayed else f"at offset {sent.offset},"
        click.echo(f"sent to queue {sent.queue} {place} id {sent.offset_id}")
    else:
        click.echo(sent.offset_id)


def _tell_unconfirmed(statuses: Counter[str]) -> None:
    """Messages that are stored, but not as safely as the broker is set to: scripts print ids only."""
    for status, count in sorted(statuses.items()):
        if status != "SEND_OK":
            text = f"note: {count} of {statuses.total()} messages stored as {status}: {UNCONFIRMED.get(status, '')}"
            click.echo(text, err=True)


def _send_stream(producer: Producer, letter: _Letter, stream: BinaryIO, as_json: bool, total: int | None) -> None:
    """Pipeline the lines; after the first failure, sends nothing more and awaits the lines in flight."""
    tally = LineTally(("stored", "not stored"))
    started = time.monotonic()
    statuses: Counter[str] = Counter()
    with terminal.progress("sending", total) as advance:

        def submit(line: bytes) -> Future[SendResult]:
            return producer.submit(letter.message(line), key=letter.key, queue=letter.next_queue())

        def tell(sent: SendResult) -> None:
            statuses[sent.status] += 1
            if as_json:
                _print_sent(sent, as_json, delayed=bool(letter.delay_level))
            advance(1)

        send_lines(stream, tally, submit, producer.flush, tell)
    took_s = time.monotonic() - started
    if not as_json and tally.applied:
        rate = tally.applied / max(took_s, 1e-9)
        click.echo(f"sent {tally.applied} messages to {letter.topic} in {took_s:.2f} s ({rate:,.0f}/s)")
    _tell_unconfirmed(statuses)
    tally.end()


@message.command(
    short_help="Print the messages of a topic, once or with --follow.",
    epilog="""\b
Examples:
  dledger message consume -t orders --from first             all there is, then stop
  dledger message consume -t orders -g billing --follow      its share of the group's new messages, until Ctrl-C
  dledger message consume -t orders --from 30m --tags "new || paid" --max 10 --json
  dledger message consume -t orders --from first --sql "amount > 10 AND region = 'EU'"

Without --group no position is kept. With one, the printed messages are committed, and the next run continues after
them; --from applies only to a group without an offset. Several consumers of a group, also RocketMQ's, share its queues:
each prints the messages of its own ones, and when one ends, the others take them over. With name servers, these are the
queues of all groups of brokers that have the topic. With --queue or --alone, it reads those queues, or all,
whatever others read. Without a terminal only the bodies are printed.""",
)
@click.option("-t", "--topic", required=True, help="The topic.")
@click.option("-g", "--group", default="", help="Consumer group that remembers its position.")
@click.option("--from", "start", type=Moment(ends=True), metavar="first|last|TIME", help="Where a new group starts.")
@click.option("--max", "count", type=flag_values.Whole(min=1), metavar="N", help="Stop after this many messages.")
@click.option("-f", "--follow", is_flag=True, help="Wait for new messages; survives the loss of a broker.")
@click.option("--tags", default="*", show_default=True, metavar="'A || B'", help="Only messages with these tags.")
@sql_option
@click.option(
    "--queue", "queues", type=flag_values.Whole(min=0), multiple=True, help="Only this queue; may be repeated."
)
@click.option("--alone", is_flag=True, help="With --group: read every queue, also those of the group's other members.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per message.")
@broker_options
def consume(  # noqa: PLR0913  # one parameter per option
    topic: str,
    group: str,
    start: str | int | None,
    count: int | None,
    follow: bool,
    tags: str,
    sql: str | None,
    queues: tuple[int, ...],
    alone: bool,
    as_json: bool,
    target: BrokerTarget,
) -> None:
    """Print the messages of a topic, from the first one, or with --follow only new ones."""
    from rocketstore.client.aio.consumer_options import ConsumerOptions

    begin = start if start is not None else "last" if follow else "first"
    assign = None if group and not queues and not alone else _own_queues(target, topic, queues)
    if assign is None and target.broker_name:
        raise click.UsageError(
            "the members of a group share the queues of all brokers: omit --broker-name, or give --alone or --queue"
        )
    options = ConsumerOptions(
        start=start_of(begin), timeout_s=target.timeout_s, pull_wait_s=FOLLOWED_WAIT_S if follow else POLL_S
    )
    with target.consumer(group, {topic: expression_of(tags, sql)}, assign, options) as source:
        _print_from(source, count, follow, target.timeout_s, as_json)


def _own_queues(target: BrokerTarget, topic: str, numbers: Sequence[int]) -> Assign:
    """The queues to read without sharing: these of the only broker that has the topic, or all of those chosen."""
    from rocketstore.remoting.topics import MessageQueue

    if not (numbers or target.broker_name):
        return "all"
    with target.brokers() as brokers:
        parts = [brokers.only_one_with(topic)] if numbers else brokers.with_topic(topic)
    return [MessageQueue(topic, part.broker, number) for part in parts for number in numbers or range(part.read_queues)]


def _print_from(source: Consumer, count: int | None, follow: bool, patience_s: float, as_json: bool) -> None:
    left = sys.maxsize if count is None else count
    heard_at = time.monotonic()
    while left > 0:
        messages = source.poll(min(left, POLLED_MAX), POLL_S)
        for one in messages:
            print_message(one.decode(), as_json)
        left -= len(messages)
        sys.stdout.flush()
        behind = source.lag().values()
        if messages or all(lag >= 0 for lag in behind):
            heard_at = time.monotonic()
        if not (messages or follow or any(behind)):
            return
        if not follow and time.monotonic() - heard_at > patience_s:
            raise click.ClickException(f"no answer for every queue within {patience_s:g} s")


SHOWN: Final = 32
COUNT: Final = flag_values.Whole(min=1)


@message.group(
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
