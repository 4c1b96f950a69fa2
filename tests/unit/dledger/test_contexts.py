"""``dledger.command_line.contexts``: what is kept, who reads it, and what wins."""

from __future__ import annotations

import fcntl
import json
import threading
from pathlib import Path
from typing import TextIO

import click
import pytest
from click.testing import CliRunner

from dledger.command_line import contexts
from dledger.command_line.contexts import CHOSEN, CONTEXTS_MAX, USED, ContextOption, Contexts
from dledger.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the contexts of this test are."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("DLEDGER_BOOTSTRAP", raising=False)
    return tmp_path / "dledger" / "contexts.json"


def _put(path: Path, name: str, *, replace: bool = False, use: bool = False, **values: str) -> None:
    with contexts.changing(path) as change:
        change.put(name, values, replace=replace, use=use)


def _run(*arguments: str, chosen: str | None = None) -> tuple[int, str]:
    """The exit code and output of a command with one option that may come from a context."""

    @click.command()
    @click.option("--bootstrap", cls=ContextOption, envvar="DLEDGER_BOOTSTRAP", default="default")
    @click.option("--insecure", cls=ContextOption, is_flag=True)
    @click.option("--other", default="other")
    @click.pass_context
    def command(context: click.Context, bootstrap: str, insecure: bool, other: str) -> None:
        click.echo(f"{bootstrap} {insecure} {other} {context.meta.get(USED)}")

    @click.group()
    @click.pass_context
    def main(context: click.Context) -> None:
        context.meta[CHOSEN] = chosen

    main.add_command(command)
    result = CliRunner().invoke(main, ["command", *arguments])
    return result.exit_code, result.output.strip() if result.exception is None else str(result.exception)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/x/dledger/contexts.json"),
        ({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}, "/h/.config/dledger/contexts.json"),
        ({"XDG_CONFIG_HOME": "", "HOME": "/h"}, "/h/.config/dledger/contexts.json"),
        ({"HOME": ""}, None),
        ({}, None),
    ],
)
def test_the_file_is_where_the_xdg_specification_says(environment: dict[str, str], expected: str | None) -> None:
    """A relative ``XDG_CONFIG_HOME`` is ignored, as the specification wants it."""
    found = contexts.contexts_path(environment)

    assert found == (None if expected is None else Path(expected))


def test_without_a_file_there_are_no_contexts(path: Path) -> None:
    """Most users have none, and a command must not need one."""
    assert contexts.load(path) == Contexts() == contexts.load(None)
    assert _run() == (0, "default False other None")


def test_the_first_context_is_used_at_once_and_later_ones_when_told(path: Path) -> None:
    """Whoever adds a second one keeps working with the first."""
    _put(path, "one", bootstrap="a:1")
    _put(path, "two", bootstrap="b:2")
    assert contexts.load(path).current == "one"

    _put(path, "three", use=True, bootstrap="c:3")

    assert contexts.load(path).current == "three"
    assert _run() == (0, "c:3 False other three")


