"""``dledger context`` and ``dledger completion``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger_cli.cli import SHELLS, main
from dledger_cli.targets import CommandSecurity, GroupTarget
from tests.support.lacking import program

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line with contexts of this test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    for name in ("DLEDGER_BOOTSTRAP", "DLEDGER_CONTEXT", "DLEDGER_NAMESRV", "DLEDGER_BROKER"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(main, arguments)


def test_a_context_is_added_listed_shown_used_and_removed(run: Run, tmp_path: Path) -> None:
    """A life of two contexts; file names become absolute, because commands run anywhere."""
    (tmp_path / "ca.crt").touch()
    assert run("context", "list").output == "no contexts: dledger context add NAME --bootstrap HOST:PORT,…\n"

    added = run("context", "add", "prod", "-b", "10.0.0.1:1,10.0.0.2:1", "--tls-ca", "ca.crt")
    run("context", "add", "test", "-n", "10.0.0.1:9876;10.0.0.2:9876", "--insecure")

    assert added.output == "added prod; it is used from now on\n"
    assert run("context", "list").output.splitlines()[1:] == [
        "*  prod  bootstrap 10.0.0.1:1,10.0.0.2:1",
        "   test  namesrv 10.0.0.1:9876,10.0.0.2:9876",
    ]
    assert run("context", "show").output == f"--bootstrap 10.0.0.1:1,10.0.0.2:1\n--tls-ca {tmp_path / 'ca.crt'}\n"
    assert run("context", "use", "test").output == "used from now on: test\n"
    assert json.loads(run("context", "list", "--json").output)["current"] == "test"
    assert run("context", "remove", "test").output == (
        "removed test; none is used now: commands go to 127.0.0.1 again\n"
    )
    assert run("context", "show").exit_code == 2
    assert run("context", "remove", "prod").output == "removed prod\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("add", "x"), "give at least one option"),
        (("add", "x", "-b", "nonsense"), "nonsense"),
        (("add", "x", "-b", "a:1", "-g", ""), "--group is empty"),
        (("add", "x", "-b", "a:1", "--access-key", "\udcff"), "contexts hold only UTF-8"),
        (("add", "x", "--tls-ca", "missing.crt", "-b", "a:1"), "--tls-ca: there is no file"),
        (("add", "a b", "-b", "a:1"), "invalid context name"),
        (("use",), "give a NAME, or --none"),
        (("use", "x", "--none"), "give a NAME, or --none"),
        (("use", "x"), "unknown context 'x'; there is none yet"),
        (("remove", "x"), "unknown context 'x'"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(run: Run, arguments: tuple[str, ...], problem: str) -> None:
    """Exit code 2, as for every wrong usage."""
    result = run("context", *arguments)

    assert result.exit_code == 2
    assert problem in result.output
    assert json.loads(run("context", "list", "--json").output) == {"current": "", "contexts": {}}


def test_a_failure_at_an_address_of_a_context_names_it(run: Run) -> None:
    """Otherwise nobody would know where the address comes from."""
    run("context", "add", "prod", "-b", "127.0.0.1:1")

    failed = run("status", "--timeout", "0.2")
    elsewhere = run("--context", "", "status", "-b", "127.0.0.1:2", "--timeout", "0.2")

    assert failed.exit_code == 1
    assert "127.0.0.1:1 is unreachable" in failed.output
    assert "Context prod was used" in failed.output
    assert "127.0.0.1:2 is unreachable" in elsewhere.output
    assert "Context" not in elsewhere.output


def test_name_servers_of_a_context_win_over_the_default_broker_but_not_over_a_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable is closer to the command than a context."""
    run("context", "add", "prod", "-n", "127.0.0.1:3")
    assert "127.0.0.1:3" in run("topic", "list", "--timeout", "0.2").output

    monkeypatch.setenv("DLEDGER_BROKER", "127.0.0.1:4")

    assert "127.0.0.1:4" in run("topic", "list", "--timeout", "0.2").output


def _environment(tmp_path: Path) -> dict[str, str]:
    """One in which the command on the path is the one under test."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HOME": str(tmp_path),
    }


def _shell(shell: str, script: str, tmp_path: Path) -> list[str]:
    done = subprocess.run(
        [program(shell), "-c", script],
        env=_environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


def test_bash_completes_commands_and_contexts(run: Run, tmp_path: Path) -> None:
    """As bash calls the function that the script defines."""
    run("context", "add", "production", "-b", "127.0.0.1:1")
    script = """source <(dledger completion bash)
        COMP_WORDS=(dledger sta); COMP_CWORD=1; _dledger_completion dledger; echo "${COMPREPLY[@]}"
        COMPREPLY=(); COMP_WORDS=(dledger --context pr); COMP_CWORD=2; _dledger_completion dledger
        echo "${COMPREPLY[@]}\""""

    assert _shell("bash", script, tmp_path) == ["status", "production"]


def test_fish_completes_commands_with_their_lines_and_contexts(run: Run, tmp_path: Path) -> None:
    """As fish does it when the tabulator is pressed."""
    run("context", "add", "production", "-b", "127.0.0.1:1")
    script = "dledger completion fish | source; complete -C 'dledger sta'; complete -C 'dledger context use pr'"

    assert _shell("fish", script, tmp_path) == ["status\tShow every member.", "production"]


