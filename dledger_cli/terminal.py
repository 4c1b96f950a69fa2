"""Input and output of commands: rich tables and progress bars on a terminal, plain text elsewhere.

Names, tags, addresses and errors come from anyone who can connect. They are escaped where they are shown, in logs,
tables, errors and JSON, so that they do nothing to a terminal and begin no other line. Bodies that go to a pipe are
data, and stay as they are.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar

import click

from dledger.conditions import Condition

if TYPE_CHECKING:
    from rich.table import Table

    from rocketstore.message.message import HostAddress

_HIDDEN: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ud800-\\udfff\\ufeff"
    "\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"
)
"""Characters that move the cursor, change colours, end a line, hide or reorder text; but not line feeds and tabs."""


def escaped_lines(text: str) -> str:
    """``text`` with every such character as an escape; its lines stay lines."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def escaped(text: str) -> str:
    """The same as one line."""
    return escaped_lines(text).replace("\n", "\\n").replace("\t", "\\t")


def escaped_json(document: str) -> str:
    """A JSON document of one line, with such characters as JSON escapes: it means the same."""
    return _HIDDEN.sub(lambda found: _units(found[0]), document)


def _units(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


Advance = Callable[[int], None]
"""Advances a progress bar by a number of steps."""
_T = TypeVar("_T")


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


@contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once with exit code 130, for commands that only display data and have nothing to
    finish.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        with suppress(OSError, RuntimeError):  # a closed pipe, or an interrupted print
            sys.stdout.flush()
        os._exit(128 + signal.SIGINT)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def confirm(question: str) -> None:
    """Return only after a yes. Raises ``click.Abort``, or without a terminal an error that names the option to pass."""
    try:
        click.confirm(question, abort=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo()  # ends the line of the question
        raise click.ClickException("not confirmed, so nothing was changed: pass --yes to confirm in a script") from None


def print_json(value: object) -> None:
    """One JSON document on one line."""
    click.echo(escaped_json(json.dumps(value, ensure_ascii=False)))


def condition_text(condition: Condition) -> str:
    """The condition, its subject and its start (local time)."""
    since = datetime.fromtimestamp(condition.since_ms / 1000).astimezone()
    about = f" {condition.subject}" if condition.subject else ""
    return escaped(f"{condition.kind.upper()}{about} since {since:%Y-%m-%d %H:%M:%S}: {condition.message}")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str] | None = None) -> Table:
    """A rich table; ``styles`` maps a cell's text to the style of its row."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(header_style="bold underline", box=None, pad_edge=False)  # frames would not fit into 80 columns
    for number, column in enumerate(columns):
        figures = rows and all(row[number].lstrip("-").replace(",", "").isdigit() or row[number] == "" for row in rows)
        grid.add_column(column, justify="right" if figures else "left", no_wrap=True)
    for row in rows:
        style = next((styles[cell] for cell in row if cell in styles), "") if styles else ""
        grid.add_row(*(Text(escaped(cell)) for cell in row), style=style)
    return grid


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For pipes and logs: columns padded with blanks, easy to cut."""
    lines = [list(columns), *(list(map(escaped, row)) for row in rows)]
    widths = [max(len(line[number]) for line in lines) for number in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def fitting(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, least: Sequence[str]
) -> tuple[list[str], list[list[str]], list[str]]:
    """The table without as many of the columns ``least``, in this order, as must go to fit; and those that went."""
    shown, gone = list(range(len(columns))), []
    widths = [max(len(line[place]) for line in (columns, *rows)) for place in shown]
    for name in least:
        if sum(widths[place] for place in shown) + 2 * (len(shown) - 1) <= width:
            break
        shown.remove(columns.index(name))
        gone.append(name)
    return [columns[place] for place in shown], [[row[place] for place in shown] for row in rows], gone


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Mapping[str, str] | None = None,
    *,
    least: Sequence[str] = (),
    below: tuple[str, str] | None = None,
) -> None:
    """A rich table on a terminal, a padded one elsewhere.

    On a terminal, columns of ``least`` are left out where there is no room, and the texts of the second column of
    ``below`` are printed under the table, each after the first one's.
    """
    if not on_terminal():
        click.echo(plain_table(columns, rows))
        return
    from rich.console import Console

    console = Console()
    notes: list[tuple[str, str]] = []
    if below is not None:
        label, note = (columns.index(name) for name in below)
        notes = [(row[label], row[note]) for row in rows if row[note]]
        rows = [[*row[:note], *row[note + 1 :]] for row in rows]
        columns = [*columns[:note], *columns[note + 1 :]]
    columns, rows, gone = fitting(columns, rows, console.width, least)
    console.print(table(columns, rows, styles))
    for about, text in notes:
        click.echo(escaped(f"{about}: {text}"))
    if gone:
        click.echo(f"(no room for: {', '.join(gone)})")


def printable(body: bytes) -> str:
    """The body as text in which no byte can move the cursor or change colours."""
    text = body.decode(errors="backslashreplace")
    return "".join(one if one.isprintable() or one == "\t" else ascii(one)[1:-1] for one in text)


def host_text(host: HostAddress) -> str:
    """``ip:port``."""
    try:
        address = ipaddress.ip_address(host.ip)
    except ValueError:
        return f"?:{host.port}"
    return f"[{address}]:{host.port}" if address.version == 6 else f"{address}:{host.port}"


def body_json(body: bytes) -> dict[str, object]:
    """The body as a JSON field: ``body``, or ``body_base64`` if it is not UTF-8."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def count_lines(stream: BinaryIO) -> int | None:
    """The number of lines of a file, which is then rewound; None for a pipe, which can be read only once."""
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return None
    count = sum(1 for _ in stream)
    stream.seek(0)
    return count


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Advance]:
    """A progress bar on standard error if that is a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield _no_advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=total)

        def advance(steps: int) -> None:
            bar.advance(task, steps)

        yield advance


def _no_advance(_steps: int) -> None:
    """Does nothing."""


def print_broker_tables(
    columns: Sequence[str],
    found: Sequence[tuple[str, Sequence[_T]]],
    row: Callable[[_T], tuple[str, ...]],
    *,
    least: Sequence[str] = (),
) -> None:
    """Print the answers of several groups of brokers, each row with its group's name; without names for a single one.

    Columns of ``least`` are left out where there is no room.
    """
    if len(found) > 1:
        rows = [(broker, *row(one)) for broker, ones in found for one in ones]
        print_table(("broker", *columns), rows, least=least)
    else:
        print_table(columns, [row(one) for _, ones in found for one in ones], least=least)
