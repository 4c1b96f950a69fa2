"""Lines that are sent: none is lost, shortened or left unaccounted for."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from dledger.errors import DiskFullError, EntryTooLargeError, RequestTimeoutError
from dledger_cli.commands import log as log_commands
from dledger_cli.commands.log import LineReader, LineTally, send_lines


@pytest.mark.parametrize(
    ("stream", "lines"),
    [
        (b"one\r\ntwo\n", [b"one", b"two"]),
        (b"one\r", [b"one\r"]),
        (b"one\r\n\r\n\r", [b"one", b"", b"\r"]),
        (b"\n\none", [b"", b"", b"one"]),
        (b"", []),
        (b"a" * 200_000 + b"\nb", [b"a" * 200_000, b"b"]),
    ],
)
def test_only_line_ends_are_removed(stream: bytes, lines: list[bytes]) -> None:
    """A carriage return without a newline behind it is part of the line, as `--help` says."""
    assert list(LineReader(io.BytesIO(stream)).lines(lambda: True)) == lines


@dataclass
class _Answer:
    number: int
    fail: Exception | None = None
    answered: Callable[[], None] = lambda: None

    def done(self) -> bool:
        return False

    def result(self) -> int:
        self.answered()
        if self.fail is not None:
            raise self.fail
        return self.number


@dataclass
class _Log:
    """Takes lines; ``failures`` are those of the answers, ``refused`` a line that is not taken."""

    failures: dict[int, Exception] = field(default_factory=dict)
    refused: bytes | None = None
    answered: Callable[[], None] = lambda: None
    lines: list[bytes] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    tally: LineTally = field(default_factory=lambda: LineTally(("stored", "not stored")))

    def submit(self, line: bytes) -> _Answer:
        if line == self.refused:
            raise EntryTooLargeError("too large")
        self.lines.append(line)
        number = len(self.lines)
        return _Answer(number, self.failures.get(number), self.answered)

    def send(self, stream: io.BufferedReader | io.BytesIO) -> None:
        send_lines(stream, self.tally, self.submit, lambda: None, self.told.append)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Whoever runs the tests may ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def pipe() -> Iterator[tuple[io.BufferedReader, int]]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream:
        yield stream, writing


def test_a_line_is_answered_before_the_next_one_comes(pipe: tuple[io.BufferedReader, int]) -> None:
    """Whoever writes lines one by one, and reads the answers, must not have to write another one to see an answer."""
    stream, writing = pipe
    log = _Log()
    os.write(writing, b"one\n")
    told: list[list[int]] = []

    def close_when_told(number: int) -> None:
        told.append([number])
        os.close(writing)

    send_lines(stream, log.tally, log.submit, lambda: None, close_when_told)

    assert told == [[1]]  # otherwise this would have waited for ever


def test_a_failure_is_told_before_the_next_line_comes(pipe: tuple[io.BufferedReader, int]) -> None:
    """Nobody types into a command that has failed."""
    stream, writing = pipe
    log = _Log(failures={1: RequestTimeoutError("late")})
    os.write(writing, b"one\n")

    log.send(stream)

    os.close(writing)
    assert (log.tally.applied, log.tally.unknown) == (0, 1)


def test_lines_before_a_refused_one_are_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A line that is too large does not hide what became of those before it."""
    log = _Log(refused=b"large")

    log.send(io.BytesIO(b"one\ntwo\nlarge\nthree"))
    with pytest.raises(SystemExit) as ended:
        log.tally.end()

    assert ended.value.code == 1
    assert log.told == [1, 2]
    assert capsys.readouterr().err.endswith(
        "2 stored, 1 not stored, 0 with unknown outcome; "
        "line 3 is the first that failed, and no line after line 3 was sent\n"
    )


def test_the_first_line_that_failed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines in flight behind it may be stored: a resumption at the number of stored lines would lose some."""
    log = _Log(failures={2: DiskFullError("full")})

    log.send(io.BytesIO(b"one\ntwo\nthree\n"))
    with pytest.raises(SystemExit) as ended:
        log.tally.end()

    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith(
        "2 stored, 1 not stored, 0 with unknown outcome; "
        "line 2 is the first that failed, and no line after line 3 was sent\n"
    )


def test_what_waits_for_more_lines_is_sent_when_none_comes() -> None:
    """Nobody awaits the answer to a line that lies in an unfinished batch."""
    log, sent = _Log(), 0

    def flush() -> None:
        nonlocal sent
        sent = len(log.lines)

    def answered() -> None:
        assert sent == len(log.lines)

    log.answered = answered
    send_lines(io.BytesIO(b"one\ntwo\n"), log.tally, log.submit, flush, log.told.append)

    assert log.told == [1, 2]


def test_only_so_many_lines_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast they come: a leader takes no more, and each occupies memory here."""
    monkeypatch.setattr(log_commands, "PIPELINE_MAX", 3)
    in_flight: list[int] = []
    log = _Log(answered=lambda: in_flight.append(len(log.lines) - len(log.told)))

    log.send(io.BytesIO(b"line\n" * 10))

    assert max(in_flight) == 3
    assert log.told == list(range(1, 11))


def test_ctrl_c_ends_the_lines_and_accounts_for_those_sent(
    pipe: tuple[io.BufferedReader, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted command says how much it has stored, so that nobody stores it again."""
    stream, writing = pipe
    log = _Log()
    os.write(writing, b"one\ntwo\nthr")
    told_all = threading.Event()

    def interrupt() -> None:
        told_all.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def tell(number: int) -> None:
        log.told.append(number)
        if number == 2:
            told_all.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    send_lines(stream, log.tally, log.submit, lambda: None, tell)
    thread.join()
    os.close(writing)
    with pytest.raises(SystemExit) as ended:
        log.tally.end()

    assert log.lines == [b"one", b"two"]
    assert ended.value.code == 130
    shown = capsys.readouterr().err
    assert "interrupted" in shown
    assert "2 stored, 0 not stored, 0 with unknown outcome; no line after line 2 was sent" in shown


def test_a_second_ctrl_c_leaves_the_outcome_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3 says that lines may have been stored: 1 would say that they were not."""

    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    log = _Log(answered=interrupt_twice)

    log.send(io.BytesIO(b"one\ntwo\n"))
    with pytest.raises(SystemExit) as ended:
        log.tally.end()

    assert ended.value.code == 3
    assert (
        "2 with unknown outcome; line 1 is the first that failed, and no line after line 2" in capsys.readouterr().err
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_line_whose_sending_was_interrupted_may_be_stored() -> None:
    """It is nowhere among those in flight, and yet may have been sent."""
    log = _Log()

    def submit(line: bytes) -> _Answer:
        if line == b"two":
            raise KeyboardInterrupt
        return log.submit(line)

    send_lines(io.BytesIO(b"one\ntwo\n"), log.tally, submit, lambda: None, log.told.append)

    assert (log.tally.applied, log.tally.not_applied, log.tally.unknown) == (0, 0, 2)