def test_zsh_takes_the_script_and_is_given_commands(tmp_path: Path) -> None:
    """Zsh has no completion without a terminal: its script is loaded, and what it would ask is asked."""
    script = """autoload -Uz compinit; compinit -u -d "$HOME/dump"; source <(dledger completion zsh)
        print $_comps[dledger]
        COMP_WORDS="dledger sta" COMP_CWORD=1 _DLEDGER_COMPLETE=zsh_complete dledger"""

    assert _shell("zsh", script, tmp_path) == ["_dledger_completion", "plain", "status", "Show every member."]


def test_completing_commands_loads_none_of_them() -> None:
    """Whoever presses the tabulator waits for it."""
    script = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from dledger_cli.cli import main; main(prog_name='dledger')"
    )
    environment = os.environ | {"_DLEDGER_COMPLETE": "bash_complete", "COMP_WORDS": "dledger s", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.splitlines() == ["plain,serve", "plain,snapshot", "plain,status"]
    assert not [one for one in done.stderr.split() if one.startswith(("dledger_cli.commands.", "grpc", "asyncio"))]


def test_every_shell_of_the_choice_has_a_script(run: Run) -> None:
    """And only those."""
    for shell in SHELLS:
        assert "_DLEDGER_COMPLETE" in run("completion", shell).output
    assert run("completion", "tcsh").exit_code == 2


@pytest.mark.parametrize(
    ("context", "command", "missing"),
    [
        (("-b", "10.0.0.1:1"), ("topic", "delete", "orders", "--yes"), "--broker or --namesrv"),
        (("--broker", "10.0.0.1:1"), ("append", "hello"), "--bootstrap"),
        (("--broker", "10.0.0.1:1"), ("console",), "--bootstrap or --nodes or --namesrv"),
    ],
)
def test_a_context_without_the_addresses_of_a_command_does_not_send_it_to_the_default_ones(
    run: Run, context: tuple[str, ...], command: tuple[str, ...], missing: str
) -> None:
    """What was meant for production must not happen to what runs here; a context without any is of no place."""
    run("context", "add", "prod", *context)
    run("context", "add", "keys", "--insecure")

    found = run("--context", "prod", *command)
    elsewhere = run("--context", "keys", "status", "--timeout", "0.2")

    assert "has no addresses" not in elsewhere.output
    assert found.exit_code == 2
    assert f"context prod has no addresses for this command: give {missing}" in found.stderr


def test_a_secret_in_the_environment_wins_over_the_file_of_the_context(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key and its secret come from one place: a variable wins over the context."""
    (tmp_path / "ops.key").write_text("secret of ops")
    run("context", "add", "prod", "-b", "127.0.0.1:1", "--access-key", "ops", "--secret-key-file", "ops.key")
    seen: list[CommandSecurity] = []
    monkeypatch.setattr(GroupTarget, "client", lambda target, **_: seen.append(target.security))

    run("append", "hello")
    monkeypatch.setenv("DLEDGER_ACCESS_KEY", "alice")
    monkeypatch.setenv("DLEDGER_SECRET_KEY", "secret of alice")
    run("append", "hello")

    assert [(one.access_key, one.secret_key) for one in seen] == [
        ("ops", "secret of ops"),
        ("alice", "secret of alice"),
    ]


@pytest.mark.parametrize("variable", [True, False])
def test_the_secret_of_a_context_is_for_its_own_access_key(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, variable: bool
) -> None:
    """Another account's requests must not be signed with it: they would be refused without saying why."""
    (tmp_path / "ops.key").write_text("secret of ops")
    run("context", "add", "prod", "-b", "127.0.0.1:1", "--access-key", "ops", "--secret-key-file", "ops.key")
    if variable:
        monkeypatch.setenv("DLEDGER_ACCESS_KEY", "alice")

    found = run("append", "hello", *(() if variable else ("--access-key", "alice")))

    assert found.exit_code == 2
    assert "--access-key requires its secret" in found.stderr


def test_an_empty_context_works_beside_a_damaged_file(run: Run, tmp_path: Path) -> None:
    """``--context ""`` is none: the way to work until somebody has corrected the file."""
    (tmp_path / "config" / "dledger").mkdir(parents=True)
    (tmp_path / "config" / "dledger" / "contexts.json").write_text("{")

    assert "is damaged" in run("status", "--timeout", "0.2").stderr
    found = run("--context", "", "status", "-b", "127.0.0.1:2", "--timeout", "0.2")

    assert "127.0.0.1:2 is unreachable" in found.output
    assert "damaged" not in found.stderr


def test_what_is_shown_can_be_given_again(run: Run, tmp_path: Path) -> None:
    """A flag has no value, and a name with blanks is quoted."""
    (tmp_path / "my ca.crt").touch()
    run("context", "add", "prod", "-b", "a:1", "--insecure", "--tls-ca", "my ca.crt")

    shown = run("context", "show").output
    again = run("context", "add", "again", *shlex.split(shown))

    assert again.exit_code == 0
    assert run("context", "show", "again").output == shown
