"""``dledger append``, ``get`` and ``tail``: write and read the log.

The lines of a file or of standard input are sent many at once, and every line that was read is accounted for.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol, TypeVar

import click

from dledger.command_line import flag_values
from dledger.core.noops import describe_payload
from dledger.errors import DLedgerError
from dledger.types import Entry, LogIndex, Magic
from dledger_cli import terminal
from dledger_cli.commands.status import find_leader
from dledger_cli.targets import GroupTarget, group_options
from dledger_cli.terminal import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNKNOWN_OUTCOME

if TYPE_CHECKING:
    from dledger.client import AppendResult, DLedgerClient

PIPELINE_MAX: Final = 10_000
"""Lines in flight at once; equal to a leader's default limit of pending entries."""
_CHUNK_BYTES: Final = 1 << 16
_SOON_S: Final = 0.005
"""Input without a pause is not settled in between, which would cost a quarter of the rate."""
_ResultT = TypeVar("_ResultT", covariant=True)


READ_PAGE = 1000
OWN_AMONG_THEM = 16
"""How many extra entries ``get`` and ``tail`` read at first, to allow for the log's own among them."""


@click.command(
    short_help="Write entries.",
    epilog="""\b
Examples:
  dledger append hello world              two entries
  journalctl -o json | dledger append -   one entry per line of standard input
  dledger append --file access.log        one entry per line of a file

Lines end with \\n or \\r\\n, which is not part of the entry.

An append is acknowledged when a majority has flushed it. Exit code 3 means that some entries have an unknown
outcome (they may or may not be in the log): read the end of the log before repeating them.

Ctrl-C ends the lines: those sent are awaited and counted; a second one leaves their outcome unknown. After a failure,
no more are sent either, and the error names the first line that failed and the last one sent: lines between them may
be in the log.

Lines are numbered, so that what a lost connection or a dying leader left unanswered is sent again and yet stored
once. For that the command first registers in the log as a producer, which takes one index. Arguments that fit into
one request (1 MiB) are sent without numbers and leave nothing else behind, but are not sent again once they may have
arrived: then the exit code is 3.""",
)
@click.argument("texts", nargs=-1, metavar="[TEXT]… | -")
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Append the lines of this file.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per acknowledged entry.")
@group_options
def append(
    texts: tuple[str, ...],
    file: Path | None,
    as_json: bool,
    target: GroupTarget,
) -> None:
    """Append entries: each argument, or each line of standard input (-) or of a file."""
    if bool(texts) == bool(file):
        raise click.UsageError("give either texts, or - for standard input, or --file")
    if "-" in texts and len(texts) > 1:
        raise click.UsageError("- is standard input: give it alone, or texts only")
    from dledger.client.shared import split

    bodies = [os.fsencode(text) for text in texts] if texts != ("-",) else []
    one_request = len(list(split(bodies))) == 1
    with closing(target.client(enable_idempotence=not one_request)) as client:
        if file is not None:
            with file.open("rb") as stream:
                total = terminal.count_lines(stream)
                _append_stream(client, stream, as_json, total)
        elif bodies:
            for result in client.append_many(bodies):
                _print_appended(result, as_json)
        else:
            _append_stream(client, sys.stdin.buffer, as_json, None)


def _print_appended(result: AppendResult, as_json: bool) -> None:
    if as_json:
        terminal.print_json({"index": result.index, "term": result.term, "position": result.position})
    elif terminal.on_terminal():
        click.echo(f"appended at index {result.index} (term {result.term}, position {result.position})")
    else:
        click.echo(result.index)


def _append_stream(client: DLedgerClient, stream: BinaryIO, as_json: bool, total: int | None) -> None:
    """Pipeline the lines; after the first failure, sends nothing more and awaits the lines in flight."""
    tally = LineTally(("acknowledged", "not appended"))
    indexes: list[LogIndex] = []  # the first and the last one
    started = time.monotonic()
    with terminal.progress("appending", total) as advance:

        def tell(result: AppendResult) -> None:
            indexes[1:] = [result.index]
            if as_json:
                _print_appended(result, as_json)
            advance(1)

        send_lines(stream, tally, client.submit, client.flush, tell)
    took_s = time.monotonic() - started
    if not as_json and indexes:
        several = f"{tally.applied} entries, index {indexes[0]} to {indexes[-1]}"
        what = several if tally.applied > 1 else f"1 entry, index {indexes[0]}"
        click.echo(f"appended {what}, in {took_s:.2f} s ({tally.applied / max(took_s, 1e-9):,.0f}/s)")
    tally.end()


