"""Sends the lines of a file or of standard input, many at once, and accounts for every line that was read."""

from __future__ import annotations

import os
import select
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import BinaryIO, Final, Protocol, TypeVar

import click

from dledger.errors import DLedgerError
from dledger_cli.reporting import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNKNOWN_OUTCOME

PIPELINE_MAX: Final = 10_000
"""Lines in flight at once; equal to a leader's default limit of pending entries."""
_CHUNK_BYTES: Final = 1 << 16
_SOON_S: Final = 0.005
"""Input without a pause is not settled in between, which would cost a quarter of the rate."""
_ResultT = TypeVar("_ResultT", covariant=True)


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
