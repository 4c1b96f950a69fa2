"""Input and output of commands: rich tables and progress bars on a terminal, plain text elsewhere.

Times are read and shown here, and errors become a sentence on standard error and an exit code.

Names, tags, addresses and errors come from anyone who can connect. They are escaped where they are shown, in logs,
tables, errors and JSON, so that they do nothing to a terminal and begin no other line. Bodies that go to a pipe are
data, and stay as they are.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import ipaddress
import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, Final, Literal, TypeVar

import click
from click.exceptions import NoArgsIsHelpError

from dledger.command_line.contexts import USED
from dledger.errors import ConfigError, DLedgerError
from dledger.values import parse_duration_ms

if TYPE_CHECKING:
    from rich.table import Table

    from dledger.monitoring import Condition
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


class Moment(click.ParamType[str | int]):
    """A time: milliseconds since 1970, ISO 8601 (local time unless it has an offset), or an age (``30m``).

    With ``ends``, also ``first`` and ``last``, which stay text.
    """

    name = "time"

    def __init__(self, *, ends: bool = False) -> None:
        self._ends = ends

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        """Milliseconds since 1970, or the word."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if self._ends and text in ("first", "last"):
            return text
        if text.isascii() and text.isdigit():
            return int(text)
        try:
            return _moment_ms(text)
        except ValueError:
            words = "first, last, " if self._ends else ""
            self.fail(f"invalid time {text!r}: use {words}2026-01-31T12:00, 30m (ago) or milliseconds", param, ctx)


def _moment_ms(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (ago_ms := parse_duration_ms(text, unit="")) >= 0:
            return int(time.time() * 1000 - ago_ms)
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def start_of(moment: str | int) -> Literal["first", "last"] | int:
    """Converts the value of ``Moment(ends=True)`` to a consumer's start."""
    if isinstance(moment, int):
        return moment
    return "last" if moment == "last" else "first"


def time_text(moment_ms: int) -> str:
    """Local time to the millisecond; empty for no time."""
    if moment_ms <= 0:
        return ""
    return datetime.fromtimestamp(moment_ms / 1000).astimezone().isoformat(" ", "milliseconds")[:23]


EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNKNOWN_OUTCOME = 3
EXIT_INTERRUPTED = 130
"""After Ctrl-C, as shells have it; a server stops gracefully instead, with 0."""
EXIT_CLOSED_PIPE = 141
"""When nobody reads the output any more (``| head``): as if SIGPIPE had ended the command."""
_CLICKS_OWN = ("Got unexpected ", "Invalid value", "Missing ", "No such ", "Option ")
"""How click's own messages begin, which it writes as sentences."""


class ErrorReportingGroup(click.Group):
    """Turns the project's errors into a sentence on standard error and an exit code; no traceback.

    ``writing`` names the commands after which an unknown outcome matters.
    """

    def __init__(self, *arguments: object, writing: frozenset[str] = frozenset(), **attributes: object) -> None:
        super().__init__(*arguments, **attributes)  # type: ignore[arg-type]  # click's own
        self._writing = writing

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Parse the options before the command."""
        try:
            return super().parse_args(context, arguments)
        except click.UsageError as error:
            _say(error)
            context.exit(error.exit_code)
        except BrokenPipeError:
            context.exit(EXIT_CLOSED_PIPE)

    def invoke(self, context: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(context)
        except click.ClickException as error:
            _say(error)
            context.exit(error.exit_code)
        except ConfigError as error:
            for problem in error.problems:
                _tell(problem)
            _say_context(context)
            context.exit(EXIT_USAGE)
        except DLedgerError as error:
            _tell(str(error))
            _say_context(context)
            unknown = error.outcome == "unknown" and context.invoked_subcommand in self._writing
            if unknown:
                click.echo("The outcome is unknown: it may or may not have happened. Check before you retry.", err=True)
            context.exit(EXIT_UNKNOWN_OUTCOME if unknown else EXIT_FAILED)
        except click.Abort as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # at a question
                click.echo(err=True)
                context.exit(EXIT_INTERRUPTED)
            raise
        except KeyboardInterrupt:
            context.exit(EXIT_INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE and error.filename is None:
                context.exit(EXIT_CLOSED_PIPE)
            if error.filename is None:
                raise
            _tell(f"{error.filename}: {error.strerror}")
            context.exit(EXIT_FAILED)


def _say(error: click.ClickException) -> None:
    """As click does it, but in the style of all other errors."""
    if isinstance(error, NoArgsIsHelpError):  # the help of a group of commands
        error.show()
        return
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n", err=True)
    text = error.format_message()
    if text.startswith(_CLICKS_OWN):
        text = text[0].lower() + text[1:]
    _tell(text)


def _tell(text: str) -> None:
    """Errors quote what others say."""
    click.echo(f"error: {escaped_lines(text)}", err=True)


def _say_context(context: click.Context) -> None:
    if USED in context.meta:
        name = context.meta[USED]
        click.echo(f"Context {name} was used: see `dledger context show {name}`.", err=True)
