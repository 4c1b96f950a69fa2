"""The rules file: whose it must be, and what happens when it changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.access.audit import AuditLog
from dledger.access.guard import AccessControl
from dledger.access.rules import FILE_BYTES_MAX, PROBLEMS_MAX, AccessRules, RulesFile, load_rules
from dledger.clock import Clock
from dledger.config import AccessConfig
from dledger.errors import TOLD_CHARS_MAX, ConfigError
from dledger.runtime.threads import Supervisor
from tests.support.waiting import wait_until

GOOD = "accounts:\n- accessKey: {key}\n  secretKey: 12345678\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plain_acl.yml"
    write(path, GOOD.format(key="one"))
    return path


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """As an editor does it: another file in its place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


def problems_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rules(path)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o601, 0o660])
def test_a_file_that_others_get_at_is_refused(file: Path, mode: int) -> None:
    """It holds secrets; a warning would be read too late."""
    file.chmod(mode)

    assert f"mode {mode:04o} exposes its secrets to others: run `chmod 600 {file}`" in problems_of(file)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_the_group_may_read(file: Path, mode: int) -> None:
    """That is how Kubernetes hands out secrets."""
    file.chmod(mode)

    assert set(load_rules(file).accounts) == {"one"}


def test_a_file_that_cannot_be_read_is_told_with_its_path(file: Path, tmp_path: Path) -> None:
    """Missing, no file, no text, too large, wrong."""
    assert problems_of(tmp_path / "missing").endswith(
        "missing: cannot read the access rules: No such file or directory"
    )
    assert "Is a directory" in problems_of(tmp_path)
    file.write_bytes(b"\xff\xfe")
    assert "not valid UTF-8" in problems_of(file)
    file.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    assert "more than" in problems_of(file)
    file.write_text("accounts: none")
    assert problems_of(file).startswith(f"{file}: line 1: ")


@pytest.fixture
def watched(file: Path) -> Iterator[tuple[RulesFile, list[AccessRules]]]:
    changes: list[AccessRules] = []
    made = RulesFile(file, interval_s=0.01)
    made.start(Supervisor(lambda _error: None).thread, "n0", changes.append, AuditLog())
    yield made, changes
    made.close()


def test_a_changed_file_is_read_again(watched: tuple[RulesFile, list[AccessRules]], file: Path) -> None:
    """Without a restart."""
    rules_file, changes = watched

    write(file, GOOD.format(key="two"))

    wait_until(lambda: bool(changes), "the new rules are told")
    assert set(changes[0].accounts) == {"two"}
    assert rules_file.rules is changes[0]


@pytest.mark.parametrize("bad", ["accounts: none", None], ids=["wrong", "gone"])
def test_a_broken_file_keeps_the_old_rules_and_is_told_once(
    watched: tuple[RulesFile, list[AccessRules]], file: Path, bad: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Every problem in the log; the next good file is in force."""
    rules_file, changes = watched

    if bad is None:
        file.unlink()
    else:
        write(file, bad)
    wait_until(lambda: "cannot reload access rules" in caplog.text, "the problem is told")
    rules_file.look()
    rules_file.look()

    assert caplog.text.count("cannot reload access rules") == 1
    assert changes == []
    assert set(rules_file.rules.accounts) == {"one"}
    write(file, GOOD.format(key="two"))
    wait_until(lambda: bool(changes), "the good file is in force")


def test_a_file_that_becomes_readable_for_others_changes_nothing_but_is_told(
    watched: tuple[RulesFile, list[AccessRules]], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its secrets may be known now; who runs the server must hear of it."""
    file.chmod(0o644)

    wait_until(lambda: "exposes its secrets to others" in caplog.text, "the mode is told")
    assert watched[1] == []


def test_wrong_rules_keep_a_server_from_starting(file: Path) -> None:
    """Nothing may be open by mistake."""
    file.write_text("accounts: none")

    with pytest.raises(ConfigError):
        AccessControl.of(AccessConfig(acl_enable=True, acl_file=file), name="n0", clock=Clock())


def test_a_file_without_the_switch_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who wrote rules believes that they hold."""
    assert AccessControl.of(AccessConfig(acl_file=file), name="n0", clock=Clock()) is None
    assert "acl_enable is not true: access control is off" in caplog.text
    caplog.clear()
    assert AccessControl.of(AccessConfig(), name="n0", clock=Clock()) is None
    assert caplog.text == ""


def test_the_switch_without_a_file_is_a_problem() -> None:
    """And a share is a percentage."""
    problems = AccessConfig(acl_enable=True, account_share_percent=101).problems()

    assert len(problems) == 2
    assert "acl_enable=true requires acl_file" in problems[1]


def test_the_end_of_its_thread_is_reported(file: Path) -> None:
    """Else the rules would never be read again, and nobody would know."""
    reported: list[BaseException] = []

    def changed(_rules: AccessRules) -> None:
        raise RuntimeError("a bug")

    rules_file = RulesFile(file, interval_s=0.01)
    rules_file.start(Supervisor(reported.append).thread, "n0", changed, AuditLog())
    write(file, GOOD.format(key="two"))

    wait_until(lambda: bool(reported), "the thread's end is reported")
    assert str(reported[0]) == "a bug"
    rules_file.close()


def test_the_problems_of_a_large_file_are_told_briefly(file: Path) -> None:
    """They quote it, and there may be as many as it has lines."""
    long = "x" * 20_000
    file.write_text(f"? {long}\n: 1\n" * 300)

    told = problems_of(file)

    assert "is given twice (first on line 1)" in told
    assert told.endswith(f"{file}: 249 more problems")
    assert len(told) < PROBLEMS_MAX * (TOLD_CHARS_MAX + len(str(file)) + 10)
