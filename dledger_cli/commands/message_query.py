"""``dledger message query-by-id``, ``query-by-key``, ``print`` and ``trace``: find messages, print queues.

``trace`` shows who sent and who consumed a message, when, and how long it took.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import click

from dledger.command_line import flag_values
from dledger.errors import IndexOutOfRangeError, InvalidRequestError
from dledger_cli import terminal
from dledger_cli.messages import body_of, message_json, print_details, print_message, walk
from dledger_cli.targets import BrokerTarget, broker_options
from dledger_cli.terminal import Moment, start_of, time_text
from rocketstore.message.trace import TRACE_TOPIC

if TYPE_CHECKING:
    from rocketstore.client.aio.admin_requests import TopicInfo, Traced
    from rocketstore.client.aio.consumer_options import Sql
    from rocketstore.client.blocking import Admin
    from rocketstore.message.message import Message


@click.command(
    "query-by-id",
    short_help="Show the message with an id.",
    epilog="""\b
Examples:
  dledger message query-by-id 7F00000100002A9F0000000000000400
  dledger message query-by-id 7F00000100002A9F0000000000000400 --json | jq -r .body""",
)
@click.argument("message_id", metavar="OFFSET_MESSAGE_ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@broker_options
def query_by_id(message_id: str, as_json: bool, target: BrokerTarget) -> None:
    """Show the message with an offset message id, which contains its position in the log."""
    check_offset_id(message_id)
    with target.brokers() as brokers:
        message = brokers.admin.message_by_id(message_id, target.broker_name)
    (_print_json if as_json else print_details)(message, body_of(message))


def check_offset_id(message_id: str) -> None:
    """RocketMQ's clients print another id, the producer's, as msgId: only its topic's index knows that one."""
    from rocketstore.message.ids import parse_offset_message_id

    try:
        parse_offset_message_id(message_id)
    except InvalidRequestError as error:
        raise click.UsageError(f"{error} (dledger message query-by-key -t TOPIC --unique ID)") from error


@click.command(
    "query-by-key",
    short_help="Find messages by a key.",
    epilog="""\b
Examples:
  dledger message query-by-key -t orders order-17
  dledger message query-by-key -t orders order-17 --begin 1h --json
  dledger message query-by-key -t orders --unique C0000202B9F818B4AAC24DD5B1B70000""",
)
@click.argument("key")
@click.option("-t", "--topic", required=True, help="The topic.")
@click.option("--unique", is_flag=True, help="KEY is the id that the producer gave the message.")
@click.option(
    "--max",
    "count",
    type=flag_values.Whole(min=1),
    default=32,
    show_default=True,
    metavar="N",
    help="Maximum messages.",
)
@click.option("--begin", type=Moment(), default=0, metavar="TIME", help="Stored at this time or later.")
@click.option("--end", type=Moment(), default=0, metavar="TIME", help="Stored at this time or earlier.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per message.")
@broker_options
def query_by_key(  # noqa: PLR0913  # one parameter per option
    key: str, topic: str, unique: bool, count: int, begin: int, end: int, as_json: bool, target: BrokerTarget
) -> None:
    """Find messages by one of their business keys. Exit code 1 if there is none."""
    from rocketstore.client.aio.admin_messages import FOREVER_MS  # here, so that --help does not load it

    with target.brokers() as brokers:
        brokers.with_topic(topic)
        found = brokers.admin.messages_by_key(
            topic,
            key,
            max_messages=count,
            begin_ms=begin,
            end_ms=end or FOREVER_MS,
            unique=unique,
            broker=target.broker_name,
        )
    if not found:
        raise click.ClickException(f"no message in {topic} has key {key}")
    shown = [(message, body_of(message)) for message in found]
    if as_json:
        for message, body in shown:
            _print_json(message, body)
        return
    rows = [
        (
            str(message_json(message, b"")["offset_message_id"]),
            str(message.queue_id),
            str(message.queue_offset),
            time_text(message.store_timestamp),
            terminal.printable(message.tags.encode()),
            terminal.printable(" ".join(message.keys).encode()),
            terminal.printable(body[:60]),
        )
        for message, body in shown
    ]
    terminal.print_table(("id", "queue", "offset", "stored", "tags", "keys", "body"), rows)


def _print_json(message: Message, body: bytes) -> None:
    terminal.print_json(message_json(message, body))


sql_option = click.option(
    "--sql",
    metavar="CONDITION",
    help='Instead of tags: only messages whose properties fulfil an SQL92 condition, such as "amount > 10".',
)


def expression_of(tags: str, sql: str | None) -> str | Sql:
    """The filter that ``--tags`` and ``--sql`` ask for. Raises ``UsageError``."""
    from rocketstore.client import Sql

    if sql is None:
        return tags
    if tags != "*":
        raise click.UsageError("give either --tags or --sql")
    return Sql(sql)


