"""The demo's proof must fail when something is wrong, and its writer must neither lose nor double a line."""

from __future__ import annotations

import hashlib
import io
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from dledger.command_line import flag_values
from dledger.errors import DiskFullError, DLedgerError, QuorumAckTimeoutError, UnavailableError
from dledger.types import Entry, LogIndex, Magic, Position, Term
from dledger_cli.cli import main
from dledger_cli.commands import demo
from dledger_cli.local.group import LocalGroupError


def entry(index: int, body: bytes, magic: Magic = Magic.NORMAL, term: int = 1) -> Entry:
    """One entry; positions do not matter here."""
    return Entry(LogIndex(index), Term(term), Position(0), body, magic)


def indexes(*numbers: int) -> list[LogIndex]:
    """Indexes, typed."""
    return [LogIndex(number) for number in numbers]


GOOD = (entry(0, b"", Magic.NOOP), entry(1, b"a"), entry(2, b"b"), entry(3, b"", Magic.NOOP), entry(4, b"c"))
LINES = (b"a", b"b", b"c")


def test_the_proof_accepts_exactly_the_lines() -> None:
    """NOOPs in between are the new leaders'."""
    assert demo.check_entries(GOOD, LINES, indexes(1, 2, 4)) == []


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (GOOD[:-1], "1 lines are not at their acknowledged positions; the first is line 3"),
        ((*GOOD, entry(5, b"c")), "4 lines that are not the 3 lines"),
        ((*GOOD[:2], entry(2, b"x"), *GOOD[3:]), "the first is line 2"),
        ((*GOOD[:1], entry(1, b"b"), entry(2, b"a"), *GOOD[3:]), "2 lines are not at"),
        ((*GOOD[:3], *GOOD[4:]), "gaps"),
    ],
)
def test_the_proof_rejects_lost_doubled_changed_swapped_and_missing_entries(
    entries: Sequence[Entry], words: str
) -> None:
    """Each kind of loss is named."""
    assert any(words in problem for problem in demo.check_entries(entries, LINES, indexes(1, 2, 4)))


def test_the_digest_covers_the_log_over_all_segments_and_nothing_else(tmp_path: Path) -> None:
    """From begin to end position; other files and what lies behind the end do not count."""
    (tmp_path / "00000000000000000000").write_bytes(b"0123456789")
    (tmp_path / "00000000000000000010").write_bytes(b"abcdefghij")
    (tmp_path / "00000000000000000020").write_bytes(b"\0" * 10)
    (tmp_path / "notes.txt").write_bytes(b"?")

    assert demo.digest_of(tmp_path, 0, 15) == hashlib.sha256(b"0123456789abcde").hexdigest()
    assert demo.digest_of(tmp_path, 13, 15) == hashlib.sha256(b"de").hexdigest()
    with pytest.raises(LocalGroupError, match="end at 30, the log at 31"):
        demo.digest_of(tmp_path, 0, 31)


def test_the_generated_text_is_long_and_the_same_each_time() -> None:
    """At least 10,000 lines of real text."""
    lines = demo.generated_lines()

    assert len(lines) == demo.GENERATED_LINES >= 10_000
    assert lines == demo.generated_lines()
    assert any(b"import" in line for line in lines)


def test_lines_lose_only_their_ends(tmp_path: Path) -> None:
    """Empty lines are lines."""
    file = tmp_path / "text"
    file.write_bytes(b"a\r\n\n b \nc")

    assert demo.read_lines(file) == [b"a", b"", b" b ", b"c"]


@dataclass(frozen=True)
class Appended:
    index: LogIndex
    term: Term


