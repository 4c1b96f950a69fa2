"""Prints messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dledger_cli import terminal
from dledger_cli.moments import time_text
from dledger_cli.terminal import escaped

if TYPE_CHECKING:
    from rocketstore.message.message import Message


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
