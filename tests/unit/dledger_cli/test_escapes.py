"""What strangers write does nothing to whoever reads it."""

from __future__ import annotations

import json
import logging
import unicodedata

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import DLedgerError
from dledger_cli import process, terminal
from dledger_cli.terminal import ErrorReportingGroup, escaped, escaped_json, escaped_lines

EVIL = "\x1b[31mEVIL\x1b]0;pwn\x07\x9b2J\r\u202egnp\u2028\n2026-11-27 00:00:00,000 INFO forged line"
BAD = ("\x1b", "\x07", "\r", "\x9b", "\u202e", "\u2028")


def harmless(text: str) -> bool:
    """Whether nothing of it acts on a terminal, and the forged line is none."""
    return not any(one in text for one in BAD) and "\n2026" not in text


@given(st.text())
def test_every_character_is_shown_as_itself_or_as_an_escape(text: str) -> None:
    """Except those without a shape that change nothing either; JSON stays the same document."""
    shown = escaped(text)
    assert not any(unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") for one in shown)
    assert escaped(shown) == shown
    assert escaped_lines(text).count("\n") == text.count("\n")
    document = json.dumps(text, ensure_ascii=False)
    assert json.loads(escaped_json(document)) == text
    if text.isascii() and text.isprintable():
        assert shown == text


@pytest.mark.parametrize("form", process.FORMATS)
def test_a_stranger_writes_no_line_of_a_log(form: str) -> None:
    """In both formats, in the message, in facts, and in a traceback."""
    formatter = process.JsonFormatter() if form == "json" else process.TextFormatter()
    try:
        int(EVIL)
    except ValueError as error:
        record = logging.LogRecord("l", logging.INFO, "p", 1, "broker %s", (EVIL,), (ValueError, error, None))
    record.address = EVIL
    line = formatter.format(record)
    assert not any(one in line for one in BAD)
    assert "\n2026" not in line.partition("\n")[0]
    assert "\\x1b[31mEVIL" in line or "\\u001b[31mEVIL" in line


@pytest.mark.parametrize("tty", [True, False])
def test_tables_and_json_and_errors_are_harmless(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, tty: bool
) -> None:
    """On a terminal and in a pipe."""
    monkeypatch.setattr(terminal, "on_terminal", lambda: tty)
    terminal.print_table(("name", "notes"), [("a" + EVIL, "b" + EVIL)], below=("name", "notes"))
    terminal.print_json({"name": EVIL})
    out = capsys.readouterr().out
    assert harmless(out)
    assert "EVIL" in out


@pytest.mark.parametrize("error", [DLedgerError(EVIL), click.ClickException(EVIL)])
def test_an_error_quotes_others_harmlessly(error: Exception) -> None:
    """Such as the reason of a broker that a name server names."""

    @click.group(cls=ErrorReportingGroup)
    def main() -> None:
        pass

    @main.command()
    def fail() -> None:
        raise error

    said = CliRunner().invoke(main, ["fail"]).output
    assert not any(one in said for one in BAD)
    assert "EVIL" in said
