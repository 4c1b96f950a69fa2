"""``dledger_cli.terminal``: every error is a sentence in one style."""

from __future__ import annotations

import errno
from typing import NoReturn

import click
import pytest
from click.testing import CliRunner

from dledger_cli.cli import main
from dledger_cli.terminal import ErrorReportingGroup


@pytest.mark.parametrize(
    ("words", "usage", "error"),
    [
        (["--nix"], "Usage: dledger [OPTIONS]", "error: no such option '--nix'."),
        (["nix"], "Usage: dledger [OPTIONS]", "error: no such command 'nix'."),
        (["statsu"], "Usage: dledger [OPTIONS]", "error: no such command 'statsu'. Did you mean 'status'?"),
        (
            ["get", "9" * 20],
            "Usage: dledger get",
            f"error: invalid value for 'INDEX': {'9' * 20} is too large: numbers go to {(1 << 63) - 1:,}",
        ),
        (
            ["get", "9" * 5000],
            "Usage: dledger get",
            f"error: invalid value for 'INDEX': '{'9' * 64}' is not a whole number",
        ),
        (["get", "x"], "Usage: dledger get", "error: invalid value for 'INDEX': 'x' is not a whole number"),
        (
            ["tail", "-n", "-1"],
            "Usage: dledger tail",
            "error: invalid value for '-n' / '--lines': -1 is not allowed: use 0 or more",
        ),
        (["status", "--nix"], "Usage: dledger status", "error: no such option '--nix'."),
        (["topic", "lst"], "Usage: dledger topic", "error: no such command 'lst'. Did you mean 'list'?"),
        (["topic", "route"], "Usage: dledger topic route", "error: missing argument 'NAME'."),
        (["append"], "Usage: dledger append", "error: give either texts, or - for standard input, or --file"),
    ],
)
def test_wrong_usage_is_an_error_like_any_other(words: list[str], usage: str, error: str) -> None:
    """With how to use the command above it, and exit code 2."""
    result = CliRunner().invoke(main, words, prog_name="dledger")

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(usage)
    assert result.stderr.splitlines()[-1].startswith(error)


def test_a_failure_that_click_reports_is_an_error_like_any_other() -> None:
    """``Error:`` and ``error:`` of one program would look like two."""
    result = CliRunner().invoke(main, ["get", "0", "-b", "127.0.0.1:1", "--timeout", "0.1"], prog_name="dledger")

    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("words", [[], ["topic"]])
def test_a_group_of_commands_alone_shows_its_help(words: list[str]) -> None:
    """Nothing is wrong with asking what there is."""
    result = CliRunner().invoke(main, words, prog_name="dledger")

    assert result.exit_code == 2
    assert "Commands:" in result.output
    assert "error:" not in result.output


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141)],
)
@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["status"], "dledger.client.blocking.DLedgerClient.members_status"),
        (["status", "--watch", "--json"], "dledger.client.blocking.DLedgerClient.members_status"),
        (["topic", "list"], "rocketstore.client.blocking.Admin.topics"),
        (["consumer", "progress"], "rocketstore.client.blocking.Admin.brokers"),
        (["transfer-leader"], "dledger.client.blocking.DLedgerClient.transfer_leadership"),
    ],
)
def test_ctrl_c_and_a_closed_pipe_have_one_code_in_every_command(
    words: list[str], asked: str, raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sentence, for nothing went wrong."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise raised

    monkeypatch.setattr(asked, fail)
    result = CliRunner().invoke(main, words, prog_name="dledger")

    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "")


def test_ctrl_c_at_a_question_has_the_same_code() -> None:
    """And "no" is an ordinary failure."""
    said_no = CliRunner().invoke(main, ["consumer", "delete", "billing"], input="n\n")

    @click.group(cls=ErrorReportingGroup)
    def group() -> None: ...

    @group.command()
    def ask() -> None:
        error = click.Abort()
        error.__context__ = KeyboardInterrupt()  # as click's prompts leave it
        raise error

    assert said_no.exit_code == 1
    assert CliRunner().invoke(group, ["ask"]).exit_code == 130