# --- reading ---------------------------------------------------------------------------------------------------------

_show_all = click.option("--all", "show_all", is_flag=True, help="Show the log's own entries, too.")
_READ_MODES = ("committed", "linearizable", "local")


@click.command(
    short_help="Read entries by index.",
    epilog="""\b
Examples:
  dledger get 42
  dledger get 0 --count 100 --json
  dledger get 42 --mode committed        also without a leader
  dledger get 0 --count 100 --all        the log's own entries, too

Without a terminal only the bodies are printed, one per line: dledger get 0 --count 10 > lines

Some indexes are taken by the log's own entries: one at the beginning of each term, one for each producer. --count does
not count them; an INDEX that is one of theirs is explained instead.""",
)
@click.argument("index", type=flag_values.Whole(min=0))
@click.option("--count", type=flag_values.Whole(min=1), help="How many entries; without it, the one at INDEX.")
@click.option(
    "--mode",
    type=click.Choice(_READ_MODES),
    help="linearizable: the leader confirms its leadership first. committed: what the node knows to be committed, "
    "possibly slightly stale. local: whatever is stored. Default: linearizable, or committed with --node.",
)
@click.option("--node", metavar="HOST:PORT", help="Read from this node.")
@_show_all
@click.option("--json", "as_json", is_flag=True, help="One JSON object per entry.")
@group_options
def get(
    index: int,
    count: int | None,
    mode: str | None,
    node: str | None,
    show_all: bool,
    as_json: bool,
    target: GroupTarget,
) -> None:
    """Print entries, starting at INDEX."""
    from dledger.rpc.clients.codec import ReadMode

    read_mode = ReadMode[mode.upper()] if mode else ReadMode.COMMITTED if node else ReadMode.LINEARIZABLE
    with closing(target.client()) as client:
        read = partial(client.read, mode=read_mode, address=node)
        if count is None:
            _print_entry_at(read, index, show_all=show_all, as_json=as_json)
            return
        left = count
        while left > 0:
            page = read(LogIndex(index), count=min(left + (0 if show_all else OWN_AMONG_THEM), READ_PAGE))
            if not page:
                raise click.ClickException(f"the log ends before index {index}")
            entries = _wanted(page, show_all)[:left]
            _print_entries(entries, as_json)
            left -= len(entries)
            index += len(page)


def _print_entry_at(read: Callable[..., list[Entry]], index: int, *, show_all: bool, as_json: bool) -> None:
    """Print one entry; explain one of the log's own on standard error, where it is in nobody's way."""
    entries = read(LogIndex(index), count=1)
    if not entries:
        raise click.ClickException(f"the log ends before index {index}")
    if as_json or show_all or not _about(entries[0]):
        _print_entries(entries, as_json)
    else:
        click.echo(f"entry {index} is the log's own: {_about(entries[0])}", err=True)


@click.command(
    short_help="Read the end of the log and follow it.",
    epilog="""\b
Examples:
  dledger tail                 the last 10 entries
  dledger tail -f              and new ones, until Ctrl-C
  dledger tail -f --from 0     the whole log, then new entries
  dledger tail --all           the log's own entries, too: where terms begin and who the producers are""",
)
@click.option("-f", "--follow", is_flag=True, help="Wait for new entries; survives a change of leader.")
@click.option("--from", "first_index", type=flag_values.Whole(min=0), metavar="N", help="Start at this index.")
@click.option(
    "-n",
    "--lines",
    type=flag_values.Whole(min=0),
    help="How many entries: of the last ones (default: 10), or with --from of the first ones from there.",
)
@_show_all
@click.option("--json", "as_json", is_flag=True, help="One JSON object per entry.")
@group_options
def tail(
    follow: bool,
    first_index: int | None,
    lines: int | None,
    show_all: bool,
    as_json: bool,
    target: GroupTarget,
) -> None:
    """Print the end of the log."""
    if follow and first_index is not None and lines is not None:
        raise click.UsageError("-f has no end: give -n, or --from, not both")
    from dledger.rpc.clients.codec import ReadMode

    with closing(target.client()) as client:
        leader = find_leader(client.members_status())
        status = leader or client.metadata()
        end = status.committed_index + 1
        # A follower may not know yet that the last append was committed; without a leader, a follower's view must do.
        read = partial(client.read, mode=ReadMode.LINEARIZABLE)
        if leader is None:
            read = partial(client.read, mode=ReadMode.COMMITTED, address=status.client_address or None)
        begin = max(status.begin_index, 0)
        last = 10 if lines is None else lines
        left = lines if first_index is not None else None
        if first_index is not None:
            start = first_index
        elif show_all:
            start = max(end - last, begin)
        else:
            start = _start_of_last(read, begin, end, last)
        if follow:
            with terminal.ending_at_interrupt():
                for entry in client.follow(LogIndex(start)):
                    _print_entries(_wanted([entry], show_all), as_json)
                    sys.stdout.flush()
        else:
            for entries in _pages(read, start, end):
                wanted = _wanted(entries, show_all)[:left]
                _print_entries(wanted, as_json)
                left = None if left is None else left - len(wanted)
                if left == 0:
                    break