@dataclass
class StubbornClient:
    """A log that takes ``survivors[n]`` lines of the n-th failing batch before it fails with ``errors[n]``."""

    errors: dict[int, DLedgerError]
    survivors: dict[int, int] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    batches: int = 0

    def append_as(self, _producer: str, sequence: int, bodies: Sequence[bytes]) -> list[Appended]:
        number, self.batches = self.batches, self.batches + 1
        term = 1 + sum(failed < number for failed in self.errors)
        stored = [one for one in self.entries if one.magic is Magic.NORMAL]
        assert sequence <= len(stored)
        new = bodies[len(stored) - sequence :]
        for body in new[: self.survivors.get(number, 0)] if number in self.errors else new:
            self.entries.append(entry(len(self.entries), body, term=term))
            stored.append(self.entries[-1])
        if number in self.errors:
            self.entries.append(entry(len(self.entries), b"", Magic.NOOP, term=term + 1))
            raise self.errors[number]
        return [Appended(one.index, one.term) for one in stored[sequence : sequence + len(bodies)]]


def write(client: StubbornClient, lines: Sequence[bytes]) -> demo.Writer:
    """Let the demo's writer write them all."""
    moved: list[int] = []
    writer = demo.Writer(client, lines, moved.append)  # type: ignore[arg-type] # a stand-in with the same methods
    writer.watch_for_term_after(Term(1))
    writer.write_until(len(lines))
    assert sum(moved) == len(lines)
    return writer


@pytest.mark.parametrize("survivors", [0, 1, 30, demo.BATCH_LINES])
def test_an_unknown_batch_is_sent_again_under_its_numbers(survivors: int) -> None:
    """Whatever part of it survived, each line is in the log once and in order."""
    lines = [b"%d" % number for number in range(4 * demo.BATCH_LINES + 3)]
    client = StubbornClient({1: QuorumAckTimeoutError("late")}, {1: survivors})

    writer = write(client, lines)

    assert demo.check_entries(client.entries, lines, writer.indexes) == []
    assert writer.new_leader_acknowledged_at > 0


def test_the_very_first_batch_may_fail_too() -> None:
    """Refused, then unknown: it is sent again either way."""
    lines = [b"%d" % number for number in range(2 * demo.BATCH_LINES)]
    client = StubbornClient({0: UnavailableError("nobody"), 1: QuorumAckTimeoutError("late")}, {1: 3})

    writer = write(client, lines)

    assert demo.check_entries(client.entries, lines, writer.indexes) == []


def test_the_writer_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that stays is raised."""
    monkeypatch.setattr(demo, "GIVE_UP_S", 0.0)
    client = StubbornClient(dict.fromkeys(range(1000), DiskFullError("no room")))

    with pytest.raises(DiskFullError):
        write(client, [b"x"] * 200)


def test_a_short_text_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """There must be a middle in which to kill."""
    file = tmp_path / "short"
    file.write_text("one line\n")

    with pytest.raises(click.UsageError, match=r"too short \(1 of at least 200 lines\)"):
        demo.run(file, keep=False)


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), 130), (SystemExit(1), 141)])
@pytest.mark.parametrize("keep", [False, True])
def test_a_demo_that_is_interrupted_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: BaseException, code: int, keep: bool
) -> None:
    """Ctrl-C, or a reader that goes away: the directory is removed."""

    class Interrupted:
        def __init__(self, directory: Path, **_options: object) -> None:
            assert directory.parent == tmp_path

        def __enter__(self) -> Interrupted:
            raise end

        def __exit__(self, *_: object) -> None:
            """Never entered."""

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "LocalGroup", Interrupted)

    assert demo.run(None, keep=keep) == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--console", "--brokers"])
def test_a_missing_extra_is_told_before_anything_is_started(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence is whole, brackets included, and no directory is left behind."""
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    shown = CliRunner().invoke(main, ["demo", option])

    assert shown.exit_code == 1
    assert shown.output.startswith("error: the console requires starlette, not installed here: run pip install")
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_demo_itself_says_how_to_get_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on without it. Brackets are printed as they are."""
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setattr(flag_values, "install_command", lambda extra: f"pip install '.[{extra}]'")
    out = Console(file=io.StringIO(), highlight=False, soft_wrap=True, markup=False)

    with demo._page(out, None) as page:  # type: ignore[arg-type]  # no group is looked at
        assert page.url == ""

    assert isinstance(out.file, io.StringIO)
    assert "not installed here: run pip install '.[console]'\n" in out.file.getvalue()
