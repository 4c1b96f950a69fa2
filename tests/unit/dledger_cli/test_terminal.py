"""Tables on terminals that are too narrow for them."""

from __future__ import annotations

import io

import click
import pytest

from dledger_cli import terminal

COLUMNS = ("name", "place", "rate", "notes")
ROWS = [("a", "here", "1.00", ""), ("b", "there", "22.00", "something long that happened")]


@pytest.mark.parametrize(
    ("width", "shown"),
    [(80, ["name", "place", "rate"]), (18, ["name", "place", "rate"]), (17, ["name", "place"]), (1, ["place"])],
)
def test_columns_go_in_turn_until_the_rest_fits(width: int, shown: list[str]) -> None:
    """Those that matter least first; what is not listed stays, however narrow it gets."""
    columns, rows, gone = terminal.fitting(COLUMNS[:3], [row[:3] for row in ROWS], width, ("rate", "name"))

    assert columns == shown
    assert [len(row) for row in rows] == [len(shown)] * 2
    assert gone == [name for name in ("rate", "name") if name not in shown]


def print_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, *, tty: bool
) -> list[str]:
    monkeypatch.setattr(terminal, "on_terminal", lambda: tty)
    monkeypatch.setenv("COLUMNS", str(width))
    terminal.print_table(COLUMNS, ROWS, least=("rate",), below=("name", "notes"))
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_notes_are_below_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One long note would take the room of all columns; what is left out is told."""
    assert print_on(monkeypatch, capsys, 15, tty=True) == [
        "name  place",
        "a     here",
        "b     there",
        "b: something long that happened",
        "(no room for: rate)",
    ]
    assert print_on(monkeypatch, capsys, 60, tty=True)[-1] == "b: something long that happened"


def test_a_pipe_gets_every_column(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """However narrow the terminal behind it is."""
    assert print_on(monkeypatch, capsys, 15, tty=False) == [
        "name  place  rate   notes",
        "a     here   1.00",
        "b     there  22.00  something long that happened",
    ]


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_a_script_that_is_asked_learns_the_option(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Nobody answers there: a bare "Aborted!" would not say how to go on."""
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))

    with pytest.raises(click.ClickException, match="nothing was changed: pass --yes"):
        terminal.confirm("Delete it?")