def _start_of_last(read: Callable[..., list[Entry]], begin: int, end: int, lines: int) -> int:
    """Where the last ``lines`` application entries start; NOOPs of terms and producers do not count.

    Each read makes the leader confirm its leadership, so steps back double up to a page.
    """
    step = min(lines + OWN_AMONG_THEM, READ_PAGE)
    while lines and end > begin:
        start = max(end - step, begin)
        step = min(2 * step, READ_PAGE)
        pages = _pages(read, start, end)
        found = [entry.index for page in pages for entry in page if entry.magic is Magic.NORMAL][-lines:]
        if len(found) == lines:
            return found[0]
        lines, end = lines - len(found), start
    return end


def _pages(read: Callable[..., list[Entry]], start: int, end: int) -> Iterator[Sequence[Entry]]:
    while start < end:
        entries = read(start, count=min(end - start, READ_PAGE))
        if not entries:
            return
        yield entries
        start += len(entries)


def _wanted(entries: Sequence[Entry], show_all: bool) -> list[Entry]:
    """The entries of applications; with ``show_all`` all of them."""
    return [entry for entry in entries if show_all or entry.magic is Magic.NORMAL]


def _about(entry: Entry) -> str:
    """The kind of one of the log's own entries; empty for those of applications."""
    if entry.magic is Magic.NORMAL:
        return ""
    return describe_payload(entry.body) or f"{entry.magic.name} of term {entry.term}"


def _print_entries(entries: Sequence[Entry], as_json: bool) -> None:
    for entry in entries:
        about = _about(entry)
        if as_json:
            terminal.print_json(_entry_json(entry, about))
        elif terminal.on_terminal():
            text = click.style(f"({about})", dim=True) if about else terminal.printable(entry.body)
            click.echo(f"{click.style(f'{entry.index:>10} {entry.term:>4}', dim=True)}  {text}")
        else:
            click.echo(f"({about})" if about else entry.body)


def _entry_json(entry: Entry, about: str) -> dict[str, object]:
    return {
        "index": entry.index,
        "term": entry.term,
        "position": entry.position,
        "type": entry.magic.name,
        **({"about": about} if about else {}),
        **terminal.body_json(entry.body),
    }


class LineSending(Protocol[_ResultT]):
    """The future of one line."""

    def done(self) -> bool:
        """Whether ``result`` returns at once."""
        ...

    def result(self) -> _ResultT:
        """Its outcome. Raises ``DLedgerError``."""
        ...


class LineReader:
    """The lines of a stream, without their ends, up to Ctrl-C.

    The first Ctrl-C ends the lines, so that those read before can be accounted for; the second one raises
    ``KeyboardInterrupt``.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._signals = 0
        self._woken: list[int] = []  # readable after a signal, whichever instruction it comes before
        self.interrupted = False

    def lines(self, wait: Callable[[], bool]) -> Iterator[bytes]:
        """All of them. ``wait`` is called when nothing comes for a moment; false ends the lines."""
        rest: list[bytes] = []
        while chunk := self._chunk(wait):
            *whole, begun = chunk.split(b"\n")
            for number, line in enumerate(whole):
                if self.interrupted:
                    return
                yield (line if number or not rest else b"".join((*rest, line))).removesuffix(b"\r")
            if whole:
                rest = []
            if begun:
                rest.append(begun)
        if rest and not self.interrupted:
            yield b"".join(rest)

    @contextmanager
    def ending_at_interrupt(self) -> Iterator[None]:
        """Let Ctrl-C end the lines, unless our parent has us ignore it."""
        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:
            yield
            return
        woken, waking = os.pipe()
        os.set_blocking(waking, False)
        waking_before = signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, self._on_interrupt)
        self._woken = [woken]
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            signal.set_wakeup_fd(waking_before)
            self._woken = []
            os.close(woken)
            os.close(waking)

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        self.interrupted = True
        if self._signals > 1:
            raise KeyboardInterrupt

    def _chunk(self, wait: Callable[[], bool]) -> bytes:
        """More of the stream; empty at its end, and after Ctrl-C."""
        if not self._is_readable(_SOON_S):
            if not wait():
                return b""
            self._is_readable(None)
        if self.interrupted:
            return b""
        chunk: bytes = self._stream.read1(_CHUNK_BYTES)  # type: ignore[attr-defined]  # every buffered stream has it
        return chunk

    def _is_readable(self, timeout_s: float | None) -> bool:
        """Whether a read returns at once: ``read1`` leaves nothing in the stream's own buffer."""
        watched: list[BinaryIO | int] = [self._stream, *self._woken]
        try:
            ready, _, _ = select.select(watched, [], [], timeout_s)
        except (OSError, ValueError):  # it is in memory
            return True
        if self._woken and self._woken[0] in ready and signal.SIGINT in os.read(self._woken[0], 64):
            self.interrupted = True
        return bool(ready)


