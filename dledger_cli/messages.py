"""Messages, read in bulk from a queue, printed, and delivered again when they are dead letters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from dledger.access.rules import DEAD_PREFIX
from dledger_cli import terminal
from dledger_cli.terminal import escaped, time_text

if TYPE_CHECKING:
    from rocketstore.client.aio.consumer_options import Sql
    from rocketstore.client.blocking import Admin
    from rocketstore.message.message import Message
    from rocketstore.remoting.topics import MessageQueue

PAGE: Final = 256
RESEND_LEVEL: Final = 1
"""The shortest delay."""
RESENDS_MAX: Final = 1_000_000
"""A dead letter was delivered more often than its group allows."""


def walk(
    admin: Admin, queue: MessageQueue, place: int, end: int, count: int = sys.maxsize, expression: str | Sql = "*"
) -> Iterator[Message]:
    """At most ``count`` messages of a queue from offset ``place`` to before ``end``, as they are stored."""
    left = count
    while left > 0 and place < end:
        messages, next_offset = admin.messages(
            queue, place, max_messages=min(left, PAGE, end - place), expression=expression
        )
        yield from messages
        left -= len(messages)
        if next_offset <= place:
            return
        place = next_offset


def send_again(admin: Admin, group: str, position: int, broker: str = "") -> None:
    """Deliver a copy of the dead letter at this position of a broker's log to its group once more, after a second; the
    letter itself stays.
    """
    topic = f"{DEAD_PREFIX}{group}"
    admin.send_back(group, topic, position, delay_level=RESEND_LEVEL, retries_max=RESENDS_MAX, broker=broker)


def print_message(message: Message, as_json: bool) -> None:
    """One line: JSON for scripts, position and body on a terminal, only the body in pipes."""
    body = body_of(message)
    if as_json:
        terminal.print_json(message_json(message, body))
    elif terminal.on_terminal():
        place = f"{message.queue_id}:{message.queue_offset}"
        when, tags = time_text(message.store_timestamp), escaped(message.tags)
        head = click.style(f"{place:>10} {when}", dim=True)
        click.echo(f"{head}  {click.style(tags, bold=True) + '  ' if tags else ''}{terminal.printable(body)}")
    else:
        click.echo(body)


def body_of(message: Message) -> bytes:
    """The decompressed body; if it cannot be decompressed, the stored one, with the reason on standard error.

    One message must not hide those behind it.
    """
    from rocketstore.client.aio.received import plain_body

    body, problem = plain_body(message)
    if problem:
        place = f"{message.topic}, queue {message.queue_id}, offset {message.queue_offset}"
        click.echo(f"note: {place} is shown as stored: {escaped(problem)}", err=True)
    return body


def message_json(message: Message, body: bytes) -> dict[str, object]:
    """Everything stored with it, and the decompressed body."""
    from rocketstore.message.ids import offset_message_id

    offset_id = offset_message_id(message.store_host, message.offset)
    return {
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "message_id": message.unique_key or offset_id,
        "offset_message_id": offset_id,
        "tags": message.tags,
        "keys": message.keys,
        "properties": message.properties,
        "offset": message.offset,
        "size": message.size,
        "flag": message.flag,
        "sys_flag": message.sys_flag,
        "reconsume_times": message.reconsume_times,
        "born_timestamp": message.born_timestamp,
        "born_host": terminal.host_text(message.born_host),
        "store_timestamp": message.store_timestamp,
        "store_host": terminal.host_text(message.store_host),
        **terminal.body_json(body),
    }


def print_details(message: Message, body: bytes) -> None:
    """All of one message, one line per property, like mqadmin's queryMsgById."""
    facts = message_json(message, body)
    facts["born_timestamp"] = time_text(message.born_timestamp)
    facts["store_timestamp"] = time_text(message.store_timestamp)
    facts["keys"] = " ".join(message.keys)
    facts["properties"] = ", ".join(f"{name}={value}" for name, value in sorted(message.properties.items()))
    facts.pop("body_base64", None)
    facts["body"] = terminal.printable(body)
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name.replace('_', ' '):<{width}}  {terminal.printable(str(value).encode())}")
