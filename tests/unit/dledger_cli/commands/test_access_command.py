"""``dledger access``, and how commands get their keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.access.guard import AccessControl
from dledger.access.rules import parse_rules
from dledger.clock import Clock
from dledger.config import AccessConfig, ServerConfig
from dledger_cli.cli import main
from tests.support.fake_node import FakeNode, client_server

RULES = """\
accounts:
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - default=PUB|SUB
"""


def run(*words: str, **environment: str) -> Result:
    names = ("ACCESS_KEY", "SECRET_KEY", "SECRET_KEY_FILE")
    env: dict[str, str | None] = {f"DLEDGER_{name}": None for name in names}
    return CliRunner(env=env | environment).invoke(main, list(words), prog_name="dledger")


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "plain_acl.yml"
    path.touch(0o600)
    path.write_text(RULES)
    return path


@contextmanager
def guarded(rules: Path) -> Iterator[str]:
    config = ServerConfig(client_port=0, access=AccessConfig(acl_enable=True, acl_file=rules))
    access = AccessControl.of(config.access, name="n0", clock=Clock())
    assert access is not None
    server = client_server(config, FakeNode(), access.guard)
    server.start()
    try:
        yield server.address
    finally:
        server.close()


def test_new_accounts_are_good_and_never_alike(rules: Path) -> None:
    """Random keys; what is printed can be put into a file, and means what was asked for."""
    made = [run("access", "new", "billing", "--topic", "orders=PUB|SUB", "--group", "g=SUB") for _ in range(2)]

    with rules.open("a") as file:
        file.write("".join(one.output for one in made))
    accounts = parse_rules(rules.read_text()).accounts
    first, second = (accounts[key] for key in accounts if key.startswith("billing-"))
    assert first.secret != second.secret
    assert len(first.secret) >= 32
    assert (first.topic("orders"), first.group("g"), first.topic("other"), first.admin) == (3, 2, 0, False)


def test_a_whole_file_can_be_made() -> None:
    """With an administrator to begin with."""
    result = run("access", "new", "ops", "--admin", "--file")

    assert [one.admin for one in parse_rules(result.output).accounts.values()] == [True]


@pytest.mark.parametrize("words", [("a b",), ("a", "--topic", "t=ALL"), ("a", "--group", "g")])
def test_a_wrong_account_is_not_printed(words: tuple[str, ...]) -> None:
    """Usage error that names no line of a file that nobody wrote; nothing is printed that could be appended to one."""
    result = run("access", "new", *words)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "line " not in result.stderr


def test_check_shows_what_the_rules_allow(rules: Path) -> None:
    """Without a secret."""
    with rules.open("a") as file:
        file.write("- accessKey: root\n  secretKey: root-secret\n  admin: true\n  whiteRemoteAddress: 10.0.0.*\n")
        file.write("globalWhiteRemoteAddresses:\n- 10.1.0.1\n")

    result = run("access", "check", str(rules))

    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "alice: topic default=PUB|SUB; other topics=DENY; other groups=DENY",
        "root: an administrator; without a signature from 10.0.0.*",
        "full access without a key from 10.1.0.1",
        f"{rules} is valid: 2 accounts",
    ]


def test_check_names_everything_that_is_wrong(rules: Path) -> None:
    """One line each, exit code 2."""
    rules.write_text("accounts:\n- accessKey: a\n  admin: maybe\n  defaultTopicPerm: ALL\n")

    result = run("access", "check", str(rules))

    assert result.exit_code == 2
    assert result.stderr.count("error: ") == 3
    assert f"error: {rules}: line 3: admin: invalid boolean 'maybe': use true or false" in result.stderr


def test_commands_take_keys_from_the_environment_or_a_file(rules: Path, tmp_path: Path) -> None:
    """Never the secret from the command line, which everybody on the machine can see."""
    secret = tmp_path / "secret"
    secret.write_text("alice-secret\n")
    with guarded(rules) as address:
        ways = [
            run("append", "-b", address, "1", DLEDGER_ACCESS_KEY="alice", DLEDGER_SECRET_KEY="alice-secret"),
            run("append", "-b", address, "2", "--access-key", "alice", "--secret-key-file", str(secret)),
            run("append", "-b", address, "3", DLEDGER_ACCESS_KEY="alice", DLEDGER_SECRET_KEY_FILE=str(secret)),
        ]
        nobody = run("append", "-b", address, "4")
        status = run("status", "-b", address, DLEDGER_ACCESS_KEY="alice", DLEDGER_SECRET_KEY="alice-secret")

    assert [one.exit_code for one in ways] == [0, 0, 0], [one.output for one in ways]
    assert nobody.exit_code == 1
    assert f"error: {address}: this server requires an access key and its secret" in nobody.stderr
    assert status.exit_code == 0
    assert "--secret-key " not in run("append", "--help").output


@pytest.mark.parametrize(
    ("words", "environment", "problem"),
    [
        (("--access-key", "alice"), {}, "--access-key requires its secret: set DLEDGER_SECRET_KEY"),
        ((), {"DLEDGER_SECRET_KEY": "alice-secret"}, "secret key without access key"),
        (("--secret-key-file", "/nonexistent"), {}, "/nonexistent cannot be read: No such file or directory\n"),
    ],
)
def test_half_a_key_is_a_usage_error(words: tuple[str, ...], environment: dict[str, str], problem: str) -> None:
    """Not an unsigned request."""
    result = run("append", *words, "x", **environment)

    assert result.exit_code == 2
    assert problem in result.stderr
    assert "DLEDGER_SECRET_KEY" not in os.environ


def test_a_secret_is_also_written_for_clients_to_a_new_private_file(tmp_path: Path) -> None:
    """The one in the printed account; an existing file is kept, and then nothing is printed."""
    file = tmp_path / "ops.secret"
    made = run("access", "new", "ops", "--admin", "--secret-file", str(file))
    again = run("access", "new", "ops", "--admin", "--secret-file", str(file))

    assert f"secretKey: {file.read_text().strip()}\n" in made.stdout
    assert file.stat().st_mode & 0o777 == 0o600
    assert (again.exit_code, again.stdout, "File exists" in again.stderr) == (1, "", True)