@dataclass(slots=True)
class LineTally:
    """The outcomes of the lines. ``words``: how an applied and a not applied one are called."""

    words: tuple[str, str]
    applied: int = 0
    not_applied: int = 0
    unknown: int = 0
    first_error: DLedgerError | None = None
    interrupted: bool = False
    first_failed: int | None = None
    """The number of the first line that failed, from 1; lines in flight behind it may have been applied."""

    def fail(self, error: DLedgerError, line: int) -> None:
        """Count one that failed."""
        self.first_error = self.first_error or error
        self.first_failed = min(line, self.first_failed or line)
        if error.outcome == "unknown":
            self.unknown += 1
        else:
            self.not_applied += 1

    def end(self) -> None:
        """Say what went wrong, if something did. Raises ``SystemExit`` with the exit code."""
        if self.first_error is None and not self.interrupted:
            return
        applied, not_applied = self.words
        first = f"line {self.first_failed} is the first that failed, and " if self.first_failed else ""
        count = self.applied + self.not_applied + self.unknown
        last = f"no line after line {count} was sent" if count else "no line was sent"
        click.echo(
            f"error: {self.first_error or 'interrupted'}\n{self.applied} {applied}, {self.not_applied} {not_applied}, "
            f"{self.unknown} with unknown outcome; {first}{last}",
            err=True,
        )
        if self.unknown:
            raise SystemExit(EXIT_UNKNOWN_OUTCOME)
        raise SystemExit(EXIT_FAILED if self.first_error is not None else EXIT_INTERRUPTED)


def send_lines(
    stream: BinaryIO,
    tally: LineTally,
    submit: Callable[[bytes], LineSending[_ResultT]],
    flush: Callable[[], None],
    tell: Callable[[_ResultT], None],
) -> None:
    """Submit every line, and ``tell`` of each that was applied, in order; ``tally`` counts.

    Submitted lines are settled before waiting for more, so that nobody who writes them one by one waits for an
    answer until the next one. After the first failure, and after Ctrl-C, no line is submitted any more, and those in
    flight are awaited; a second Ctrl-C leaves their outcome unknown.
    """
    reader = LineReader(stream)
    in_flight: deque[LineSending[_ResultT]] = deque()
    submitted = sent = 0

    def settle(left: int) -> bool:
        while len(in_flight) > left:
            try:
                result = in_flight[0].result()
            except DLedgerError as error:
                in_flight.popleft()
                tally.fail(error, sent - len(in_flight))
                continue
            in_flight.popleft()
            tally.applied += 1
            tell(result)
        return tally.first_error is None

    def settle_all() -> bool:
        flush()
        return settle(0)

    try:
        with reader.ending_at_interrupt():
            for line in reader.lines(settle_all):
                submitted += 1
                try:
                    in_flight.append(submit(line))
                except DLedgerError as error:  # refused without being sent
                    tally.fail(error, submitted)
                    break
                sent += 1
                if not settle(min(len(in_flight) - in_flight[0].done(), PIPELINE_MAX - 1)):
                    break
            settle_all()
    except KeyboardInterrupt:
        tally.unknown = submitted - tally.applied - tally.not_applied
        if tally.unknown and tally.first_failed is None:
            tally.first_failed = submitted - tally.unknown + 1
    tally.interrupted = reader.interrupted
