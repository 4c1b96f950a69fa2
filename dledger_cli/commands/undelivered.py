"""Shared by the commands about dead letters and given-up transactions: which messages, and how they are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from dledger.command_line import flag_values
from dledger_cli import terminal
from dledger_cli.commands.message_print import body_of, message_json
from dledger_cli.dead_letters import walk
from dledger_cli.moments import Moment, start_of, time_text

if TYPE_CHECKING:
    from dledger_cli.chosen_brokers import ChosenBrokers
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