def test_an_option_wins_over_its_variable_and_that_over_the_context(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that the documents promise."""
    _put(path, "prod", bootstrap="context:1", insecure="true")
    assert _run() == (0, "context:1 True other prod")

    monkeypatch.setenv("DLEDGER_BOOTSTRAP", "variable:1")

    assert _run() == (0, "variable:1 True other prod")
    assert _run("--bootstrap", "option:1") == (0, "option:1 True other prod")


def test_a_chosen_context_wins_over_the_current_one_and_an_empty_name_chooses_none(path: Path) -> None:
    """``--context`` is for one command."""
    _put(path, "prod", bootstrap="prod:1")
    _put(path, "test", bootstrap="test:1")

    assert _run(chosen="test") == (0, "test:1 False other test")
    assert _run(chosen="") == (0, "default False other None")


def test_an_unknown_context_is_refused_with_the_known_ones(path: Path) -> None:
    """A slip must not send a command to the default address."""
    _put(path, "prod", bootstrap="prod:1")

    code, message = _run(chosen="prd")

    assert code == 1
    assert "unknown context 'prd'; there are: prod" in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"current": "",\n "contexts": {', "line 2"),
        ("[]", "not of the form"),
        ('{"current": "x", "contexts": {}}', "'x' is not among them"),
        ('{"current": "", "contexts": {"a b": {}}}', "'a b' is not a context"),
        ('{"current": "", "contexts": {"a": {"colour": "red"}}}', "'colour' is not a setting"),
        ('{"current": "", "contexts": {"a": {"group": 1}}}', "its value no text"),
        ("\xff", "damaged"),
        ("[" * 100_000, "damaged"),
        (" " * (1 << 20) + " ", "more than 1048576 bytes"),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_never_written_over(path: Path, content: str, problem: str) -> None:
    """What somebody wrote by hand is theirs to correct."""
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="latin-1")

    with pytest.raises(ConfigError, match=problem):
        contexts.load(path)
    with pytest.raises(ConfigError, match=problem):
        _put(path, "new", bootstrap="a:1")
    assert path.read_text(encoding="latin-1") == content


def test_a_context_is_replaced_only_when_told(path: Path) -> None:
    """A name that is used twice would send commands elsewhere."""
    _put(path, "prod", bootstrap="a:1", tls_ca="/ca.crt")
    with pytest.raises(ConfigError, match="prod exists already: --force"):
        _put(path, "prod", bootstrap="b:1")
    assert contexts.load(path).named("prod")["bootstrap"] == "a:1"

    _put(path, "prod", replace=True, bootstrap="b:1")

    assert contexts.load(path).named("prod") == {"bootstrap": "b:1"}
    assert contexts.load(path).current == "prod"


def test_removing_the_used_context_leaves_none_in_use(path: Path) -> None:
    """Another one must not take its place silently."""
    _put(path, "prod", bootstrap="a:1")
    _put(path, "test", bootstrap="b:1")

    with contexts.changing(path) as change:
        change.remove("prod")

    assert contexts.load(path) == Contexts({"test": {"bootstrap": "b:1"}}, "")
    with pytest.raises(ConfigError, match="unknown context 'prod'"), contexts.changing(path) as change:
        change.use("prod")


def test_the_number_of_contexts_has_a_limit(path: Path) -> None:
    """The file is read by every command."""
    path.parent.mkdir(parents=True)
    known = {f"c{number}": {"group": "g"} for number in range(CONTEXTS_MAX)}
    path.write_text(json.dumps({"current": "", "contexts": known}))

    with pytest.raises(ConfigError, match="remove one first"):
        _put(path, "one-more", bootstrap="a:1")
    _put(path, "c0", replace=True, bootstrap="a:1")


def test_no_file_is_written_that_cannot_be_read_again(path: Path) -> None:
    """One context too many, or too large, must not take all others away."""
    _put(path, "prod", bootstrap="a:1")

    with pytest.raises(ConfigError, match="more than 1,048,576 bytes: remove one first"):
        _put(path, "large", bootstrap="b:1", tls_ca="/" * (1 << 20))

    assert contexts.load(path) == Contexts({"prod": {"bootstrap": "a:1"}}, "prod")


def test_the_file_is_the_users_alone(path: Path) -> None:
    """Addresses and accounts are nobody else's business."""
    _put(path, "prod", bootstrap="a:1")

    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0


def test_the_lock_is_the_users_alone_and_no_link_to_another_file(path: Path, tmp_path: Path) -> None:
    """Who can open it for reading can hold it; through a link, another file would be made."""
    _put(path, "one", group="g")
    lock = path.with_suffix(".lock")
    assert lock.stat().st_mode & 0o777 == 0o600

    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        _put(path, "two", group="g")
    assert not (tmp_path / "elsewhere").exists()


def test_two_who_add_at_once_lose_nothing(path: Path) -> None:
    """The second one waits for the first, and reads what it wrote."""
    inside, go = threading.Event(), threading.Event()

    def first() -> None:
        with contexts.changing(path) as change:
            inside.set()
            assert go.wait(30)
            change.put("first", {"group": "g"}, replace=False, use=False)

    threads = [threading.Thread(target=first), threading.Thread(target=lambda: _put(path, "second", group="g"))]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(30)

    assert set(contexts.load(path).known) == {"first", "second"}


def test_what_another_writes_while_one_waits_for_it_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contexts are read only when nobody else can change them."""
    lock = fcntl.flock

    def wait(file: TextIO, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        _put(path, "first", group="g")
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", wait)
    _put(path, "second", group="g")

    assert set(contexts.load(path).known) == {"first", "second"}


@pytest.mark.parametrize("name", ["", ".x", "-x", "a b", "a/b", "x" * 65, "ä"])
def test_a_name_that_shells_would_stumble_over_is_refused(name: str) -> None:
    """Names are typed and completed."""
    with pytest.raises(ConfigError, match="invalid context name"):
        contexts.check_name(name)


def test_a_user_without_a_home_can_run_commands_but_keep_no_contexts() -> None:
    """Containers often have none."""
    with pytest.raises(ConfigError, match="set HOME or XDG_CONFIG_HOME"), contexts.changing(None):
        pass