@click.command(
    "print",
    short_help="Print queues without a consumer group.",
    epilog="""\b
Examples:
  dledger message print -t orders --max 10
  dledger message print -t orders --queue 3 --offset 1200 --max 5
  dledger message print -t orders --from 1h --tags new --json
  dledger message print -t orders --sql "amount > 10 AND region = 'EU'\"""",
)
@click.option("-t", "--topic", required=True, help="The topic.")
@click.option("--queue", type=flag_values.Whole(min=0), help="Only this queue; default: all, one after the other.")
@click.option("--offset", type=flag_values.Whole(min=0), help="With --queue: start here.")
@click.option(
    "--from",
    "start",
    type=Moment(ends=True),
    default="first",
    show_default=True,
    metavar="first|TIME",
    help="Where to start.",
)
@click.option("--max", "count", type=flag_values.Whole(min=1), metavar="N", help="Maximum messages per queue.")
@click.option("--tags", default="*", show_default=True, metavar="'A || B'", help="Only messages with these tags.")
@sql_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per message.")
@broker_options
def print_messages(  # noqa: PLR0913  # one parameter per option
    topic: str,
    queue: int | None,
    offset: int | None,
    start: str | int,
    count: int | None,
    tags: str,
    sql: str | None,
    as_json: bool,
    target: BrokerTarget,
) -> None:
    """Print the current messages of a topic, queue by queue."""
    if offset is not None and queue is None:
        raise click.UsageError("--offset needs --queue")
    expression = expression_of(tags, sql)
    with target.brokers() as brokers:
        places = brokers.with_topic(topic) if queue is None else [brokers.only_one_with(topic)]
        for one in places:
            if queue is not None and queue >= one.read_queues:
                raise IndexOutOfRangeError(
                    f"topic {topic} has {one.read_queues} read queues: there is no queue {queue}"
                )
            queues = range(one.read_queues) if queue is None else [queue]
            for number in queues:
                _print_queue(brokers.admin, one, number, offset, start_of(start), count, expression, as_json)


def _print_queue(  # noqa: PLR0913  # one parameter per option
    admin: Admin,
    topic: TopicInfo,
    number: int,
    offset: int | None,
    start: Literal["first", "last"] | int,
    count: int | None,
    expression: str | Sql,
    as_json: bool,
) -> None:
    from rocketstore.remoting.topics import MessageQueue

    queue = MessageQueue(topic.name, topic.broker, number)
    end = admin.offset_at(queue, "last")
    place = admin.offset_at(queue, start if offset is None else "first")
    place = max(place, offset or 0)
    for one in walk(admin, queue, place, end, end if count is None else count, expression):
        print_message(one, as_json)


@click.command(
    "trace",
    short_help="Show who sent and consumed a message.",
    epilog="""\b
Examples:
  dledger message trace 7F0000011F9018B4AAC24DD5B1B70000
  dledger message trace 7F0000011F9018B4AAC24DD5B1B70000 --json | jq .cost_ms""",
)
@click.argument("message_id", metavar="MESSAGE_ID")
@click.option("-t", "--trace-topic", default=TRACE_TOPIC, show_default=True, help="Where its clients write traces.")
@click.option("--begin", type=Moment(), default=0, metavar="TIME", help="Only traces written at this time or later.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per step.")
@broker_options
def trace(message_id: str, trace_topic: str, begin: int, as_json: bool, target: BrokerTarget) -> None:
    """Show the way of the message with this id (that of its producer), as its clients have written it.

    Producers and consumers of this project write traces with trace=True, RocketMQ's with enableMsgTrace. Traces are
    written about a second later. Exit code 1 if there is none.
    """
    with target.brokers() as brokers:
        steps = brokers.admin.trace(message_id, topic=trace_topic, begin_ms=begin)
    if not steps:
        raise click.ClickException(
            f"no trace of message {message_id} in {trace_topic}: its clients wrote none (trace=True), it has expired, "
            "or it is written in a moment"
        )
    if as_json:
        for one in steps:
            terminal.print_json(dataclasses.asdict(one))
        return
    terminal.print_table(("step", "group", "client", "began", "took", "result", "at"), [_row(one) for one in steps])


def _row(one: Traced) -> tuple[str, ...]:
    took = f"{one.cost_ms} ms" if one.cost_ms >= 0 else ""
    if one.step == "ended":
        result = ""
    elif one.step == "consumed" and one.cost_ms < 0:
        result = "not done yet"
    else:
        result = "ok" if one.ok else "failed"
    step = f"{one.step} (try {one.retries + 1})" if one.retries else one.step
    texts = (step, one.group or "-", one.host, time_text(one.time_ms), took, result, one.detail)
    return tuple(terminal.printable(text.encode()) for text in texts)
