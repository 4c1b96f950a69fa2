"""``dledger console``: what it refuses to do unsafely, and that it runs and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import dledger_cli.console
from dledger_cli import process
from dledger_cli.cli import main
from dledger_cli.console.server import ConsoleServer
from tests.unit.dledger_cli.console.support import request


def run(*words: str, **environment: str) -> Result:
    """The command in this process; it ends at once, for its words make no sense."""
    return CliRunner().invoke(main, ["console", "--nodes", "127.0.0.1:1", *words], env=environment)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--listen", "0.0.0.0:0"), "--allow-remote"),
        (("--listen", "192.0.2.1:80"), "--allow-remote"),
        (("--listen", "8080"), "HOST:PORT"),
        (("--listen", "localhost:70000"), "HOST:PORT"),
        (("--https-cert", "x"), "must be given together"),
        (("--nodes", "nowhere"), "invalid address 'nowhere'"),
    ],
)
def test_words_that_are_wrong_or_unsafe_are_refused(words: tuple[str, ...], told: str) -> None:
    """Exit code 2, and what to say instead."""
    shown = run(*words)

    assert shown.exit_code == 2
    assert told in shown.stderr


@pytest.mark.parametrize(
    ("words", "environment", "shown"),
    [
        (("--namesrv", "127.0.0.1:2;127.0.0.1:3"), {}, "127.0.0.1:2"),
        (("--namesrv", "127.0.0.1:2"), {"DLEDGER_CONSOLE_NODES": "127.0.0.1:1"}, "127.0.0.1:2"),
        (("--namesrv", ""), {"DLEDGER_CONSOLE_NODES": "127.0.0.1:1"}, ""),  # as in compose.yaml without name server
        ((), {"DLEDGER_NAMESRV": "127.0.0.1:2"}, "127.0.0.1:2"),
        ((), {"DLEDGER_NAMESRV": "127.0.0.1:2", "DLEDGER_BOOTSTRAP": "127.0.0.1:1"}, ""),
        (("--nodes", "127.0.0.1:1"), {"DLEDGER_NAMESRV": "127.0.0.1:2"}, ""),
        (("--nodes", "127.0.0.1:1", "--namesrv", "127.0.0.1:2"), {}, ""),
        ((), {}, ""),
    ],
)
def test_name_servers_show_all_groups_unless_nodes_are_given(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], environment: dict[str, str], shown: str
) -> None:
    """Options precede the environment; in both, nodes precede name servers, as for other commands."""
    found: list[tuple[str, ...]] = []

    def stop(make: Callable[[], ConsoleServer], *_: object, **__: object) -> int:
        made = make()
        state: Any = made._shown.state()
        found.append(tuple(one["address"] for one in state.get("name_servers", ())))
        made.stop()
        return 0

    monkeypatch.setattr(process, "run", stop)
    CliRunner().invoke(main, ["console", *words], env=environment)

    assert [one[:1] for one in found] == [(shown,) if shown else ()]


def test_a_short_token_is_refused() -> None:
    """It could be guessed."""
    assert "too short" in run(DLEDGER_CONSOLE_TOKEN="hunter2").stderr  # that is the point


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a traceback."""
    monkeypatch.setattr(dledger_cli, "console", dledger_cli.console)  # what is imported below would stay there
    for name in [name for name in sys.modules if name.startswith("dledger_cli.console")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.datastructures", None)
    monkeypatch.setitem(sys.modules, "starlette", None)

    shown = run("--listen", "127.0.0.1:0")

    assert shown.exit_code == 1
    assert "the console requires starlette, not installed here: run pip install" in shown.stderr


def test_it_serves_and_ends_by_sigterm_with_exit_code_0(tmp_path: Path) -> None:
    """As a process, with a token from a file, while no node answers."""
    token = tmp_path / "token"
    token.write_text("a token in a file, long enough\n")
    words = ["console", "--nodes", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--token-file", str(token)]
    with subprocess.Popen(
        [sys.executable, "-m", "dledger_cli.cli", *words, "--until-stdin-closes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        url = ready.split()[-1]

        assert "is ready" in ready
        assert request(f"{url}api/state").status == 401
        signed = request(f"{url}api/state", headers={"authorization": "Bearer a token in a file, long enough"})
        assert signed.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_token_is_made_up_and_printed_when_other_machines_are_let_in() -> None:
    """The printed address holds it."""
    words = ["console", "--nodes", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--allow-remote", "--until-stdin-closes"]
    with subprocess.Popen(
        [sys.executable, "-m", "dledger_cli.cli", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().split()[-1]
        warning = process.stdout.readline()

        assert len(url.partition("?token=")[2]) >= 32
        assert "not encrypted" in warning
        assert request(url).status == 303
        assert request(url.partition("?")[0] + "api/state").status == 401
        process.stdin.close()
        assert process.wait(60) == 0
