"""The generated references: complete, fresh, and made from nothing but the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import click
import pytest

from dledger import settings as node_settings
from dledger.java_names import UNUSED
from dledger.values import Range, Unit, out_of_range, size_text
from rocketstore import settings as broker_settings
from rocketstore.nameserver import settings as name_server_settings
from tools.docs_reference import __main__ as program
from tools.docs_reference import commands, configuration, rocketmq_names
from tools.docs_reference.records import Field, default_text, fields_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class _Inner:
    bytes_max: Annotated[int, Range(1, 1 << 30), Unit.BYTES] = 1 << 20
    """How
    much."""
    silent: bool = False


class _Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class _Outer:
    """A record with a record in it."""

    name: str = "x"
    colour: _Colour = _Colour.RED
    """What it looks like."""
    inner: _Inner = field(default_factory=_Inner)

    def problems(self) -> list[str]:
        found = out_of_range(self.inner)
        if self.inner.silent and self.inner.bytes_max > 1:
            found.append(f"silent={self.inner.silent} needs bytes_max=1")
        return found + ([] if self.name else ["name must not be empty"]) + ["always wrong"]


def test_a_new_setting_is_found_with_its_docstring_and_the_limits_that_the_code_enforces() -> None:
    """Nothing has to be told to the generator: a field is enough."""
    found = {one.name: one for one in fields_of(_Outer(), lambda one: one.problems())}

    assert set(found) == {"name", "colour", "bytes_max", "silent"}
    assert found["bytes_max"] == Field(
        "bytes_max", "int", 1 << 20, "How much.", "_Inner", ("between 1 and 1 GiB",), Unit.BYTES
    )
    assert found["silent"].limits == ("silent needs bytes_max",)
    assert found["name"].limits == ("name must not be empty",)
    assert (found["colour"].meaning, found["silent"].meaning) == ("What it looks like.", "")
    assert default_text(found["bytes_max"], "size") == "1 MiB"
    assert default_text(found["colour"], "") == "red"


@pytest.mark.parametrize(
    ("size", "text"), [(1 << 30, "1 GiB"), (160 << 20, "160 MiB"), (6_000_000, "6,000,000 bytes"), (0, "0 bytes")]
)
def test_sizes_are_rounded_only_where_that_is_exact(size: int, text: str) -> None:
    """``6000000`` is not 5.7 MiB to anybody who sets it."""
    assert size_text(size) == text


def test_every_setting_says_what_it_means() -> None:
    """A sentence below each field of each record."""
    assert [one.name for one in configuration.entries() if not one.field.meaning] == []


def test_every_name_that_a_server_reads_is_in_the_reference() -> None:
    """A setting is one row, and in the table of name servers another one; all other names stand somewhere."""
    text = configuration.text()
    general = text[: text.index("\n## Name server\n")]
    rows = re.findall(r"^\| `(\w+)`", general, re.MULTILINE)

    targets = {**node_settings.TARGETS, **broker_settings.TARGETS}
    own = {name for name in targets if name.islower() and targets[name].setting == name}

    assert len(rows) == len(set(rows))
    assert own - set(rows) == set()
    assert [name for name in (*targets, *name_server_settings.TARGETS, *UNUSED) if f"`{name}`" not in text] == []


def test_every_setting_is_used_by_the_code() -> None:
    """What is read and thrown away must not look like a setting."""
    used = set(_attributes_read())

    idle = {one.name for one in configuration.entries() if one.name not in used}

    assert idle == set()


def _attributes_read() -> Iterator[str]:
    for package in ("dledger", "rocketstore", "dledger_cli", "cluster"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    yield node.attr


def test_a_row_shows_names_default_limits_readers_and_notes() -> None:
    """Of a setting that brokers derive from another one, of one that only plain brokers read, of an enumeration."""
    rows = {
        row.split("`")[1]: [one.strip() for one in row.split("|")[1:-1]]
        for row in configuration.text().splitlines()
        if row.startswith("| `")
    }

    assert rows["disk_check_ratio"][:2] == [
        "`disk_check_ratio` `diskSpaceRatioToCheckExpired` `diskMaxUsedSpaceRatio` (percent, `serve` only)",
        "0.7",
    ]
    assert rows["disk_check_ratio"][2].startswith("above 0 and at most 1; ")
    assert rows["disk_check_ratio"][3] == "serve, replicated"
    assert rows["disk_check_ratio"][4].endswith("derived from `disk_max_used_space_ratio`, unless set.")
    assert rows["store_path_commit_log"][3] == "plain"
    assert rows["flush_disk_type"][2] == "`SYNC_FLUSH` or `ASYNC_FLUSH`"


def test_names_that_change_nothing_stand_once_with_their_subject_and_reason() -> None:
    """A name that some server reads is not among them."""
    rows = [line.split("|") for line in rocketmq_names.section().splitlines() if line.count("|") == 5]
    names = [name for row in rows for name in row[4].replace("`", "").split()][1:]
    subjects = {name: row[1].strip() for row in rows for name in row[4].replace("`", "").split()}

    assert subjects["popPollingSize"] == "tuning of pop"
    used = {*node_settings.TARGETS, *broker_settings.TARGETS, *name_server_settings.TARGETS}
    assert sorted(one for one in names if one.strip("-")) == sorted(set(UNUSED) - used)


def test_every_option_has_help() -> None:
    """The commands' help is their reference."""
    silent = [
        f"{context.command_path} {parameter.opts[-1]}"
        for command, context in commands.walk()
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden and not parameter.help
    ]
    unexplained = [context.command_path for command, context in commands.walk() if not command.help]

    assert (silent, unexplained) == ([], [])


def test_a_stale_document_is_named_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``make check`` fails until ``make docs`` was run."""
    monkeypatch.setattr(program, "DOCS", tmp_path)
    monkeypatch.setattr(program, "DOCUMENTS", {"one.md": lambda: "new\n", "two.md": lambda: "two\n"})
    (tmp_path / "one.md").write_text("old\n")
    (tmp_path / "two.md").write_text("two\n")

    assert program.main(["--check"]) == 1
    assert capsys.readouterr().err == "stale: docs/one.md; run make docs\n"
    assert program.main([]) == 0
    assert (tmp_path / "one.md").read_text() == "new\n"
    assert program.main(["--check"]) == 0
